"""Processes as the real server has them: titles, death with the parent, held GPU nodes."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def set_title(title: str) -> None:
    """What ps and /proc/PID/comm (15 bytes) and cmdline show."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NAME, title.encode(), 0, 0, 0)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: fields 48 and 49
    if start == 0 or end - start < 2:
        return  # hidden from this process; the name alone must do
    text = title.encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it died before the line above


def hold_gpu(minor: int, root: str) -> list[int]:
    """Open the nodes as CUDA does. Nodes without a driver behind them are held by path only."""
    held = []
    for name in ("nvidiactl", "nvidia-uvm", f"nvidia{minor}"):
        path = os.path.join(root, name)
        try:
            held.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            held.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
    return held


def stray(minor: int, root: str) -> None:
    """A process that gets away: of no session and no parent of ours, under another name, deaf to
    TERM, and with the GPU's nodes open. Kernel compilers of a dead server are like that."""
    if os.fork() > 0:
        os.wait()
        return
    os.setsid()
    if os.fork() > 0:
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_title("kworker/u8:3")
    held = hold_gpu(minor, root)
    while held:
        signal.pause()


def children(pid: int) -> list[int]:
    """All descendants, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile
        parents.setdefault(ppid, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


def kill_tree(*, include_self: bool) -> None:
    """SIGKILL every descendant, then this process."""
    for pid in children(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if include_self:
        os.kill(os.getpid(), signal.SIGKILL)
