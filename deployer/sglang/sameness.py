"""Text that says nothing new, though no block comes back at once. Pure."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

from deployer.sglang import salad
from deployer.sglang.surroundings import announced, fenced
from deployer.sglang.verdict import (
    GOOD,
    Verdict,
    bad,
    is_code,
    is_command,
    is_prose,
    lines,
    new_words,
    spans,
    tokens,
)

PERIOD_SHARE = 0.3
FEW_AROUND = 18
"""Different words; a song or a list that keeps one phrase has more."""
PATTERN_RUN = 12
LONG_SENTENCE = 14
"""Tokens."""
NEW_WORDS = 0.34
"""New words a sentence: sentences of one pattern that name something each have more."""


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
        if _quoted(text, run) or _rows_then_more(text, run, prose):
            continue
        if len(run) >= (_least(text, run) if prose else 30) and len(run) / lettered > 0.3:
            worst, at, _ = run[0]
            return bad(f"{len(run)} lines with nothing new, such as {worst[:60]!r}", at)
    telling = [unit for unit in units if unit[2]]
    often = [unit for unit in telling if counts[unit[0]] >= 5]
    inline = lettered > 2 * len(lines(text))
    share = 0.55 if inline else 0.8
    once = sum(has_letters(unit) and counts[unit] == 1 for unit, _, _ in units)
    if _quoted(text, often) or (not inline and is_code(text) and once >= 0.3 * lettered):
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
                prose = len(tokens(unit)) >= 4 and is_prose(unit) and not is_command(unit)
                prose = prose and not re.search(r"\d", unit)
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


def each_again(text: str) -> Verdict:
    """Sentence after sentence is said four times or more before the next one comes."""
    stuck: list[tuple[str, int]] = []
    row, before = 0, ""
    for unit, at, prose in _units(text):
        row = row + 1 if unit == before else 1
        before = unit
        if row == 4 and prose and not fenced(text, at, at + len(unit)):
            stuck.append((unit, at))
    if len({unit for unit, _ in stuck}) >= 3:
        return bad(f"each sentence several times, such as {stuck[0][0][:60]!r}", stuck[0][1])
    return GOOD


def _rows_then_more(text: str, run: Sequence[tuple[str, int, bool]], prose: bool) -> bool:
    """Are they rows of code, forty at most, behind which the text says something else?"""
    if prose or not run:
        return False
    said = {unit for unit, _, _ in run}
    last = max(text.lower().rfind(unit) for unit in said)
    rest = text[last:].partition("\n")[2]
    rows = text.count("\n", run[0][1], last)
    return rows <= 40 and new_words(rest, " ".join(said)) >= 5


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
            if len(words) < 5 or not is_prose(part.group()) or is_command(part.group()):
                continue
            if run and _same_pattern(run[-1], words):
                run.append(words)
            else:
                run, begin = [words], line.start() + part.start()
            if len(run) >= PATTERN_RUN and _new_a_sentence(run) < NEW_WORDS:
                if _recited(text, begin, run):
                    continue
                return bad(
                    f"{len(run)} sentences of one pattern, such as {' '.join(words)[:60]!r}", begin
                )
    return GOOD


def _recited(text: str, begin: int, run: Sequence[Sequence[str]]) -> bool:
    """One sentence behind a colon, forty times at most, and then the text goes on."""
    if len(run) > 40 or len({tuple(words) for words in run}) > 1 or not announced(text, begin):
        return False
    said = " ".join(run[0])
    lines_after = text[begin:].split("\n", 1)
    return len(lines_after) == 2 and new_words(lines_after[1], said) >= 5


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
    if len(words) < 120 or figures > 0.08 * len(words) or not is_prose(text) or is_code(text):
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
    if len(words) < window or figures > 0.08 * len(words) or not is_prose(text) or is_code(text):
        return GOOD
    for begin in range(0, len(words) - window + 1, 25):
        part = words[begin : begin + window]
        different = len({word for word, _ in part})
        if different < 15:
            return bad(f"only {different} different words in {window}", part[0][1])
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
    each_again,
    one_pattern,
    phrase_share,
    few_words,
    *salad.TESTS,
    redundancy,
)
