"""The figures of a download, and the line that tells them."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH100

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from deployer.agents.fetch.common import GAVE_UP, Fatal, replace_file

CHILD_FD = 3
SHOWN = 16
WINDOW_S = 10
FAIL_S = 5.0

Shards = Callable[[], "list[tuple[str, int, int]]"]


class Gauge:
    """The shared figures. `moved` counts every byte received or hashed and never falls.

    bytes: right ones on disk, as far as known. received: body bytes off the network.
    """

    def __init__(self, total: int, files: int, method: str = "range") -> None:
        self.lock = threading.Lock()
        self.total, self.files, self.method = total, files, method
        self.bytes = self.moved = self.received = self.retries = self.files_done = 0
        self.pause_until = 0.0
        self.outage_since = self.offline_until = 0.0
        self.trouble = ""
        self.shards: Shards = list
        self.phase: Callable[[], str] = lambda: "downloading"
        self._started = time.monotonic()
        self._history: deque[tuple[float, int]] = deque(maxlen=WINDOW_S + 1)
        self._ticks = 0

    def add(self, valid: int = 0, moved: int = 0, received: int = 0) -> None:
        """Adds to bytes, moved and received."""
        with self.lock:
            self.bytes += valid
            self.moved += moved
            self.received += received
            if received:
                self.outage_since = self.offline_until = 0.0

    def outage(self, wait_s: float) -> float | None:
        """Nobody is reached, and the next try ends in `wait_s`: how long that has lasted.

        None when nothing was ever received: then it is no outage, but a wrong address.
        """
        with self.lock:
            if not self.received:
                return None
            now = time.monotonic()
            self.outage_since = self.outage_since or now
            self.offline_until = now + wait_s
            return now - self.outage_since

    def retry(self, pause_s: float, why: str) -> None:
        """Counts a retry; `pause_s` above 0 holds the whole pool back for so long."""
        with self.lock:
            self.retries += 1
            self.trouble = why
            if pause_s > 0:
                self.pause_until = max(self.pause_until, time.monotonic() + pause_s)

    def file_done(self) -> int:
        """Counts a file that is verified; the number of them."""
        with self.lock:
            self.files_done += 1
            return self.files_done

    def row(self) -> dict[str, Any]:
        """The progress figures; speed in bytes/s over the last 10 s, pause in seconds left."""
        shards = sorted(self.shards(), key=lambda shard: -shard[2])[:SHOWN]
        phase = self.phase()
        with self.lock:
            now = time.monotonic()
            self._history.append((now, self.received))
            self._ticks += 1
            then, received = self._history[0]
            speed = (self.received - received) / (now - then) if now > then else 0.0
            left = self.total - self.bytes
            return {
                "tick": self._ticks,
                "bytes": self.bytes,
                "total": self.total,
                "received": self.received,
                "speed": int(speed),
                "mean": int(self.received / max(now - self._started, 1e-3)),
                "eta": int(left / speed) if speed >= 1 else (None if left else 0),
                "files_done": self.files_done,
                "files": self.files,
                "retries": self.retries,
                "stalls": 0,
                "pause": max(0, int(max(self.pause_until, self.offline_until) - now)),
                "moved": self.moved,
                "method": self.method,
                "phase": phase,
                "shards": [list(shard) for shard in shards],
                **({"trouble": self.trouble} if self.trouble else {}),
                **({"offline": True} if self.offline_until > now else {}),
            }

    def line(self) -> str:
        """The progress line."""
        return json.dumps(self.row())


class Reporter:
    """Where progress lines go: the supervisor's pipe, or the file `progress` of the job."""

    def __init__(self, pipe: int | None, path: str = "") -> None:
        self.pipe, self.path = pipe, path
        self._owed = b""
        if pipe is not None:
            # The supervisor may be stopped with a full pipe: no worker waits for that.
            os.set_blocking(pipe, False)

    @classmethod
    def here(cls) -> Reporter:
        """Descriptor 3 when it is a pipe, else the file in this folder."""
        try:
            if stat.S_ISFIFO(os.fstat(CHILD_FD).st_mode):
                return cls(CHILD_FD)
        except OSError:
            pass
        return cls(None, os.path.abspath("progress"))

    def tell(self, line: str) -> None:
        """Raises Fatal when the supervisor is gone or the file cannot be written."""
        if self.pipe is None:
            replace_file(self.path, line + "\n", sync=False)
            return
        owed = self._owed or (line + "\n").encode()
        try:
            self._owed = owed[os.write(self.pipe, owed) :]
        except BlockingIOError:
            # A line that was cut must be ended; a whole one is stale and is dropped.
            self._owed = self._owed and owed
        except BrokenPipeError as error:
            raise Fatal(GAVE_UP, "the supervisor is gone") from error

    def fail(self, error: Fatal) -> bool:
        """Tells the supervisor why this worker ends; False when there is none to tell."""
        if self.pipe is None:
            return False
        # A line that was cut is ended first. Nobody reads for seconds: the code must do.
        text = "\n" + json.dumps({"error": str(error), "code": error.code}) + "\n"
        with contextlib.suppress(OSError):
            if select.select([], [self.pipe], [], FAIL_S)[1]:
                os.write(self.pipe, text.encode())
        return True


class Spoken(Reporter):
    """Progress lines among the answers on stdout, as {"progress": {...}}."""

    def __init__(self) -> None:
        super().__init__(None)

    def tell(self, line: str) -> None:
        """Raises Fatal when nobody listens any more."""
        say(f'{{"progress": {line}}}')


def say(line: str) -> None:
    """One line on stdout in one piece, whichever threads speak too.

    Raises Fatal when nobody listens any more.
    """
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise Fatal(GAVE_UP, "nobody listens any more") from error
