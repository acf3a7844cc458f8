"""NAME.part: the bytes of a file that does not have its name yet."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.

from __future__ import annotations

import os

from deployer.agents.fetch.common import BLOCK, disk
from deployer.agents.fetch.digest import Digest
from deployer.agents.fetch.gauge import Gauge
from deployer.agents.fetch.manifest import File


class Part:
    """NAME.part: an exact prefix of the file and its running hash."""

    def __init__(self, path: str, file: File, gauge: Gauge) -> None:
        self.path, self.file, self.gauge = path, file, gauge
        self.digest, self.offset = Digest(file), 0
        with disk(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.handle = os.open(path, flags, 0o644)
            if os.fstat(self.handle).st_size > file.size:
                os.ftruncate(self.handle, 0)
            while data := os.read(self.handle, BLOCK):
                self.digest.update(data)
                self.offset += len(data)
                gauge.add(valid=len(data), moved=len(data))

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with disk(self.path):
            while view:
                done = os.write(self.handle, view)
                self.digest.update(view[:done])
                self.offset += done
                self.gauge.add(valid=done, moved=done, received=done)
                view = view[done:]

    def restart(self) -> None:
        """Throws the prefix away."""
        self.gauge.add(valid=-self.offset)
        with disk(self.path):
            os.ftruncate(self.handle, 0)
            os.lseek(self.handle, 0, os.SEEK_SET)
        self.digest, self.offset = Digest(self.file), 0

    def sync(self) -> None:
        with disk(self.path):
            os.fsync(self.handle)

    def close(self) -> None:
        os.close(self.handle)
