"""Partial files of huggingface_hub, rsync and aria2: found, and how much of them is a prefix.

Standard library only, and nothing of its own package: `look` sends this text to the target. It
reads and changes nothing.
"""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH118, PTH119, PTH123

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import NamedTuple

HF_PLACE = ".cache/huggingface/download"
OWN_HF, OWN_INCOMING = ".deployer/hf", ".deployer/incoming"
MOST_CONTROL = 4 << 20
_ETAG = re.compile(r"\.([0-9a-f]{64}|[0-9a-f]{40})(?:\.[0-9a-f]{8})?\.incomplete\Z")


class Partial(NamedTuple):
    """A file that a client has not finished. Sizes in bytes.

    `client`: hf, hf-xet (our own child of it), rsync (our own copy) or aria2. `path` is relative
    to the model's folder. `used`: on the disk. `prefix`: so many leading bytes are surely written.
    `name`: the file that it becomes, '' where only the hash is known. `etag`: sha256 or git blob
    id, '' where only the name is known. `total`: the whole length, as its client knew it, or 0.
    """

    client: str
    path: str
    used: int
    prefix: int
    name: str
    etag: str
    total: int


def dense(path: str) -> tuple[int, int, int]:
    """(leading bytes that are written, size, bytes on disk) of a regular file; no symlink.

    The first hole ends the prefix. Where the file system cannot tell of holes, a file with fewer
    blocks than bytes counts as nothing. So does one with a second hard link: it is not only ours.
    Raises OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        size, used = facts.st_size, facts.st_blocks * 512
        if not size or facts.st_nlink > 1:
            return 0, size, used
        try:
            hole = os.lseek(handle, 0, os.SEEK_HOLE)
        except OSError:
            hole = size
        if hole >= size and used < size:
            hole = 0
        return min(hole, size), size, used
    finally:
        os.close(handle)


def etag_of(name: str) -> str:
    """The hash in the name of huggingface_hub's partial file, '' for any other name.

    `HASH.ETAG.UUID8.incomplete` since 1.18, `HASH.ETAG.incomplete` and `FILE.ETAG.incomplete`
    before; ETAG is the sha256 of an LFS file, the git blob id of another.
    """
    found = _ETAG.search(name)
    return found.group(1) if found else ""


def aria2_prefix(control: bytes) -> tuple[int, int] | None:
    """(total length, bytes of the leading complete pieces) of an aria2 control file, or None.

    The format is described in aria2's manual, "Technical Notes, Control File (*.aria2) Format":
    version (2 bytes), extension (4), info hash length (4), info hash, piece length (4), total
    length (8), upload length (8), bitfield length (4), bitfield (first piece: highest bit), then
    the pieces in flight, which are not used here. Version 1 is big-endian, version 0 has the byte
    order of the machine that wrote it. Torrents are left alone.
    """
    if len(control) < 34 or control[:2] not in (b"\0\0", b"\0\1"):
        return None
    host_order = sys.byteorder == "little" and control[1] == 0

    def number(at: int, length: int) -> int:
        return int.from_bytes(control[at : at + length], "little" if host_order else "big")

    if control[5] & 1 or number(6, 4) != 0:
        return None
    piece, total, length = number(10, 4), number(14, 8), number(30, 4)
    bits = control[34 : 34 + length]
    if not piece or not total or length != (-(-total // piece) + 7) // 8 or len(bits) != length:
        return None
    whole = 0
    while whole < length * 8 and bits[whole // 8] >> (7 - whole % 8) & 1:
        whole += 1
    return total, min(whole * piece, total)


def below(root: str, place: str) -> str:
    """`root`/`place` when every step of the way is a real folder, else ''."""
    path = root
    for name in place.split("/"):
        path = os.path.join(path, name)
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return ""
        except OSError:
            return ""
    return path


def walk(root: str, place: str) -> Iterator[tuple[str, str]]:
    """(path below `place`, whole path) of what lies there; no symlink is followed."""
    top = below(root, place)
    for folder, _, names in os.walk(top) if top else ():
        for name in sorted(names):
            path = os.path.join(folder, name)
            yield os.path.relpath(path, top), path


def partials(root: str, names: list[str]) -> list[Partial]:
    """Every partial file of another client, and of our own helpers, below `root`.

    `names`: the files outside the hidden folders, among which aria2's are found.
    """
    found: list[Partial] = []

    def add(client: str, path: str, name: str, etag: str) -> None:
        try:
            prefix, _, used = dense(path)
        except OSError:  # a symlink, a pipe, or gone since
            return
        found.append(Partial(client, os.path.relpath(path, root), used, prefix, name, etag, 0))

    for rel, path in walk(root, HF_PLACE):
        if rel.endswith(".incomplete"):
            add("hf", path, "", etag_of(os.path.basename(rel)))
    for rel, path in walk(root, OWN_HF):
        if rel.endswith(".incomplete") and rel.startswith(HF_PLACE + "/"):
            add("hf-xet", path, "", etag_of(os.path.basename(rel)))
        elif not rel.startswith(".cache/"):
            add("hf-xet", path, rel, "")
    for rel, path in walk(root, OWN_INCOMING):
        add("rsync", path, rel, "")
    for name in names:
        if name.endswith(".aria2"):
            found += _aria2(root, name)
    return found


def _aria2(root: str, control: str) -> list[Partial]:
    """What the control file `control` speaks of; the control file itself when that is gone."""
    name = control[: -len(".aria2")]
    try:
        _, size, used = dense(os.path.join(root, control))
    except OSError:
        return []
    try:
        prefix, _, blocks = dense(os.path.join(root, name))
    except OSError:
        return [Partial("aria2", control, used, 0, name, "", 0)]
    total = 0
    if size <= MOST_CONTROL:
        with open(os.path.join(root, control), "rb") as stream:
            told = aria2_prefix(stream.read())
        total, prefix = (told[0], min(prefix, told[1])) if told else (0, 0)
    return [Partial("aria2", name, blocks + used, prefix if total else 0, name, "", total)]
