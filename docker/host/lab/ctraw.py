"""Raw lxc.* keys as pct takes them: kept, kept with a warning, or reported and dropped."""

from __future__ import annotations

from dataclasses import dataclass

_RENAMED = dict(
    pair.split(">")
    for pair in """
aa_profile>apparmor.profile aa_allow_incomplete>apparmor.allow_incomplete console>console.path
devttydir>tty.dir haltsignal>signal.halt rebootsignal>signal.reboot stopsignal>signal.stop
id_map>idmap init_cmd>init.cmd loglevel>log.level logfile>log.file mount>mount.fstab pts>pty.max
se_context>selinux.context seccomp>seccomp.profile tty>tty.max utsname>uts.name
network.type>net.INDEX.type network.flags>net.INDEX.flags network.link>net.INDEX.link
network.mtu>net.INDEX.mtu network.name>net.INDEX.name network.hwaddr>net.INDEX.hwaddr
network.ipv4>net.INDEX.ipv4.address network.ipv4.gateway>net.INDEX.ipv4.gateway
network.ipv6>net.INDEX.ipv6.address network.ipv6.gateway>net.INDEX.ipv6.gateway
network.script.up>net.INDEX.script.up network.script.down>net.INDEX.script.down
""".split()
)
_KEPT = set(
    """
apparmor.profile apparmor.allow_incomplete apparmor.allow_nesting apparmor.raw selinux.context
include arch uts.name signal.halt signal.reboot signal.stop init.cmd init.cwd init.uid init.gid
pty.max console.logfile console.path tty.max devtty.dir hook.autodev autodev kmsg mount.fstab
mount.entry mount.auto rootfs.mount cap.drop cap.keep seccomp.profile seccomp.notify.proxy
seccomp.notify.cookie idmap hook.pre-start hook.pre-mount hook.mount hook.start hook.stop
hook.post-stop hook.clone hook.destroy hook.version log.level log.file start.auto start.delay
start.order group environment environment.runtime environment.hooks sysctl.fs.mqueue
sysctl.kernel.msgmax sysctl.kernel.msgmnb sysctl.kernel.msgmni sysctl.kernel.sem
sysctl.kernel.shmall sysctl.kernel.shmmax sysctl.kernel.shmmni sysctl.kernel.shm_rmid_forced
""".split()
)
_REFUSED = {
    "rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "rootfs.options": "lxc.rootfs.options is not supported, please use mount point options in the "
    '"rootfs" key',
}


@dataclass(frozen=True)
class Verdict:
    """Whether pct keeps a raw line, and what it says."""

    kept: bool
    warning: str = ""


def verdict(key: str) -> Verdict:
    """What pct does with a raw lxc.* key."""
    word = key.removeprefix("lxc.")
    if word.startswith("limit."):
        return Verdict(True, f"{key}: lxc.limit.* was renamed to lxc.prlimit.*")
    if word in _RENAMED:
        return Verdict(True, f"{key} is deprecated and was renamed to lxc.{_RENAMED[word]}")
    if word in _REFUSED:
        return Verdict(False, f"{key}: {_REFUSED[word]}")
    if word.startswith("cgroup."):
        return Verdict(True, f"{key} is deprecated, this will be a hard error in the future!")
    return Verdict(word in _KEPT or word.startswith(("cgroup2.", "prlimit.", "net.")))
