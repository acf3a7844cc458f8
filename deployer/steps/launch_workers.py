"""Notices a worker that died while the server's main process lives on.

SGLang 0.5.9 does not: it stays as a service that answers nothing. Newer versions end themselves
within 2 s, and then their log says more than is seen here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deployer.sglang.failure import Failure

TITLE = "sglang::"
"""How the title of a scheduler, a detokenizer or a controller begins once it runs."""


@dataclass
class Workers:
    """The workers seen so far, by pid and start time."""

    seen: dict[tuple[int, int], str] = field(default_factory=dict)
    lost: dict[tuple[int, int], float] = field(default_factory=dict)
    """Since when (seconds of the caller's clock) a worker is missing."""

    def look(self, answer: dict[str, Any], now: float) -> None:
        """Takes in the agent's `members`: running processes of the launch's session."""
        members = answer.get("members")
        if not answer.get("alive") or not isinstance(members, list):
            return
        there = {(one["pid"], one["start"]): str(one["title"]) for one in members}
        for key, title in there.items():
            if title.startswith(TITLE):
                self.seen[key] = title
        for key in self.seen:
            if key not in there:
                self.lost.setdefault(key, now)

    def lost_s(self, now: float) -> float:
        """For how long a worker has been missing; 0 when none is."""
        return max((now - since for since in self.lost.values()), default=0.0)

    def failure(self) -> Failure:
        """Names the first that was missed."""
        key = min(self.lost, key=lambda one: self.lost[one])
        return Failure(
            "worker-died",
            f"{self.seen[key]} (pid {key[0]}) is gone while the server's main process lives",
            "a worker was killed from outside, or crashed without a word: read the host's `dmesg`",
            False,
        )
