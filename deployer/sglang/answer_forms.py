"""The forms in which an answer is kept: JSON, lines of it, a stream of events. Pure.

Makes of the bytes the documents that `answer` reads, one a completion.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
EVENT = re.compile(r"(?:data|event|id|retry)?:", re.ASCII)
HEADERS = re.compile(r"\AHTTP/[\d.]+ \d{3}[^\n]*\n(?:[^\n]+\n)*?\r?\n")
"""What `curl -i` writes before the body."""


def documents(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects in these bytes; the pieces of a stream are put together.

    Raises ValueError where it is no JSON, and TypeError where it is JSON of no object.
    """
    text = HEADERS.sub("", _decoded(data), count=1)
    if EVENT.match(text.lstrip()) and re.search(r"^data:", text, re.MULTILINE):
        found: Any = _events(text)
        if not found:
            raise ValueError("the stream holds no event")
        return whole(found)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        rows = [row for row in text.splitlines() if row.strip()]
        if not error.msg.startswith("Extra data") or len(rows) < 2:
            raise
        found = [json.loads(row) for row in rows]
    if isinstance(found, dict):
        return whole([found])
    if isinstance(found, list) and any(is_said(one) for one in found):
        return [{"messages": found}]
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise TypeError("this JSON is no object")
    return whole(found)


def whole(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The documents with their pieces put together: chunks of a chat, of /generate."""
    rest = [_unwrapped(part) for part in parts]
    chunks = [part for part in rest if _is_chunk(part)]
    if chunks and len(chunks) >= len(rest) / 2:
        # Whatever else a stream sends (its usage, a ping) holds no answer.
        return [streamed(part for part in rest if "error" not in part)]
    texts = [part for part in rest if isinstance(part.get("text"), str) and "meta_info" in part]
    growing = len(texts) > 1 and len(texts) == len(rest) and _one_request(texts)
    return [_grown(texts)] if growing else rest


def is_said(one: Any) -> bool:
    """Is it a message of the model?"""
    return isinstance(one, dict) and one.get("role") == "assistant"


def _decoded(data: bytes) -> str:
    codec = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    return data.decode(codec)


def _events(text: str) -> list[dict[str, Any]]:
    """Of the lines `data: {...}`. Raises ValueError for one that is no JSON object."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        event = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not event or event == "[DONE]":
            continue
        part = json.loads(event)
        if not isinstance(part, dict):
            raise ValueError("an event of the stream is no object")
        found.append(part)
    return found


def _unwrapped(part: dict[str, Any]) -> dict[str, Any]:
    """An entry of a batch's output file holds the answer as the body of its response."""
    response = part.get("response")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        return {**part, "response": response["body"]}
    return part


def _is_chunk(part: Mapping[str, Any]) -> bool:
    choices = part.get("choices")
    return isinstance(choices, list) and (
        str(part.get("object", "")).endswith("chunk")
        or any(isinstance(one, dict) and "delta" in one for one in choices)
        or any(isinstance(one, dict) and "text" in one for one in choices)
    )


def streamed(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The completion that the pieces of a stream make together.

    Raises ValueError for a piece that is none.
    """
    choices: dict[int, dict[str, Any]] = {}
    together: dict[str, Any] = {}
    for part in parts:
        together.update({name: value for name, value in part.items() if name != "choices"})
        for piece in part.get("choices") or ():
            if not isinstance(piece, dict):
                raise ValueError("a choice of the stream is no object")
            at = piece.get("index")
            choice = choices.setdefault(at if isinstance(at, int) else 0, {"message": {}})
            choice["finish_reason"] = piece.get("finish_reason") or choice.get("finish_reason")
            delta = piece.get("delta")
            said_now = delta if isinstance(delta, dict) else piece.get("message")
            said_now = said_now if isinstance(said_now, dict) else {}
            for name, value in {"content": piece.get("text"), **said_now}.items():
                said = choice["message"].get(name)
                if isinstance(value, str | list) and name != "role":
                    same = isinstance(said, type(value))
                    choice["message"][name] = said + value if same else value
    return {**together, "choices": [choices[index] for index in sorted(choices)]}


def _one_request(texts: list[dict[str, Any]]) -> bool:
    """Are all but the last without their end, as the pieces of one request are?"""
    ends = [
        part["meta_info"].get("finish_reason")
        for part in texts[:-1]
        if isinstance(part["meta_info"], dict)
    ]
    return len(ends) == len(texts) - 1 and not any(ends)


def _grown(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """/generate sends the text so far in each event; with --stream-output only what is new."""
    said = [str(part["text"]) for part in texts]
    grows = all(b.startswith(a) for a, b in pairwise(said))
    return {**texts[-1], "text": said[-1] if grows else "".join(said)}
