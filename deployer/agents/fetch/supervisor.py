"""Runs the ladder of methods until every file is verified, and watches each from outside.

One worker at a time. It holds nothing that a kill can lose: the bytes are in files, the lock is the
kernel's, and the worker dies with this process.
"""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH100, PTH118

from __future__ import annotations

import fcntl
import os
import shutil
import time

from deployer.agents.fetch import methods, orphans
from deployer.agents.fetch.child import Child, become_reaper
from deployer.agents.fetch.common import (
    BAD_MANIFEST,
    DENIED,
    DISK_ERROR,
    DISK_FULL,
    GAVE_UP,
    MALFORMED,
    MISMATCH,
    NOT_FOUND,
    UNTRUSTED,
    Fatal,
    disk,
    log,
    only_one,
    replace_file,
    warn,
)
from deployer.agents.fetch.figures import Figures, whole
from deployer.agents.fetch.manifest import Job
from deployer.agents.fetch.methods import Method
from deployer.agents.fetch.signals import Interrupted, Signals
from deployer.agents.fetch.stock import HF, INCOMING, Stock, untwin
from deployer.agents.fetch.watchdog import Sample, Verdict, Watchdog

EVERY_S = 1.0
NO_CURE = frozenset({BAD_MANIFEST, MISMATCH, DENIED, NOT_FOUND, DISK_FULL, MALFORMED, DISK_ERROR})
"""Codes of a worker that end the job: no other method can help."""
MOST_DEATHS = 5
"""So often in a row a worker that brings no byte may be killed by others."""


def supervise(job: Job, token: str) -> int:
    """The whole job. 0: complete and verified; 128 + n: ended by signal n. Raises Fatal."""
    with only_one(job.path) as handle:
        supervisor = Supervisor(job, token, handle)
        with supervisor.signals.caught():
            try:
                return supervisor.run()
            except Interrupted as stop:
                log(f"stopped by signal {stop.number} at {supervisor.figures.place()}; all kept")
                return 128 + stop.number
            finally:
                os.close(supervisor.lock)


