"""What the server says: its model ids, chat completions whole or streamed."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any

from deployer.agents.serve.web import request

Record = dict[str, Any]
PASSED_ON = ("temperature", "seed", "chat_template_kwargs", "separate_reasoning")
EVENT_LIMIT = 200_000
"""Events of one stream; a server that streams without end is left."""


def models() -> Record:
    """The ids that /v1/models lists, and the longest context of each where it is told."""
    answer = request("GET", "/v1/models")
    body = answer.get("body")
    cards: list[Any] = []
    if isinstance(body, dict) and isinstance(body.get("data"), list):
        cards = [one for one in body["data"] if isinstance(one, dict)]
    return {
        "status": answer["status"],
        "ids": [one.get("id") for one in cards],
        "context": {str(one.get("id")): one.get("max_model_len") for one in cards},
        "error": answer.get("error", ""),
    }


def completion(command: Record) -> Record:
    """One chat completion; with `stream`, also when its first and its last token came.

    {status, content, reasoning, finish_reason, tokens, prompt_tokens, seconds, ttft_s, decode_s,
    error}; seconds by our clock, None where the server did not tell.
    """
    body: Record = {
        "model": command["model"],
        "messages": [{"role": "user", "content": command["prompt"]}],
        "max_tokens": int(command["max_tokens"]),
    }
    for name in PASSED_ON:
        if command.get(name) is not None:
            body[name] = command[name]
    result: Record = {
        "status": 0,
        "seconds": 0.0,
        "content": None,
        "reasoning": None,
        "finish_reason": None,
        "tokens": None,
        "prompt_tokens": None,
        "ttft_s": None,
        "decode_s": None,
        "error": "",
        "timed_out": False,
    }
    path = "/v1/chat/completions"
    if not command.get("stream"):
        answer = request("POST", path, body, command.get("timeout_s"))
        _take(answer, result)
        if not result["error"]:
            _whole(answer, result)
        return result
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    stream = _Stream()
    answer = request("POST", path, body, command.get("timeout_s"), stream.read)
    _take(answer, result)
    if answer["status"] == 200:
        result.update(stream.found())
    elif not result["error"]:
        result["error"] = _told(answer)
    return result


def _take(answer: Record, result: Record) -> None:
    result["status"], result["seconds"] = answer["status"], answer["seconds"]
    result["error"] = answer.get("error", "")
    result["timed_out"] = bool(answer.get("timed_out"))


def _whole(answer: Record, result: Record) -> None:
    parsed: Any = answer.get("body")
    try:
        choice = parsed["choices"][0]
        message = choice["message"]
        result["content"] = message.get("content")
        result["reasoning"] = message.get("reasoning_content") or message.get("reasoning")
        result["finish_reason"] = choice.get("finish_reason")
        usage = parsed.get("usage") or {}
        result["tokens"] = usage.get("completion_tokens")
        result["prompt_tokens"] = usage.get("prompt_tokens")
    except (KeyError, IndexError, TypeError, AttributeError):
        result["error"] = _told(answer)


def _told(answer: Record) -> str:
    parsed = answer.get("body")
    shown = json.dumps(parsed) if parsed is not None else str(answer.get("text", ""))
    return shown[:600] or "an empty answer"


class _Stream:
    """The events of one streamed answer, put together."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first = self.last = 0.0
        self.parts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.finish: Any = None
        self.usage: Mapping[str, Any] = {}
        self.ended = False
        self.error = ""

    def read(self, response: http.client.HTTPResponse) -> Record:
        for _ in range(EVENT_LIMIT):
            line = response.readline()
            if not line:
                break
            text = line.decode("utf-8", "replace").strip()
            if not text.startswith("data:"):
                continue
            data = text[5:].strip()
            if data == "[DONE]":
                self.ended = True
                break
            self._event(json.loads(data))
        return {}

    def _event(self, event: Any) -> None:
        if not isinstance(event, dict):
            return
        if "error" in event and not event.get("choices"):
            self.error = json.dumps(event["error"])[:600]
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            if choice.get("finish_reason"):
                self.finish = choice["finish_reason"]
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            for name, piece in (("content", delta.get("content")), ("reasoning", thought)):
                if piece:
                    self.last = time.monotonic()
                    self.first = self.first or self.last
                    self.parts[name].append(piece)

    def found(self) -> Record:
        error = self.error
        if not error and not self.ended and self.finish is None:
            error = "the stream broke off before its end"
        content, reasoning = ("".join(self.parts[name]) for name in ("content", "reasoning"))
        return {
            "content": content or None,
            "reasoning": reasoning or None,
            "finish_reason": self.finish,
            "tokens": self.usage.get("completion_tokens"),
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "ttft_s": round(self.first - self.began, 4) if self.first else None,
            "decode_s": round(self.last - self.first, 4) if self.first else None,
            "error": error,
        }
