"""A model that answers the gates, and ways to spoil it; no server, no target."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from serverworld import (
    IDENTITY,
    Clock,
    Context,
    FakeJobs,
    FakeTransport,
    context,
    deployment,
    state,
)

from deployer.deployment import Deployment
from deployer.events import Event
from deployer.remote.transport import Answer
from deployer.state import DeploymentState, Launch
from deployer.steps import gates_bench
from deployer.steps.gates_bench import Bench
from deployer.steps.verify_prompts import CODE_WORD

Reply = dict[str, Any]
OUTPUTS = Path(__file__).parent.parent / "fixtures" / "outputs"
ESSAY = (OUTPUTS / "good" / "essay.txt").read_text(encoding="utf-8")[:600].rpartition(".")[0] + "."
"""Short, so that judging it hundreds of times takes no time."""
WANT = deployment(gates={"burst": 6, "parallel": 3, "min_tokens": 40, "alive_after_s": 60})
SMI = b"0000:21:00.0, 40000\n0000:41:00.0, 40000\n--\n"
MEMBERS = [
    {"pid": 4242, "start": 1000, "title": "python -m sglang.launch_server"},
    {"pid": 4250, "start": 1001, "title": "sglang::scheduler_TP0"},
    {"pid": 4251, "start": 1001, "title": "sglang::scheduler_TP1"},
    {"pid": 4252, "start": 1001, "title": "sglang::detokenizer"},
]


def good_text(prompt: str) -> str:
    """What a good model says."""
    if "17 * 23" in prompt:
        return "391"
    if "capital" in prompt:
        return "Paris"
    if prompt.startswith("Count"):
        return ", ".join(str(number) for number in range(1, 101))
    if "code word" in prompt:
        return f"{CODE_WORD}\n\n{ESSAY}"
    if found := re.search(r"What is (\d+) \+ (\d+)", prompt):
        return str(int(found[1]) + int(found[2]))
    if "hello" in prompt:
        return "Hello!"
    return ESSAY


class Model:
    """The agent before a server. `change(request, reply)` spoils replies to completions."""

    def __init__(
        self,
        change: Callable[[Reply, Reply], Reply | None] = lambda request, reply: None,
        *,
        info: Mapping[str, Any] | None = None,
        context_tokens: int = 32768,
        **changes: Any,
    ) -> None:
        self.change = change
        self.context_tokens = context_tokens
        self.changes = changes
        self.asked: list[Reply] = []
        self.info: Reply = {
            "version": "0.5.11",
            "tp_size": 2,
            "reasoning_parser": "qwen3",
            "speculative_algorithm": "EAGLE",
            "speculative_num_draft_tokens": 4,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "avg_spec_accept_length": 2.5,
            "max_total_num_tokens": 100_000,
            **(info or {}),
        }

    def complete(self, request: Reply) -> Reply:
        """The reply to one chat completion."""
        self.asked.append(request)
        prompt = request["prompt"]
        thinks = (request.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        text, thought = good_text(prompt), "I know how to answer that." if thinks else None
        reply: Reply = {
            "ok": True,
            "status": 200,
            "seconds": 2.0,
            "content": text,
            "reasoning": thought,
            "finish_reason": "stop",
            "tokens": max(len(text.split()), 1) + (6 if thought else 0),
            "prompt_tokens": len(prompt.split()) + 9,
            "ttft_s": 0.25 if request.get("stream") else None,
            "decode_s": 1.5 if request.get("stream") else None,
            "error": "",
            "timed_out": False,
        }
        if request.get("separate_reasoning") is False:
            marks = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
            reply.update(content=marks, reasoning=None)
        total = reply["prompt_tokens"] + request["max_tokens"]
        if total > self.context_tokens:
            told = (
                "Requested token count exceeds the model's maximum context length of "
                f"{self.context_tokens} tokens. You requested a total of {total} tokens: "
                f"{reply['prompt_tokens']} tokens from the input messages and "
                f"{request['max_tokens']} tokens for the completion."
            )
            reply = {"ok": True, "status": 400, "seconds": 0.1, "error": told}
        return self.change(request, reply) or reply

    def ask(self, transport: object, want: object, commands: list[Reply], **more: Any) -> Any:
        """Takes the place of server_agent.ask."""
        command = commands[0]
        do = command["do"]
        if do in self.changes:
            change = self.changes[do]
            return [change(command) if callable(change) else change]
        seen = {
            "ok": True,
            "alive": True,
            "owned": True,
            "listening": True,
            "owners": [{"pid": 4242, "title": "x"}],
            "members": MEMBERS,
        }
        if do == "identity":
            return [seen]
        if do == "ready":
            models = {"status": 200, "ids": ["tiny"], "context": {"tiny": self.context_tokens}}
            return [{**seen, "models": models, "health": 200, "health_s": 1.0}]
        if do == "completion":
            return [self.complete(command)]
        if do == "many":
            replies = [self.complete(one) for one in command["requests"]]
            results = [{**one, "number": number} for number, one in enumerate(replies)]
            return [{"ok": True, "results": results, "seconds": 3.0}]
        if do == "weights":
            whole: Reply = {"missing": [], "wrong": [], "cut": [], "shards": 3, "indexed": True}
            return [{"ok": True, **whole, "tensors": 90, "mtp": True}]
        if do == "generate":
            meta = {"spec_accept_length": 2.4, "spec_verify_ct": 100, "completion_tokens": 240}
            return [{"ok": True, "status": 200, "meta": meta, "run": {}, "text": ESSAY}]
        if do == "metrics":
            return [{"ok": True, "status": 404, "gauges": {}}]
        if do == "server_info":
            return [{"ok": True, "status": 200, "info": dict(self.info)}]
        raise AssertionError(do)


def ready(
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    jobs: FakeJobs | None = None,
    *,
    want: Deployment = WANT,
    log: bytes = b"",
    smi: Callable[[], bytes] = lambda: SMI,
    own: DeploymentState | None = None,
) -> tuple[Context, list[Event], FakeTransport, Clock]:
    """A context whose agent is `model`; the state has the launch that runs."""
    monkeypatch.setattr(gates_bench, "ask", model.ask)
    own = own or state()
    if not any(launch.id == IDENTITY.id for launch in own.launches):
        own.launches.append(Launch(id=IDENTITY.id, variant="mtp", started=1.0, verdict="ready"))
    guest = FakeTransport(lambda script: Answer(0, log if "tail" in script else b"", b""))
    host = FakeTransport(lambda script: Answer(0, smi(), b""))
    made, events = context(want, own, jobs or FakeJobs(), host=host, guest=guest)
    return made, events, guest, Clock()


def bench(made: Context, clock: Clock) -> Bench:
    """The launch under test."""
    return Bench(
        made, IDENTITY, "mtp", made.want.serve_args("mtp"), "qwen3_5", "", clock.now, clock.sleep
    )