class Supervisor:
    """The ladder of one job. `lock` is the descriptor of the held lock."""

    def __init__(self, job: Job, token: str, lock: int) -> None:
        self.job, self.limits = job, job.limits
        self.lock = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 10)
        self.environ = dict(os.environ)
        self.ladder = methods.ladder(job, token, self.environ)
        self.stock = Stock(job.path, job.files)
        self.figures = Figures(job.files, time.monotonic())
        self.progress = os.path.abspath("progress")
        self.strikes: dict[str, int] = {}
        self.deaths: dict[str, int] = {}
        self.barred: dict[str, str] = {}
        self.unusable: set[str] = set()
        self.untrusted = False
        self.signals = Signals()

    # ---- the story

    def run(self) -> int:
        """Method after method. Raises Fatal when none is left, or when none could help."""
        if self.look():
            become_reaper()
            log(f"{len(self.job.files)} files, {self.job.total} bytes, to {self.job.path}")
            self.collect()
        position = 0
        while self.look():
            self.signals.heed()
            method = self.next_method(position)
            position = self.ladder.index(method) + 1
            log(f"{method.name}: {len(self.stock.left)} files to go, {self.figures.place()}")
            had = self.figures.bytes
            verdict, child = self.work(method)
            self.signals.heed()
            self.collect()
            if not self.look():
                break
            self.judge(method, verdict, child, self.figures.bytes - had)
        self.figures.phase = "complete"
        self.show()
        log("complete: every file is verified")
        return 0

    def look(self) -> int:
        """How many files are not verified, by stats and the record alone."""
        left = self.stock.look()
        self.figures.files_done = len(self.job.files) - len(left)
        self.count()
        return len(left)

    def count(self) -> None:
        """Bytes of all files, as the disk shows them."""
        self.figures.shards = self.stock.shards()
        there = sum(done for _, done, _ in self.figures.shards)
        lacking = sum(size for _, _, size in self.figures.shards)
        self.figures.bytes = self.job.total - lacking + there

    def next_method(self, position: int) -> Method:
        """The first one from `position` on, round and round, that can be used. Raises Fatal."""
        count = len(self.ladder)
        for method in (self.ladder[(position + step) % count] for step in range(count)):
            if method.name in self.barred:
                continue
            obstacle = method.obstacle()
            if not obstacle:
                return method
            self.barred[method.name] = obstacle
            self.unusable.add(method.name)
            log(f"{method.name} cannot be used: {obstacle}")
        # What was tried says more than what could not be.
        rows = sorted(self.barred.items(), key=lambda row: row[0] in self.unusable)
        why = "; ".join(f"{name}: {reason}" for name, reason in rows) or "none given"
        raise Fatal(
            UNTRUSTED if self.untrusted else GAVE_UP,
            f"no method is left at {self.figures.place()}: {why}",
        )

    def judge(self, method: Method, verdict: Verdict | None, child: Child, gained: int) -> None:
        """What a worker's end means for its method. Raises Fatal when it means the job's end."""
        if verdict is None and child.status == 0:
            left = self.stock.left
            self.bar(method, f"ended without {len(left)} files, first {left[0].path}")
            return
        code, text = child.status or 0, str(child.error.get("error") or "")
        if verdict is not None:
            self.figures.stalls += 1
            trouble = str(child.line.get("trouble") or "")
            last = f", last trouble: {trouble}" if trouble else ""
            self.strike(method, verdict.text(self.figures.place()) + last, "; killed")
        elif code < 0:
            self.bury(method, f"{how_ended(code)} at {self.figures.place()}", gained)
        elif code in NO_CURE and code not in method.passing:
            raise Fatal(code, text or f"{method.name} {how_ended(code)}")
        else:
            if code == UNTRUSTED:
                self.untrusted = True
            self.bar(method, f"failed: {text or how_ended(code)}")

    def strike(self, method: Method, what: str, then: str = "") -> None:
        """A stall: the method may get another turn."""
        count = self.strikes[method.name] = self.strikes.get(method.name, 0) + 1
        if count >= self.limits.stalls_per_method:
            self.barred[method.name] = f"{what}, its stall number {count}" if count > 1 else what
        self.say_next(method, what + then)

    def bury(self, method: Method, what: str, gained: int) -> None:
        """A worker that others killed. One that brought bytes did its work: the next goes on."""
        count = self.deaths[method.name] = 0 if gained > 0 else self.deaths.get(method.name, 0) + 1
        if count >= MOST_DEATHS:
            self.barred[method.name] = f"{what}, for the {count}. time in a row without a new byte"
        self.say_next(method, what)

    def bar(self, method: Method, what: str) -> None:
        """No more of it in this run."""
        self.barred[method.name] = what
        self.say_next(method, what)

    def say_next(self, method: Method, what: str) -> None:
        """The warning; its end names what comes next, or that nothing does."""
        after = self.next_method(self.ladder.index(method) + 1)
        warn(f"{method.name} {what}, going on with {after.name}")

    # ---- one worker

    def work(self, method: Method) -> tuple[Verdict | None, Child]:
        """Runs one worker to its end, or to the watchdog's verdict. Raises Interrupted, Fatal."""
        self.figures.start(method.name)
        child = Child(method.words, method.environ, self.lock)
        try:
            verdict = self.watch(method, child)
        finally:
            child.clear()
        self.figures.take(child.line)
        return verdict, child

    def watch(self, method: Method, child: Child) -> Verdict | None:
        """One look a second until it ends by itself (None) or must go."""
        dog = Watchdog(self.limits)
        due, writing = 0.0, written()
        while not child.ended():
            child.read()
            self.signals.heed()
            now = time.monotonic()
            if now >= due:
                due = now + EVERY_S
                before, writing = writing, written()
                if child.line:
                    self.figures.take(child.line)
                self.measure(method, child)
                self.show()
                flushing = writing > before and child.blocked()
                verdict = dog.see(self.sample(now, flushing))
                if verdict is not None:
                    return verdict
            pipes = [child.pipe] if child.pipe is not None else []
            self.signals.wait(pipes, due - time.monotonic())
        return None

    def sample(self, now: float, flushing: bool) -> Sample:
        """The figures as the watchdog takes them."""
        return Sample(
            at=now,
            wire=self.figures.sum("received"),
            moved=self.figures.sum("moved"),
            disk=self.stock.on_disk(),
            phase=self.figures.phase,
            pausing=self.figures.pause > 0,
            flushing=flushing,
        )

    def measure(self, method: Method, child: Child) -> None:
        """Bytes and shards: the worker's own where it knows them, else by stats."""
        row = child.line
        if not method.own_figures or "bytes" not in row:
            self.count()
            return
        self.figures.bytes = min(self.job.total, whole(row, "bytes"))
        self.figures.files_done = whole(row, "files_done")
        shards = row.get("shards")
        if isinstance(shards, list):
            self.figures.shards = [(str(p), int(done), int(size)) for p, done, size in shards]

    def collect(self) -> None:
        """What workers left: partials become NAME.part, complete bytes are hashed and renamed."""
        self.figures.phase = "settling"
        with disk(self.job.path):
            untwin(os.path.join(self.job.path, HF))
        orphans.adopt_all(self.job.path, self.stock.look())
        # What was of use is taken. The rest is shorter than what we have, and huggingface_hub's
        # metadata would claim files that are gone.
        for folder in (HF, INCOMING):
            shutil.rmtree(os.path.join(self.job.path, folder), ignore_errors=True)
        self.settle()

    def settle(self) -> None:
        """Hashes what is complete, in a worker without network; one that is killed is followed by
        another. Raises Fatal.
        """
        for _ in range(MOST_DEATHS):
            self.stock.look()
            if not self.stock.complete_unverified():
                return
            verdict, child = self.work(methods.settle(self.environ))
            if verdict is not None:
                why = verdict.text(self.figures.place())
                raise Fatal(DISK_ERROR, f"checking what is there {why}")
            code = child.status or 0
            if code == 0:
                return
            text = str(child.error.get("error") or f"its worker {how_ended(code)}")
            if code > 0:
                raise Fatal(code, f"checking what is there: {text}")
            warn(f"checking what is there: {text}")
        raise Fatal(GAVE_UP, f"checking what is there: {text}, {MOST_DEATHS} times in a row")

    # ---- the progress file

    def show(self) -> None:
        """Writes the progress file."""
        replace_file(self.progress, self.figures.line(time.monotonic()) + "\n", sync=False)


def how_ended(code: int) -> str:
    """For a log line: an exit code, or minus a signal."""
    if code < 0:
        return f"was killed by signal {-code}"
    return f"ended with code {code}, see the lines above"


def written() -> int:
    """Pages that the kernel has written to disks since boot, 0 where it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as stream:  # noqa: PTH123
            for line in stream:
                if line.startswith("nr_written "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        return 0
    return 0
