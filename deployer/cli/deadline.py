"""The deadline of a whole command (`--timeout`)."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from deployer.errors import CommandOverdue


@contextlib.contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raises CommandOverdue in the main thread after `seconds`; locks are released on the way."""
    if seconds is None:
        yield
        return

    def overdue(signum: int, frame: FrameType | None) -> None:
        raise CommandOverdue(
            f"the command ran over its --timeout of {seconds:g} s",
            fix="run it again, with more time: it continues where it was",
        )

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
