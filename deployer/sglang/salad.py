"""Words in no order: what a model says whose weights, kernels or tokenizer are wrong. Pure.

No list of good words is needed: sentences of any tongue are full of the words that join others, a
script is left with a mark, and a small vocabulary comes back in the same phrases.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from deployer.sglang.scripts import script_of
from deployer.sglang.verdict import GOOD, Verdict, bad, is_prose, lines, spans

JOINTS = (
    "the of and to a in is it that for on as with was i you be are this de la le et les des un une "
    "en que el y los las del se der die und das ist den von zu mit ein eine o e os do da um uma il "
    "di che per non het een van niet i w na z nie to się ve bir bu için yang dan di untuk och att "
    "det som en på og er til ja ei on että és az nem egy a și să din cu je da se su và là của có "
    "ya wa kwa ni ang ng sa mga est ad ut eta du an agus ar yn ir un dhe të në və iyo oo ka og að "
    "hai ki ke shi bu le wo u"
)
FUNCTION_WORDS = frozenset(JOINTS.split())
"""Of the tongues written in Latin letters: real prose in any of them is full of them."""
STRETCH = 120
"""Words of one line that are looked at together."""
SCRIPT_STRETCH = 40
"""Changes of script that are looked at together."""
RUN_LETTERS = 15
GLUED_WORD = re.compile(r"(?<![\w/#.@-])[^\W\d_]{10,}")
JOINT = re.compile(r"[a-z](?:of|and|in|to|by|on|is|for|from|with|that|than)the[a-zA-Z]{3}")
"""English words that no space parts: `exertedbythemoon`."""
CHANGE = re.compile(r"([^\W\d_])([ \t]*)(?=([^\W\d_]))")
TWICE = re.compile(r"\b([A-Za-z\u00c0-\u052f]{2,})\s+\1\b", re.IGNORECASE)
SMALL = 0.33
"""Different words of a window that make its vocabulary small."""
WINDOW = 150
FRESH = 0.85
"""Different pairs of neighbours among all: 0.5 in a song, 0.95 in words drawn by lot."""


def joining_share(words: list[str]) -> float:
    """Of Latin words: the share of those that join others; prose has a fifth or more."""
    return sum(word in FUNCTION_WORDS for word in words) / len(words) if words else 0.0


def salad(text: str) -> Verdict:
    """Words in a row with no mark, no new line and nothing that joins words to a sentence."""
    for line in lines(text):
        row = spans(line.group()) if len(line.group()) > 3 * STRETCH else ()
        for begin in range(0, len(row) - STRETCH + 1, STRETCH // 2):
            part = row[begin : begin + STRETCH]
            words = [word for word, _ in part if word[0].isalpha() and word[0] < "\u0250"]
            # Lists, code and sentences have marks.
            if len(words) < 0.9 * STRETCH or words == sorted(words):
                continue
            if sum(map(len, words)) < 3.5 * len(words):
                continue
            joining = sum(word in FUNCTION_WORDS for word in words)
            if joining < 0.03 * len(words) or len(set(words)) < len(words) / 4:
                at = line.start() + part[0][1]
                return bad(f"{len(words)} words in a row that make no sentence", at)
    return GOOD


def only_joints(text: str) -> Verdict:
    """Nothing but the words that join others."""
    words = [word for word, _ in spans(text) if word[0].isalpha()]
    joining = sum(word in FUNCTION_WORDS for word in words)
    if len(words) >= 25 and joining > 0.85 * len(words) and sum(map(len, words)) > 2 * len(words):
        return bad("only words that join others, and none to join", spans(text)[0][1])
    return GOOD


def many_scripts(text: str) -> Verdict:
    """Three scripts or more that change in mid-word or from word to word, and join nothing."""
    for line in lines(text):
        row = line.group()
        if row.isascii() or row.count("|") >= 3:
            continue
        changes: list[tuple[int, str, str]] = []
        for match in CHANGE.finditer(row):
            one, other = script_of(match[1]), script_of(match[3])
            if one != other:
                changes.append((match.start(), one, other))
        for begin in range(0, max(1, len(changes) - 9), SCRIPT_STRETCH // 2):
            part = changes[begin : begin + SCRIPT_STRETCH]
            if len(part) < 10 or len({script for _, a, b in part for script in (a, b)}) < 3:
                continue
            said = row[part[0][0] : part[-1][0] + 1]
            back = sum(other == "LATIN" for _, _, other in part)
            latin = [w.lower() for w in re.findall(r"[A-Za-z\u00c0-\u024f]+", said)]
            short = sum(map(str.isalpha, said)) < RUN_LETTERS * len(part)
            if back >= 4 and short and joining_share(latin) < 0.1:
                return bad("scripts that change from word to word", line.start() + part[0][0])
    return GOOD


def drawn_by_lot(text: str) -> Verdict:
    """A small vocabulary whose words come in ever new order: no phrase of it comes back."""
    words = [(word, at) for word, at in spans(text) if "a" <= word[0] < "\u0250"]
    if len(words) < WINDOW or not is_prose(text):
        return GOOD
    for begin in range(0, len(words) - WINDOW + 1, WINDOW // 2):
        part = [word for word, _ in words[begin : begin + WINDOW]]
        pairs = set(pairwise(part))
        if len(set(part)) < SMALL * WINDOW and len(pairs) > FRESH * (WINDOW - 1):
            return bad(f"{len(set(part))} words in no order", words[begin][1])
    return GOOD


def stutter(text: str) -> Verdict:
    """Word after word is said twice."""
    words = sum("a" <= word[0] < "\u0530" for word, _ in spans(text))
    twice = list(TWICE.finditer(text))
    different = {match[1].lower() for match in twice}
    if words >= 40 and len(twice) > 0.12 * words and len(different) >= 10:
        return bad(f"words are said twice, such as {twice[0][1]!r}", twice[0].start())
    return GOOD


def glued_words(text: str) -> Verdict:
    """English without its spaces."""
    hits = [word for word in GLUED_WORD.finditer(text) if JOINT.search(word.group())]
    joints = sum(len(JOINT.findall(word.group())) for word in hits)
    if joints >= 4 and sum(len(word.group()) for word in hits) > 0.1 * len(text):
        return bad("words without spaces between them", hits[0].start())
    return GOOD


def small_letter_sentences(text: str) -> Verdict:
    """Full stops between words that join nothing and begin small."""
    row = spans(text)
    for begin in range(0, len(row) - STRETCH + 1, STRETCH // 2):
        part = row[begin : begin + STRETCH]
        words = [word for word, _ in part if word[0].isalpha() and word[0] < "\u0250"]
        said = text[part[0][1] : part[-1][1]]
        stops = len(re.findall(r"[a-z]{3}\. [a-z]{2}", said))
        if len(words) < 0.6 * STRETCH or stops < 5 or "\n" in said or "," not in said:
            continue
        often = Counter(words).most_common(1)[0][1]
        if joining_share(words) < 0.02 and often >= 3 and len(set(words)) < 0.85 * len(words):
            return bad(f"{len(words)} words that make no sentence", part[0][1])
    return GOOD


TESTS: tuple[Callable[[str], Verdict], ...] = (
    salad,
    only_joints,
    many_scripts,
    drawn_by_lot,
    stutter,
    glued_words,
    small_letter_sentences,
)
