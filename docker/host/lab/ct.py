"""Running containers of the lab: start, stop, enter. Namespaces instead of LXC."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from typing import NoReturn

from ctconf import Conf, device_value, die

LXC = "/var/lib/lxc"
RUN = "/run/lab/ct"
HOST_ROOT = ""
"""Where the host's /dev lies; tests have it elsewhere."""


def rootfs(vmid: str) -> str:
    """The guest's root folder on the host."""
    return f"{LXC}/{vmid}/rootfs"


def running(vmid: str) -> bool:
    """As PVE decides it: the container's command socket exists."""
    with open("/proc/net/unix") as file:
        return f"@{LXC}/{vmid}/command" in file.read()


def init_pid(vmid: str) -> int | None:
    """Pid of the guest's init as the host sees it."""
    try:
        with open(f"{RUN}/{vmid}.init") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def device(value: str) -> tuple[str, os.stat_result, dict[str, str]]:
    """A devN value: path, its node on the host, sub-keys. Ends as pct does when it is no device."""
    plain, options = device_value(value)
    try:
        node = os.stat(f"{HOST_ROOT}{plain}")
    except OSError:
        die(f"Device {plain} does not exist", 2)
    if not (stat.S_ISCHR(node.st_mode) or stat.S_ISBLK(node.st_mode)):
        die(f"{plain} is not a device")
    return plain, node, options


def plug(root: str, value: str) -> None:
    """Makes the node of a devN value below `root`/dev."""
    plain, node, options = device(value)
    target = root + plain
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)
    os.mknod(target, stat.S_IFMT(node.st_mode), node.st_rdev)
    os.chmod(target, int(options.get("mode", "0660"), 8))
    os.chown(target, int(options.get("uid", 0)), int(options.get("gid", 0)))


def prepare_dev(vmid: str, conf: Conf) -> str:
    """A fresh /dev of the guest, on the host; returns its path."""
    base = f"/run/lab/dev/{vmid}"
    subprocess.run(["rm", "-rf", base], check=True)
    dev = f"{base}/dev"
    os.makedirs(dev)
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(f"{dev}/{name}", 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        os.chmod(f"{dev}/{name}", 0o666)
    os.mknod(f"{dev}/tty", 0o666 | stat.S_IFCHR, os.makedev(5, 0))
    os.chmod(f"{dev}/tty", 0o666)
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        os.symlink(target, f"{dev}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{dev}/{name}")
    for key, value in sorted(conf.current.keys.items()):
        if re.fullmatch(r"dev\d+", key):
            plug(base, value)
    return dev


def mounts(vmid: str, conf: Conf) -> list[tuple[str, str, str]]:
    """The raw lxc.mount.entry lines as (source, target below the root, options)."""
    found = []
    for key, value in conf.current.raw:
        fields = value.split()
        if key == "lxc.mount.entry" and len(fields) >= 4:
            found.append((fields[0], fields[1], fields[3]))
    return found


def start(vmid: str, conf: Conf) -> None:
    """Starts the guest and returns once its init runs. The caller has checked state and locks."""
    dev = prepare_dev(vmid, conf)
    lines = [f"lxc.uts.name = {conf.current.keys.get('hostname', 'CT' + vmid)}"]
    lines += [f"lxc.rootfs.path = {rootfs(vmid)}", f"lab.dev = {dev}"]
    lines += [f"{key} = {value}" for key, value in conf.current.raw]
    with open(f"{LXC}/{vmid}/config", "w") as file:
        file.write("\n".join(lines) + "\n")
    os.makedirs(RUN, exist_ok=True)
    errors = f"{RUN}/{vmid}.stderr"
    with open(errors, "wb") as log:
        monitor = subprocess.Popen(
            ["/usr/bin/python3", "/usr/lib/lab/ctmon.py", vmid, dev],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True,
        )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if running(vmid) and os.path.exists(f"{RUN}/{vmid}.ready"):
            return
        if monitor.poll() is not None:
            break
        time.sleep(0.02)
    with open(errors, errors="replace") as log:
        sys.stderr.write(log.read())
    die(f"startup for container '{vmid}' failed")


def gone(vmid: str, seconds: float) -> bool:
    """Waits for the end of the guest; False when it still runs at the deadline."""
    deadline = time.monotonic() + seconds
    while running(vmid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def signal_init(vmid: str, number: int) -> None:
    """Signals the guest's init."""
    pid = init_pid(vmid)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(vmid: str) -> None:
    """lxc-stop --kill."""
    signal_init(vmid, signal.SIGKILL)
    if not gone(vmid, 10):
        die(f"container '{vmid}' did not stop")


def shut_down(vmid: str, seconds: float, force: bool) -> None:
    """Asks init to end; kills it at the deadline only when `force` says so."""
    signal_init(vmid, signal.SIGPWR)
    if gone(vmid, seconds):
        return
    if not force:
        die("container did not stop")
    kill(vmid)


def enter_argv(vmid: str) -> list[str]:
    """nsenter up to the command. The caller has checked that the guest runs."""
    return ["nsenter", "-t", str(init_pid(vmid)), "-m", "-u", "-p", "--"]


def attach(vmid: str, words: list[str], env: dict[str, str]) -> NoReturn:
    """Becomes the command inside; its death leaves the inner process running, as lxc-attach's."""
    launcher = ["/usr/bin/python3", "-I", "/usr/lib/lab/attach.py", vmid]
    os.execve("/usr/bin/nsenter", [*enter_argv(vmid), *launcher, *words], env)
