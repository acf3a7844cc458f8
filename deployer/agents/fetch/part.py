"""NAME.part: the bytes of a file that does not have its name yet.

Without NAME.part.map the whole of NAME.part is a prefix of the file. With it only the bytes that
it lists are valid: the prefix, and pieces beyond it that other connections fetched.
"""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable

from deployer.agents.fetch.common import BLOCK, DISK_ERROR, Fatal, disk
from deployer.agents.fetch.digest import Digest
from deployer.agents.fetch.gauge import Gauge
from deployer.agents.fetch.manifest import File
from deployer.agents.fetch.pieces import Journal, Span, merged

WORTH_S = 3.0
"""Half of a run that takes no longer is left to its owner: a new connection costs more."""
LEAST_PIECE = 8 * BLOCK
"""A gap is never cut into pieces shorter than this."""
MOST_LAG = 4 * BLOCK
"""How far behind the hash may be for a connection to bring it up by itself."""


class Part:
    """The partial file: spans that cover it without a gap, and the hash of its prefix.

    Each span is filled by the one connection that owns it. `ranges`: False once the server has
    shown that it ignores them; then one connection fetches the file from the beginning.
    """

    def __init__(self, path: str, file: File, gauge: Gauge) -> None:
        self.path, self.file, self.gauge = path, file, gauge
        self.lock = threading.Lock()
        self.hashing = threading.Lock()
        self.ranges, self.refused, self.refetched, self.closing = True, 0, False, False
        self.closed = False
        self.digest, self.hashed = Digest(file), 0
        self.journal = Journal(path)
        with disk(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self.handle = os.open(path, flags, 0o644)
        try:
            self.spans = self._load()
        except BaseException:
            os.close(self.handle)
            raise
        self.inherited = self.valid
        """Bytes that were there before: whose they are, nobody knows."""
        self.gauge.add(valid=self.valid)

    @property
    def valid(self) -> int:
        """Bytes on disk that count."""
        return sum(span.at - span.start for span in self.spans)

    @property
    def free(self) -> int:
        """Bytes to come that nobody fetches."""
        return sum(span.left for span in self.spans if not span.owned)

    @property
    def owned(self) -> bool:
        """Does any connection fetch some of it?"""
        return any(span.owned for span in self.spans)

    @property
    def widest(self) -> int:
        """The longest run that one connection has before it."""
        return max(span.left for span in self.spans)

    @property
    def reach(self) -> int:
        """Length of the prefix."""
        return self.spans[0].at

    def _load(self) -> list[Span]:
        """What is sure of the bytes on disk; the rest is cut off."""
        facts = os.fstat(self.handle)
        if not stat.S_ISREG(facts.st_mode):
            raise Fatal(DISK_ERROR, f"{self.path}: is no regular file: remove it")
        prefix, pieces = facts.st_size, self.journal.read()
        if pieces is None:
            pieces = [(0, prefix)] if prefix <= self.file.size else []
        there = min(prefix, self.file.size)
        runs = [(start, min(end, there)) for start, end in pieces if start < there]
        if not runs or runs[0][0]:
            runs.insert(0, (0, 0))
        ends = [start for start, _ in runs[1:]] + [self.file.size]
        spans = [Span(run[0], run[1], end) for run, end in zip(runs, ends)]  # noqa: B905 - Python 3.9
        with disk(self.path):
            if facts.st_size != runs[-1][1]:
                os.ftruncate(self.handle, runs[-1][1])
        return merged(spans)

    # ---- who fetches what
    def take(self, most: int) -> Span | None:
        """The first run that nobody fetches, cut to about `most` bytes; None when there is none."""
        with self.lock:
            if self.closing or (not self.ranges and any(span.owned for span in self.spans)):
                return None
            free = (span for span in self.spans if span.left and not span.owned)
            span = next(free, None)
            if span is None:
                return None
            cut = (span.at + max(most, LEAST_PIECE)) // BLOCK * BLOCK
            if self.ranges and span.end - cut >= LEAST_PIECE:
                self._split(span, cut)
            span.own(time.monotonic())
            return span

    def steal(self, now: float) -> Span | None:
        """The second half of the run that takes longest; its owner ends where the thief starts.

        What the server has sent the owner beyond that point by then is lost: only a wide run whose
        owner needs seconds for it is cut. `now`: monotonic seconds.
        """
        with self.lock:
            wide = (span for span in self.spans if span.left > 2 * LEAST_PIECE)
            span = max(wide, key=lambda span: span.seconds(now), default=None)
            if span is None or not self.ranges or span.seconds(now) < WORTH_S:
                return None
            thief = self._split(span, (span.at + span.left // 2) // BLOCK * BLOCK)
            thief.own(now)
            return thief

    def _split(self, span: Span, cut: int) -> Span:
        """Caller holds the lock. The journal is there before a byte beyond the prefix."""
        rest = Span(cut, cut, span.end)
        span.end = cut
        self.spans.insert(self.spans.index(span) + 1, rest)
        if not self.journal.there:
            self._journal()
        return rest

    def release(self, span: Span) -> bool:
        """The owner is done with it. True for the one caller that completed the file."""
        with self.lock:
            span.owned = False
            self.spans = merged(self.spans)
        return self.complete()

    def complete(self) -> bool:
        """True for the one caller that finds all bytes there."""
        with self.lock:
            done = not self.closing and all(not s.left and not s.owned for s in self.spans)
            self.closing = self.closing or done
            return done

    def follow(self, span: Span) -> Span | None:
        """Releases a finished span and takes the next unfinished one when nobody has it.

        For a body that goes on to the end of the file whatever was asked for.
        """
        with self.lock:
            index = self.spans.index(span)
            later = next((one for one in self.spans[index + 1 :] if one.left), None)
            if later is None or later.owned:
                return None
            later.own(time.monotonic())
            span.owned = False
            self.spans = merged(self.spans)
            return later

    def no_ranges(self) -> None:
        """The server ignores ranges: no more splitting."""
        with self.lock:
            self.ranges = False

    # ---- bytes
    def write(self, span: Span, data: memoryview) -> None:
        """Puts the next bytes of a span, up to its end, and hashes them when they are in turn."""
        at = span.at
        data = data[: max(0, span.end - at)]
        put = 0
        with disk(self.path):
            while put < len(data):
                put += os.pwrite(self.handle, data[put:], at + put)
        with self.lock:
            span.at = at + put
            prefix = span is self.spans[0]
            if self.journal.there:
                self._journal()
        self.gauge.add(valid=put)
        if prefix and self.hashing.acquire(blocking=False):
            try:
                if at - self.hashed <= MOST_LAG:
                    self._hash_to(at)
                if at == self.hashed:
                    self.digest.update(data)
                    self.hashed += put
            finally:
                self.hashing.release()

    def behind(self) -> bool:
        """Is there a part of the prefix that nobody has hashed or hashes now?"""
        return self.hashed < self.reach and not self.hashing.locked()

    def catch_up(self, goes_on: Callable[[], None]) -> None:
        """Hashes the prefix as far as it goes. `goes_on` is called a block and may raise."""
        with self.hashing:
            buffer = memoryview(bytearray(BLOCK))
            while True:
                with self.lock:
                    reach = self.reach
                if self.hashed >= reach or self.closed:
                    return
                goes_on()
                self._hash_to(min(reach, self.hashed + BLOCK), buffer)

    def _hash_to(self, end: int, buffer: memoryview | None = None) -> None:
        """Caller holds `hashing`. Reads from the page cache, as a rule."""
        if buffer is None and self.hashed < end:
            buffer = memoryview(bytearray(BLOCK))
        while buffer is not None and self.hashed < end:
            want = buffer[: min(BLOCK, end - self.hashed)]
            with disk(self.path):
                got = os.preadv(self.handle, [want], self.hashed)
            if not got:
                raise Fatal(DISK_ERROR, f"{self.path}: became shorter while it was written")
            self.digest.update(want[:got])
            self.hashed += got
            self.gauge.add(moved=got)

    def restart(self) -> None:
        """Throws everything away; for a complete file that nobody fetches any more."""
        with self.lock:
            self.gauge.add(valid=-self.valid)
            with disk(self.path):
                os.ftruncate(self.handle, 0)
            self.journal.forget()
            self.spans = [Span(0, 0, self.file.size)]
            self.digest, self.hashed = Digest(self.file), 0
            self.closing, self.refetched, self.inherited = False, True, 0

    def _journal(self) -> None:
        """Caller holds the lock. Says which bytes are valid, or that all are."""
        if len(self.spans) == 1:
            self.journal.forget()
        else:
            self.journal.write(self.spans)

    def seal(self) -> None:
        """Makes a complete file durable; from here on all of it is a prefix."""
        with disk(self.path):
            os.fsync(self.handle)
        with self.lock:
            self.journal.forget()

    def close(self) -> None:
        """Closes the file; the bytes stay. A second time it does nothing."""
        with self.hashing:
            if not self.closed:
                self.closed = True
                self.journal.close()
                os.close(self.handle)
