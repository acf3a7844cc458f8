"""What a failed launch is called. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """`cls` is a stable word; `cause_line` is the line that states the cause ('' when none)."""

    cls: str
    cause_line: str
    action: str
    next_variant_allowed: bool
    """May the next rung of the ladder be tried? False where it would only hide the cause."""
