"""A client that asks all the time, so that the gap of a cut-over is measured and not guessed."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 0.05
ASK_S = 2.0


@dataclass(frozen=True)
class Gap:
    """`longest_s`: from the last good answer before a failure to the next good one; 0: none failed.

    `open`: the last request failed, so the gap has not ended.
    """

    asked: int = 0
    failed: int = 0
    longest_s: float = 0.0
    open: bool = False
    why: str = ""

    def __str__(self) -> str:
        if not self.asked:
            return "the gap was not measured: nobody was asked"
        if self.failed == self.asked:
            return f"the gap was not measured: no request was answered from here ({self.why})"
        if not self.failed:
            return f"no gap: all of {self.asked} requests were answered"
        more = "at least " if self.open else ""
        return (
            f"gap: {more}{self.longest_s:.2f} s; {self.failed} of {self.asked} requests failed "
            f"({self.why})"
        )


class Ledger:
    """Turns answers into the gap. Times in seconds of one clock."""

    def __init__(self) -> None:
        self.asked = self.failed = 0
        self.longest = 0.0
        self.good: float | None = None
        self.since: float | None = None
        self.why = ""

    def add(self, began: float, ended: float, problem: str) -> None:
        """One request. A gap lasts from the end of a good answer to the end of the next one."""
        self.asked += 1
        if problem:
            self.failed += 1
            self.why = problem
            if self.since is None:
                self.since = self.good if self.good is not None else began
            return
        if self.since is not None:
            self.longest = max(self.longest, ended - self.since)
            self.since = None
        self.good = ended

    def gap(self, now: float) -> Gap:
        """As of `now`."""
        running = now - self.since if self.since is not None else 0.0
        longest = max(self.longest, running)
        return Gap(self.asked, self.failed, longest, self.since is not None, self.why)


def ask(url: str) -> str:
    """Asks `url`/v1/models; '' for an answer below 400, else the problem."""
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port or (443 if secure else 80), timeout=ASK_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/v1/models")
        answer = connection.getresponse()
        answer.read()
        # 401: it is there and wants a key, which is no gap.
        return "" if answer.status < 500 and answer.status != 404 else f"status {answer.status}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        # A name that no resolver takes is a ValueError.
        return str(error) or type(error).__name__
    finally:
        connection.close()


class Meter:
    """Asks in a thread while a `with` block runs; '' as URL measures nothing."""

    def __init__(self, url: str, asks: Callable[[str], str] = ask) -> None:
        self.url, self.asks = url, asks
        self.ledger, self.lock = Ledger(), threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self.ended.is_set():
            began = time.monotonic()
            problem = self.asks(self.url)
            with self.lock:
                self.ledger.add(began, time.monotonic(), problem)
            self.ended.wait(max(0.0, EVERY_S - (time.monotonic() - began)))

    def __enter__(self) -> Meter:
        if self.url:
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        if self.url:
            self.thread.join(ASK_S + 1.0)

    def gap(self) -> Gap:
        """So far."""
        with self.lock:
            return self.ledger.gap(time.monotonic())

    def settled(self, limit_s: float) -> Gap:
        """Waits until an answer is good again, at most `limit_s`."""
        ends = time.monotonic() + limit_s
        while self.url and self.gap().open and time.monotonic() < ends:
            self.ended.wait(EVERY_S)
        return self.gap()
