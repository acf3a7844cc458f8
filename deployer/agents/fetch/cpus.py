"""How busy the CPUs are: whether one more stream through a cipher would find one."""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH123

from __future__ import annotations

import os

SPARE = 0.3
"""So much of all CPUs must have been idle for another stream to be worth its start."""


def count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class Cpus:
    """Looks at /proc/stat (proc(5)); `idle` tells of the time since the look before."""

    def __init__(self, path: str = "/proc/stat") -> None:
        self.path = path
        self.seen = self.ticks()

    def ticks(self) -> tuple[int, int]:
        """(idle, all) ticks of all CPUs since boot; zeros where the kernel does not say."""
        try:
            with open(self.path, encoding="ascii") as stream:
                row = [int(word) for word in stream.readline().split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return sum(row[3:5]), sum(row)

    def idle(self) -> float:
        """Share of idle time, 0 to 1; 1 where it is not known."""
        before, self.seen = self.seen, self.ticks()
        spent = self.seen[1] - before[1]
        if not self.seen[1]:
            return 1.0
        return (self.seen[0] - before[0]) / spent if spent > 0 else 0.0
