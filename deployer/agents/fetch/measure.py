"""Mode `measure`: how fast bytes come from one source, in a few seconds; they are thrown away."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections import deque

from deployer.agents.fetch.borrow import Lender
from deployer.agents.fetch.common import BLOCK, Again, Fatal, Withheld
from deployer.agents.fetch.hubhttp import Hub
from deployer.agents.fetch.manifest import File, Job
from deployer.agents.fetch.throttle import Throttle

AGAIN_S = 0.3
"""Until a connection that was refused is tried again."""


class Measure:
    """All connections at once, as in the download: the largest files first, cut among them."""

    def __init__(self, job: Job, hub: Hub, seconds: float, most: int) -> None:
        self.job, self.hub, self.seconds, self.most = job, hub, seconds, most
        self.lock = threading.Lock()
        self.queue: deque[tuple[File, int, int]] = deque()
        self.throttle = Throttle(job.limits.bwlimit_bytes_per_s, job.connections)
        self.bytes = 0
        self.error = ""
        self.asked = time.monotonic()
        self.ends = math.inf  # until the first byte
        self.came: list[tuple[float, int]] = []
        self.started: dict[int, float] = {}

    def run(self) -> dict[str, object]:
        """`bytes_per_s` is of all connections at work; `error` says why nothing came."""
        files = sorted((one for one in self.job.files if one.size), key=lambda one: -one.size)
        if not files:
            return {"bytes": 0, "bytes_per_s": 0.0, "error": "there is nothing to fetch"}
        for file in files:
            count = max(1, min(self.job.connections, file.size // BLOCK))
            cuts = [file.size * index // count for index in range(count + 1)]
            self.queue += [(file, cuts[at], cuts[at + 1]) for at in range(count)]
        count = min(self.job.connections, len(self.queue))
        threads = [
            threading.Thread(target=self.one, args=(number,), daemon=True)
            for number in range(count)
        ]
        for thread in threads:
            thread.start()
        # The handshake and the first answer are no part of the rate, but they have a limit.
        limit = time.monotonic() + self.seconds + self.hub.limits.recv_timeout_s
        for thread in threads:
            while thread.is_alive() and time.monotonic() < limit:
                self.hub.hurry(time.monotonic())
                thread.join(0.1)
        with self.lock:
            return {"bytes": self.bytes, "bytes_per_s": self.rate(), "error": self.error}

    def rate(self) -> float:
        """Bytes a second from when all connections were at work; caller holds the lock.

        What came before the last of them began says little: some were still at their handshake.
        """
        if not self.came:
            return 0.0
        last, begun = self.came[-1][0], max(self.started.values())
        counted = sum(count for at, count in self.came if at > begun)
        if 4 * counted >= self.bytes and last > begun:
            return counted / (last - begun)
        return self.bytes / max(last - self.asked, 1e-6)

    def one(self, number: int) -> None:
        """One connection: span after span, to the end of the time, or of what may be spent."""
        view = memoryview(bytearray(BLOCK))
        while self.goes_on():
            with self.lock:
                if not self.queue:
                    return
                file, start, end = self.queue.popleft()
            try:
                body = self.hub.open(file, start, end)
                try:
                    left = end - start
                    most = self.throttle.most
                    while left > 0 and self.goes_on():
                        got = body.readinto(view[: min(left, most)])
                        if not got:
                            break
                        left -= got
                        self.count(number, got)
                        time.sleep(min(self.seconds, self.throttle.take(got)))
                finally:
                    body.close()
            except Withheld as error:
                self.note(error)
            except Fatal as error:
                self.note(error)
                return
            except (Again, OSError, http.client.HTTPException) as error:
                self.note(error)
                with self.lock:
                    self.queue.appendleft((file, start, end))
                    if not self.bytes and time.monotonic() - self.asked >= self.seconds:
                        return
                time.sleep(AGAIN_S)

    def note(self, error: Exception) -> None:
        """The first thing that went wrong says why nothing came."""
        ours = isinstance(error, (Fatal, Again))
        with self.lock:
            self.error = self.error or (str(error) if ours else f"{type(error).__name__}: {error}")

    def goes_on(self) -> bool:
        """Is there time, and may more be spent?"""
        with self.lock:
            return time.monotonic() < self.ends and self.bytes < self.most

    def count(self, number: int, got: int) -> None:
        """Bytes came on one connection; the first of all start the clock."""
        now = time.monotonic()
        with self.lock:
            if not self.bytes:
                self.ends = now + self.seconds
            self.started.setdefault(number, now)
            self.bytes += got
            self.came.append((now, got))


def mode(job: Job, token: str, words: list[str]) -> int:
    """Words: `hub` or `peer`, seconds, most bytes. Prints one JSON line."""
    source, seconds, most = words
    hub = Lender(job) if source == "peer" else Hub(job, token, job.endpoint)
    print(json.dumps(Measure(job, hub, float(seconds), int(most)).run()), flush=True)
    return 0
