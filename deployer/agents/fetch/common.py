"""Exit codes, errors, log lines, and the few file operations that everything shares."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH103, PTH105, PTH108, PTH118, PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator

BLOCK = 1024 * 1024
"""Bytes that a connection may lose when its process is killed."""

LAST_BREATH_S = 5.0
"""How long what a dead holder of the lock has left may take to end."""

BAD_MANIFEST = 2
MISMATCH, DENIED, NOT_FOUND, DISK_FULL, GAVE_UP, LOCKED = 10, 11, 12, 13, 14, 15
UNTRUSTED, MALFORMED, DISK_ERROR = 16, 17, 18
"""Exit codes besides 0: complete and verified."""

_WORDS = {
    errno.ENOTDIR: "a file stands where a folder is needed",
    errno.EEXIST: "a file stands where a folder is needed",
    errno.EISDIR: "a folder stands where a file is needed",
    errno.ELOOP: "is a symbolic link, which is never followed here: remove it",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
}


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


class Unreached(Again):
    """Not even a connection came about: no name, no route, refused, or no answer."""


class Withheld(Fatal):
    """This source does not give this file, or gives it wrong; it may well give the others."""


class Stopped(Exception):
    """Another worker met a fatal error; the bytes so far are kept."""


@contextlib.contextmanager
def disk(path: str) -> Iterator[None]:
    """Turns errors of the local file system into fatal ones, apart from network errors."""
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        if error.errno == errno.ENOSPC:
            text = f"{named}: no space left; the bytes so far are kept"
            raise Fatal(DISK_FULL, text) from error
        if error.errno == errno.EDQUOT:
            text = f"{named}: the disk quota is used up; the bytes so far are kept"
            raise Fatal(DISK_FULL, text) from error
        why = _WORDS.get(error.errno or 0) or error.strerror or str(error)
        raise Fatal(DISK_ERROR, f"{named}: {why}") from error


def log(text: str) -> None:
    """One line of the job's log. A server's words could end it or move a cursor: those are `?`."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    print(time.strftime("%H:%M:%S ") + shown, flush=True)


def warn(text: str) -> None:
    """A line that the controller shows."""
    log(f"warning: {text}")


def replace_file(path: str, text: str, sync: bool = True) -> None:
    """Writes `path` by a temp file, which never follows a link, and rename."""
    temp = path + ".tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with disk(path):
        try:
            handle = os.open(temp, flags, 0o644)
        except FileExistsError:  # of a process that was killed
            os.unlink(temp)
            handle = os.open(temp, flags, 0o644)
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.replace(temp, path)


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


def holder_text(record: bytes) -> tuple[bool, str]:
    """(alive, who wrote the lock: pid and command line, as far as the kernel still knows them)."""
    try:
        row = json.loads(record)
        pid, start = int(row["pid"]), int(row["start"])
    except (ValueError, KeyError, TypeError):
        return False, "a process that left no record"
    if not start or kernel_start(pid) != start:
        return False, f"a process started by pid {pid}, which is gone"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = stream.read(4096).decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return True, f"pid {pid}"
    line = "".join(c if c.isprintable() else "?" for c in " ".join(words))
    return True, f"pid {pid}: {line}"


def make_folder(root: str, folder: str) -> None:
    """Makes `folder`, at or below `root`. Raises Fatal when a link leads it out of there."""
    with disk(folder):
        real, top = os.path.realpath(folder), os.path.realpath(root)
        if os.path.commonpath([real, top]) != top:
            raise Fatal(DISK_ERROR, f"{folder}: a link leads out of {root}, to {real}; remove it")
        os.makedirs(folder, exist_ok=True)


@contextlib.contextmanager
def only_one(root: str) -> Iterator[int]:
    """Holds `.deployer/lock` and yields its descriptor, for children to inherit.

    The kernel frees it when this process and all who inherited it have ended. What a dead holder
    left behind is given a few seconds for that.
    """
    folder = os.path.join(root, ".deployer")
    make_folder(root, folder)
    with disk(folder):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(os.path.join(folder, "lock"), flags, 0o644)
    try:
        ends = time.monotonic() + LAST_BREATH_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                alive, who = holder_text(os.pread(handle, 200, 0))
                if alive or time.monotonic() >= ends:
                    text = f"{root}: another download holds the lock: {who}"
                    raise Fatal(LOCKED, text) from None
            time.sleep(0.02)
        with disk(folder):
            os.ftruncate(handle, 0)
            mine = {"pid": os.getpid(), "start": kernel_start(os.getpid())}
            os.pwrite(handle, json.dumps(mine).encode(), 0)
        yield handle
    finally:
        os.close(handle)
