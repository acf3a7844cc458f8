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
from dataclasses import dataclass, replace

CHARACTER_RUN = 24
DRAWING = frozenset("-=_*#.~ \t\n│─═━|+ ·•…>/\\")
"""Characters that tables, rules and diagrams repeat."""
DRAWING_RUN = 400
PERIOD_SHARE = 0.3
MOJIBAKE = re.compile(r"(?:Ã[\x80-\xbf©¨¤¶¼±ª«¡³º]|â€[™œ\x9d“”¦˜]|ä¸|Â[\xa0-\xbf])")
THINK_TAG = re.compile(r"</?think(?:ing)?>")
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
    said = (content or "").strip()
    thought = (reasoning or "").strip()
    if not said and not thought:
        return Verdict(False, "the answer is empty", f"finish_reason={finish_reason}", 0)
    if not said and finish_reason != "length":
        return Verdict(
            False, "there is reasoning but no answer", _excerpt(thought, len(thought)), len(thought)
        )
    for part, text in (("reasoning_content", reasoning or ""), ("content", content or "")):
        if text.strip():
            verdict = _judge_text(text, asks_to_repeat(prompt))
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
    return bool(re.search(r"\b(?:repeat|again and again|\d+ times|over and over)\b", prompt, re.I))


def tokens(text: str) -> list[str]:
    """Words and marks; of a script without spaces, its characters."""
    found: list[str] = []
    for word in WORD.findall(text):
        found += list(word) if IDEOGRAPH.search(word) else [word.lower()]
    return found


def _judge_text(text: str, repeats_wanted: bool) -> Verdict:
    for test in (_replacement, _mojibake, _think_tags):
        verdict = test(text)
        if not verdict.good:
            return verdict
    if repeats_wanted:
        return GOOD
    for test in (_character_run, _period, _repeated_lines, _phrase_share, _few_words, _redundancy):
        verdict = test(text)
        if not verdict.good:
            return verdict
    return GOOD


def _replacement(text: str) -> Verdict:
    count = text.count("\ufffd")
    # A cut at max_tokens may leave one torn character at the very end.
    torn_end = text.endswith("\ufffd") and count <= 2
    if count and not torn_end and (count >= 3 or count / len(text) > 0.01):
        at = text.index("\ufffd")
        return Verdict(False, f"{count} undecodable characters", _excerpt(text, at), at)
    return GOOD


def _mojibake(text: str) -> Verdict:
    hits = list(MOJIBAKE.finditer(text))
    if len(hits) >= 3 and len(hits) / len(text) > 0.005:
        at = hits[0].start()
        return Verdict(False, "text in the wrong encoding (mojibake)", _excerpt(text, at), at)
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


def _period(text: str) -> Verdict:
    """One block of 1 to 40 tokens said over and over without a break."""
    spans = _spans(text)
    count = len(spans)
    words = [word for word, _ in spans]
    for period in range(1, min(40, count // 4) + 1):
        run = 0
        for i in range(period, count + 1):
            if i < count and words[i] == words[i - period]:
                run += 1
                continue
            repeats = run // period + 1
            begin = i - run - period
            block = words[begin : begin + period]
            if _too_often(block, repeats, run + period, count):
                at = spans[begin + period][1]
                return Verdict(
                    False,
                    f"{_shown(block)!r} {repeats} times in a row",
                    _excerpt(text, at),
                    at,
                )
            run = 0
    return GOOD


def _too_often(block: list[str], repeats: int, covered: int, total: int) -> bool:
    lettered = any(word[0].isalpha() for word in block)
    if not lettered:
        # Rules of tables, rows of figures, nested brackets: only when it is most of a long text.
        return repeats >= 40 and covered / total > 0.5 and not set("".join(block)) <= DRAWING
    if len(block) == 1:
        return repeats >= 8
    if len(block) <= 3:
        return repeats >= 7
    return repeats >= 5 or (repeats >= 4 and covered / total > 0.5)


def _repeated_lines(text: str) -> Verdict:
    """Lines (or sentences of a long paragraph) that come back; refrains may, up to a share."""
    units = [
        (sentence.group().strip(), line.start() + sentence.start())
        for line in _lines(text)
        for sentence in re.finditer(r"[^.!?。！？]+[.!?。！？]*", line.group())
    ]
    telling = [(unit, at) for unit, at in units if len(tokens(unit)) >= 4 and _is_prose(unit)]
    if len(telling) < 10:
        return GOOD
    counts = Counter(unit.lower() for unit, _ in telling)
    worst, times = counts.most_common(1)[0]
    share = sum(n for n in counts.values() if n >= 4) / len(telling)
    if times >= 5 and (times / len(telling) > 0.4 or share > 0.6):
        at = [place for unit, place in telling if unit.lower() == worst][1]
        return Verdict(
            False, f"the same line {times} times: {worst[:80]!r}", _excerpt(text, at), at
        )
    return GOOD


def _phrase_share(text: str) -> Verdict:
    """One three-word phrase that makes up much of a long text."""
    spans = [(word, at) for word, at in _spans(text) if word[0].isalpha()]
    if len(spans) < 120 or not _is_prose(text):
        return GOOD
    phrases = Counter(
        (spans[i][0], spans[i + 1][0], spans[i + 2][0]) for i in range(len(spans) - 2)
    )
    phrase, times = phrases.most_common(1)[0]
    if 3 * times / len(spans) > PERIOD_SHARE:
        second = [
            at
            for i, (_, at) in enumerate(spans[:-2])
            if tuple(word for word, _ in spans[i : i + 3]) == phrase
        ][1]
        return Verdict(
            False,
            f"{' '.join(phrase)!r} {times} times in {len(spans)} words",
            _excerpt(text, second),
            second,
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
