"""Answers in the three forms (chat, completion, native), whole and streamed; Prometheus text."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from sglang.lookalike.engine import EOS, Engine, Request
from sglang.version import RELEASE


def prompt_of(messages: list[Any]) -> str:
    """The conversation as a template makes it; the last user part is what is answered."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(p.get("text", "") for p in content if isinstance(p, dict))
        parts.append(f"<|im_start|>{message.get('role', 'user')}\n{content}<|im_end|>\n")
    return "".join(parts)


def usage(request: Request) -> dict[str, Any]:
    return {
        "prompt_tokens": request.prompt_tokens,
        "total_tokens": request.prompt_tokens + request.made,
        "completion_tokens": request.made,
        "prompt_tokens_details": None,
        "reasoning_tokens": min(request.made, request.reasoning_pieces),
    }


class Chat:
    """`split`: the reasoning parser moves the thought out of the content; `swallow`: all of it."""

    def __init__(self, request: Request, model: str, *, split: bool, swallow: bool = False) -> None:
        self.request, self.split, self.swallow = request, split, swallow
        self.head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def parts(self) -> tuple[str, str]:
        r = self.request
        thought = "".join(r.pieces[: r.reasoning_pieces])
        answer = "".join(r.pieces[r.reasoning_pieces :])
        if self.swallow:
            return thought + answer, ""
        if self.split or not thought:
            return thought, answer
        return "", f"{thought}\n</think>\n\n{answer}" if answer else thought

    def whole(self, text: str) -> dict[str, Any]:
        thought, answer = self.parts()
        message = {
            "role": "assistant",
            "content": answer or ("" if not thought else None),
            "reasoning_content": thought or None,
            "tool_calls": None,
        }
        finish = self.request.finish
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": finish,
            "matched_stop": EOS if finish == "stop" else None,
        }
        body = {**self.head, "object": "chat.completion", "choices": [choice]}
        return {**body, "usage": usage(self.request), "metadata": {"weight_version": "default"}}

    def event(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        full = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
        choice = {
            "index": 0,
            "delta": full | delta,
            "logprobs": None,
            "finish_reason": finish,
            "matched_stop": EOS if finish == "stop" else None,
        }
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice], "usage": None}

    def stream(self, pieces: Iterator[str], with_usage: bool) -> Iterator[dict[str, Any]]:
        yield self.event({"role": "assistant", "content": ""})
        thought, answer = self.parts()
        sent = 0
        mark = 0 if self.split else len(thought + answer) - sum(map(len, self.request.pieces))
        for piece in pieces:
            # text of this step, cut at the border between thought and answer
            end = sent + len(piece)
            if sent < len(thought):
                yield self.event({"reasoning_content": thought[sent : min(end, len(thought))]})
            if end > len(thought):
                start = max(0, sent - len(thought))
                yield self.event({"content": answer[start : end - len(thought)]})
            sent = end
        if mark > 0:
            yield self.event({"content": (thought + answer)[sent:]})
        yield self.event({}, self.request.finish)
        if with_usage:
            body = {**self.head, "object": "chat.completion.chunk", "choices": []}
            yield {**body, "usage": usage(self.request)}


class Text:
    """/v1/completions."""

    def __init__(self, request: Request, model: str) -> None:
        self.request = request
        self.head = {
            "id": uuid.uuid4().hex,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def event(self, text: str, finish: str | None) -> dict[str, Any]:
        stop = EOS if finish == "stop" else None
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {**self.head, "choices": [{**choice, "matched_stop": stop}], "usage": None}

    def whole(self, text: str) -> dict[str, Any]:
        body = self.event(text, self.request.finish)
        return {**body, "usage": usage(self.request), "metadata": {"weight_version": "default"}}

    def stream(self, pieces: Iterator[str], with_usage: bool) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            yield self.event(piece, None)
        yield self.event("", self.request.finish)
        if with_usage:
            yield {**self.head, "choices": [], "usage": usage(self.request)}


class Native:
    """/generate; a streamed event holds all text so far."""

    def __init__(self, request: Request, engine: Engine) -> None:
        self.request, self.engine = request, engine

    def whole(self, text: str) -> dict[str, Any]:
        ids = [3 + len(p) % 20 for p in self.request.pieces]
        return {"text": text, "output_ids": ids, "meta_info": self.engine.meta(self.request)}

    def stream(self, pieces: Iterator[str], with_usage: bool) -> Iterator[dict[str, Any]]:
        text = ""
        for piece in pieces:
            text += piece
            event = self.whole(text)
            if self.request.made < self.request.tokens:
                event["meta_info"]["finish_reason"] = None
            yield event


def metrics(args: Any, engine: Engine) -> str:
    """Prometheus text."""
    labels = f'{{model_name="{args.served_model_name}",engine_type="unified",tp_rank="0"'
    labels += ',pp_rank="0",moe_ep_rank="0"}'
    held = sum(r.prompt_tokens + r.made for r in list(engine.running.values()))
    total = engine.info["max_total_num_tokens"]
    gauges: list[tuple[str, str, float]] = [
        ("gen_throughput", "gauge", engine.throughput),
        ("num_running_reqs", "gauge", len(engine.running)),
        ("num_queue_reqs", "gauge", engine.waiting),
        ("num_used_tokens", "gauge", held),
        ("token_usage", "gauge", held / total),
        ("max_total_num_tokens", "gauge", total),
        ("cache_hit_rate", "gauge", 0.0),
        ("prompt_tokens_total", "counter", engine.prompted),
        ("generation_tokens_total", "counter", engine.generated),
        ("num_requests_total", "counter", engine.served),
    ]
    mean = engine.mean_accept()
    if args.speculative_algorithm:
        drafts = max(1, (args.speculative_num_draft_tokens or 2) - 1)
        gauges.append(("spec_accept_length", "gauge", mean or 0.0))
        rate = (mean - 1) / drafts if mean else 0.0
        if RELEASE < (0, 5, 10):  # the bonus token counts on both sides
            rate = (mean or 0.0) / (drafts + 1)
        gauges.append(("spec_accept_rate", "gauge", rate))
    lines = []
    for name, kind, value in gauges:
        lines.append(f"# HELP sglang:{name} {name.replace('_', ' ')}.")
        lines.append(f"# TYPE sglang:{name} {kind}")
        lines.append(f"sglang:{name}{labels} {float(value)}")
    return "\n".join(lines) + "\n"
