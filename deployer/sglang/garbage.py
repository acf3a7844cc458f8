"""Letters in no order that any tongue has. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from deployer.sglang.scripts import script_of

SPACED = frozenset({"LATIN", "CYRILLIC", "ARABIC", "HEBREW", "DEVANAGARI", "GEORGIAN", "ARMENIAN"})
UNSPACED = frozenset({"CJK", "THAI", "LAO", "KHMER", "MYANMAR"})
"""Written without spaces between words, so that a Latin name stands right in the text."""
HAN = re.compile(r"[\u4e00-\u9fff]")
NOISE_LINE = 200
CHANGES = 0.64
"""Share of changes between small, capital, digit and mark: 0.72 in noise, 0.55 in dense code."""
MARKS = 0.2
FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
LETTERS = re.compile(r"(?:\b[a-z] ){60,}")


def mixed_words(text: str) -> tuple[str, int] | None:
    """Words of which each has letters of several alphabets."""
    words = list(re.finditer(r"[^\W\d_]{2,}", text))
    mixed = [match.start() for match in words if _mixed(match.group())]
    if len(mixed) >= 3 and len(mixed) > 0.05 * len(words):
        return "several scripts within one word", mixed[0]
    return None


def _mixed(word: str) -> bool:
    scripts = {script_of(letter) for letter in word} & (SPACED | UNSPACED)
    if "LATIN" in scripts and not scripts - UNSPACED - {"LATIN"}:
        return False
    return len(scripts) >= 2


def rare_signs(text: str) -> tuple[str, int] | None:
    """Chinese of signs that hardly any text uses."""
    signs = HAN.findall(text)
    if len(signs) < 40:
        return None
    rare = [sign for sign in signs if not _common(sign)]
    if len(rare) > 0.35 * len(signs):
        return "characters in no order", text.index(rare[0])
    return None


def _common(sign: str) -> bool:
    """Of the first, frequent levels of GB 2312 or Big5 (the only ones that most text needs)."""
    for codec, first, last in (("gb2312", 0xB0, 0xD7), ("big5", 0xA4, 0xC6)):
        try:
            if first <= sign.encode(codec)[0] <= last:
                return True
        except UnicodeError:
            continue
    return False


def noise(text: str) -> tuple[str, int] | None:
    """A long line in which small letters, capitals, digits and marks change without a rule."""
    shown = {at for block in FENCED.finditer(text) for at in (block.start(), block.end())}
    for line in re.finditer(r"[^\n]+", text):
        if sum(at <= line.start() for at in shown) % 2:
            continue
        visible = [letter for letter in line.group() if "!" <= letter <= "~"]
        if len(visible) < max(NOISE_LINE, 0.7 * len(line.group())) or len(set(visible)) < 40:
            continue
        kinds = [_kind(letter) for letter in visible]
        changes = sum(a != b for a, b in pairwise(kinds))
        if changes > CHANGES * len(kinds) and kinds.count("mark") > MARKS * len(kinds):
            return "characters in no order", line.start()
    return None


def _kind(letter: str) -> str:
    if letter.isdigit():
        return "digit"
    if letter.isalpha():
        return "capital" if letter.isupper() else "small"
    return "mark"


def torn_words(text: str) -> tuple[str, int] | None:
    """Words whose letters stand apart, many in a row; the alphabet in order is none."""
    for row in LETTERS.finditer(text):
        letters = row.group().split()
        rising = sum(a < b for a, b in pairwise(letters))
        if len(set(letters)) >= 12 and rising < 0.75 * len(letters):
            return "letters instead of words", row.start()
    return None


GARBAGE: tuple[Callable[[str], tuple[str, int] | None], ...] = (
    mixed_words,
    rare_signs,
    noise,
    torn_words,
)
