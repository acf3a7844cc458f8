"""Streams the state of a job to the controller: one JSON line a second, over one exec.

Looks only: it starts no process and writes no file. What a line says follows the job mechanism of
`deployer/remote/jobs.py`: offsets count every byte ever logged, `log.base` is what rotation has
taken away, a job is its boot id, pid and start time.
"""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH110, PTH112, PTH116, PTH118, PTH123

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

CHUNK = 64 * 1024
"""Most log bytes of one line."""
EVERY_S = 1.0
LOOK_S = 0.1
"""How soon the end of the job is noticed."""
ROTATING_S = 1.0
GRACE_S = 30.0
"""A reader that takes nothing for so long after our time is over ends us."""
MAX_PROGRESS = 16 * 1024


def value(folder: str, name: str) -> str:
    """The one-line file `name` of the job, '' when there is none."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as stream:
            return stream.readline().strip()
    except OSError:
        return ""


def number(text: str) -> int:
    """0 for what is no number."""
    return int(text) if text.isdigit() else 0


def runs(pid: str, start: str) -> bool:
    """Is the process with this pid, started at this tick, there and no zombie?"""
    if not (pid.isdigit() and start):
        return False
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return len(fields) > 19 and fields[19].decode() == start and fields[0] not in (b"Z", b"X", b"x")


class JobFolder:
    """One job's folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            self.boot = stream.read().strip()

    def state(self) -> tuple[bool, int | None]:
        """(alive, exit): exit is the code, or minus the signal; None while there is none.

        A job whose script has just ended is alive until its wrapper has written how.
        """
        alive = value(self.folder, "boot") == self.boot and (
            runs(value(self.folder, "pid"), value(self.folder, "start"))
            or runs(value(self.folder, "session"), value(self.folder, "leader"))
        )
        kind, _, code = value(self.folder, "exit").partition(" ")
        if kind in ("code", "signal") and code.isdigit():
            return False, int(code) if kind == "code" else -int(code)
        return alive, None

    def progress(self) -> str:
        """The job's progress line, '' when there is none."""
        try:
            with open(os.path.join(self.folder, "progress"), "rb") as stream:
                lines = stream.read(MAX_PROGRESS).decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def read(self, inode: int, offset: int) -> tuple[int, int, bytes, bool]:
        """(inode, from, bytes, more): what was logged from `offset` on, at most CHUNK bytes.

        An offset that this log cannot have means: from the beginning of what is there.
        """
        self.wait_for_rotation()
        path = os.path.join(self.folder, "log")
        base = number(value(self.folder, "log.base"))
        try:
            facts = os.stat(path)
            old = os.stat(path + ".1").st_size if offset < base else 0
        except FileNotFoundError:
            facts, old = None, 0
        if facts is None:
            return 0, base, b"", False
        begin = offset if inode in (0, facts.st_ino) and offset <= base + facts.st_size else base
        if begin < base:
            begin = max(begin, base - old)
            data = self.slice(path + ".1", old - (base - begin), min(CHUNK, base - begin))
        else:
            data = self.slice(path, begin - base, CHUNK)
        return facts.st_ino, begin, data, begin + len(data) < base + facts.st_size

    def wait_for_rotation(self) -> None:
        """While the log is copied away its offsets are not those of `log.base`."""
        ends = time.monotonic() + ROTATING_S
        while os.path.exists(os.path.join(self.folder, "rotating")) and time.monotonic() < ends:
            time.sleep(0.02)

    @staticmethod
    def slice(path: str, begin: int, most: int) -> bytes:
        try:
            with open(path, "rb") as stream:
                stream.seek(begin)
                return stream.read(most)
        except FileNotFoundError:
            return b""


def whole(data: bytes) -> int:
    """Length without a character that is cut at the end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < length else len(data)
        if byte < 0x80:
            break
    return len(data)


def stream(job: JobFolder, inode: int, offset: int, seconds: float) -> None:
    """Writes lines until the job has ended and its log is drained, or the time is over.

    Raises BrokenPipeError when nobody reads any more.
    """
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)
    ends = time.monotonic() + seconds
    due = 0.0
    while True:
        alive, code = job.state()
        now = time.monotonic()
        last = not alive or now >= ends
        if not last and now < due:
            if reader.poll(LOOK_S * 1000):
                raise BrokenPipeError
            continue
        found, begin, data, more = job.read(inode, offset)
        if alive and not more:
            data = data[: whole(data)]
        elif more:
            data = data[: whole(data) or len(data)]
        inode, offset = found, begin + len(data)
        row: dict[str, Any] = {"alive": alive or more, "exit": None if more else code}
        row.update(inode=inode, offset=offset, log=data.decode("utf-8", "replace"))
        row["progress"] = job.progress()
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if last and not (more and not alive):
            return
        due = now if more else now + EVERY_S


def attach(words: Sequence[str]) -> int:
    """`attach JOBDIR INODE OFFSET SECONDS`. 2: what was asked makes no sense; 0 else."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        folder, inode, offset, seconds = words[0], int(words[1]), int(words[2]), float(words[3])
        if not os.path.isdir(folder):
            raise ValueError(f"there is no job folder {folder}")
        job = JobFolder(folder)
    except (ValueError, IndexError, OSError) as error:
        print(f"attach JOBDIR INODE OFFSET SECONDS: {error}", file=sys.stderr)
        return 2
    signal.alarm(int(seconds + GRACE_S) + 1)
    try:
        stream(job, inode, offset, seconds)
    except BrokenPipeError:
        # The interpreter would flush into the closed pipe once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
