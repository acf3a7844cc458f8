"""The range workers: who fetches what, until every file stands under its name.

Small files come first, then the others by size, largest first. A file is taken whole while there is
enough for everybody; near the end it is cut so that every worker has its share, and a worker that
still finds nothing takes half of what another has before it.
"""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque

from deployer.agents.fetch.borrow import Lender
from deployer.agents.fetch.common import (
    BLOCK,
    GAVE_UP,
    MISMATCH,
    Fatal,
    Stopped,
    Withheld,
    log,
    warn,
)
from deployer.agents.fetch.cpus import SPARE, Cpus
from deployer.agents.fetch.gauge import Gauge, Reporter
from deployer.agents.fetch.hubhttp import Hub
from deployer.agents.fetch.landing import Landing
from deployer.agents.fetch.manifest import PEER, File, Job
from deployer.agents.fetch.part import Part
from deployer.agents.fetch.pieces import Journal, Span
from deployer.agents.fetch.stream import Stop, Stream, Yielded
from deployer.agents.fetch.throttle import Throttle

LOOK_AGAIN_S = 0.25
END_S = 2.0
"""How long a worker may take to notice the end; then the process goes without it."""


class Download:
    """The pool. `endpoint`: whom to ask, the job's own, a mirror, or the peer that lends."""

    def __init__(self, job: Job, token: str, reporter: Reporter, endpoint: str) -> None:
        self.job, self.reporter = job, reporter
        self.gauge = Gauge(job.total, len(job.files))
        self.gauge.shards, self.gauge.phase = self.shards, self.phase
        self.stop = Stop()
        self.hub = Lender(job) if endpoint == PEER else Hub(job, token, endpoint)
        self.throttle = Throttle(job.limits.bwlimit_bytes_per_s, job.connections)
        self.landing = Landing(job, self.gauge, self.stop.check)
        self.changed = threading.Condition()
        self.queue: deque[File] = deque()
        self.parts: list[Part] = []
        self.judging = self.fetching = 0
        self.errors: list[Fatal] = []
        self.withheld: dict[str, str] = {}
        """Files that this source has not, or has wrong, and why; the others are fetched."""

    def run(self) -> None:
        """Fetches everything; raises the first Fatal, or one for all files that were withheld."""
        todo = [file for file in self.job.files if not self.landing.recorded(file)]
        self.queue.extend(in_order(todo))
        log(f"{len(todo)} of {len(self.job.files)} files to fetch or judge, in {self.job.path}")
        threads: list[threading.Thread] = []
        self.start(threads, self.hub.at_once(self.job.connections) if todo else 0)
        cpus = Cpus()
        try:
            while any(thread.is_alive() for thread in threads):
                self.reporter.tell(self.gauge.line())
                self.hub.hurry(time.monotonic())
                join(threads, 1.0, self.stop.event)
                if len(threads) < self.job.connections and cpus.idle() >= SPARE:
                    self.start(threads, 1)
                if self.stop.event.is_set():
                    self.hub.hurry(math.inf)
                    join(threads, END_S)
                    break
            self.reporter.tell(self.gauge.line())
        finally:
            self.stop.set()
        if self.errors:
            raise self.errors[0]
        if self.withheld:
            count, first = len(self.withheld), next(iter(self.withheld.values()))
            told = f"{count} of {len(self.job.files)} files are not to be had there, first {first}"
            raise Fatal(GAVE_UP, told)

    def start(self, threads: list[threading.Thread], count: int) -> None:
        """So many workers more."""
        for _ in range(count):
            threads.append(threading.Thread(target=self.work, daemon=True))
            threads[-1].start()

    def work(self) -> None:
        """One worker's life."""
        while not self.stop.event.is_set():
            what = ""
            try:
                job = self.next()
                if job is None:
                    return
                if isinstance(job, File):
                    what = job.path
                    self.begin(job)
                else:
                    what = job[0].file.path
                    self.fetch(*job)
            except Stopped:
                return
            except Fatal as error:
                self.fail(error)
            except Exception as error:  # noqa: BLE001 - a worker's bug must end the job, named
                self.fail(Fatal(1, f"{what}: {type(error).__name__}: {error}"))

    def fail(self, error: Fatal) -> None:
        """Ends the pool."""
        self.errors.append(error)
        self.stop.set()
        with self.changed:
            self.changed.notify_all()

    def next(self) -> File | tuple[Part, Span] | None:
        """A file to begin or a span to fill; None when everything is done. Raises Stopped."""
        with self.changed:
            while True:
                self.stop.check()
                work = self.free_span() or self.new_file() or self.stolen_span()
                if work is not None:
                    return work
                if not self.parts and not self.judging:
                    return None
                self.changed.wait(LOOK_AGAIN_S)

    def free_span(self) -> tuple[Part, Span] | None:
        """Caller holds the lock, as for the next two."""
        most = self.share()
        for part in self.parts:
            span = part.take(most)
            if span is not None:
                return part, span
        return None

    def share(self) -> int:
        """An even share, in bytes, of what nobody fetches yet."""
        free = sum(file.size for file in self.queue) + sum(part.free for part in self.parts)
        return max(BLOCK, free // self.job.connections)

    def new_file(self) -> File | None:
        """The next file that nobody has looked at."""
        if not self.queue:
            return None
        self.judging += 1
        return self.queue.popleft()

    def stolen_span(self) -> tuple[Part, Span] | None:
        """Half of the longest run that another worker has before it."""
        for part in sorted(self.parts, key=lambda part: -part.widest):
            span = part.steal(time.monotonic())
            if span is not None:
                return part, span
        return None

    def begin(self, file: File) -> None:
        """Judges what is there of a file; opens its part unless it is complete and right."""
        part = None
        try:
            if not self.landing.stands(file):
                path = self.landing.partial(file)
                if not os.path.lexists(path):
                    Journal(path).forget()
                part = Part(path, file, self.gauge)
        finally:
            with self.changed:
                self.judging -= 1
                if part is not None:
                    self.parts.append(part)
                self.changed.notify_all()
        if part is not None:
            self.settle(part, part.complete())

    def fetch(self, part: Part, span: Span) -> None:
        """Fills a span, or leaves it as far as it came."""
        with self.changed:
            self.fetching += 1
        stream = Stream(self.hub, self.gauge, self.throttle, self.stop, part, span)
        why = ""
        try:
            stream.run()
        except Yielded:
            pass
        except Withheld as error:
            why = str(error)
        finally:
            complete = part.release(stream.span)
            with self.changed:
                self.fetching -= 1
                self.changed.notify_all()
        if why:
            self.leave(part, why)
        if part.file.path not in self.withheld:
            self.settle(part, complete)
        elif not part.owned:
            part.close()

    def leave(self, part: Part, why: str) -> None:
        """No more of this file from here; what came of it stays."""
        with self.changed:
            if part not in self.parts:
                return
            self.parts.remove(part)
            self.withheld[part.file.path] = why
            self.changed.notify_all()
        warn(f"{why}; left to another source")

    def settle(self, part: Part, complete: bool) -> None:
        """Brings the hash up; a complete file gets its name, or is fetched once more."""
        if not complete:
            if part.behind():
                part.catch_up(self.stop.check)
            return
        part.catch_up(self.stop.check)
        wrong = part.digest.wrong()
        name = part.file.path
        if not wrong:
            self.landing.land(part.file, part)
        elif not part.refetched and (part.inherited or not self.hub.exact):
            warn(f"{name}: {wrong}; fetching it again")
            part.restart()
        elif self.hub.exact:
            self.gauge.add(valid=-part.valid)
            part.journal.forget()
            self.landing.put_aside(part.file, part.path, wrong)
            self.leave(part, f"{name}: the bytes of {self.hub.endpoint} are wrong")
            part.close()
            return
        else:
            self.landing.put_aside(part.file, part.path, "wrong twice")
            raise Fatal(MISMATCH, f"{name}: {wrong}, twice; kept as {name}.bad")
        with self.changed:
            if not wrong:
                self.parts.remove(part)
                part.close()
            self.changed.notify_all()

    def shards(self) -> list[tuple[str, int, int]]:
        """The files under way: path, bytes on disk, size."""
        with self.changed:
            parts = list(self.parts)
        return [(part.file.path, part.valid, part.file.size) for part in parts]

    def phase(self) -> str:
        """What the figures are about to count."""
        with self.changed:
            busy = self.judging or self.parts
            return "hashing" if busy and not self.fetching else "downloading"


def in_order(files: list[File]) -> list[File]:
    """Small ones first: they show a refusal early; then the largest."""
    small = sorted((f for f in files if f.size < BLOCK), key=lambda f: f.size)
    return small + sorted((f for f in files if f.size >= BLOCK), key=lambda f: -f.size)


def join(
    threads: list[threading.Thread], seconds: float, until: threading.Event | None = None
) -> None:
    """Waits for the threads, or until the event or the time is over."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            if until is not None and until.is_set():
                return
            thread.join(min(0.1, max(0.0, deadline - time.monotonic())))
