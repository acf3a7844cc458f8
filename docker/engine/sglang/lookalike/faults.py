"""Faults that were ordered: one name a line in /etc/lab/faults, read at the start and a request."""

from __future__ import annotations

import os
from pathlib import Path

SILENT_DEATH = "server-dies-silent"
NEVER_READY = "server-never-ready"
DIES_AFTER_FIRST = "server-dies-after-first"
DEGENERATE = "server-degenerate"
DEGENERATE_MTP = "server-degenerate-mtp"
EMPTY = "server-empty"
SLOW = "server-slow"


def active() -> set[str]:
    """The names that are switched on now; LAB_FAULTS names another file."""
    try:
        text = Path(os.environ.get("LAB_FAULTS", "/etc/lab/faults")).read_text(encoding="utf-8")
    except OSError:
        return set()
    return {line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"}
