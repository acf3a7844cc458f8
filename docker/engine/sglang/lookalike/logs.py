"""Log lines in SGLang's form, on stderr, one write a line."""

from __future__ import annotations

import os
import sys
import threading
import time

_rank = ""
_muted = False
_lock = threading.Lock()


def set_rank(rank: str) -> None:
    """`TP0` goes into every line of this process."""
    global _rank
    _rank = f" {rank}" if rank else ""


def mute() -> None:
    """Nothing is written any more: a recorded log is played, and is the only one."""
    global _muted
    _muted = True


def raw(text: str) -> None:
    if _muted:
        return
    with _lock:
        sys.stderr.write(text)
        sys.stderr.flush()


def say(text: str) -> None:
    raw(f"{time.strftime('[%Y-%m-%d %H:%M:%S')}{_rank}] {text}\n")


def wait(seconds: float) -> None:
    """A delay of the start or of a token; SGLANG_LOOKALIKE_SPEED=10 makes it ten times shorter."""
    time.sleep(seconds / float(os.environ.get("SGLANG_LOOKALIKE_SPEED", "1")))


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
