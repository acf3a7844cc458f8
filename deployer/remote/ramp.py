"""How many logins to one sshd are under way at once.

sshd counts connections that are not logged in yet and drops further ones at random from the tenth
on (MaxStartups 10:30:100): 16 of 50 at once were refused. Each sshd counts for itself, so targets
behind one gateway do not share its limit; the gateway's own login does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

AT_ONCE = 8
"""Leaves room for others below the default limit of 10."""

LOOK_S = 0.2
"""How often a wait asks whether it is still wanted."""


def wanted() -> bool:
    """For a wait that nobody gives up."""
    return True


@dataclass
class _Gate:
    free: threading.Semaphore
    users: int = field(default=0)


class Ramp:
    """Turns, one line a sshd."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._gates: dict[Hashable, _Gate] = {}

    @contextmanager
    def turn(
        self, sshd: Hashable, seconds: float, still: Callable[[], bool] = wanted
    ) -> Iterator[None]:
        """One login to `sshd` within the block. Raises TimeoutError when it is not its turn so long

        or when `still` says that nobody waits for it any more.
        """
        with self._lock:
            gate = self._gates.setdefault(sshd, _Gate(threading.Semaphore(self._at_once)))
            gate.users += 1
        try:
            self._take(gate, time.monotonic() + seconds, still)
            try:
                yield
            finally:
                gate.free.release()
        finally:
            with self._lock:
                gate.users -= 1
                if not gate.users:
                    del self._gates[sshd]

    def _take(self, gate: _Gate, until: float, still: Callable[[], bool]) -> None:
        while not gate.free.acquire(timeout=max(0.0, min(LOOK_S, until - time.monotonic()))):
            if time.monotonic() >= until or not still():
                raise TimeoutError("other logins to it are still under way")
