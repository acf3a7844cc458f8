"""One connection at work: fills a span of a part, try after try."""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable

from deployer.agents.fetch.body import Body
from deployer.agents.fetch.common import (
    BLOCK,
    GAVE_UP,
    UNTRUSTED,
    Again,
    Fatal,
    Stopped,
    Unreached,
    log,
    warn,
)
from deployer.agents.fetch.gauge import Gauge
from deployer.agents.fetch.hubhttp import Hub
from deployer.agents.fetch.manifest import Limits
from deployer.agents.fetch.part import Part
from deployer.agents.fetch.pieces import Span
from deployer.agents.fetch.throttle import Throttle

OUTAGE_TRY_S = 10.0
"""Between two tries while nobody is reached, at most."""
FLUSH_S = 0.02
"""Bytes wait no longer for their block to fill: what comes slowly is on disk soon."""


class Yielded(Exception):
    """The server ignores ranges: this piece is left to the connection at the beginning."""


class Stop:
    """Ends all connections at once."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.lock = threading.Lock()
        self.bodies: set[Body] = set()

    def check(self) -> None:
        """Raises Stopped."""
        if self.event.is_set():
            raise Stopped

    def set(self) -> None:
        """Wakes every connection that waits for bytes, and every wait."""
        self.event.set()
        with self.lock:
            for body in self.bodies:
                body.abort()

    def add(self, body: Body) -> None:
        """A body to abort when the time comes."""
        with self.lock:
            self.bodies.add(body)
            if self.event.is_set():
                body.abort()

    def remove(self, body: Body) -> None:
        """The body is closed."""
        with self.lock:
            self.bodies.discard(body)


class Pace:
    """The slow rule: below `slow_bytes_per_s` over `slow_window_s` a connection is dropped.

    The window slides, in tenths: a drip is seen as soon when it follows a fast beginning.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits, self.clock = limits, clock
        self.count, self.waited = 0, 0.0
        self.marks = deque([(clock(), 0)])

    def see(self, count: int, waited: float) -> None:
        """`count` bytes came; `waited` seconds of our own limit do not count. Raises Again."""
        window = self.limits.slow_window_s
        self.count += count
        self.waited += waited
        now = self.clock() - self.waited
        if now - self.marks[-1][0] >= window / 10:
            self.marks.append((now, self.count))
        while len(self.marks) > 1 and now - self.marks[1][0] >= window:
            self.marks.popleft()
        spent, gain = now - self.marks[0][0], self.count - self.marks[0][1]
        if spent >= window and gain < self.limits.slow_bytes_per_s * spent:
            raise Again(f"only {gain / spent:.0f} bytes/s over {spent:.0f} s")


