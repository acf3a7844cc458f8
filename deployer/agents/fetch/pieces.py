"""The runs of a partial file, and the journal beside it that says which of them are on disk."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH108

from __future__ import annotations

import contextlib
import json
import math
import os
import stat

from deployer.agents.fetch.common import DISK_ERROR, Fatal, disk, replace_file

SHOWS_S = 1.0
MAX_MAP = 1024 * 1024
PAGE = 4096


class Span:
    """A run of the file: [start, at) is on disk, [at, end) is still to come."""

    def __init__(self, start: int, at: int, end: int) -> None:
        self.start, self.at, self.end = start, at, end
        self.owned = False
        self.since, self.first = 0.0, at

    @property
    def left(self) -> int:
        """Bytes to come."""
        return self.end - self.at

    def own(self, now: float) -> None:
        """One connection has it from now on (monotonic seconds)."""
        self.owned, self.since, self.first = True, now, self.at

    def seconds(self, now: float) -> float:
        """How long its owner needs for what is left, at the speed so far; 0 before that shows."""
        spent, got = now - self.since, self.at - self.first
        if not self.owned or spent < SHOWS_S:
            return 0.0
        return self.left * (spent / got) if got else math.inf


def merged(spans: list[Span]) -> list[Span]:
    """Without the finished spans: the next one begins where they did."""
    kept: list[Span] = []
    start = spans[0].start
    for span in spans:
        if span.left or span.owned or span is spans[-1]:
            span.start = start
            kept.append(span)
            start = span.end
    return kept


class Journal:
    """NAME.part.map: `{"prefix": n, "pieces": [[start, end], ...]}`. Without it all is prefix.

    Whoever puts another NAME.part there removes it first. Callers take turns.
    """

    def __init__(self, part: str) -> None:
        self.path = part + ".map"
        self.there = False
        self._handle = -1

    def read(self) -> list[tuple[int, int]] | None:
        """The valid runs, in order; None without a map.

        Of a map that makes no sense nothing is believed. Raises Fatal for no regular file.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with disk(self.path):
            try:
                handle = os.open(self.path, flags)
            except FileNotFoundError:
                return None
        self.there = True
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Fatal(DISK_ERROR, f"{self.path}: is no regular file: remove it")
            with disk(self.path):
                row = json.loads(os.read(handle, MAX_MAP))
            runs = [(0, int(row["prefix"]))] + [(int(a), int(b)) for a, b in row["pieces"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []
        finally:
            os.close(handle)
        end = 0
        for start, stop in runs:
            if start < end or stop < start:
                return []
            end = stop
        return runs

    def write(self, spans: list[Span]) -> None:
        """Says what is on disk of these spans, the first of which is the prefix."""
        pieces = [[span.start, span.at] for span in spans[1:] if span.at > span.start]
        text = json.dumps({"prefix": spans[0].at, "pieces": pieces}).ljust(PAGE)
        # One write within one page is all or nothing, whenever this process is killed, and costs
        # a tenth of a new file and a rename for every block.
        with disk(self.path):
            if self._handle >= 0 and len(text) == PAGE:
                os.pwrite(self._handle, text.encode(), 0)
                return
        self.close()
        replace_file(self.path, text, sync=False)
        with disk(self.path):
            self._handle = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.there = True

    def forget(self) -> None:
        """From here on all of NAME.part is a prefix."""
        self.close()
        for path in (self.path, self.path + ".tmp"):
            with disk(path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self.there = False

    def close(self) -> None:
        """Leaves it as it is."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1
