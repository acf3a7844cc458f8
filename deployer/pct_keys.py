"""Which keys of a container configuration pct takes, and their values in its own form.

The tables are those of pve-container 6 (src/PVE/LXC/Config.pm): raw keys outside them are reported
and dropped at pct's next write, however valid they are for LXC itself.
"""

from __future__ import annotations

import re

BOOLEANS = frozenset(["console", "debug", "onboot", "protection", "template", "unprivileged"])
INTEGERS = frozenset(["cores", "cpuunits", "memory", "snaptime", "swap", "tty"])
ENVIRONMENT = "lxc.environment.runtime"
"""The form in the file of the key `env`: one line a variable, which pct joins by NUL."""
NO_KEYS = frozenset(["digest", "lxc", "pending", "snapshots"])
"""Names that pct uses for itself: a line of such a key is never written again."""

_TRUE = re.compile(r"^(1|on|yes|true)$", re.IGNORECASE)
_FALSE = re.compile(r"^(0|off|no|false)$", re.IGNORECASE)
_LARGEST = 2**64 - 1

_RAW_WORDS = """
apparmor.profile apparmor.allow_incomplete apparmor.allow_nesting apparmor.raw selinux.context
include arch uts.name signal.halt signal.reboot signal.stop init.cmd init.cwd init.uid init.gid
pty.max console.logfile console.path tty.max devtty.dir hook.autodev autodev kmsg mount.fstab
mount.entry mount.auto rootfs.mount cap.drop cap.keep seccomp.profile seccomp.notify.proxy
seccomp.notify.cookie idmap hook.pre-start hook.pre-mount hook.mount hook.start hook.stop
hook.post-stop hook.clone hook.destroy hook.version log.level log.file start.auto start.delay
start.order group environment environment.runtime environment.hooks sysctl.fs.mqueue
sysctl.kernel.msgmax sysctl.kernel.msgmnb sysctl.kernel.msgmni sysctl.kernel.sem
sysctl.kernel.shmall sysctl.kernel.shmmax sysctl.kernel.shmmni sysctl.kernel.shm_rmid_forced
"""
_OLD_WORDS = """
aa_profile aa_allow_incomplete console devttydir haltsignal rebootsignal stopsignal id_map init_cmd
loglevel logfile mount pts se_context seccomp tty utsname network.type network.flags network.link
network.mtu network.name network.hwaddr network.ipv4 network.ipv4.gateway network.ipv6
network.ipv6.gateway network.script.up network.script.down
"""  # Names of lxc 2: pct warns and keeps them.
_RAW_KEYS = frozenset(f"lxc.{word}" for word in (_RAW_WORDS + _OLD_WORDS).split())
_RAW_FAMILIES = ("lxc.cgroup.", "lxc.cgroup2.", "lxc.prlimit.", "lxc.net.", "lxc.limit.")


def typed(key: str, value: str) -> str:
    """`value` in pct's own form: booleans 0 or 1, integers without leading zeros.

    A value that does not fit its type stays as it is, which is what pct does with it.
    """
    if key in BOOLEANS:
        return "1" if _TRUE.match(value) else "0" if _FALSE.match(value) else value
    if key in INTEGERS and re.fullmatch(r"[0-9]+", value):
        number = int(value)
        # Perl has no larger integers: it goes on with a floating number.
        return str(number) if number <= _LARGEST else f"{float(number):.15g}"
    return value


def is_raw_key(key: str) -> bool:
    """Whether pct takes this raw key; lines of others are dropped."""
    return key in _RAW_KEYS or key.startswith(_RAW_FAMILIES)
