"""How a file comes to stand under its final name: only with the right bytes, and recorded."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH105, PTH114, PTH116, PTH118, PTH120

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from deployer.agents.fetch.common import (
    DISK_ERROR,
    Fatal,
    disk,
    log,
    make_folder,
    sync_folder,
    warn,
)
from deployer.agents.fetch.digest import check_content, foreign_start, hash_file
from deployer.agents.fetch.gauge import Gauge
from deployer.agents.fetch.manifest import OWN_FOLDER, File, Job
from deployer.agents.fetch.part import Part
from deployer.agents.fetch.pieces import Journal
from deployer.agents.fetch.record import Record


class Landing:
    """Judges what stands under final names, and gives right files theirs.

    `goes_on` is called a block of hashing and may raise Stopped.
    """

    def __init__(self, job: Job, gauge: Gauge, goes_on: Callable[[], None]) -> None:
        self.root, self.gauge, self.goes_on = job.path, gauge, goes_on
        self.names = frozenset(file.path for file in job.files)
        make_folder(self.root, os.path.join(self.root, OWN_FOLDER))
        self.record = Record(self.root)

    def final(self, file: File) -> str:
        """The path under which it will be served."""
        return os.path.join(self.root, file.path)

    def partial(self, file: File) -> str:
        """NAME.part."""
        return self.final(file) + ".part"

    def recorded(self, file: File) -> bool:
        """True for a file that was verified and is untouched; it counts from now on. One stat."""
        try:
            facts = os.stat(self.final(file))
        except OSError:
            return False
        if not stat.S_ISREG(facts.st_mode) or not self.record.holds(file, facts):
            return False
        self.gauge.add(valid=file.size)
        self.gauge.file_done()
        return True

    def stands(self, file: File) -> bool:
        """Judges a file under its final name; what is wrong is moved out of the way.

        One that is only too short becomes NAME.part. Raises Fatal for a folder or a device.
        """
        final = self.final(file)
        make_folder(self.root, os.path.dirname(final))
        with disk(final):
            try:
                facts = os.stat(final)
            except FileNotFoundError:
                return False
        if not stat.S_ISREG(facts.st_mode):
            raise Fatal(DISK_ERROR, f"{final}: is no regular file; move it away")
        part = self.partial(file)
        # What a link leads to is not ours: the link itself is moved away.
        resumable = not os.path.islink(final) and not os.path.lexists(part)
        if facts.st_size < file.size and resumable and not foreign_start(final, file):
            log(f"{file.path}: {facts.st_size} of {file.size} bytes; resuming")
            Journal(part).forget()
            with disk(final):
                os.replace(final, part)
            return False
        if facts.st_size != file.size:
            self.put_aside(file, final, f"{facts.st_size} bytes, not {file.size}")
            return False
        digest = hash_file(final, file, self._hashed)
        if wrong := digest.wrong():
            self.put_aside(file, final, wrong)
            return False
        check_content(file, final, self.names)
        self.record.add(file, facts, digest.sha256.hexdigest())
        self.gauge.add(valid=file.size)
        self._verified(file)
        return True

    def _hashed(self, count: int) -> None:
        self.gauge.add(moved=count)
        self.goes_on()

    def put_aside(self, file: File, path: str, why: str) -> None:
        """Keeps wrong bytes as NAME.bad, the newest ones only."""
        warn(f"{file.path}: {why}; moved to {file.path}.bad")
        with disk(path):
            os.replace(path, self.final(file) + ".bad")

    def land(self, file: File, part: Part) -> None:
        """Gives a part whose hash is right its final name. Raises Fatal MALFORMED."""
        final = self.final(file)
        part.seal()
        check_content(file, part.path, self.names)
        with disk(final):
            os.replace(part.path, final)
            facts = os.stat(final)
        sync_folder(os.path.dirname(final))
        self.record.add(file, facts, part.digest.sha256.hexdigest())
        self._verified(file)

    def _verified(self, file: File) -> None:
        done = self.gauge.file_done()
        log(f"verified {file.path} ({file.size} bytes), {done} of {self.gauge.files}")