class Stream:
    """Fills one span. `span` is another one when a body went on into the next."""

    def __init__(
        self, hub: Hub, gauge: Gauge, throttle: Throttle, stop: Stop, part: Part, span: Span
    ) -> None:
        self.hub, self.gauge, self.throttle, self.stop = hub, gauge, throttle, stop
        self.limits: Limits = hub.limits
        self.part, self.span = part, span
        self.name, self.size = part.file.path, part.file.size
        self.buffer = memoryview(bytearray(BLOCK))
        self.filled = 0
        self.waited = 0.0

    @property
    def place(self) -> str:
        """`X of Y` for messages."""
        return f"{self.span.at} of {self.size}"

    def run(self) -> None:
        """Tries until the span is full. Bounded: tries that bring nothing, and those that bring
        less than a block. One that brings more goes on for ever: the span is finite.

        Raises Fatal, Stopped or Yielded.
        """
        idle = poor = 0
        again = Again("no try was allowed")
        while poor < self.limits.tries:
            if not self.span.left:
                return
            self.wait_turn()
            before = self.span.at
            try:
                self.one_try()
                return
            except socket.timeout as error:  # noqa: UP041 - Python 3.9: no TimeoutError
                again = Again(str(error))
                self.warn_silence()
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                self.stop.check()
                if isinstance(error, ssl.SSLCertVerificationError):
                    text = f"{self.hub.endpoint}: {error.verify_message or error}"
                    raise self.hub.fatal(UNTRUSTED, text) from error
                via = f" (through {self.hub.proxy})" if self.hub.proxy else ""
                again = Again(f"{type(error).__name__}: {error}{via}")
            except Again as error:
                again = error
            self.stop.check()  # what was cut off for the end is no failure
            if isinstance(again, Unreached) and self.sits_out(again):
                continue
            self.count_refusal(again)
            idle = 0 if self.span.at > before else idle + 1
            poor += self.span.at - before < BLOCK
            if idle > self.limits.idle_tries:
                break
            self.back_off(again, idle)
        raise Fatal(GAVE_UP, f"{self.name}: gave up at {self.place} bytes: {again}")

    def sits_out(self, again: Again) -> bool:
        """Waits while nobody is reached, in the middle of a download: a router that starts anew
        costs no try. False when that has lasted `max_pause_s`, or nothing ever came.
        """
        wait = min(OUTAGE_TRY_S, self.limits.max_backoff_s)
        lasted = self.gauge.outage(wait + self.limits.recv_timeout_s + 2)
        if lasted is None or lasted >= self.limits.max_pause_s:
            return False
        self.gauge.retry(0, f"{self.name}: {again}")
        if not lasted:
            most = f"{self.limits.max_pause_s:g} s"
            warn(f"{self.hub.endpoint} is out of reach ({again}); trying again for {most}")
        self.stop.event.wait(wait * random.uniform(0.5, 1))
        return True

    def warn_silence(self) -> None:
        wait = f"{self.limits.recv_timeout_s:g} s"
        where = f"at {self.place} on one connection"
        warn(f"{self.name}: no byte for {wait} {where}; reconnecting")

    def count_refusal(self, again: Again) -> None:
        """Two refusals of a range in a row: from now on the file is asked for as a whole."""
        self.part.refused = self.part.refused + 1 if again.range_refused else 0
        if self.part.refused >= 2 and self.part.ranges:
            log(f"{self.name}: the server refuses ranges; from the beginning")
            self.part.no_ranges()
        self.check_place()

    def check_place(self) -> None:
        """Raises Yielded when this is a piece and the server ignores ranges."""
        if not self.part.ranges and self.span is not self.part.spans[0]:
            raise Yielded

    def back_off(self, again: Again, idle: int) -> None:
        """Logs the retry and waits: the whole pool when the hub asked for it."""
        self.gauge.retry(again.pause_s, f"{self.name}: {again}")
        log(f"{self.name}: {again}; going on at {self.place}")
        if not again.pause_s:
            longest = min(self.limits.max_backoff_s, self.limits.backoff_s * 2**idle)
            self.stop.event.wait(longest * random.uniform(0.25, 0.5))

    def wait_turn(self) -> None:
        """Waits while the pool is held back. Raises Stopped."""
        while True:
            self.stop.check()
            left = self.gauge.pause_until - time.monotonic()
            if left <= 0:
                return
            self.stop.event.wait(left)

    def one_try(self) -> None:
        """One request; returns when the span is full. Raises Again."""
        span = self.span
        offset = span.at
        self.check_place()
        body = self.hub.open(self.part.file, offset, span.end, self.part.ranges)
        self.stop.add(body)
        try:
            self.stop.check()
            whole = (body.start, body.stop) == (0, self.size)
            if whole and (offset, span.end) != (0, self.size):
                if self.part.ranges:
                    log(f"{self.name}: the server ignored the range; no more than one connection")
                    self.part.no_ranges()
                self.check_place()
            self.pour(body, goes_on=whole)
        finally:
            self.stop.remove(body)
            body.close()

    def pour(self, body: Body, goes_on: bool) -> None:
        """From the body into the span, and into the next ones when the body `goes_on`."""
        pace = Pace(self.limits)
        at = body.start
        while True:
            self.skip(body, at, pace)
            self.fill(body, pace)
            at = self.span.at
            later = self.part.follow(self.span) if goes_on else None
            if later is None:
                return
            self.span = later

    def skip(self, body: Body, at: int, pace: Pace) -> None:
        """Reads over bytes that are on disk already."""
        while at < self.span.at:
            at += self.receive(body, self.buffer[: min(BLOCK, self.span.at - at)], pace)

    def fill(self, body: Body, pace: Pace) -> None:
        """Receives into the block, and writes it when it is full or old. Keeps all that came."""
        span, self.filled = self.span, 0
        flushed = time.monotonic()
        try:
            while True:
                # The end may come nearer while another connection takes the second half.
                room = min(BLOCK, span.left) - self.filled
                if room > 0:
                    view = self.buffer[self.filled : self.filled + room]
                    self.filled += self.receive(body, view, pace)
                now = time.monotonic()
                if self.filled >= min(BLOCK, span.left) or now - flushed >= FLUSH_S:
                    self.flush()
                    flushed = now
                if not span.left:
                    return
        finally:
            self.flush()

    def flush(self) -> None:
        filled, self.filled = self.filled, 0
        if filled:
            self.part.write(self.span, self.buffer[:filled])

    def receive(self, body: Body, view: memoryview, pace: Pace) -> int:
        """At least one byte. Raises Again at the end of the connection, and Stopped."""
        got = body.readinto(view[: self.throttle.most])
        self.stop.check()
        if not got:
            raise Again("the connection ended early")
        self.gauge.add(moved=got, received=got)
        wait = self.throttle.take(got)
        if wait > 0:
            self.stop.event.wait(wait)
        pace.see(got, wait)
        return got
