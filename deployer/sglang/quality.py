"""Is an answer of the model good text, or has it degenerated? Pure; no model is asked.

Judges content and reasoning together, in a way that grows with the length: a short answer may
repeat itself, three hundred words of one phrase may not. Code, tables, lists, poems with refrains,
JSON, enumerations, Chinese and mathematics are good text. `position` is the character at which an
answer turns bad, so that "starts well, then degenerates" can be shown.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from deployer.sglang.brokentext import INVISIBLE, broken_text

CHARACTER_RUN = 24
DRAWING = frozenset("-=_*#.~^ \t\n│─═━|+ ·•…>/\\")
"""Characters that tables, rules and diagrams repeat."""
DRAWING_RUN = 400
PERIOD_SHARE = 0.3
FEW_AROUND = 18
"""Different words; a song or a list that keeps one phrase has more."""
THINK_TAG = re.compile(r"</?think(?:ing)?>")
WORD = re.compile(r"[^\W_]+|[^\w\s]")
IDEOGRAPH = re.compile(r"[぀-ヿ㐀-鿿가-힯]")
EXCERPT = 160
ASKS = re.compile(
    r"\b(?:repeat|repeatedly|again and again|\w+ times|over and over|in a row|count)\b",
    re.IGNORECASE,
)


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


def judge(
    prompt: str,
    content: str | None,
    reasoning: str | None = None,
    finish_reason: str | None = None,
    *,
    min_tokens: int = 0,
    completion_tokens: int | None = None,
    answer_required: bool = False,
) -> Verdict:
    """The verdict on one answer. `prompt` excuses what it asks for (a word said fifty times).

    `min_tokens`: the answer must have been at least so long; judged by `completion_tokens` when the
    server gave it, else by words. `answer_required`: reasoning that the limit cut before the answer
    began is bad too; a gate with a small limit leaves it off.
    """
    said = INVISIBLE.sub("", content or "").strip()
    thought = INVISIBLE.sub("", reasoning or "").strip()
    if not said and not thought:
        return Verdict(False, "the answer is empty", f"finish_reason={finish_reason}", 0)
    if not said and finish_reason != "length":
        return Verdict(
            False, "there is reasoning but no answer", _excerpt(thought, len(thought)), len(thought)
        )
    for part, text in (("reasoning_content", reasoning or ""), ("content", content or "")):
        if text.strip():
            verdict = _judge_text(text, prompt)
            if not verdict.good:
                return replace(verdict, part=part)
    if not said and answer_required:
        return Verdict(
            False,
            "the limit was reached before the reasoning ended: there is no answer",
            _excerpt(thought, len(thought)),
            len(thought),
            "reasoning_content",
        )
    length = completion_tokens if completion_tokens is not None else len(tokens(thought + said))
    if length < min_tokens:
        return Verdict(
            False,
            f"the answer has {length} tokens; at least {min_tokens} were expected",
            _excerpt(said or thought, 0),
            0,
        )
    return GOOD


def asks_to_repeat(prompt: str) -> bool:
    """Does the prompt itself ask for repetition?"""
    return bool(ASKS.search(prompt))


def _excused(prompt: str, text: str, position: int) -> bool:
    """Is what comes back at `position` the very words that the prompt wants repeated?

    Not without end: three times the number that it names, or 300, is a loop all the same.
    """
    if not asks_to_repeat(prompt):
        return False
    asked = set(tokens(prompt))
    near = [word for word in tokens(text[position : position + EXCERPT]) if word[0].isalpha()]
    near = near[:-1] or near
    known = [word for word in near if word in asked or (len(set(word)) == 1 and word[0] in asked)]
    if not near or len(known) < 0.5 * len(near):
        return False
    wanted = [int(number) for number in re.findall(r"\d{1,6}", prompt)]
    limit = 3 * max(wanted) + 10 if wanted else 300
    return max(Counter(tokens(text)).values()) <= limit


def tokens(text: str) -> list[str]:
    """Words and marks; of a script without spaces, its characters."""
    found: list[str] = []
    for word in WORD.findall(text):
        found += list(word) if IDEOGRAPH.search(word) else [word.lower()]
    return found


def _judge_text(text: str, prompt: str) -> Verdict:
    if broken := broken_text(text):
        why, at = broken
        return Verdict(False, why, _excerpt(text, at), at)
    for test in (_think_tags, *REPETITION):
        verdict = test(text)
        if not verdict.good and not (
            test is not _think_tags and _excused(prompt, text, verdict.position)
        ):
            return replace(verdict, evidence=_excerpt(text, verdict.position))
    return GOOD


def _think_tags(text: str) -> Verdict:
    tags = list(THINK_TAG.finditer(text))
    if len(tags) >= 6:
        at = tags[2].start()
        return Verdict(False, "a think loop: thinking begins over and over", _excerpt(text, at), at)
    lines = [(match.group().strip().lower(), match.start()) for match in _lines(text)]
    alone = [at for line, at in lines if line in {"thinking", "thinking...", "think", "<think>"}]
    if len(alone) >= 3 and len(alone) / len(lines) > 0.3:
        return Verdict(
            False, "a think loop: thinking begins over and over", _excerpt(text, alone[1]), alone[1]
        )
    return GOOD


def _character_run(text: str) -> Verdict:
    for match in re.finditer(rf"(.)\1{{{CHARACTER_RUN - 1},}}", text, re.DOTALL):
        character = match.group(1)
        if character in DRAWING and len(match.group()) < DRAWING_RUN:
            continue
        if character.isdigit() and len(match.group()) < 4 * CHARACTER_RUN:
            continue
        return Verdict(
            False,
            f"{character!r} {len(match.group())} times in a row",
            _excerpt(text, match.start()),
            match.start(),
        )
    return GOOD


def _syllable_run(text: str) -> Verdict:
    """A few letters over and over within one word; of digits (a fraction) much more."""
    for match in re.finditer(r"([^\s]{2,12}?)\1{13,}", text):
        least = 48 if any(character.isalpha() for character in match[1]) else 200
        if len(match.group()) >= least and any(character.isalnum() for character in match[1]):
            times = len(match.group()) // len(match[1])
            return Verdict(False, f"{match[1]!r} {times} times in a row", "", match.start())
    return GOOD


def _period(text: str) -> Verdict:
    """One block of tokens, 120 at most, said over and over without a break."""
    spans = _spans(text)
    total = len(spans)
    longest = 120 if total < 20_000 else 40
    return _period_of(
        spans, longest, lambda block, repeats, begin: _too_often(block, repeats, total)
    )


def _period_of(
    spans: list[tuple[str, int]], longest: int, bad: Callable[[list[str], int, int], bool]
) -> Verdict:
    """The first block, shortest first, of which `bad(block, repeats, index of it)` holds."""
    count = len(spans)
    words = [word for word, _ in spans]
    for period in range(1, min(longest, count // 4) + 1):
        run = 0
        for i in range(period, count + 1):
            if i < count and words[i] == words[i - period]:
                run += 1
                continue
            repeats = run // period + 1
            begin = i - run - period
            block = words[begin : begin + period]
            if bad(block, repeats, begin):
                where = spans[begin + period][1] if repeats > 1 else spans[begin][1]
                return Verdict(False, f"{_shown(block)!r} {repeats} times in a row", "", where)
            run = 0
    return GOOD


def _too_often(block: list[str], repeats: int, total: int) -> bool:
    covered = repeats * len(block)
    letters = [word for word in block if word[0].isalpha()]
    lettered = any(len(word) > 1 or word > "\u2e80" for word in letters) or (
        len(letters) >= len(block) / 2
    )
    if letters and not lettered:
        # Escapes and one-letter keys of code.
        return repeats >= 12
    if not lettered:
        # Rules of tables, rows of figures, nested brackets: only when it is most of a long text.
        if len({word for word in block if word.isdigit()}) >= 6:
            return repeats >= 10 and covered / total > 0.5
        if set(block) <= {".", "…"}:
            return covered >= 300
        return repeats >= 40 and covered / total > 0.5 and not set("".join(block)) <= DRAWING
    if len(block) == 1:
        return repeats >= 9
    if len(block) <= 3:
        return repeats >= 7
    return repeats >= 5 or (repeats >= 4 and covered / total > 0.5)


def _numbered_period(text: str) -> Verdict:
    """A sentence said over and over with only its number counted up: prose, so no table."""
    spans = [(word, at) for word, at in _spans(text) if word[0].isalpha() or word in ".!?"]

    def bad(block: list[str], repeats: int, begin: int) -> bool:
        if repeats < 12 or len(block) < 4:
            return False
        end = min(begin + repeats * len(block), len(spans)) - 1
        return _is_prose(text[spans[begin][1] : spans[end][1]])

    return _period_of(spans, 30, bad)


def _old_units(text: str) -> Verdict:
    """Lines or sentences that say nothing new, one after the other.

    A refrain, a litany, a form or a list comes back too, but new lines stand between; a loop has
    none. A train of thought that turns in circles changes one sentence of several.
    """
    units = _units(text)
    counts = Counter(unit for unit, _, _ in units)
    seen: set[str] = set()
    run: list[tuple[str, int, bool]] = []
    for unit in units:
        # Twice is a draft and its fair copy.
        if unit[0] in seen and counts[unit[0]] >= 3:
            run.append(unit)
        else:
            run = []
        seen.add(unit[0])
        prose = sum(is_prose for _, _, is_prose in run) > len(run) / 2
        if len(run) >= (10 if prose else 30) and len(run) / len(units) > 0.3:
            worst, at, _ = run[0]
            return Verdict(
                False,
                f"{len(run)} lines with nothing new, such as {worst[:60]!r}",
                _excerpt(text, at),
                at,
            )
    telling = [unit for unit in units if unit[2]]
    often = [unit for unit in telling if counts[unit[0]] >= 5]
    lines = len(_lines(text))
    if len(telling) >= max(16, len(units) / 2) and len(often) / len(telling) > (
        0.55 if len(units) > 2 * lines else 0.8
    ):
        worst, at, _ = often[1]
        return Verdict(
            False,
            f"{len(often)} of {len(telling)} sentences come back, such as {worst[:60]!r}",
            _excerpt(text, at),
            at,
        )
    return GOOD


def _units(text: str) -> list[tuple[str, int, bool]]:
    """(lowered sentence or line, place, is it a prose sentence); bare marks are left out."""
    found: list[tuple[str, int, bool]] = []
    for line in _lines(text):
        for part in re.finditer(r"[^.!?。！？]+[.!?。！？]*", line.group()):
            unit = part.group().strip().lower()
            if any(character.isalnum() for character in unit):
                prose = len(tokens(unit)) >= 4 and _is_prose(unit)
                found.append((unit, line.start() + part.start(), prose))
    return found


def _phrase_share(text: str) -> Verdict:
    """One three-word phrase that makes up much of a long text of few words."""
    spans = [(word, at) for word, at in _spans(text) if word[0].isalpha()]
    if len(spans) < 120 or not _is_prose(text):
        return GOOD
    places: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(spans) - 2):
        phrase = (spans[i][0], spans[i + 1][0], spans[i + 2][0])
        places.setdefault(phrase, []).append(i)
    most, hits = max(places.items(), key=lambda item: len(item[1]))
    around = {word for word, _ in spans[hits[0] : hits[-1] + 3]}
    if 3 * len(hits) / len(spans) > PERIOD_SHARE and len(around) < FEW_AROUND:
        at = spans[hits[1]][1]
        return Verdict(
            False,
            f"{' '.join(most)!r} {len(hits)} times in {len(spans)} words",
            _excerpt(text, at),
            at,
        )
    return GOOD


def _few_words(text: str) -> Verdict:
    """Too few different words for the length, in any window of 150 words of prose."""
    spans = [(word, at) for word, at in _spans(text) if word[0].isalpha()]
    window = 150
    if len(spans) < window or not _is_prose(text):
        return GOOD
    for begin in range(0, len(spans) - window + 1, 25):
        part = spans[begin : begin + window]
        if len({word for word, _ in part}) < 15:
            at = part[0][1]
            return Verdict(
                False,
                f"only {len({w for w, _ in part})} different words in {window}",
                _excerpt(text, at),
                at,
            )
    return GOOD


def _redundancy(text: str) -> Verdict:
    """The last resort: a long tail that compresses to almost nothing is a loop of any period."""
    tail = text[-3000:]
    if len(tail) < 1500 or not _is_prose(tail):
        return GOOD
    data = tail.encode("utf-8", "replace")
    ratio = len(zlib.compress(data, 9)) / len(data)
    if ratio < 0.07:
        at = len(text) - len(tail)
        return Verdict(False, "the text repeats itself in a long loop", _excerpt(text, at), at)
    return GOOD


def _lines(text: str) -> list[re.Match[str]]:
    return [match for match in re.finditer(r"[^\n]+", text) if match.group().strip()]


def _spans(text: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for match in WORD.finditer(text):
        word = match.group()
        if IDEOGRAPH.search(word):
            found += [(character, match.start() + i) for i, character in enumerate(word)]
        else:
            found.append((word.lower(), match.start()))
    return found


def _is_prose(text: str) -> bool:
    """Mostly letters: not code, tables, JSON or figures, whose frame repeats rightly."""
    visible = [character for character in text if not character.isspace()]
    letters = sum(character.isalpha() for character in visible)
    return bool(visible) and letters / len(visible) > 0.8


def _shown(block: list[str]) -> str:
    return " ".join(block)[:60]


def _excerpt(text: str, at: int) -> str:
    begin = max(0, at - EXCERPT // 4)
    return text[begin : begin + EXCERPT]


REPETITION: tuple[Callable[[str], Verdict], ...] = (
    _character_run,
    _syllable_run,
    _period,
    _numbered_period,
    _old_units,
    _phrase_share,
    _few_words,
    _redundancy,
)
