"""The JSON of an answer, in the forms that people have at hand. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployer.errors import UsageError
from deployer.sglang.answer_forms import documents, is_said

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
    """The answers in a document: our own form, a (chat) completion, or one of /generate.

    Raises UsageError where it is no JSON, or JSON of something else.
    """
    try:
        found = documents(data)
    except TypeError as error:
        raise UsageError(str(error), where=where, fix=FIX) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON: {error}", where=where, fix=FIX) from error
    return [answer for one in found for answer in _of_document(one, where)]


def _of_document(document: Mapping[str, Any], where: str) -> list[Answer]:
    prompt = _prompt(document, where)
    if isinstance(document.get("response"), dict):
        # An exchange that somebody logged: the request beside its response.
        asked = document.get("request")
        prompt = prompt or (_prompt(asked, where) if isinstance(asked, dict) else "")
        document = document["response"]
    if isinstance(document.get("output"), list) and "choices" not in document:
        document = _of_output(document)
    return _answers(document, prompt, where)


def _of_output(document: Mapping[str, Any]) -> dict[str, Any]:
    """The message of /v1/responses: its items of text, of thoughts and of calls."""
    items = [item for item in document["output"] if isinstance(item, dict)]
    parts = [
        (item.get("type"), part)
        for item in items
        for part in (item.get("content") or item.get("summary") or [])
        if isinstance(part, dict)
    ]
    texts = {
        name: "".join(str(part.get("text") or part.get("refusal") or "") for _, part in chosen)
        for name, chosen in (
            ("content", [one for one in parts if one[0] == "message"]),
            ("reasoning_content", [one for one in parts if one[0] == "reasoning"]),
        )
    }
    calls = [item for item in items if str(item.get("type", "")).endswith("_call")]
    cut = document.get("status") == "incomplete"
    return {**texts, "tool_calls": calls, "finish_reason": "length" if cut else "stop"}


def _answers(document: Mapping[str, Any], prompt: str, where: str) -> list[Answer]:
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
    said = document.get("messages")
    if isinstance(said, list) and said and is_said(said[-1]) and "content" not in document:
        return [_message(said[-1], document.get("finish_reason"), prompt, None, where)]
    if not any(name in document for name in (*FIELDS, "reasoning", "tool_calls")):
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
    call = message.get("tool_calls") or message.get("function_call")
    if not content and call:
        # A call of a tool is an answer, although its text is empty.
        content = json.dumps(call, ensure_ascii=False)
    content = content or _text(message, "refusal", where) or content
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
    if isinstance(value, list) and all(isinstance(part, dict | str) for part in value):
        texts = [part if isinstance(part, str) else part.get("text") for part in value]
        return "".join(text for text in texts if isinstance(text, str))
    raise UsageError(f"`{name}` is no text", where=where, fix=FIX)


def _reason(value: Any, where: str) -> str | None:
    """The word; /generate gives it as {"type": word}."""
    if isinstance(value, dict):
        value = value.get("type")
    if value is None or isinstance(value, str):
        return value
    raise UsageError("`finish_reason` is no text", where=where, fix=FIX)
