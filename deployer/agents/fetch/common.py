"""Exit codes, errors, log lines, and the few file operations that everything shares."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH103, PTH105, PTH118, PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator

BLOCK = 256 * 1024
MISMATCH, DENIED, NOT_FOUND, DISK_FULL, GAVE_UP, LOCKED = 10, 11, 12, 13, 14, 15
UNTRUSTED, MALFORMED, DISK_ERROR = 16, 17, 18
"""Exit codes. 0: complete and verified; 2: bad manifest."""


class Fatal(Exception):
    """Ends the whole download with an exit code and one line."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Again(Exception):
    """This try is over; the file goes on where it is. `pause_s` holds back the whole pool."""

    def __init__(self, why: str, pause_s: float = 0.0, range_refused: bool = False) -> None:
        super().__init__(why)
        self.pause_s = pause_s
        self.range_refused = range_refused


class Stopped(Exception):
    """Another worker met a fatal error; the bytes so far are kept."""


@contextlib.contextmanager
def disk(path: str) -> Iterator[None]:
    """Turns errors of the local file system into fatal ones, apart from network errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Fatal(DISK_FULL, f"{path}: no space left; the bytes so far are kept") from error
        raise Fatal(DISK_ERROR, f"{path}: {error.strerror or error}") from error


def log(text: str) -> None:
    """One line of the job's log."""
    print(time.strftime("%H:%M:%S ") + text, flush=True)


def replace_file(path: str, text: str, sync: bool = True) -> None:
    """Writes `path` by temp file and rename."""
    with disk(path):
        with open(path + ".tmp", "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.replace(path + ".tmp", path)


def sync_folder(path: str) -> None:
    """Makes a rename in `path` durable."""
    with disk(path):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def safe_name(name: str) -> bool:
    """True for a relative path that stays below its folder and has no control characters."""
    parts = name.split("/")
    return bool(name) and name.isprintable() and not any(part in ("", ".", "..") for part in parts)


def kernel_start(pid: int) -> int:
    """Start time in clock ticks (field 22 of /proc/PID/stat), 0 when unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextlib.contextmanager
def only_one(root: str) -> Iterator[None]:
    """Holds `.deployer/lock`; the kernel frees it however this process ends."""
    folder = os.path.join(root, ".deployer")
    with disk(folder):
        os.makedirs(folder, exist_ok=True)
        handle = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode("utf-8", "replace").strip()
            raise Fatal(LOCKED, f"{root}: another download holds the lock: {holder}") from None
        with disk(folder):
            os.ftruncate(handle, 0)
            who = {"pid": os.getpid(), "start": kernel_start(os.getpid())}
            os.pwrite(handle, json.dumps(who).encode(), 0)
        yield
    finally:
        os.close(handle)
