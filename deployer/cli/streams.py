"""stdout and stderr that fail in a known way: nobody reads any more, or there is no room.

A reader that went away (`deploy status | head -1`) ends the command as the signal SIGPIPE ends
other tools, quietly and after its locks are released. Python ignores that signal and raises
BrokenPipeError in its place.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(BrokenPipeError):
    """stdout cannot be written for another cause than a closed pipe. Passes where that does."""


class _Raw(io.FileIO):
    """The descriptor of stdout or stderr."""

    def write(self, data: ReadableBuffer, /) -> int:
        """As FileIO.write. Raises BrokenPipeError, OutputLost."""
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except BrokenPipeError as error:
            # Without its number, by which click would end the program with status 1.
            raise BrokenPipeError from error
        except OSError as error:
            if self.fileno() == 2:
                # There is no place left to say it; the exit code still tells how it ended.
                return memoryview(data).nbytes
            raise OutputLost(error.errno, error.strerror) from error


def take_over() -> None:
    """Replaces sys.stdout and sys.stderr. A descriptor that is closed leads to /dev/null."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # Else the next file that is opened, a lock perhaps, would be stdout.
            mode = os.O_RDONLY if number == 0 else os.O_WRONLY
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    sys.stdout = _wrapped(1, sys.stdout)
    sys.stderr = _wrapped(2, sys.stderr)


def _wrapped(number: int, before: TextIO | None) -> TextIO:
    if before is not None:
        before.flush()
    buffer = io.BufferedWriter(_Raw(number, "w", closefd=False))
    errors = before.errors if before is not None else None
    return io.TextIOWrapper(
        buffer,
        encoding=before.encoding if before is not None else "utf-8",
        # A character that a locale of old lacks ends no run.
        errors="backslashreplace" if errors in (None, "strict") else errors,
        line_buffering=number == 2 or buffer.isatty(),
        write_through=bool(getattr(before, "write_through", False)),
    )


def end_by_pipe() -> NoReturn:
    """Ends this process as one that writes into a closed pipe."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])
    os.kill(os.getpid(), signal.SIGPIPE)
    os._exit(128 + signal.SIGPIPE)
