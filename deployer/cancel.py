"""An interrupt reaches every thread of a run, also one that waits on a connection.

Signals reach the main thread only. It asks; then a worker ends at its next event, and the
connections that it may be waiting on are closed, so that the event comes soon.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from deployer.errors import CommandOverdue, Interrupted
from deployer.events import Event, RunFinished

Cause = Interrupted | CommandOverdue


class Cancel:
    """Asked once, for all workers. As a subscriber of events it ends the worker that emits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = threading.Event()
        self._cause: Cause = Interrupted("interrupted")
        self._wakers: list[Callable[[], None]] = []

    @property
    def asked(self) -> bool:
        """Whether the workers are to end."""
        return self._asked.is_set()

    def ask(self, cause: Cause | None = None) -> None:
        """From now on, workers end; what they wait on is closed. A second call changes nothing."""
        with self._lock:
            if self._asked.is_set():
                return
            self._cause = cause or self._cause
            self._asked.set()
            wakers = list(self._wakers)
        for wake in wakers:
            # Each by itself: the goodbye of a dead connection takes its time.
            threading.Thread(target=wake, daemon=True, name="interrupt").start()

    def error(self, where: str) -> Cause:
        """The cause, for the place that it ends."""
        return type(self._cause)(self._cause.what, where=where, fix=self._cause.fix)

    def check(self, where: str) -> None:
        """Raises the cause when the workers are to end."""
        if self._asked.is_set():
            raise self.error(where)

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within the block, `wake` is called, from another thread, when the end is asked for."""
        with self._lock:
            self._wakers.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakers.remove(wake)

    def __call__(self, event: Event) -> None:
        """Raises the cause in the worker that emits `event`."""
        # How a run ended is told in any case; it waits for nothing.
        if isinstance(event, RunFinished):
            return
        if threading.current_thread() is not threading.main_thread():
            self.check(event.deployment or event.host)
