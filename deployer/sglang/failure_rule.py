"""One row of the table of failure classes. Plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass


class Lines:
    """Lines of a log, and the text that they make."""

    def __init__(self, each: list[str]) -> None:
        self.each = each
        self.text = "\n".join(each)


@dataclass(frozen=True)
class Rule:
    """`pattern` is looked for in each line; the cause is the first line that has it, or the last.

    `phases`: the phases in which the rule holds, first and last; None is any. `passing`: a launch
    may go on after such a line; it is the cause only when nothing follows it, or nothing else is
    found.
    """

    cls: str
    pattern: re.Pattern[str]
    action: str
    next_variant: bool = False
    last: bool = False
    phases: tuple[str, str] | None = None
    passing: bool = False

    def hits(self, lines: Lines) -> list[str]:
        """The lines that have the pattern."""
        # One look at the whole text spares a look at each of a hundred thousand lines.
        if not re.compile(self.pattern.pattern, re.MULTILINE).search(lines.text):
            return []
        return [line for line in lines.each if self.pattern.search(line)]


def rule(
    cls: str,
    pattern: str,
    action: str,
    *,
    next_variant: bool = False,
    last: bool = False,
    phases: tuple[str, str] | None = None,
    passing: bool = False,
) -> Rule:
    """A row, its pattern given as text."""
    return Rule(cls, re.compile(pattern), action, next_variant, last, phases, passing)
