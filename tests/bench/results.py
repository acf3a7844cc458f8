"""RESULTS.md: one section a bench; each bench replaces only its own."""

from __future__ import annotations

import re
from pathlib import Path

PATH = Path(__file__).parent / "RESULTS.md"


def keep(topic: str, title: str, lines: list[str]) -> None:
    """Writes the section whose title begins with `topic`; other sections stay as they are."""
    text = PATH.read_text() if PATH.exists() else "# Results\n"
    head, *sections = re.split(r"(?m)^(?=## )", text)
    new = f"## {title}\n\n" + "\n".join(lines).strip() + "\n"
    others = [one for one in sections if not one.startswith(f"## {topic}")]
    kept = [one.strip() + "\n" for one in (*others, new)]
    PATH.write_text(head.strip() + "\n\n" + "\n".join(kept))
