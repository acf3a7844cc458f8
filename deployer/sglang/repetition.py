"""Blocks of text that come back at once: characters, syllables, phrases, counted lines. Pure.

A model that loops does not find out again. So what stands behind a repetition counts: a song, a
transcript in a code fence, a list of zeros goes on to something new, and may repeat more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from deployer.sglang.surroundings import (
    PHRASE,
    announced,
    blank_rows,
    fenced,
    in_code,
    is_data,
    opened,
    underlines,
)
from deployer.sglang.verdict import GOOD, Verdict, bad, is_prose, lines, new_words, spans

CHARACTER_RUN = 24
DRAWING = frozenset("-=_*#.~^ \t\n│─═━|+ ·•…>/\\")
"""Characters that tables, rules and diagrams repeat; the blocks U+2500 to U+25FF are more."""
SQUARES = frozenset(
    "\u2b1b\u2b1c\U0001f7e5\U0001f7e6\U0001f7e7\U0001f7e8\U0001f7e9\U0001f7ea\U0001f7eb"
)
"""Emoji that calendars and games draw with."""
DRAWING_RUN = 400
TRAILING_RUN = 100
"""Drawing behind words on one line, at the very end of a text."""
LONGEST = 120
"""Tokens of a block that is looked for."""
BANDS = ((1, 3), (4, 12), (13, 40), (41, LONGEST))
NUMBER = re.compile(r"\d[\d./:-]*")
"""A date or a time is one."""
COUNTED_LINES = 40
PICTURE = re.compile("[\u2600-\u27bf\u2b00-\u2bff\U0001f300-\U0001faff]")
PICTURES = re.compile("(?:[\u2600-\u27bf\u2b00-\u2bff\U0001f300-\U0001faff][\ufe0f\u200d ]*){100,}")
BLANK_RUN = 3000
"""Characters of a form that is cut."""


def character_run(text: str) -> Verdict:
    """One character over and over."""
    for match in re.finditer(rf"(.)\1{{{CHARACTER_RUN - 1},}}", text, re.DOTALL):
        character, length = match[1], len(match.group())
        if _may_run(text, match, character, length):
            continue
        return bad(f"{character!r} {length} times in a row", match.start())
    return GOOD


def _may_run(text: str, match: re.Match[str], character: str, length: int) -> bool:
    after = text[match.end() :]
    if underlines(text, match):
        return True
    if character in SQUARES and length <= 60 and len(set(text) & SQUARES) >= 2:
        return True
    if character in DRAWING or "\u2500" <= character <= "\u25ff" or character == "\u2800":
        before = text[: match.start()].rpartition("\n")[2]
        behind_words = sum(mark.isalpha() for mark in before) >= 10
        return length < (TRAILING_RUN if behind_words and not after.strip() else DRAWING_RUN)
    goes_on = new_words(after, match.group()) >= 4
    if character.isdigit():
        return length < (DRAWING_RUN if goes_on else 4 * CHARACTER_RUN)
    if length <= 2 * TRAILING_RUN and fenced(text, match.start(), match.end()):
        return True
    if character.isalnum() and length <= DRAWING_RUN and goes_on and in_code(text, match):
        return True
    head = re.match(r"\S*", text[max(0, match.start() - 200) : match.start()][::-1])
    tail = re.match(r"\S*", after[:200])
    around = (head.group()[::-1] if head else "") + (tail.group() if tail else "")
    others = set(around) - {character}
    if character.isalnum() and len(others) >= 6 and len(around) >= 12:
        # Base64, a sequence of amino acids.
        return length <= 120 and len(after) > 30
    # A cry: one word, in capitals or not.
    cry = character.isalpha() and around[-3:].isupper() == character.isupper()
    return cry and len(others) >= 2 and length <= 60 and goes_on


def syllable_run(text: str) -> Verdict:
    """A few letters over and over within one word; of digits (a fraction) much more."""
    for match in re.finditer(r"([^\s]{2,12}?)\1{13,}", text):
        least = 48 if any(character.isalpha() for character in match[1]) else 200
        if new_words(text[match.end() :], match.group()) >= 4:
            least *= 3
        if least <= len(match.group()) and any(character.isalnum() for character in match[1]):
            if len(match.group()) <= DRAWING_RUN and in_code(text, match):
                continue
            times = len(match.group()) // len(match[1])
            return bad(f"{match[1]!r} {times} times in a row", match.start())
    for glued in re.finditer(r"([^\W\d_]{13,60}?)\1{5,}", text):
        if len(glued.group()) <= DRAWING_RUN and in_code(text, glued):
            continue
        return bad(f"{glued[1]!r} over and over, without a space", glued.start())
    return GOOD


def period(text: str) -> Verdict:
    """One block of tokens, LONGEST at most, said over and over without a break."""
    words = spans(text)

    def refused(block: Sequence[str], repeats: int, begin: int, end: int) -> bool:
        first = words[begin][1]
        last = words[end][1] if end < len(words) else len(text)
        return _too_often(text, block, repeats, len(words), first, last)

    return _period_of(words, LONGEST, refused)


Refused = Callable[[Sequence[str], int, int, int], bool]


def _period_of(words: Sequence[tuple[str, int]], longest: int, refused: Refused) -> Verdict:
    """The first block, shortest first, of which `refused(block, repeats, begin, end)` holds."""
    numbers: dict[str, int] = {}
    # One character a token: a regular expression then finds the repetitions fast.
    line = "".join(_letter(numbers.setdefault(word, len(numbers))) for word, _ in words)
    for least, most in BANDS:
        if least > longest:
            break
        most = min(most, longest)
        for match in re.finditer(rf"(.{{{least},{most}}}?)\1{{3,}}", line, re.DOTALL):
            begin, length = match.start(), len(match[1])
            repeats = (match.end() - begin) // length
            block = [word for word, _ in words[begin : begin + length]]
            if refused(block, repeats, begin, match.end()):
                return bad(
                    f"{' '.join(block)[:60]!r} {repeats} times in a row", words[begin + length][1]
                )
    return GOOD


def _letter(number: int) -> str:
    """A character for a number; the surrogates are left out."""
    return chr(number + 0x100 if number + 0x100 < 0xD800 else min(number + 0x900, 0x10FFFF))


def _too_often(
    text: str, block: Sequence[str], repeats: int, total: int, first: int, last: int
) -> bool:
    covered = repeats * len(block)
    letters = [word for word in block if word[0].isalpha()]
    lettered = any(len(word) > 1 or word > "\u2e80" for word in letters) or (
        len(letters) >= len(block) / 2 and "(" not in block
    )
    rest = text[last:]
    goes_on = new_words(rest, " ".join(block)) >= 5
    if repeats <= 100 and last - first <= 2500 and fenced(text, first, last):
        return False
    if goes_on and repeats <= 40 and last - first <= 2000 and announced(text, first):
        return False
    run = text[first:last]
    if goes_on and repeats <= 40 and last - first <= 2000 and is_data(run):
        return False
    if len(run) <= BLANK_RUN and blank_rows(run) and (goes_on or opened(text[:first])):
        return False
    if letters and not lettered:
        # Escapes and one-letter keys of code.
        return repeats >= (25 if goes_on else 12)
    if not lettered:
        return _marks_too_often(text[first:last], block, repeats, covered / total, rest)
    more = 2 if goes_on else 1
    if len(block) == 1:
        return repeats >= 9 * more
    if len(block) <= 3:
        return repeats >= 7 * more + more - 1
    return repeats >= 5 * more or (repeats >= 4 and covered / total > 0.5 and not goes_on)


def _marks_too_often(run: str, block: Sequence[str], repeats: int, share: float, rest: str) -> bool:
    """Rules of tables, rows of figures, nested brackets: most of a long text, or its end."""
    numbers = {word for word in block if word.isdigit()}
    if len(numbers) >= 6:
        return repeats >= 10 and share > 0.5
    if set(block) <= {".", "…"}:
        return repeats * len(block) >= 300
    rows = [len(row) for row in run.split("\n") if row.strip()]
    if len(rows) >= 6 and len(set(rows)) >= 5:
        # A figure drawn with them.
        return False
    if not rest.strip() and len(rows) <= 2 and any(len(number) >= 3 for number in numbers):
        return repeats >= 15
    if not rest.strip() and len(rows) <= 2 and numbers and len(block) >= 3:
        return repeats >= 20
    return repeats >= 40 and share > 0.5 and not set("".join(block)) <= DRAWING


def numbered_period(text: str) -> Verdict:
    """A sentence said over and over with only its number counted up: prose, so no table."""
    kept = [one for one in spans(text) if one[0][0].isalpha() or one[0] in ".!?。"]

    def refused(block: Sequence[str], repeats: int, begin: int, end: int) -> bool:
        if repeats < 12 or len(block) < 4:
            return False
        said = text[kept[begin][1] : kept[end - 1][1]]
        # A verse that counts names its number more than once.
        numbers = len(NUMBER.findall(said)) / repeats
        return is_prose(said) and 0.5 < numbers < 2.5 and _counts(said, repeats)

    return _period_of(kept, 30, refused)


def _counts(said: str, repeats: int) -> bool:
    """Do its figures only count? A table of times or of degrees takes other steps."""
    figures = [int(figure) for figure in re.findall(r"\d+", said)]
    each = round(len(figures) / repeats)
    steps = [b - a for a, b in zip(figures, figures[each:], strict=False)]
    return sum(abs(step) <= 1 for step in steps) >= 0.85 * len(steps)


def counted_lines(text: str) -> Verdict:
    """Lines of any kind that differ only in a counter, up to the end of the text.

    A table of data has other figures in it, and a literal or a fence is closed at its end.
    """
    rows = lines(text)
    if len(rows) <= COUNTED_LINES:
        return GOOD
    # The limit may have cut the last one.
    rows = rows[:-1]
    shapes = [re.sub(r"\d+", "0", row.group()) for row in rows]
    for length in range(1, 13):
        same = length
        while same < len(rows) and shapes[-same - 1] == shapes[-same - 1 + length]:
            same += 1
        repeats = same // length
        block = " ".join(shapes[-length:])
        if repeats < COUNTED_LINES:
            continue
        words = len(set(re.findall(r"[^\W\d_]{2,}", block)))
        if words < 3 or not (length > 1 or PHRASE.search(block)):
            # Rows of data; a longer block would only be more of them.
            return GOOD
        start = len(rows) - repeats * length
        columns = zip(
            *(
                [int(number) for row in rows[i : i + length] for number in _digits(row.group())]
                for i in range(start, len(rows), length)
            ),
            strict=True,
        )
        if all(len({b - a for a, b in pairwise(column)}) == 1 for column in columns):
            return bad(
                f"{repeats} lines that differ only in a counter, such as {block.strip()[:60]!r}",
                rows[start + length].start(),
            )
    return GOOD


def _digits(line: str) -> list[str]:
    return re.findall(r"\d+", line)


def empty_items(text: str) -> Verdict:
    """A list whose items say nothing, up to the end."""
    found = re.search(r"(?:(?:^|\n)[ \t]*(?:\d+[.)]|[-*•])[ \t]*(?=\n|\Z)){25,}\s*\Z", text)
    return bad("a list of empty items", found.start()) if found else GOOD


def emoji_row(text: str) -> Verdict:
    """A hundred small pictures on one line and not a word among them."""
    for line in lines(text):
        for row in PICTURES.finditer(line.group()):
            shown = PICTURE.findall(row.group())
            if len(shown) >= 100 and not set(shown) <= SQUARES:
                return bad(f"{len(shown)} pictures in a row", line.start() + row.start())
    return GOOD


def spaced_marks(text: str) -> Verdict:
    """One mark with spaces between, behind words and up to the end."""
    found = re.search(r"(?<=[\w.])[ \t]+([^\w\s]|_)(?:[ \t]+\1){23,}\s*\Z", text)
    if found and (found[1] in DRAWING or found[1] == "_") and len(found.group()) < 160:
        return GOOD
    return bad(f"{found[1]!r} over and over", found.start()) if found else GOOD


TESTS: tuple[Callable[[str], Verdict], ...] = (
    character_run,
    syllable_run,
    period,
    numbered_period,
    counted_lines,
    empty_items,
    emoji_row,
    spaced_marks,
)
