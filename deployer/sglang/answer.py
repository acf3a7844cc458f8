"""The JSON of an answer, in the forms that people have at hand. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployer.errors import UsageError

FIELDS = ("prompt", "content", "reasoning_content", "finish_reason")
FIX = "give an object with prompt, content, reasoning_content, finish_reason, or a chat completion"


@dataclass(frozen=True)
class Answer:
    """One answer of the model; what the document did not tell is '' or None."""

    prompt: str
    content: str | None
    reasoning: str | None
    finish_reason: str | None
    completion_tokens: int | None = None


def read_answers(data: bytes, where: str) -> list[Answer]:
    """The answers in a JSON document: our own form, a (chat) completion, or one of /generate.

    Raises UsageError where it is no JSON, or JSON of something else.
    """
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON: {error}", where=where, fix=FIX) from error
    if not isinstance(document, dict):
        raise UsageError("this JSON is no object", where=where, fix=FIX)
    prompt = _prompt(document, where)
    if "choices" in document:
        choices = document["choices"]
        if not isinstance(choices, list) or not choices:
            raise UsageError("`choices` holds no answer", where=where, fix=FIX)
        usage = document.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        count = count if isinstance(count, int) and len(choices) == 1 else None
        return [_choice(choice, prompt, count, where) for choice in choices]
    if "error" in document or document.get("object") == "error":
        raise UsageError("this is a server's error, no answer", where=where, fix=FIX)
    if isinstance(document.get("message"), dict):
        return [_choice(document, prompt, None, where)]
    if "text" in document and "content" not in document:
        return [_generated(document, prompt, where)]
    if not any(name in document for name in (*FIELDS, "reasoning")):
        raise UsageError("this JSON holds no answer", where=where, fix=FIX)
    return [_message(document, document.get("finish_reason"), prompt, None, where)]


def _choice(choice: Any, prompt: str, count: int | None, where: str) -> Answer:
    if not isinstance(choice, dict):
        raise UsageError("a choice is no object", where=where, fix=FIX)
    reason = choice.get("finish_reason")
    if isinstance(choice.get("message"), dict):
        return _message(choice["message"], reason, prompt, count, where)
    if "text" in choice:
        text = _text(choice, "text", where)
        return Answer(prompt, text, None, _reason(reason, where), count)
    raise UsageError("a choice holds neither message nor text", where=where, fix=FIX)


def _generated(document: Mapping[str, Any], prompt: str, where: str) -> Answer:
    about = document.get("meta_info")
    about = about if isinstance(about, dict) else {}
    count = about.get("completion_tokens")
    return Answer(
        prompt,
        _text(document, "text", where),
        None,
        _reason(about.get("finish_reason", document.get("finish_reason")), where),
        count if isinstance(count, int) else None,
    )


def _message(
    message: Mapping[str, Any], reason: Any, prompt: str, count: int | None, where: str
) -> Answer:
    content = _text(message, "content", where)
    if not content and message.get("tool_calls"):
        # A call of a tool is an answer, although its text is empty.
        content = json.dumps(message["tool_calls"], ensure_ascii=False)
    thought = _text(message, "reasoning_content", where) or _text(message, "reasoning", where)
    return Answer(prompt, content, thought, _reason(reason, where), count)


def _prompt(document: Mapping[str, Any], where: str) -> str:
    if "prompt" in document:
        return _text(document, "prompt", where) or ""
    asked = document.get("messages")
    texts = [
        _text(message, "content", where) or ""
        for message in (asked if isinstance(asked, list) else [])
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    return texts[-1] if texts else ""


def _text(holder: Mapping[str, Any], name: str, where: str) -> str | None:
    """A text, or the joined text parts of a list; None where absent or null."""
    value = holder.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        return "".join(part["text"] for part in value if isinstance(part.get("text"), str))
    raise UsageError(f"`{name}` is no text", where=where, fix=FIX)


def _reason(value: Any, where: str) -> str | None:
    """The word; /generate gives it as {"type": word}."""
    if isinstance(value, dict):
        value = value.get("type")
    if value is None or isinstance(value, str):
        return value
    raise UsageError("`finish_reason` is no text", where=where, fix=FIX)
