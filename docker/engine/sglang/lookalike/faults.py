"""Faults that were ordered: one name a line in /etc/lab/faults, read at the start and a request."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from sglang.lookalike import logs

SILENT_DEATH = "server-dies-silent"
NEVER_READY = "server-never-ready"
DIES_AFTER_FIRST = "server-dies-after-first"
DEGENERATE = "server-degenerate"
DEGENERATE_MTP = "server-degenerate-mtp"
EMPTY = "server-empty"
SLOW = "server-slow"
STRAYS = "server-strays"
"""A scheduler leaves a process that got away from it."""
THINKS_ALOUD = "server-thinks-aloud"
"""The reasoning parser does not know the model's marks."""
SWALLOWS = "server-swallows"
"""The reasoning parser takes every answer for a thought."""
THINKS_ON = "server-thinks-on"
"""The thoughts never end."""
LATE = "server-degenerates-late"
LONG = "server-degenerates-long"
EDGE_DEATH = "server-dies-at-edge"
HANGS = "server-hangs"
NO_SWITCH = "server-refuses-thinking"
LATE_PIECES, LONG_TOKENS, EDGE_SHARE = 150, 2500, 0.9


def spoil(request: Any, longest: int, on: set[str]) -> None:
    """What a broken engine makes of an answer that was planned. May end the server."""
    if LATE in on and len(request.pieces) > LATE_PIECES:
        rest = len(request.pieces) - LATE_PIECES
        request.pieces[LATE_PIECES:] = ["!"] * rest
    if LONG in on and request.prompt_tokens > LONG_TOKENS:
        request.pieces[:] = (["and", " so ", "on", " "] * request.max_tokens)[: request.max_tokens]
        request.reasoning_pieces = 0
    if THINKS_ON in on and request.reasoning_pieces:
        # The answer's own words, thought instead of said, and cut by the limit.
        more = request.pieces[request.reasoning_pieces :]
        request.pieces[:] = (request.pieces + more * request.max_tokens)[: request.max_tokens]
        request.reasoning_pieces = len(request.pieces)
    if EDGE_DEATH in on and request.prompt_tokens > EDGE_SHARE * longest:
        logs.say(
            "Scheduler hit an exception: torch.AcceleratorError: CUDA error: an illegal memory "
            "access was encountered"
        )
        os.kill(os.getpid(), signal.SIGQUIT)
        time.sleep(60)
    if HANGS in on:
        time.sleep(3600)


def active() -> set[str]:
    """The names that are switched on now; LAB_FAULTS names another file."""
    try:
        text = Path(os.environ.get("LAB_FAULTS", "/etc/lab/faults")).read_text(encoding="utf-8")
    except OSError:
        return set()
    return {line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"}
