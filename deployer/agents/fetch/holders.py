"""Which live processes write to a file, or hold a lock on it.

Standard library only, and nothing of its own package: `look` sends this text to the target. It
reads and changes nothing.
"""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH115, PTH116, PTH119, PTH123, PTH208

from __future__ import annotations

import os
import re
from typing import NamedTuple

_SECRET = re.compile(
    r"(hf_|bearer\s+|--?[\w-]*(?:token|password|passwd|secret|api-key)[ =]"
    r"|://[^/@\s:]*:(?=[^/@\s]*@))[^\s@'\"]+",
    re.IGNORECASE,
)

Inode = tuple[int, int]
"""Device and number."""


class Holder(NamedTuple):
    """A live process that has a file of the folder open for writing, or holds a lock there."""

    pid: int
    command: str
    path: str


def command_of(pid: int) -> str:
    """The command line of a process, on one line, what looks like a secret left out."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            words = stream.read(4096).decode("utf-8", "replace").replace("\0", " ").strip()
    except OSError:
        return ""
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return _SECRET.sub(r"\1***", shown)[:200]


def holders(inodes: dict[Inode, str]) -> list[Holder]:
    """Live processes, but for this one, that write to or lock one of these files."""
    bases = {os.path.basename(path) for path in inodes.values()}
    found: dict[int, str] = {}
    for pid, numbers in _lockers().items():
        # btrfs names another device in /proc/locks than stat does: the number only preselects.
        wanted = {key: path for key, path in inodes.items() if key[1] in numbers}
        if wanted and (key := _opens(pid, bases, wanted, writing=False)):
            found[pid] = inodes[key]
    for entry in os.listdir("/proc") if inodes else ():
        if not entry.isdigit() or int(entry) in found:
            continue
        if key := _opens(int(entry), bases, inodes, writing=True):
            found[int(entry)] = inodes[key]
    found.pop(os.getpid(), None)
    return [Holder(pid, command_of(pid), found[pid]) for pid in sorted(found)]


def _lockers() -> dict[int, set[int]]:
    """pid -> inode numbers of the locks that it holds; who only waits is left out."""
    found: dict[int, set[int]] = {}
    try:
        with open("/proc/locks") as stream:
            rows = [line.split() for line in stream if " -> " not in line]
    except OSError:
        return found
    for row in rows:
        inode = row[5].split(":")[-1] if len(row) > 5 else ""
        if inode.isdigit() and row[4].isdigit():
            found.setdefault(int(row[4]), set()).add(int(inode))
    return found


def _opens(pid: int, bases: set[str], inodes: dict[Inode, str], writing: bool) -> Inode | None:
    """The first of `inodes` that the process has open (for writing).

    Only what has the base name of one of them is looked at closely: a stat of something on a
    network that does not answer would hang.
    """
    folder = f"/proc/{pid}/fd/"
    try:
        handles = os.listdir(folder)
    except OSError:
        return None
    for handle in handles:
        try:
            link = os.readlink(folder + handle)
            if link[:1] != "/" or os.path.basename(link) not in bases:
                continue
            facts = os.stat(folder + handle)
            key = (facts.st_dev, facts.st_ino)
            if key not in inodes:
                continue
            with open(f"/proc/{pid}/fdinfo/{handle}") as stream:
                flags = [line.split()[1] for line in stream if line.startswith("flags:")]
        except (OSError, IndexError):
            continue
        if not writing or (flags and int(flags[0], 8) & os.O_ACCMODE):
            return key
    return None
