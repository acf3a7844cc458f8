"""The supervisor's figures: those of the worker of the moment on top of those that have ended."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from deployer.agents.fetch.manifest import File

SPEED_WINDOW_S = 10.0
MOST_SHARDS = 16


def whole(row: Mapping[str, Any], name: str) -> int:
    """A count out of a worker's line, 0 for what is none."""
    value = row.get(name)
    return int(value) if isinstance(value, (int, float)) and value == value and value >= 0 else 0


class Figures:
    """What the progress line says. `received` and `moved` never fall, whoever counts."""

    def __init__(self, files: Sequence[File], clock: float) -> None:
        self.total, self.files = sum(file.size for file in files), len(files)
        self.began = clock
        self.bytes = self.files_done = self.stalls = self.ticks = 0
        self.method, self.phase = "", "starting"
        self.shards: list[tuple[str, int, int]] = []
        self.pause, self.offline = 0, False
        self.ended = {"received": 0, "moved": 0, "retries": 0}
        self.current = dict(self.ended)
        self.history: deque[tuple[float, int]] = deque()

    def start(self, method: str) -> None:
        """A new worker counts from zero."""
        for name, value in self.current.items():
            self.ended[name] += value
        self.current = dict.fromkeys(self.ended, 0)
        self.method, self.phase, self.pause = method, "starting", 0
        self.offline = False

    def take(self, row: Mapping[str, Any]) -> None:
        """The line of the worker. Its counters never fall either, whatever it says."""
        for name in self.current:
            self.current[name] = max(self.current[name], whole(row, name))
        self.current["moved"] = max(self.current["moved"], self.current["received"])
        self.phase = str(row.get("phase") or "downloading")
        self.pause, self.offline = whole(row, "pause"), row.get("offline") is True

    def sum(self, name: str) -> int:
        """received, moved or retries, of all workers."""
        return self.ended[name] + self.current[name]

    def place(self) -> str:
        """`X of Y bytes`, for a log line."""
        return f"{self.bytes} of {self.total} bytes"

    def line(self, now: float) -> str:
        """The progress line. Speeds in bytes/s; eta in seconds, null when unknown."""
        self.ticks += 1
        received = self.sum("received")
        self.history.append((now, received))
        while len(self.history) > 2 and now - self.history[1][0] >= SPEED_WINDOW_S:
            self.history.popleft()
        then, had = self.history[0]
        speed = (received - had) / (now - then) if now > then else 0.0
        left = max(0, self.total - self.bytes)
        biggest = sorted(self.shards, key=lambda shard: (-shard[2], shard[0]))[:MOST_SHARDS]
        return json.dumps(
            {
                "tick": self.ticks,
                "bytes": self.bytes,
                "total": self.total,
                "received": received,
                "speed": int(speed),
                "mean": int(received / max(1e-3, now - self.began)),
                "eta": 0 if not left else int(left / speed) if speed >= 1 else None,
                "files_done": self.files_done,
                "files": self.files,
                "retries": self.sum("retries"),
                "stalls": self.stalls,
                "pause": self.pause,
                "moved": self.sum("moved"),
                "method": self.method,
                "phase": self.phase,
                "shards": [list(shard) for shard in biggest],
                **({"offline": True} if self.offline else {}),
            }
        )


def monotonic() -> float:
    """Seconds; one name for the clock of the figures."""
    return time.monotonic()
