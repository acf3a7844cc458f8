"""The range workers: small files first, then by size, largest first."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH103, PTH105, PTH110, PTH116, PTH118, PTH120, PTH123

from __future__ import annotations

import http.client
import os
import queue
import random
import ssl
import threading
import time

from deployer.agents.fetch.common import (
    BLOCK,
    GAVE_UP,
    MISMATCH,
    UNTRUSTED,
    Again,
    Fatal,
    Stopped,
    disk,
    log,
    sync_folder,
)
from deployer.agents.fetch.digest import Digest, check_content
from deployer.agents.fetch.gauge import Gauge, Reporter
from deployer.agents.fetch.hubhttp import Hub, resumes_at
from deployer.agents.fetch.manifest import File, Job
from deployer.agents.fetch.orphans import adopt_orphan
from deployer.agents.fetch.part import Part
from deployer.agents.fetch.record import Record


class Download:
    """The pool: small files first, then by size, largest first."""

    def __init__(self, job: Job, token: str, reporter: Reporter, endpoint: str) -> None:
        self.root, self.limits, self.files = job.path, job.limits, job.files
        self.hub = Hub(job, token, endpoint)
        self.workers = min(job.connections, len(self.files) or 1)
        self.reporter = reporter
        self.gauge = Gauge(sum(file.size for file in self.files), len(self.files))
        self.record = Record(self.root)
        self.queue: queue.SimpleQueue[File] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.errors: list[Fatal] = []
        small = sorted((f for f in self.files if f.size < 1 << 20), key=lambda f: f.size)
        large = sorted((f for f in self.files if f.size >= 1 << 20), key=lambda f: -f.size)
        for file in small + large:
            self.queue.put(file)

    def run(self) -> None:
        """Fetches everything; raises the first Fatal."""
        log(f"{len(self.files)} files, {self.gauge.total} bytes, to {self.root}")
        threads = [threading.Thread(target=self.work, daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            self.reporter.tell(self.gauge.line())
            deadline = time.monotonic() + 1.0
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        self.reporter.tell(self.gauge.line())
        if self.errors:
            raise self.errors[0]

    def work(self) -> None:
        while not self.stop.is_set():
            try:
                file = self.queue.get_nowait()
            except queue.Empty:
                return
            try:
                self.fetch(file)
            except Stopped:
                return
            except Fatal as error:
                self.errors.append(error)
                self.stop.set()
            except Exception as error:  # noqa: BLE001 - a worker's bug must end the job, named
                self.errors.append(Fatal(1, f"{file.path}: {type(error).__name__}: {error}"))
                self.stop.set()

    def fetch(self, file: File) -> None:
        """Brings one file to its final name, verified."""
        final = os.path.join(self.root, file.path)
        with disk(final):
            os.makedirs(os.path.dirname(final), exist_ok=True)
        if not self.already_there(file, final):
            adopt_orphan(self.root, file, final + ".part")
            part = Part(final + ".part", file, self.gauge)
            try:
                sha256 = self.receive_right(file, part)
                part.sync()
            finally:
                part.close()
            with disk(final):
                os.replace(final + ".part", final)
                facts = os.stat(final)
            sync_folder(os.path.dirname(final))
            self.record.add(file, facts, sha256)
        check_content(file, final, [one.path for one in self.files])
        done = self.gauge.file_done()
        log(f"verified {file.path} ({file.size} bytes), {done} of {self.gauge.files}")

    def already_there(self, file: File, final: str) -> bool:
        """Judges a file that has the final name; what is wrong is moved out of the way."""
        try:
            facts = os.stat(final)
        except FileNotFoundError:
            return False
        if self.record.holds(file, facts):
            self.gauge.add(valid=file.size)
            return True
        if facts.st_size == file.size:
            digest = Digest(file)
            with disk(final), open(final, "rb", buffering=0) as stream:
                while data := stream.read(BLOCK):
                    digest.update(data)
                    self.gauge.add(moved=len(data))
                    if self.stop.is_set():
                        raise Stopped
            wrong = digest.wrong()
            if not wrong:
                self.record.add(file, facts, digest.sha256.hexdigest())
                self.gauge.add(valid=file.size)
                return True
            log(f"{file.path}: {wrong}; moved to {file.path}.bad, fetching it again")
        elif facts.st_size < file.size and not os.path.exists(final + ".part"):
            log(f"{file.path}: {facts.st_size} of {file.size} bytes; resuming")
            with disk(final):
                os.replace(final, final + ".part")
            return False
        else:
            log(f"{file.path}: {facts.st_size} bytes, not {file.size}; moved to {file.path}.bad")
        with disk(final):
            os.replace(final, final + ".bad")
        return False

    def receive_right(self, file: File, part: Part) -> str:
        """Receives until the hash is right; wrong bytes are fetched once more, then named."""
        self.receive(file, part)
        if wrong := part.digest.wrong():
            log(f"{file.path}: {wrong}; fetching it again")
            part.restart()
            self.receive(file, part)
        if wrong := part.digest.wrong():
            with disk(part.path):
                os.replace(part.path, part.path[: -len(".part")] + ".bad")
            raise Fatal(MISMATCH, f"{file.path}: {wrong}, twice; kept as {file.path}.bad")
        return part.digest.sha256.hexdigest()

    def receive(self, file: File, part: Part) -> None:
        """Tries until all bytes are there. Bounded: tries that bring nothing, and tries in all."""
        idle = refused = 0
        again = Again("no try was allowed")
        for _ in range(self.limits.tries):
            if part.offset == file.size:
                return
            self.wait_turn()
            before = part.offset
            try:
                self.one_try(file, part)
                return
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    text = f"{self.hub.endpoint}: {error.verify_message or error}"
                    raise Fatal(UNTRUSTED, text) from error
                again = Again(f"{type(error).__name__}: {error}")
            except Again as error:
                again = error
            refused = refused + 1 if again.range_refused else 0
            if refused >= 2:
                part.restart()
            idle = 0 if part.offset > before else idle + 1
            if idle > self.limits.idle_tries:
                break
            self.back_off(file, part, again, idle)
        raise Fatal(GAVE_UP, f"{file.path}: gave up at {part.offset} of {file.size} bytes: {again}")

    def back_off(self, file: File, part: Part, again: Again, idle: int) -> None:
        """Logs the retry and waits: the whole pool when the hub asked for it."""
        self.gauge.retry(again.pause_s)
        log(f"{file.path}: {again}; going on at {part.offset} of {file.size}")
        if not again.pause_s:
            longest = min(self.limits.max_backoff_s, self.limits.backoff_s * 2**idle)
            self.stop.wait(longest * random.uniform(0.25, 0.5))

    def wait_turn(self) -> None:
        """Waits while the pool is held back. Raises Stopped."""
        while not self.stop.is_set():
            left = self.gauge.pause_until - time.monotonic()
            if left <= 0:
                return
            self.stop.wait(left)
        raise Stopped

    def one_try(self, file: File, part: Part) -> None:
        """One request; returns when all bytes came."""
        connection, response = self.hub.open(file, part.offset)
        try:
            if not resumes_at(response, file, part.offset) and part.offset:
                log(f"{file.path}: the server ignored the range; from the beginning")
                part.restart()
            mark, since = part.offset, time.monotonic()
            while part.offset < file.size:
                if self.stop.is_set():
                    raise Stopped
                data = response.read1(min(BLOCK, file.size - part.offset))
                if not data:
                    raise Again("the connection ended early")
                part.write(data)
                spent = time.monotonic() - since
                if spent >= self.limits.slow_window_s:
                    if (part.offset - mark) / spent < self.limits.slow_bytes_per_s:
                        raise Again(f"only {(part.offset - mark) / spent:.0f} bytes/s")
                    mark, since = part.offset, time.monotonic()
        finally:
            connection.close()
