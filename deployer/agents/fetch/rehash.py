"""Hashes every file of the manifest again, whatever the record says."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH116

from __future__ import annotations

import json
import os
import stat

from deployer.agents.fetch.common import MISMATCH
from deployer.agents.fetch.digest import hash_file
from deployer.agents.fetch.gauge import Gauge, Reporter, say
from deployer.agents.fetch.hashers import Hashers
from deployer.agents.fetch.landing import Landing
from deployer.agents.fetch.manifest import File, Job


class Rehash:
    """`quarantine`: what is wrong is moved to NAME.bad; else it only leaves the record."""

    def __init__(self, job: Job, reporter: Reporter, quarantine: bool) -> None:
        self.job, self.quarantine = job, quarantine
        self.gauge = Gauge(job.total, len(job.files), method="rehash")
        self.gauge.phase = lambda: "hashing"
        self.hashers = Hashers(self.gauge, reporter)
        self.landing = Landing(job, self.gauge, self.hashers.goes_on)
        self.wrong = 0

    def run(self) -> int:
        """0 when all are right, else MISMATCH; one JSON line on stdout a file. Raises Fatal."""
        self.hashers.run(list(self.job.files), self.judge)
        return MISMATCH if self.wrong else 0

    def judge(self, file: File) -> None:
        """One file."""
        expected, final = file.sha256 or file.blob_id, self.landing.final(file)
        got, size = "", -1
        try:
            facts = os.stat(final)
        except (FileNotFoundError, NotADirectoryError):
            got = "no such file"
        else:
            size = facts.st_size
            got = "no regular file"
            if stat.S_ISREG(facts.st_mode):
                digest = hash_file(final, file, self.hashed)
                got = digest.value()
                if not digest.wrong():
                    self.landing.record.add(file, facts, digest.sha256.hexdigest())
                    self.gauge.add(valid=file.size)
        right = got == expected and size == file.size
        if not right:
            self.landing.record.drop(file)
            if self.quarantine and size >= 0 and got != "no regular file":
                self.landing.put_aside(file, final, f"expected {expected}, got {got}")
        row = {"path": file.path, "size": size, "ok": right, "expected": expected, "got": got}
        with self.gauge.lock:
            self.wrong += not right
            self.gauge.files_done += 1
            say(json.dumps(row))

    def hashed(self, count: int) -> None:
        self.gauge.add(moved=count)
        self.hashers.goes_on()
