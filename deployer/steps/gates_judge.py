"""What is wrong with one answer, and whose fault it is: of model, parser or request. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from deployer.sglang.quality import judge
from deployer.sglang.reasoning import Reading, read, way_out

Record = dict[str, Any]
Kind = Literal["output", "parser", "thinking", "request", "config", "gone", "speed"]


@dataclass(frozen=True)
class Fault:
    """`kind`: output: what the model says is bad; parser: it is good, but clients do not get it;
    thinking: it was cut before the answer; request: refused, broken off, or no answer in time;
    config: the launch is not what it should be; gone: processes ended; speed: too slow.
    """

    kind: Kind
    why: str
    evidence: str = ""
    fix: str = ""


def reading(answer: Record) -> Reading:
    """The parts of an answer."""
    return read(
        answer.get("content"),
        answer.get("reasoning"),
        answer.get("finish_reason"),
        answer.get("tokens"),
    )


def whole(answer: Record) -> str:
    """Thoughts and answer as one text."""
    parts = reading(answer)
    return f"{parts.reasoning}\n{parts.content}".strip()


def texts(answer: Record) -> tuple[str, ...]:
    """Thoughts and content apart: a draft and its fair copy are no repetition."""
    parts = reading(answer)
    return tuple(text for text in (parts.reasoning, parts.content) if text)


def without_answer(answer: Record) -> bool:
    """Did the server end an answer of which clients get no content?"""
    return answer.get("status") == 200 and reading(answer).kind in {"swallowed", "lost", "empty"}


def refused(answer: Record) -> Fault | None:
    """The fault of an answer that is none."""
    if answer.get("status") == 200 and not answer.get("error"):
        return None
    told = str(answer.get("error", ""))[:600]
    if answer.get("timed_out"):
        return Fault("request", f"a request got {told}: the server hangs")
    status = answer.get("status") or "no answer"
    return Fault("request", f"a request failed: {status}", told)


def text_fault(
    prompt: str,
    answer: Record,
    *,
    parser: str = "",
    model_type: str | None = None,
    min_tokens: int = 0,
    right: Callable[[str], str] | None = None,
    to_its_end: bool = False,
) -> Fault | None:
    """None for a good answer. `right` says what is wrong with its content, '' when nothing is.

    `to_its_end`: an answer that was cut in the thoughts will not do.
    """
    if broken := refused(answer):
        return broken
    parts = reading(answer)
    finish = answer.get("finish_reason")
    verdict = judge(
        prompt,
        parts.content,
        parts.reasoning,
        "length" if parts.kind in {"thinking", "leaked"} and not parts.content else finish,
        min_tokens=min_tokens,
        completion_tokens=answer.get("tokens"),
    )
    if not verdict.good:
        place = f" of {verdict.part}" if verdict.part else ""
        return Fault(
            "output", f"{verdict.why} (at character {verdict.position}{place})", verdict.evidence
        )
    if parts.kind == "leaked" and parser:
        why = "its thoughts stand in the content: the reasoning parser does not fit this model"
        return Fault("parser", why, _around(answer), way_out("leaked", parser, model_type))
    if parts.kind == "leaked" and not parts.content:
        why = "its thoughts end without an answer"
        return Fault("output", why, parts.reasoning[-400:])
    if parts.kind == "thinking" and to_its_end:
        return Fault("thinking", "cut by max_tokens while it thinks", parts.reasoning[-400:])
    if right is not None and parts.content and (wrong := right(parts.content)):
        return Fault("output", wrong, whole(answer)[-400:])
    return None


def raw_fault(
    judged: Callable[[Record], Fault | None],
    raw: Record,
    answer: Record,
    fault: Fault,
    parser: str,
    model_type: str | None,
) -> Fault:
    """Of an answer without content: is the model at fault, or what stands between it and clients?

    `raw` is the answer to the same request with separate_reasoning off, which no parser touches.
    """
    parts = reading(answer)
    text = raw if raw.get("status") == 200 else answer
    unparsed = reading(text)
    said = unparsed.content or unparsed.reasoning
    as_content = {**text, "content": said, "reasoning": None, "finish_reason": "stop"}
    if not said:
        count = answer.get("tokens")
        made = f", {count} tokens" if count else ""
        why = f"the answer is empty (finish_reason {answer.get('finish_reason')}{made})"
        return Fault("output", why, fault.evidence, fault.fix)
    if bad := judged(as_content):
        return bad if bad.kind != "parser" else fault
    way = way_out(parts.kind, parser, model_type)
    where = (
        "all of it came as reasoning_content" if parts.kind == "swallowed" else "none of it came"
    )
    named = f"reasoning parser {parser}" if parser else "a parser"
    why = f"the model answers well, but {where} and clients see no content: {named} takes it away"
    return Fault("parser", why, said[:400], way)


def _around(answer: Record) -> str:
    text = str(answer.get("content") or "")
    at = max(text.find("</"), 0)
    return text[max(0, at - 120) : at + 160]
