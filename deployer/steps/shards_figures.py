"""The figures of a download: the agent's progress line as typed data, and in words. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from deployer.events import Part

MOST_PARTS = 16


@dataclass(frozen=True)
class Figures:
    """One progress line. Sizes in bytes, speeds in bytes/s, times in seconds.

    `tick` rises by one a second while the supervisor lives, -1 when the line has none.
    `speed` is that of the last 10 s, `mean` that since the start; `eta` is None when unknown.
    """

    tick: int = -1
    done: int = 0
    total: int = 0
    received: int = 0
    speed: float = 0.0
    mean: float = 0.0
    eta: float | None = None
    files_done: int = 0
    files: int = 0
    retries: int = 0
    stalls: int = 0
    pause: float = 0.0
    offline: bool = False
    """The pause is our own: nobody is reached."""
    method: str = ""
    phase: str = ""
    parts: tuple[Part, ...] = ()
    """The files under way, largest first."""

    def mapping(self) -> dict[str, float | str | None]:
        """For programs: every figure with its unit in the name."""
        return {
            "received_bytes": self.received,
            "speed_bytes_per_s": self.speed,
            "mean_bytes_per_s": self.mean,
            "eta_s": self.eta,
            "files_done": self.files_done,
            "files": self.files,
            "retries": self.retries,
            "stalls": self.stalls,
            "pause_s": self.pause,
            "method": self.method,
            "phase": self.phase,
        }

    def words(self) -> str:
        """For people: speeds, time left, files, method, and what went wrong on the way."""
        said = [f"{size_text(self.speed)}/s"]
        if self.mean > 0:
            said.append(f"mean {size_text(self.mean)}/s")
        if self.eta is not None:
            said.append(f"{time_text(self.eta)} left")
        said.append(f"{self.files_done} of {self.files} files")
        if self.method:
            said.append(self.method)
        if self.phase and self.phase != "downloading":
            said.append(self.phase)
        said += [
            f"{count} {one if count == 1 else many}"
            for count, one, many in (
                (self.retries, "retry", "retries"),
                (self.stalls, "stall", "stalls"),
            )
            if count
        ]
        if self.offline:
            said.append("the Hub is out of reach, trying again")
        elif self.pause > 0:
            said.append(f"waiting {self.pause:.0f} s as the Hub asked")
        return ", ".join(said)


def read_figures(line: str) -> Figures | None:
    """The agent's progress line; None when there is none yet or it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    eta = row.get("eta")
    return Figures(
        tick=_whole(row, "tick", -1),
        done=_whole(row, "bytes"),
        total=_whole(row, "total"),
        received=_whole(row, "received"),
        speed=_number(row.get("speed")),
        mean=_number(row.get("mean")),
        eta=None if eta is None else _number(eta),
        files_done=_whole(row, "files_done"),
        files=_whole(row, "files"),
        retries=_whole(row, "retries"),
        stalls=_whole(row, "stalls"),
        pause=_number(row.get("pause")),
        offline=row.get("offline") is True,
        method=str(row.get("method") or ""),
        phase=str(row.get("phase") or ""),
        parts=_parts(row.get("shards")),
    )


def size_text(count: float) -> str:
    """`52.1 GB`, `24.1 MB`, `512 bytes` (decimal units)."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def time_text(seconds: float) -> str:
    """`0:47`, `12:05`, `3:20:10`, `2 d 3 h`."""
    left = max(0, round(seconds))
    if left >= 2 * 86400:
        return f"{left // 86400} d {left % 86400 // 3600} h"
    hours, minutes = left // 3600, left % 3600 // 60
    if hours:
        return f"{hours}:{minutes:02d}:{left % 60:02d}"
    return f"{minutes}:{left % 60:02d}"


def _number(value: Any) -> float:
    """A figure of a line that came from afar: 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0.0
    return max(0.0, float(value))


def _whole(row: dict[str, Any], key: str, lacking: int = 0) -> int:
    return int(_number(row[key])) if key in row else lacking


def _parts(rows: Any) -> tuple[Part, ...]:
    if not isinstance(rows, list):
        return ()
    return tuple(
        Part(str(row[0]), _number(row[1]), _number(row[2]))
        for row in rows[:MOST_PARTS]
        if isinstance(row, list) and len(row) == 3
    )
