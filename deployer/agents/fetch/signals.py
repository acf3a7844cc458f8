"""Signals of a process that must end its work tidily: they are noted, and wake it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Signals:
    """SIGTERM, SIGINT and SIGHUP end the work at its next look, SIGCHLD only wakes it."""

    def __init__(self) -> None:
        self.asked_to_stop = 0
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """The handlers are ours within the block, once."""
        before: Mapping[int, object] = {
            number: signal.signal(number, self._note) for number in (*_ENDING, signal.SIGCHLD)
        }
        waker = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]
            for handle in (self._wake, self._waker):
                os.close(handle)

    def heed(self) -> None:
        """Raises Interrupted."""
        if self.asked_to_stop:
            raise Interrupted(self.asked_to_stop)

    def wait(self, pipes: Sequence[int], seconds: float) -> None:
        """Until a signal comes, one of `pipes` has something to read, or the time is over."""
        select.select([self._wake, *pipes], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 64)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler: only remembers."""
        if number in _ENDING:
            self.asked_to_stop = number
