"""One model repository: its files, their hashes, and how Xet cuts them up."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_model

CHUNK = 64 << 10
"""Bytes of a Xet chunk (real ones vary between 8 and 128 KiB)."""
XORB = 256 * CHUNK
"""Bytes of a file in one xorb (real ones hold up to 64 MiB)."""
FRAME = 8
"""Bytes before each chunk of a xorb."""


@dataclass(frozen=True)
class Blob:
    """One file. `oid`: git's id of what git has, for a large file its LFS pointer."""

    path: Path
    size: int
    sha256: str
    oid: str
    lfs: bool

    @property
    def xet(self) -> str:
        """The file's hash in the CAS. Not Xet's own function: its client does not check it."""
        return hashlib.sha256(b"xet " + self.sha256.encode()).hexdigest()

    def xorb(self, n: int) -> str:
        """The hash of the file's n-th xorb."""
        return hashlib.sha256(f"xorb {n} {self.sha256}".encode()).hexdigest()

    @property
    def xorbs(self) -> int:
        return -(-self.size // XORB)


def git_id(data: bytes) -> str:
    """git's object id of a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """What git keeps of a large file."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


class Repo:
    """Name, commit and files. Content is made once below `root`; hashes are kept beside it."""

    def __init__(self, name: str, root: Path, shards: int, mb: float) -> None:
        self.name = name
        names = tiny_model.build(root, shards, mb)
        known = Hashes(root / ".hashes.json")
        self.blobs = {path: self._blob(root / path, known) for path in names}
        known.save()
        text = "".join(f"{path}{blob.sha256}" for path, blob in sorted(self.blobs.items()))
        self.commit = hashlib.sha1(text.encode()).hexdigest()
        self.by_sha = {blob.sha256: path for path, blob in self.blobs.items()}
        self.by_xet = {blob.xet: path for path, blob in self.blobs.items()}
        self.by_xorb = {
            blob.xorb(n): (path, n) for path, blob in self.blobs.items() for n in range(blob.xorbs)
        }

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(blob.size for blob in self.blobs.values())

    @staticmethod
    def _blob(path: Path, known: Hashes) -> Blob:
        sha256, size = known.of(path), path.stat().st_size
        lfs = path.suffix == ".safetensors"
        oid = git_id(pointer(sha256, size) if lfs else path.read_bytes())
        return Blob(path, size, sha256, oid, lfs)


class Hashes:
    """sha256 of files, kept with size and mtime so that a large model starts at once."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.rows: dict[str, list[Any]] = {}
        if store.exists():
            self.rows = json.loads(store.read_text())

    def of(self, path: Path) -> str:
        facts = path.stat()
        row = self.rows.get(path.name)
        if row and row[:2] == [facts.st_size, facts.st_mtime_ns]:
            return str(row[2])
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        self.rows[path.name] = [facts.st_size, facts.st_mtime_ns, digest]
        return digest

    def save(self) -> None:
        part = self.store.with_name(self.store.name + ".part")
        part.write_text(json.dumps(self.rows))
        part.replace(self.store)
