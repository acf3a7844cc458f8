"""An answer that goes on with the turns of both sides: its end was not seen. Pure."""

from __future__ import annotations

import re

from deployer.sglang.verdict import GOOD, Verdict, bad

TURN = re.compile(
    r"^[ \t]*(?:#+ ?|\*\*|<\|)?(human|user|assistant|instruction|response|question|answer)"
    r"(?:\*\*:|:\*\*|:|\|>)",
    re.IGNORECASE | re.MULTILINE,
)
ASKING = frozenset({"human", "user", "instruction", "question"})
WANTED = re.compile(
    r"\b(?:dialog\w*|conversation|chat|transcript|interview|turns?|human|user|assistant|q ?& ?a|faq"
    r"|questions?|quiz|examples?|data ?set|prompts?|few.shot|fine.?tun\w*)\b"
    r"|\u5bf9\u8bdd|\u95ee\u7b54",
    re.IGNORECASE,
)
"""What tells in a prompt, or just before, that such turns are the answer."""
TURNS = 6


def own_turns(text: str, prompt: str) -> Verdict:
    """Three turns or more of each side behind an answer that nobody asked to be a dialogue."""
    turns = list(TURN.finditer(text))
    if len(turns) < TURNS or not text[: turns[0].start()].strip() or WANTED.search(prompt):
        return GOOD
    asking = sum(turn[1].lower() in ASKING for turn in turns)
    before = text[max(0, turns[0].start() - 200) : turns[0].start()].rstrip()
    if before.endswith((":", "\uff1a", "```")) or WANTED.search(before):
        return GOOD
    if min(asking, len(turns) - asking) >= TURNS // 2:
        return bad(
            "the answer goes on with turns of its own: its end was not seen", turns[0].start()
        )
    return GOOD
