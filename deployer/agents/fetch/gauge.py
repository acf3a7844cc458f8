"""The figures of a download, and the line that tells them."""

from __future__ import annotations

import json
import threading
import time
from collections import deque


class Gauge:
    """The shared figures. `moved` counts every byte received or hashed and never falls."""

    def __init__(self, total: int, files: int) -> None:
        self.lock = threading.Lock()
        self.total, self.files = total, files
        self.bytes = self.moved = self.retries = self.files_done = 0
        self.pause_until = 0.0
        self.history: deque[tuple[float, int]] = deque(maxlen=11)
        self.received = 0

    def add(self, valid: int = 0, moved: int = 0, received: int = 0) -> None:
        with self.lock:
            self.bytes += valid
            self.moved += moved
            self.received += received

    def line(self) -> str:
        """The progress line; speed in bytes/s over the last 10 s, pause in seconds left."""
        with self.lock:
            now = time.monotonic()
            self.history.append((now, self.received))
            then, received = self.history[0]
            speed = (self.received - received) / (now - then) if now > then else 0.0
            return json.dumps(
                {
                    "bytes": self.bytes,
                    "total": self.total,
                    "speed": int(speed),
                    "files_done": self.files_done,
                    "files": self.files,
                    "retries": self.retries,
                    "moved": self.moved,
                    "pause": max(0, int(self.pause_until - now)),
                }
            )
