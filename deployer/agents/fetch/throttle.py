"""One limit of bytes a second for all connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deployer.agents.fetch.common import BLOCK

STEP_S = 0.1
SMALLEST = 4096


class Throttle:
    """A token bucket. `rate` in bytes/s, 0 for no limit; shared by `workers` connections."""

    def __init__(
        self, rate: float, workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rate, self.clock = rate, clock
        self.lock = threading.Lock()
        self.free_at = clock()
        share = int(rate * STEP_S / max(1, workers))
        self.most = min(BLOCK, max(SMALLEST, share)) if rate else BLOCK
        """Most bytes to read at once, so that no connection is silent for long."""

    def take(self, count: int) -> float:
        """Books `count` received bytes; the seconds to wait before the next read."""
        if not self.rate:
            return 0.0
        with self.lock:
            now = self.clock()
            self.free_at = max(self.free_at, now - STEP_S) + count / self.rate
            return max(0.0, self.free_at - now)
