"""What the gates ask, and what a right answer holds. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A prompt with a known answer: any of `accepts` (regular expressions) must be in it."""

    prompt: str
    accepts: tuple[str, ...]

    def right(self, text: str) -> bool:
        """Does the text hold the answer?"""
        return any(re.search(pattern, text, re.IGNORECASE) for pattern in self.accepts)


HELLO = "Say hello."
QUESTIONS = (
    Question("What is 17 * 23? Answer with the number only.", (r"\b391\b",)),
    Question("What is the capital of France? Answer with one word.", (r"\bparis\b", "巴黎")),
)
ESSAY = "Explain in about 400 words how the tides work and why they differ from coast to coast."
CONTINUED = (
    "The following is a chapter of a book about the sea, for curious readers.\n\n"
    "Chapter 1. Why the sea rises and falls\n\n"
)
"""For /generate, which knows no roles: a text to go on with."""
COUNT_TO = 100
COUNTING = f"Count from 1 to {COUNT_TO}, separated by commas. Write nothing else."
CODE_WORD = "kingfisher"
ASKED_AT_THE_END = (
    "What is the code word given in the first line? Then explain in about 350 words how such a "
    "record of a tide gauge is read and what it is good for."
)
SAMPLES = (4, 16)
"""Entries of the two documents by which the length of an entry is measured."""


def burst_prompts(count: int) -> list[str]:
    """Short prompts with different answers, so that mixed-up answers would show."""
    return [f"What is {11 + number} + {5 + 3 * number}? Answer briefly." for number in range(count)]


def burst_answer(number: int) -> str:
    """The sum that prompt `number` asks for."""
    return str(16 + 4 * number)


def document(entries: int, filling: int = 0) -> str:
    """A prompt whose first line is asked for at its end; each entry has about as many tokens.

    `filling`: so many more words of one token each.
    """
    lines = [f"The code word of this document is {CODE_WORD}."]
    for number in range(1, entries + 1):
        lines.append(
            f"Entry {number:06d}: the tide gauge at station {number * 7 % 97:02d} was read at hour "
            f"{number * 5 % 24:02d} and showed {number * 13 % 450:03d} centimetres above the mark."
        )
    if filling > 0:
        lines.append("Remarks:" + " so" * filling)
    return "\n".join([*lines, ASKED_AT_THE_END])


FILLING_MARGIN = 6


@dataclass(frozen=True)
class Ruler:
    """Tokens of a document by the server's own count: `base` and `entry` for each entry."""

    base: float
    entry: float

    @classmethod
    def of(cls, counts: tuple[int, int]) -> Ruler | None:
        """From the prompt_tokens of the two SAMPLES; None when they cannot be right."""
        few, many = SAMPLES
        entry = (counts[1] - counts[0]) / (many - few)
        if entry < 1:
            return None
        return cls(counts[0] - few * entry, entry)

    def at_least(self, tokens: int) -> int:
        """Entries of the shortest document with so many tokens."""
        return max(1, math.ceil((tokens - self.base) / self.entry))

    def at_most(self, tokens: int) -> int:
        """Entries of the longest document with no more tokens; 0 when none fits."""
        return max(0, math.floor((tokens - self.base) / self.entry))

    def left(self, tokens: int, entries: int) -> int:
        """Tokens that a document of `entries` leaves of `tokens`, less what joins them."""
        return max(0, math.floor(tokens - self.base - entries * self.entry) - FILLING_MARGIN)

    def corrected(self, entries: int, counted: int) -> Ruler:
        """The ruler after a document of `entries` was counted."""
        return Ruler(self.base, max(1.0, (counted - self.base) / max(1, entries)))


def counted_up_to(text: str) -> int:
    """How far the text counts 1, 2, 3 .. without a gap (the best run in it)."""
    best = run = 0
    for number in (int(found) for found in re.findall(r"\d+", text) if len(found) < 6):
        if number == run + 1:
            run = number
        elif number == 1:
            run = 1
        elif number != run:
            run = 0
        best = max(best, run)
    return best


def first_gap(text: str) -> tuple[int, int]:
    """(the number that should have come, the character where another stands); (0, -1): no gap."""
    expected = 0
    for match in re.finditer(r"\d+", text):
        number = int(match.group()) if len(match.group()) < 9 else -1
        if expected == 0 and number != 1:
            continue
        if number != expected + 1:
            return expected + 1, match.start()
        expected = number
    return 0, -1
