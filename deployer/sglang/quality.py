"""Is an answer of the model good text, or has it degenerated? Pure; no model is asked.

Judges content and reasoning together, in a way that grows with the length: a short answer may
repeat itself, three hundred words of one phrase may not. Code, tables, lists, poems with refrains,
JSON, enumerations, Chinese and mathematics are good text. `position` is the character at which an
answer turns bad, so that "starts well, then degenerates" can be shown.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from deployer.sglang import repetition, salad, sameness
from deployer.sglang.brokentext import INVISIBLE, broken_text
from deployer.sglang.reasoning import BEGIN, END
from deployer.sglang.scripts import drifted
from deployer.sglang.tokenruns import token_ids
from deployer.sglang.turns import own_turns
from deployer.sglang.verdict import EXCERPT, GOOD, Verdict, bad, excerpt, lines, tokens

__all__ = ["GOOD", "Verdict", "asks_to_repeat", "judge", "tokens"]

THINK_TAG = re.compile(r"</?think(?:ing)?>")
ASKS = re.compile(
    r"\b(?:repeat|repeatedly|again and again|\w+ times|over and over|in a row|count)\b",
    re.IGNORECASE,
)
ASKS_WORDS = re.compile(r"\b(?:words?|lists?|random|names?|tokens?|ids?|numbers?)\b", re.IGNORECASE)
LONG_TEXT = 200
"""Characters of a JSON string that is judged by itself."""


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
            False, "there is reasoning but no answer", excerpt(thought, len(thought)), len(thought)
        )
    for part, text in (("reasoning_content", reasoning or ""), ("content", content or "")):
        if text.strip():
            verdict = _judge_text(text, prompt)
            if not verdict.good:
                return replace(verdict, part=part)
    if said and not _answer_in(said):
        if finish_reason != "length" or END.search(said):
            return Verdict(
                False,
                "there is reasoning but no answer",
                excerpt(said, len(said)),
                len(said),
                "content",
            )
        said, thought = "", thought or said
    if not said and answer_required:
        return Verdict(
            False,
            "the limit was reached before the reasoning ended: there is no answer",
            excerpt(thought, len(thought)),
            len(thought),
            "reasoning_content" if reasoning else "content",
        )
    length = completion_tokens if completion_tokens is not None else len(tokens(thought + said))
    if length < min_tokens:
        return Verdict(
            False,
            f"the answer has {length} tokens; at least {min_tokens} were expected",
            excerpt(said or thought, 0),
            0,
        )
    return GOOD


def asks_to_repeat(prompt: str) -> bool:
    """Does the prompt itself ask for repetition?"""
    return bool(ASKS.search(prompt))


def _answer_in(said: str) -> bool:
    """Does the content hold more than thoughts that no parser took out?"""
    ends = list(END.finditer(said))
    if BEGIN.match(said):
        return bool(ends) and bool(said[ends[-1].end() :].strip())
    return not (ends and ends[-1].end() == len(said) and "\n" in said)


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


def _judge_text(text: str, prompt: str) -> Verdict:
    if broken := broken_text(text):
        why, at = broken
        return Verdict(False, why, excerpt(text, at), at)
    if verdict := _strings_of(text, prompt):
        return verdict
    strict = [_think_tags]
    if not ASKS_WORDS.search(prompt):
        strict += [token_ids]
    for test in (*strict, *repetition.TESTS, *sameness.TESTS):
        if test in salad.TESTS and ASKS_WORDS.search(prompt):
            continue
        verdict = test(text)
        if not verdict.good and (test in strict or not _excused(prompt, text, verdict.position)):
            return replace(verdict, evidence=excerpt(text, verdict.position))
    verdict = drifted(text, prompt)
    if verdict.good:
        verdict = own_turns(text, prompt)
    return verdict if verdict.good else replace(verdict, evidence=excerpt(text, verdict.position))


def _strings_of(text: str, prompt: str) -> Verdict | None:
    """Of a whole JSON document: it came to its end, so only long texts in it can be loops."""
    inside = re.fullmatch(r"\s*(?:```\w*\n)?([\[{].*[\]}])\s*(?:```)?\s*", text, re.DOTALL)
    if inside is None:
        return None
    try:
        document = json.loads(inside[1])
    except (ValueError, RecursionError):
        return None
    for string in _long_strings(document):
        verdict = _judge_text(string, prompt)
        if not verdict.good:
            at = max(0, text.find(string[:40]))
            return replace(verdict, position=at + verdict.position)
    return token_ids(text)


def _long_strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if len(value) >= LONG_TEXT else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [string for one in inner for string in _long_strings(one)]


def _think_tags(text: str) -> Verdict:
    tags = list(THINK_TAG.finditer(text))
    why = "a think loop: thinking begins over and over"
    if len(tags) >= 6:
        return bad(why, tags[2].start())
    rows = [(match.group().strip().lower(), match.start()) for match in lines(text)]
    alone = [at for line, at in rows if line in {"thinking", "thinking...", "think", "<think>"}]
    if len(alone) >= 3 and len(alone) / len(rows) > 0.3:
        return bad(why, alone[1])
    return GOOD
