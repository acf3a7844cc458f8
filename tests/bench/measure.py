"""What a command costs: wall time, CPU time, and the memory of all its processes together."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 0.05
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Cost:
    """Seconds, and bytes at the peak. `rss` counts pages that processes share once for each."""

    wall: float
    cpu: float
    rss: int
    pss: int
    said: str = field(default="", repr=False)
    """What the command wrote."""

    def then(self, other: Cost) -> Cost:
        """The cost of one command after the other."""
        return Cost(
            self.wall + other.wall,
            self.cpu + other.cpu,
            max(self.rss, other.rss),
            max(self.pss, other.pss),
        )


def descendants(pid: int) -> Iterator[int]:
    """The process and all below it, as far as they are there."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from descendants(int(child))


def memory(pid: int) -> tuple[int, int]:
    """RSS and PSS of a process tree, bytes."""
    rss = pss = 0
    for one in descendants(pid):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Rss:"):
                    rss += int(line.split()[1]) * 1024
                elif line.startswith("Pss:"):
                    pss += int(line.split()[1]) * 1024
    return rss, pss


def cost(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    sample: bool = True,
    timeout_s: float = 600,
) -> Cost:
    """Runs a command to its end. A failure ends the bench with the command's last words."""
    peak = [0, 0]
    done = threading.Event()

    def watch(pid: int) -> None:
        while not done.wait(SAMPLE_S):
            for i, size in enumerate(memory(pid)):
                peak[i] = max(peak[i], size)

    began = time.monotonic()
    process = subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    killer = threading.Timer(timeout_s, process.kill)
    watcher = threading.Thread(target=watch, args=(process.pid,), daemon=True)
    killer.start()
    if sample:
        watcher.start()
    words = process.stdout.read() if process.stdout else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    done.set()
    killer.cancel()
    if sample:
        watcher.join()
    if process.returncode != 0:
        sys.exit(f"{' '.join(argv)}: exit {process.returncode}\n{words.decode()[-4000:]}")
    # Where there are samples, not the kernel's maximum: it counts the parent before exec.
    rss = peak[0] if sample else usage.ru_maxrss * 1024
    said = words.decode("utf-8", "replace")
    return Cost(wall, usage.ru_utime + usage.ru_stime, rss, peak[1], said)
