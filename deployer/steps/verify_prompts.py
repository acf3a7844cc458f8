"""What the gates ask, and what a right answer holds. Pure."""

from __future__ import annotations

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


QUESTIONS = (
    Question("What is 17 * 23? Answer with the number only.", (r"\b391\b",)),
    Question("What is the capital of France? Answer with one word.", (r"\bparis\b", "巴黎")),
)
ESSAY = "Explain in about 400 words how the tides work and why they differ from coast to coast."
COUNT_TO = 100
COUNTING = f"Count from 1 to {COUNT_TO}, separated by commas. Write nothing else."
CODE_WORD = "kingfisher"


def burst_prompts(count: int) -> list[str]:
    """Short prompts with different answers, so that mixed-up answers would show."""
    return [f"What is {11 + number} + {5 + 3 * number}? Answer briefly." for number in range(count)]


def burst_answer(number: int) -> str:
    """The sum that prompt `number` asks for."""
    return str(16 + 4 * number)


def long_prompt(words: int) -> str:
    """A prompt of about so many words with a question about its first line."""
    lines = [f"The code word of this document is {CODE_WORD}."]
    length = 8
    number = 0
    while length < words:
        number += 1
        lines.append(
            f"Entry {number}: the tide gauge at station {number * 7 % 97} was read at hour "
            f"{number * 5 % 24} and showed {number * 13 % 450} centimetres above the mark."
        )
        length += 19
    lines.append("What is the code word given in the first line? Answer with one word.")
    return "\n".join(lines)


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
