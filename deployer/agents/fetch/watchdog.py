"""When a worker counts as hung. Pure: figures in, verdict out; nothing is looked at here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deployer.agents.fetch.manifest import Limits

WITHOUT_BYTES = frozenset({"starting", "metadata", "probing"})
"""Phases that move no byte: they have a deadline of their own, `phase_s`."""
MAX_GAP_S = 5.0
"""Most time that counts between two samples: a machine that was frozen is not a stall."""
MAX_FLUSH_S = 600.0
"""How long a worker may wait for a disk that the kernel does write to."""


@dataclass(frozen=True)
class Sample:
    """One look. Counters in bytes; `wire` and `moved` never fall, `disk` may."""

    at: float
    """Monotonic seconds."""
    wire: int
    """Received, as the worker counts."""
    moved: int
    """Received or hashed, as the worker counts."""
    disk: int
    """What the partial files occupy, as the supervisor sees it."""
    phase: str = "downloading"
    pausing: bool = False
    """The Hub asked for this wait (Retry-After)."""
    flushing: bool = False
    """The worker waits in the kernel for a disk that is being written."""


@dataclass(frozen=True)
class Verdict:
    """Why the worker must go: `stalled`, `slow` or `overdue`, after `seconds`."""

    kind: str
    seconds: float
    rate: float = 0.0
    """Bytes/s, of `slow`."""
    phase: str = ""

    def text(self, place: str) -> str:
        """For a log line; `place` is `X of Y bytes`."""
        if self.kind == "slow":
            return f"brought only {self.rate:.0f} bytes/s over {self.seconds:.0f} s at {place}"
        if self.kind == "overdue":
            return f"did not get past its phase {self.phase!r} in {self.seconds:.0f} s at {place}"
        return f"stalled at {place} for {self.seconds:.0f} s"


class Watchdog:
    """Judges the samples of one worker, in order. Limits are those of the manifest.

    `stalled`: no figure moved for stall_s. `slow`: the mean over floor_window_s is below
    floor_bytes_per_s. `overdue`: a phase without bytes took over phase_s. Pauses that the Hub asked
    for are no time, up to max_pause_s between two bytes.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.last: Sample | None = None
        self.idle = self.phase_time = self.paused = self.flushed = 0.0
        self.clock = 0.0
        self.gained = 0
        self.window: deque[tuple[float, int]] = deque()

    def see(self, sample: Sample) -> Verdict | None:
        """None while the worker is well. Times add up from the first sample on."""
        last, self.last = self.last, sample
        if last is None:
            self.window.append((0.0, 0))
            return None
        spent = min(max(0.0, sample.at - last.at), MAX_GAP_S)
        gain = max(sample.wire - last.wire, sample.moved - last.moved, sample.disk - last.disk, 0)
        if gain:
            self.idle = self.paused = self.flushed = 0.0
        elif sample.pausing and self.paused < self.limits.max_pause_s:
            self.paused += spent
            spent = 0.0
        elif sample.flushing and self.flushed < MAX_FLUSH_S:
            self.flushed += spent
            spent = 0.0
        if sample.phase in WITHOUT_BYTES:
            self.phase_time = 0.0 if sample.phase != last.phase else self.phase_time + spent
            if self.phase_time >= self.limits.phase_s:
                return Verdict("overdue", self.phase_time, phase=sample.phase)
            return None
        self.phase_time = 0.0
        self.idle += 0.0 if gain else spent
        if self.idle >= self.limits.stall_s:
            return Verdict("stalled", self.idle)
        return self.too_slow(spent, gain)

    def too_slow(self, spent: float, gain: int) -> Verdict | None:
        """The mean over the window, of time that counted."""
        self.clock += spent
        self.gained += gain
        self.window.append((self.clock, self.gained))
        length, floor = self.limits.floor_window_s, self.limits.floor_bytes_per_s
        if self.limits.bwlimit_bytes_per_s:
            floor = min(floor, self.limits.bwlimit_bytes_per_s / 2)
        while len(self.window) > 1 and self.clock - self.window[1][0] >= length:
            self.window.popleft()
        then, had = self.window[0]
        over = self.clock - then
        if floor <= 0 or over < length:
            return None
        rate = (self.gained - had) / over
        return Verdict("slow", over, rate=rate) if rate < floor else None
