"""Gives every file that is complete on disk its final name, without a network."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.

from __future__ import annotations

import os
import stat

from deployer.agents.fetch.common import DISK_ERROR, Fatal, log
from deployer.agents.fetch.gauge import Gauge, Reporter
from deployer.agents.fetch.hashers import Hashers
from deployer.agents.fetch.landing import Landing
from deployer.agents.fetch.manifest import File, Job
from deployer.agents.fetch.part import Part


class Settle:
    """Judges files under final names that the record does not know, and complete parts.

    Incomplete parts are counted and stay as they are; wrong bytes become NAME.bad.
    """

    def __init__(self, job: Job, reporter: Reporter) -> None:
        self.job = job
        self.gauge = Gauge(job.total, len(job.files), method="settle")
        self.gauge.phase = lambda: "settling"
        self.hashers = Hashers(self.gauge, reporter)
        self.landing = Landing(job, self.gauge, self.hashers.goes_on)

    def run(self) -> int:
        """0: all that is there has been judged. Raises Fatal."""
        todo = [file for file in self.job.files if not self.landing.recorded(file)]
        self.hashers.run(todo, self.judge)
        done, files = self.gauge.files_done, self.gauge.files
        log(f"{done} of {files} files are verified")
        return 0

    def judge(self, file: File) -> None:
        """One file."""
        if self.landing.stands(file):
            return
        path = self.landing.partial(file)
        try:
            facts = os.lstat(path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(facts.st_mode):
            raise Fatal(DISK_ERROR, f"{path}: is no regular file: remove it")
        part = Part(path, file, self.gauge)
        try:
            if not part.complete():
                return
            part.catch_up(self.hashers.goes_on)
            wrong = part.digest.wrong()
            if not wrong:
                self.landing.land(file, part)
                return
            self.gauge.add(valid=-part.valid)
            part.seal()
        finally:
            part.close()
        self.landing.put_aside(file, path, wrong)
