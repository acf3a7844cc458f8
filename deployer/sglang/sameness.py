"""Text that says nothing new, though no block comes back at once. Pure."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from deployer.sglang.repetition import announced, fenced
from deployer.sglang.verdict import GOOD, Verdict, bad, is_prose, lines, new_words, spans, tokens

PERIOD_SHARE = 0.3
FEW_AROUND = 18
"""Different words; a song or a list that keeps one phrase has more."""
PATTERN_RUN = 12
LONG_SENTENCE = 14
"""Tokens."""
NEW_WORDS = 0.34
"""New words a sentence: sentences of one pattern that name something each have more."""
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


def old_units(text: str) -> Verdict:
    """Lines or sentences that say nothing new, one after the other.

    A refrain, a litany, a form or a list comes back too, but new lines stand between; a loop has
    none. A train of thought that turns in circles changes one sentence of several.
    """
    units = _units(text)
    counts = Counter(unit for unit, _, _ in units)
    lettered = sum(has_letters(unit) for unit, _, _ in units)
    seen: set[str] = set()
    run: list[tuple[str, int, bool]] = []
    for unit in units:
        # Twice is a draft and its fair copy.
        if unit[0] in seen and counts[unit[0]] >= 3:
            run += [unit] if has_letters(unit[0]) else []
        else:
            run = []
        seen.add(unit[0])
        prose = sum(is_told for _, _, is_told in run) > len(run) / 2
        if _quoted(text, run):
            continue
        if len(run) >= (_least(text, run) if prose else 30) and len(run) / lettered > 0.3:
            worst, at, _ = run[0]
            return bad(f"{len(run)} lines with nothing new, such as {worst[:60]!r}", at)
    telling = [unit for unit in units if unit[2]]
    often = [unit for unit in telling if counts[unit[0]] >= 5]
    inline = lettered > 2 * len(lines(text))
    share = 0.55 if inline else 0.8
    if _quoted(text, often):
        return GOOD
    if len(telling) >= max(16, lettered / 2) and len(often) / len(telling) > share:
        worst, at, _ = often[1]
        return bad(
            f"{len(often)} of {len(telling)} sentences come back, such as {worst[:60]!r}", at
        )
    return GOOD


def _units(text: str) -> list[tuple[str, int, bool]]:
    """(lowered sentence or line, place, is it a prose sentence); bare marks are left out.

    A sentence with a figure in it may be a step of a procedure or a result: it is none of prose.
    """
    found: list[tuple[str, int, bool]] = []
    for line in lines(text):
        for part in re.finditer(r"[^.!?。！？]+[.!?。！？]*", line.group()):
            unit = part.group().strip().lower()
            if any(character.isalnum() for character in unit):
                prose = len(tokens(unit)) >= 4 and is_prose(unit) and not re.search(r"\d", unit)
                found.append((unit, line.start() + part.start(), prose))
    return found


def _least(text: str, run: Sequence[tuple[str, int, bool]]) -> int:
    """How many are too many: the verses of a song, short and each on a line, may be more."""
    verses = sum(
        len(unit) < 60 and text[: at + 1].rpartition("\n")[2].strip() in ("", text[at])
        for unit, at, _ in run
    )
    return 20 if verses > 0.9 * len(run) and len({unit for unit, _, _ in run}) >= 4 else 10


def _quoted(text: str, run: Sequence[tuple[str, int, bool]]) -> bool:
    """Is it output that is shown: in a code fence, or one line behind a colon that ends again?"""
    if not run:
        return False
    unit, last, _ = run[-1]
    if len(run) <= 100 and fenced(text, run[0][1], last + len(unit)):
        return True
    if len(run) > 40 or len({unit for unit, _, _ in run}) > 1:
        return False
    first = text.lower().find(unit)
    rest = text[last:].lower().replace(unit, "")
    return announced(text, first) and new_words(rest, unit) >= 5


def has_letters(unit: str) -> bool:
    """A figure alone is a number of a list, or a part of one."""
    return any(character.isalpha() for character in unit)


def one_pattern(text: str) -> Verdict:
    """Sentences that put a few words into one pattern, again and again: inline, or long ones."""
    run: list[list[str]] = []
    begin = 0
    for line in lines(text):
        parts = list(re.finditer(r"[^.!?。！？]+[.!?。！？]*", line.group()))
        if len(parts) > 1 or len(tokens(line.group())) < LONG_SENTENCE:
            # Short lines of one pattern are a list.
            run = []
        for part in parts:
            words = tokens(part.group())
            if len(words) < 5 or not is_prose(part.group()):
                continue
            if run and _same_pattern(run[-1], words):
                run.append(words)
            else:
                run, begin = [words], line.start() + part.start()
            if len(run) >= PATTERN_RUN and _new_a_sentence(run) < NEW_WORDS:
                return bad(
                    f"{len(run)} sentences of one pattern, such as {' '.join(words)[:60]!r}", begin
                )
    return GOOD


def _same_pattern(one: Sequence[str], other: Sequence[str]) -> bool:
    if len(one) != len(other):
        return False
    same = sum(a == b for a, b in zip(one, other, strict=True))
    return same >= 0.55 * len(one)


def _new_a_sentence(run: list[list[str]]) -> float:
    """Words that the first third of the run did not have, for each later sentence.

    Figures count where a sentence has more than one: it then computes something.
    """
    third = len(run) // 3
    known = {word for words in run[:third] for word in words}
    new: set[str] = set()
    for words in run[third:]:
        figures = sum(word.isdigit() for word in words)
        new |= {word for word in words if word[0].isalpha() or (word.isdigit() and figures > 1)}
    return len(new - known) / (len(run) - third)


def phrase_share(text: str) -> Verdict:
    """One three-word phrase that makes up much of a long text of few words and no figures."""
    words = [(word, at) for word, at in spans(text) if word[0].isalpha()]
    figures = sum(word.isdigit() for word, _ in spans(text))
    if len(words) < 120 or figures > 0.08 * len(words) or not is_prose(text):
        return GOOD
    places: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(words) - 2):
        phrase = (words[i][0], words[i + 1][0], words[i + 2][0])
        places.setdefault(phrase, []).append(i)
    most, hits = max(places.items(), key=lambda item: len(item[1]))
    around = {word for word, _ in words[hits[0] : hits[-1] + 3]}
    rest = text[words[hits[-1] + 2][1] :]
    if (
        len(hits) <= 40
        and announced(text, words[hits[0]][1])
        and new_words(rest, " ".join(around)) > 4
    ):
        return GOOD
    if 3 * len(hits) / len(words) > PERIOD_SHARE and len(around) < FEW_AROUND:
        return bad(f"{' '.join(most)!r} {len(hits)} times in {len(words)} words", words[hits[1]][1])
    return GOOD


def few_words(text: str) -> Verdict:
    """Too few different words for the length, in any window of 150 words of prose."""
    words = [(word, at) for word, at in spans(text) if word[0].isalpha()]
    figures = sum(word.isdigit() for word, _ in spans(text))
    window = 150
    if len(words) < window or figures > 0.08 * len(words) or not is_prose(text):
        return GOOD
    for begin in range(0, len(words) - window + 1, 25):
        part = words[begin : begin + window]
        different = len({word for word, _ in part})
        if different < 15:
            return bad(f"only {different} different words in {window}", part[0][1])
    return GOOD


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


def redundancy(text: str) -> Verdict:
    """The last resort: a long tail that compresses to almost nothing is a loop of any period."""
    tail = text[-3000:]
    if len(tail) < 1500 or not is_prose(tail) or sum(map(str.isdigit, tail)) > 0.03 * len(tail):
        return GOOD
    data = tail.encode("utf-8", "replace")
    if len(zlib.compress(data, 9)) / len(data) < 0.07:
        return bad("the text repeats itself in a long loop", len(text) - len(tail))
    return GOOD


TESTS: tuple[Callable[[str], Verdict], ...] = (
    old_units,
    one_pattern,
    phrase_share,
    few_words,
    salad,
    only_joints,
    redundancy,
)
