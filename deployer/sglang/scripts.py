"""A text that leaves its script in the middle of a sentence and does not come back. Pure."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from deployer.sglang.verdict import GOOD, Verdict, bad

ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "HANGUL": "CJK", "KATAKANA-HIRAGANA": "CJK"}
BEFORE = 60
AFTER = 40
AFTER_CJK = 20
"""Letters; a sign of Chinese says what some letters say."""
NAMED = re.compile(
    r"\b(?:chinese|mandarin|japanese|korean|russian|ukrainian|bulgarian|serbian|arabic|persian"
    r"|farsi|urdu|hebrew|yiddish|hindi|sanskrit|bengali|tamil|telugu|thai|greek|georgian|armenian"
    r"|languages?|translat\w*|original|script|alphabet|say|says|called|written|means?|reads"
    r"|phrases?|words?|transcri\w*|native|bilingual)\b",
    re.IGNORECASE,
)
"""What tells a reader that another script is coming."""


@lru_cache(maxsize=4096)
def script_of(letter: str) -> str:
    """The name of its script; Chinese, Japanese and Korean are one, for they stand together."""
    name = unicodedata.name(letter, "UNKNOWN").split(" ")[0]
    return ONE_SCRIPT.get(name, name)


def drifted(text: str, prompt: str) -> Verdict:
    """Latin words, and then another script to the end, with no mark and no word between."""
    letters = [(i, script_of(mark)) for i, mark in enumerate(text) if mark.isalpha()]
    last = next((k for k in range(len(letters) - 1, -1, -1) if letters[k][1] == "LATIN"), None)
    if last is None or last + 1 >= len(letters):
        return GOOD
    after = letters[last + 1 :]
    other = after[0][1]
    if len(after) < (AFTER_CJK if other == "CJK" else AFTER):
        return GOOD
    latin = sum(script == "LATIN" for _, script in letters[: last + 1])
    if latin < BEFORE or latin < 0.85 * (last + 1):
        return GOOD
    at = after[0][0]
    between = text[letters[last][0] + 1 : at]
    if between.strip(" \t") or NAMED.search(prompt) or NAMED.search(text[max(0, at - 100) : at]):
        return GOOD
    return bad(f"the text turns to another script ({other.lower()}) in mid-sentence", at)
