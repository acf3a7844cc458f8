"""Mode `measure`: how fast bytes come from one source, in a few seconds; they are thrown away."""

from __future__ import annotations

import http.client
import json
import threading
import time

from deployer.agents.fetch.borrow import Lender
from deployer.agents.fetch.common import BLOCK, Again, Fatal
from deployer.agents.fetch.hubhttp import Hub
from deployer.agents.fetch.manifest import File, Job


class Measure:
    """All connections at once on the largest file, each at a place of its own."""

    def __init__(self, job: Job, hub: Hub, seconds: float, most: int) -> None:
        self.job, self.hub, self.seconds, self.most = job, hub, seconds, most
        self.lock = threading.Lock()
        self.bytes = 0
        self.first = self.last = 0.0
        self.error = ""
        self.ends = time.monotonic() + seconds

    def run(self) -> dict[str, object]:
        """`bytes_per_s` counts from the first byte on; `error` says why nothing came."""
        file = max(self.job.files, key=lambda one: one.size, default=None)
        if file is None or not file.size:
            return {"bytes": 0, "bytes_per_s": 0.0, "error": "there is nothing to fetch"}
        count = max(1, min(self.job.connections, file.size // BLOCK))
        threads = [
            threading.Thread(target=self.one, args=(file, file.size * index // count), daemon=True)
            for index in range(count)
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
            spent = self.last - self.first
            rate = self.bytes / spent if spent > 0 else 0.0
            return {"bytes": self.bytes, "bytes_per_s": rate, "error": self.error}

    def one(self, file: File, start: int) -> None:
        """One connection: to the end of the file, of the time, or of what may be spent."""
        view = memoryview(bytearray(BLOCK))
        try:
            body = self.hub.open(file, start, file.size)
            try:
                while got := body.readinto(view):
                    now = time.monotonic()
                    with self.lock:
                        if not self.bytes:
                            self.first, self.ends = now, now + self.seconds
                        self.bytes += got
                        self.last = now
                        if now >= self.ends or self.bytes >= self.most:
                            return
            finally:
                body.close()
        except (Fatal, Again, OSError, http.client.HTTPException) as error:
            with self.lock:
                self.error = self.error or f"{type(error).__name__}: {error}"


def mode(job: Job, token: str, words: list[str]) -> int:
    """Words: `hub` or `peer`, seconds, most bytes. Prints one JSON line."""
    source, seconds, most = words
    hub = Lender(job) if source == "peer" else Hub(job, token, job.endpoint)
    print(json.dumps(Measure(job, hub, float(seconds), int(most)).run()), flush=True)
    return 0
