"""Are these the right bytes? Hashes, and what a weight file says of itself."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH118, PTH120, PTH123, PTH202

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable

from deployer.agents.fetch.common import BLOCK, MALFORMED, Fatal, disk
from deployer.agents.fetch.manifest import File

MAX_HEADER = 32 * 1024 * 1024


class Digest:
    """sha256 of the bytes, and the git blob id where only that is known."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.git = None if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)

    def update(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        if self.git is not None:
            self.git.update(data)

    def value(self) -> str:
        """The hash that the manifest has, of the bytes so far."""
        return self.sha256.hexdigest() if self.git is None else self.git.hexdigest()

    def wrong(self) -> str:
        """'' when the bytes are right, else expected and got."""
        got = self.value()
        expected = self.file.sha256 or self.file.blob_id
        return "" if got == expected else f"expected {expected}, got {got}"


def hash_file(path: str, file: File, goes_on: Callable[[int], None]) -> Digest:
    """Hashes a whole file in blocks; `goes_on` gets the bytes of each and may raise.

    Raises Fatal for a file that cannot be read.
    """
    digest = Digest(file)
    buffer = memoryview(bytearray(BLOCK))
    with disk(path), open(path, "rb", buffering=0) as stream:
        while got := stream.readinto(buffer):
            digest.update(buffer[:got])
            goes_on(got)
    return digest


def broken_header(path: str) -> str:
    """'' when a safetensors file's length word, JSON and offsets cover the file exactly."""
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return f"header of {length} bytes in a file of {size}"
        if length > MAX_HEADER:
            return f"header of {length} bytes is over {MAX_HEADER}"
        try:
            header = json.loads(stream.read(length))
            spans = sorted(
                (int(row["data_offsets"][0]), int(row["data_offsets"][1]))
                for name, row in header.items()
                if name != "__metadata__"
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return f"header is not safetensors JSON ({error})"
    end = 0
    for start, stop in spans:
        if start != end or stop < start:
            return f"tensor offsets have a hole or overlap at {end}"
        end = stop
    return "" if end == size - 8 - length else f"tensors end at {end}, data at {size - 8 - length}"


def foreign_start(path: str, file: File) -> bool:
    """Can these not be the first bytes of `file`: a git-lfs pointer, or no safetensors header?

    `git clone` without git-lfs leaves such a pointer, 134 bytes, for every shard. Raises Fatal.
    """
    with disk(path), open(path, "rb") as stream:
        start = stream.read(64)
    if file.sha256 and start.startswith(b"version https://git-lfs"):
        return True
    if not file.path.endswith(".safetensors") or len(start) < 9:
        return False
    return start[8:9] != b"{" or int.from_bytes(start[:8], "little") > file.size - 8


def check_content(file: File, final: str, names: Iterable[str]) -> None:
    """An index must name only files of the list; a shard's header must cover it. Raises Fatal."""
    if file.path.endswith(".safetensors"):
        with disk(final):
            broken = broken_header(final)
        if broken:
            raise Fatal(MALFORMED, f"{file.path}: right hash, but {broken}")
    if file.path.endswith(".safetensors.index.json"):
        folder = os.path.dirname(file.path)
        try:
            with open(final, encoding="utf-8") as stream:
                shards = set(json.load(stream)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise Fatal(MALFORMED, f"{file.path}: not a weight index ({error})") from error
        there = set(names)
        lost = sorted(s for s in shards if os.path.join(folder, str(s)) not in there)
        if lost:
            text = f"{file.path} names {len(lost)} files that the list lacks: {lost[0]}"
            raise Fatal(MALFORMED, text)
