"""Each form in which people keep an answer is read, good or bad; what is none is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployer.errors import UsageError
from deployer.sglang.answer import Answer, read_answers

SAID = "The moon pulls the water, and so it rises."
WORDS = [word + " " for word in SAID.split()]


def whole(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}


def chunk(text: str) -> dict[str, Any]:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }


def piece(text: str, end: str | None = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"finish_reason": end and {"type": end}}}


def events(parts: list[dict[str, Any]], before: str = "", end: str = "\n\n") -> bytes:
    return (before + "".join(f"data: {json.dumps(part)}{end}" for part in parts)).encode()


def lines(parts: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, parts)).encode()


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def output(*items: dict[str, Any], status: str = "completed") -> dict[str, Any]:
    return {"object": "response", "status": status, "output": list(items)}


CHUNKS = [chunk(word) for word in WORDS]
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "o", "text": SAID}]}
FORMS: dict[str, bytes] = {
    "a list of choices": dumped(whole(SAID)["choices"]),
    "a list of completions": dumped([whole(SAID)]),
    "lines of completions": lines([whole(SAID), whole(SAID)]),
    "a stream with comments": events(CHUNKS, ": ping\n\nevent: message\n"),
    "a stream of CRLF": events([*CHUNKS, {"usage": {"completion_tokens": 9}}], end="\r\n\r\n"),
    "lines of chunks": lines(CHUNKS),
    "a list of chunks": dumped(CHUNKS),
    "chunks without an index": events([{"choices": [{"index": None, "delta": {"content": SAID}}]}]),
    "generate, the text so far": events([piece(SAID[:9]), piece(SAID[:20]), piece(SAID, "stop")]),
    "generate, what is new": events([piece(SAID[:9]), piece(SAID[9:20]), piece(SAID[20:], "stop")]),
    "responses": dumped(output({"type": "reasoning", "summary": []}, MESSAGE)),
    "a line of a batch": dumped({"response": {"status_code": 200, "body": whole(SAID)}}),
    "with its headers": b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\n\r\n" + dumped(whole(SAID)),
    "UTF-16": json.dumps(whole(SAID)).encode("utf-16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form(name: str) -> None:
    answers = read_answers(FORMS[name], name)
    assert {(answer.content or "").strip() for answer in answers} == {SAID}


def test_each_answer_of_a_list_is_judged() -> None:
    several = dumped([piece("one", "stop"), piece("two", "length")])
    assert [answer.content for answer in read_answers(several, "-")] == ["one", "two"]
    assert [answer.finish_reason for answer in read_answers(several, "-")] == ["stop", "length"]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            output({"type": "reasoning", "content": [{"text": "Think."}]}, status="incomplete"),
            Answer("", "", "Think.", "length"),
        ),
        (
            output({"type": "function_call", "name": "f"}),
            Answer("", '[{"type": "function_call", "name": "f"}]', None, "stop"),
        ),
    ],
)
def test_items_of_responses(document: dict[str, Any], expected: Answer) -> None:
    assert read_answers(dumped(document), "-") == [expected]


@pytest.mark.parametrize(
    "data",
    [
        events([{"choices": ["x"]}]),
        events([{"choices": ["x"], "object": "chat.completion.chunk"}]),
        events([{"error": {"message": "boom"}}]),
        events(CHUNKS) + b'data: {"choices": [{"del',
        lines([whole(SAID)]) + b"\nnonsense",
        dumped([5]),
        "hi".encode("utf-16"),
        b"<html>502 Bad Gateway</html>",
        bytes(range(256)),
    ],
)
def test_what_is_none(data: bytes) -> None:
    with pytest.raises(UsageError) as caught:
        read_answers(data, "answer.json")
    assert "\n" not in str(caught.value).split("->")[0].strip()
