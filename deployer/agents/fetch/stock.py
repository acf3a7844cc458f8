"""What of a job's files is on the disk by now, whichever method brought it. Stats only."""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH108, PTH116, PTH118, PTH120, PTH208

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from deployer.agents.fetch.look import valid_of_part
from deployer.agents.fetch.manifest import File
from deployer.agents.fetch.record import Record

INCOMING = os.path.join(".deployer", "incoming")
HF = os.path.join(".deployer", "hf")
HF_CACHE = os.path.join(HF, ".cache", "huggingface", "download")


def size_of(path: str) -> int:
    """Bytes of a regular file, 0 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def occupied(path: str) -> int:
    """Bytes that a file has on the disk, at most its size: holes do not count."""
    try:
        facts = os.stat(path)
    except OSError:
        return 0
    return min(facts.st_size, facts.st_blocks * 512)


def below(folder: str) -> Iterator[str]:
    """Every file below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(place, name)


def untwin(folder: str) -> None:
    """Leaves one name to every file below `folder`: its final one, where it has that."""
    seen: set[tuple[int, int]] = set()
    for path in sorted(below(folder), key=lambda path: (path.endswith(".incomplete"), path)):
        facts = os.lstat(path)
        if (facts.st_dev, facts.st_ino) in seen:
            os.unlink(path)
        seen.add((facts.st_dev, facts.st_ino))


class Stock:
    """The files of one job below `root`."""

    def __init__(self, root: str, files: Sequence[File]) -> None:
        self.root, self.files = root, files
        self.left: list[File] = list(files)

    def look(self) -> list[File]:
        """The files that are not verified, after a new look at the record and at each file."""
        record = Record(self.root)
        self.left = [file for file in self.files if not self._verified(record, file)]
        return self.left

    def _verified(self, record: Record, file: File) -> bool:
        try:
            return record.holds(file, os.stat(os.path.join(self.root, file.path)))
        except OSError:
            return False

    def complete_unverified(self) -> list[File]:
        """Files of `left` that are all there under some name, and only lack the proof."""
        found = []
        for file in self.left:
            final = os.path.join(self.root, file.path)
            if os.path.lexists(final) or valid_of_part(final) >= file.size:
                found.append(file)
        return found

    def held(self, file: File) -> int:
        """About how many bytes of an unverified file are there, wherever."""
        final = os.path.join(self.root, file.path)
        best = max(
            min(size_of(final), file.size),
            valid_of_part(final),
            occupied(os.path.join(self.root, INCOMING, file.path)),
            size_of(os.path.join(self.root, HF, file.path)),
            *(occupied(path) for path in self.hf_partials(file)),
        )
        return min(best, file.size)

    def hf_partials(self, file: File) -> list[str]:
        """What our own huggingface_hub child has begun of a file; their names carry the hash."""
        folder = os.path.join(self.root, HF_CACHE, os.path.dirname(file.path))
        mark = f".{file.sha256 or file.blob_id}."
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        return [
            os.path.join(folder, name)
            for name in names
            if mark in name and name.endswith(".incomplete")
        ]

    def shards(self) -> list[tuple[str, int, int]]:
        """(path, bytes, size) of every unverified file."""
        return [(file.path, self.held(file), file.size) for file in self.left]

    def on_disk(self) -> int:
        """The disk gauge: what everything unfinished occupies."""
        total = 0
        for file in self.left:
            final = os.path.join(self.root, file.path)
            total += occupied(final + ".part") + occupied(final)
        for folder in (INCOMING, HF):
            total += sum(occupied(path) for path in below(os.path.join(self.root, folder)))
        return total
