"""A worker process: its own process group, dies with its parent, tells its figures on a pipe."""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deployer.agents.fetch.common import DISK_ERROR, Fatal

PROGRESS_FD = 3
KILL_S = 30.0
"""How long a killed process may take to go; longer means it hangs in the kernel."""
MOST_LINE = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl() -> Callable[[int, int], int]:
    """prctl(2); loaded before a fork, never after."""
    function = ctypes.CDLL(None, use_errno=True).prctl
    return lambda option, argument: int(function(option, argument, 0, 0, 0))


def become_reaper() -> None:
    """What a dead child leaves behind becomes ours, so that it can be seen and reaped."""
    _prctl()(_PR_SET_CHILD_SUBREAPER, 1)


def dies_with_its_parent() -> Callable[[], None]:
    """To be called in a new child: SIGKILL when the thread that made it ends.

    Only for children of a main thread: the kernel means the thread, not the process.
    """
    prctl, parent = _prctl(), os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def takes_its_group_along() -> None:
    """From now on the end of our parent, or SIGTERM, kills our whole process group.

    For a worker with children whose own children the kernel does not tell of that end.
    """
    parent = os.getppid()

    def end(number: int, frame: object) -> None:
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() != os.getpid():
        return  # run by hand: the group is the shell's
    signal.signal(signal.SIGTERM, end)
    _prctl()(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end(signal.SIGTERM, None)


def children_of(parent: int) -> Iterator[int]:
    """Pids of its direct children, zombies too."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    fields = stream.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if len(fields) > 1 and int(fields[1]) == parent:
                yield int(name)


def group_members(group: int) -> Iterator[tuple[int, str]]:
    """(pid, state) of every process of a process group that is no zombie."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stream:
                fields = stream.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 2 and int(fields[2]) == group and fields[0] not in (b"Z", b"X", b"x"):
            yield int(name), fields[0].decode()


class Child:
    """One worker. Its stdin is empty, its output is ours, `lock` stays open in all its processes.

    Single-threaded parents only. `line` is the last progress line that was whole.
    """

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], lock: int) -> None:
        arm = dies_with_its_parent()
        reader, writer = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(words, environ, writer, lock, arm)
        os.close(writer)
        os.set_blocking(reader, False)
        self.pipe: int | None = reader
        with contextlib.suppress(OSError):  # it does this too; whoever comes first
            os.setpgid(self.pid, self.pid)
        self.line: dict[str, Any] = {}
        self.error: dict[str, Any] = {}
        self.status: int | None = None
        self._rest = b""

    def read(self) -> None:
        """Takes what is on the pipe, without waiting."""
        while self.pipe is not None:
            try:
                data = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                os.close(self.pipe)
                self.pipe = None
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-MOST_LINE:]
            for text in lines:
                self._take(text)

    def _take(self, text: bytes) -> None:
        try:
            row = json.loads(text)
        except ValueError:
            return  # a line cut by its writer's end; the next look sees that end
        if isinstance(row, dict):
            if "error" in row:
                self.error = row
            else:
                self.line = row

    def ended(self) -> bool:
        """Reaps. True once it has ended; then `status` is its code, or minus the signal."""
        while self.status is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.status = -signal.SIGKILL  # somebody else reaped it: how it ended is lost
                break
            if pid == 0:
                return False
            if pid == self.pid:
                self.status = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else status >> 8
        self.read()
        return True

    def clear(self, limit_s: float = KILL_S) -> None:
        """SIGKILL to the group, until nothing of it is left. Raises Fatal after `limit_s`."""
        ends = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            gone = self.ended()
            left = list(group_members(self.pid))
            if gone and not left:
                break
            if time.monotonic() >= ends:
                who = ", ".join(f"pid {pid} in state {state}" for pid, state in left)
                raise Fatal(
                    DISK_ERROR,
                    f"a killed worker does not end ({who or f'pid {self.pid}'}): its disk or mount "
                    "hangs in the kernel; nothing else writes meanwhile. Look at dmesg; a process "
                    "that stays in state D needs a reboot",
                )
            time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        self.close()

    def close(self) -> None:
        """Lets go of the pipe."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def blocked(self) -> bool:
        """Does a thread of the group wait in the kernel, uninterruptibly (state D)?"""
        for pid, state in group_members(self.pid):
            if state == "D":
                return True
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/stat", "rb") as stream:
                        if stream.read().rpartition(b")")[2].split()[0] == b"D":
                            return True
        return False


def _become(
    words: Sequence[str],
    environ: Mapping[str, str],
    writer: int,
    lock: int,
    arm: Callable[[], None],
) -> None:
    """The child's side of the fork: never returns."""
    try:
        os.setpgid(0, 0)
        arm()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # Out of the way of fd 3 first: either may be it.
        kept = fcntl.fcntl(lock, fcntl.F_DUPFD, PROGRESS_FD + 1)
        os.dup2(fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, PROGRESS_FD + 1), PROGRESS_FD)
        os.set_inheritable(kept, True)
        os.set_inheritable(PROGRESS_FD, True)
        os.execve(words[0], list(words), dict(environ))
    except BaseException as error:  # noqa: BLE001 - this process must end here, whatever it is
        os.write(2, f"{words[0]} could not be started: {error}\n".encode())
    finally:
        os._exit(127)
