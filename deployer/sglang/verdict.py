"""What a judge of text says, and how text is cut for it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

WORD = re.compile(r"[^\W_]+|[^\w\s]")
IDEOGRAPH = re.compile(r"[぀-ヿ㐀-鿿가-힯]")
EXCERPT = 160


@dataclass(frozen=True)
class Verdict:
    """`why` is one line; `evidence` an excerpt at `position` (characters into the judged text).

    `part` is which text was judged bad: content or reasoning_content; '' where it is both.
    """

    good: bool
    why: str = ""
    evidence: str = ""
    position: int = -1
    part: str = ""


GOOD = Verdict(True)


def bad(why: str, position: int) -> Verdict:
    """A verdict whose excerpt is still to be cut."""
    return Verdict(False, why, "", position)


def tokens(text: str) -> list[str]:
    """Words and marks; of a script without spaces, its characters."""
    return [word for word, _ in spans(text)]


@lru_cache(maxsize=8)
def spans(text: str) -> tuple[tuple[str, int], ...]:
    """The tokens, lowered, with their places in characters."""
    found: list[tuple[str, int]] = []
    for match in WORD.finditer(text):
        word = match.group()
        if IDEOGRAPH.search(word):
            found += [(character, match.start() + i) for i, character in enumerate(word)]
        else:
            found.append((word.lower(), match.start()))
    return tuple(found)


def lines(text: str) -> list[re.Match[str]]:
    """The lines that are not blank, with their places."""
    return [match for match in re.finditer(r"[^\n]+", text) if match.group().strip()]


def is_prose(text: str) -> bool:
    """Mostly letters: not code, tables, JSON or figures, whose frame repeats rightly.

    Digits do not count: a sentence with a number in it is a sentence.
    """
    visible = [mark for mark in text if not mark.isspace() and not mark.isdigit()]
    letters = sum(character.isalpha() for character in visible)
    return bool(visible) and letters / len(visible) > 0.8


def is_command(line: str) -> bool:
    """Has it options, as a command line has? Two at least; a dash of prose has a space behind."""
    return len(re.findall(r"(?:^|\s)--?[A-Za-z]", line)) >= 2


def is_code(text: str) -> bool:
    """Do most of its lines, five at least, end as statements do?"""
    rows = [row.rstrip() for row in text.split("\n") if row.strip()]
    return len(rows) >= 5 and sum(row[-1] in ";{}()\\" for row in rows) > 0.5 * len(rows)


def excerpt(text: str, at: int) -> str:
    """Some characters round the place."""
    begin = max(0, at - EXCERPT // 4)
    return text[begin : begin + EXCERPT]


def new_words(text: str, old: str) -> int:
    """How many different words `text` has that `old` has not."""
    known = set(tokens(old))
    return len({word for word in tokens(text[:2000]) if word[0].isalpha()} - known)
