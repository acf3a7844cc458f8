"""Where the thoughts of an answer stand: is the model dead, or does a parser not fit it? Pure.

A wrong reasoning parser makes a good model look broken: its thoughts come as content, or its whole
answer as reasoning_content, with `content` null. The text itself tells the two apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deployer.sglang.parsers import FAMILIES

BEGIN = re.compile(
    r"<think(?:ing)?>|\[THINK\]|\u25c1think\u25b7|<seed:think>|<\|channel\|>analysis|<mm:think>"
)
END = re.compile(
    r"</think(?:ing)?>|\[/THINK\]|\u25c1/think\u25b7|</seed:think>|<\|channel\|>final|</mm:think>"
)


@dataclass(frozen=True)
class Reading:
    """One answer, taken apart. `kind`:

    said: there is content; thinking: cut while it still thinks; leaked: thoughts stand in the
    content (`content` and `reasoning` are parted here); swallowed: it ended, but all of it is
    reasoning; lost: tokens were made and no text came; empty: nothing was made.
    """

    kind: str
    content: str
    reasoning: str


def read(
    content: str | None,
    reasoning: str | None,
    finish_reason: str | None,
    tokens: int | None = None,
) -> Reading:
    """What the fields of an answer hold. `tokens`: completion_tokens, where the server told."""
    said, thought = (content or "").strip(), (reasoning or "").strip()
    end = END.search(said)
    if end:
        before = BEGIN.sub("", said[: end.start()], count=1).strip()
        return Reading(
            "leaked", said[end.end() :].strip(), "\n".join(filter(None, [thought, before]))
        )
    begin = BEGIN.match(said)
    if begin:
        inside = said[begin.end() :].strip()
        kind = "thinking" if finish_reason == "length" else "leaked"
        return Reading(kind, "", "\n".join(filter(None, [thought, inside])))
    if said:
        return Reading("said", said, thought)
    if thought:
        return Reading("thinking" if finish_reason == "length" else "swallowed", "", thought)
    return Reading("lost" if (tokens or 0) > 2 else "empty", "", "")


def fitting_parser(model_type: str | None) -> str | None:
    """The reasoning parser of this family of models, where it is known."""
    known = ((prefix, name) for prefix, name, _ in FAMILIES if name)
    return next((name for prefix, name in known if (model_type or "").startswith(prefix)), None)


def way_out(kind: str, parser: str, model_type: str | None) -> str:
    """What to change when the parser, not the model, is at fault."""
    fitting = fitting_parser(model_type)
    if kind == "leaked":
        if not parser:
            name = fitting or "the one of this model's family"
            return f"add serve.args reasoning-parser: {name}"
        if fitting and fitting != parser:
            return f"serve.args reasoning-parser: {fitting} (it is {parser})"
        return f"serve.args reasoning-parser: {parser} does not know this model's marks"
    if fitting and parser and fitting != parser:
        return f"serve.args reasoning-parser: {fitting} (it is {parser})"
    if parser:
        return (
            f"take reasoning-parser: {parser} out of serve.args (this model does not mark the end "
            "of its thoughts), or choose one that does not take every answer for a thought"
        )
    return "see serve.args tool-call-parser and the chat template: something takes the text away"
