"""Generation: requests that run, their tokens with time between, figures, `Decode batch` lines."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.lookalike import answers, faults, logs, outputs
from sglang.version import RELEASE

TOKEN_S, SLOW_TOKEN_S = 0.0016, 0.25
DEGENERATE_UNIT = ["thinking", "\n\n"]
LONGEST_PIECE = 16
EOS = 2
CHAT_MARK = re.compile(r"<\|im_start\|>user\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)


@dataclass
class Request:
    """One generation. `text` parts: reasoning first (may be empty), then the answer."""

    prompt_tokens: int
    pieces: list[str]
    reasoning_pieces: int
    max_tokens: int
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    made: int = 0
    begun: float = field(default_factory=time.monotonic)
    accept: float = 1.0

    @property
    def finish(self) -> str:
        return "length" if len(self.pieces) >= self.max_tokens else "stop"

    @property
    def tokens(self) -> int:
        """Tokens this request will have made; the end mark counts."""
        return min(self.max_tokens, len(self.pieces) + 1)


class Engine:
    """What runs now, and what has run."""

    def __init__(self, args: Any, info: dict[str, Any]) -> None:
        self.args, self.info = args, info
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(max(1, info["max_running_requests"]))
        self.running: dict[str, Request] = {}
        self.waiting = self.served = self.salt = 0
        self.generated = self.prompted = self.decoded = 0
        self.drafted: list[float] = []
        self.throughput = 0.0
        self.marked = time.monotonic()
        self.marked_tokens = 0

    # ---- what is said
    def plan(self, prompt: str, limit: int, temperature: float, think: bool) -> Request:
        """Decide the whole answer. May end the server, as a model with missing weights does."""
        said = prompt
        marks = CHAT_MARK.findall(prompt)
        said = marks[-1] if marks else prompt
        with self.lock:
            self.salt += 1
            salt = self.salt if temperature > 0 else 0
        thought = answers.tokens(answers.thought(said)) if think else []
        pieces = thought + answers.tokens(answers.answer(said, salt))
        on = faults.active()
        spec = bool(self.args.speculative_algorithm)
        accept = 2.4 + zlib.crc32(prompt.encode()) % 70 / 100 if spec else 1.0
        if self.info["missing_shards"]:
            self._missing_weights(temperature)
            thought, pieces = [], ["!"] * limit
        elif (text := outputs.ordered(on, said)) is not None:
            text = text[: limit * LONGEST_PIECE]
            thought, pieces = [], list(text) if text.isspace() else answers.tokens(text)
        elif faults.EMPTY in on:
            thought, pieces = [], []
        elif self._degenerate(on):
            thought = []
            pieces = (DEGENERATE_UNIT * (limit // 2 + 1))[:limit]
            accept = float(self.args.speculative_num_draft_tokens or 1)
        request = Request(len(answers.tokens(prompt)) + 4, pieces[:limit], len(thought), limit)
        request.accept = accept
        return request

    def _degenerate(self, on: set[str]) -> bool:
        args = self.args
        if faults.DEGENERATE in on:
            return True
        if faults.DEGENERATE_MTP in on and args.speculative_algorithm:
            return True
        # 0.5.9 skips the all-reduce of the dense qwen3_5 at tp > 1
        return RELEASE < (0, 5, 10) and args.model_config.model_type == "qwen3_5" and (
            args.tp_size > 1
        )  # fmt: skip

    @staticmethod
    def _missing_weights(temperature: float) -> None:
        if temperature == 0:
            return
        logs.say(
            "/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:109: _assert_async_cuda_kernel: "
            "block: [0,0,0], thread: [0,0,0] Assertion `probability tensor contains either `inf`, "
            "`nan` or element < 0` failed."
        )
        logs.say(
            "Scheduler hit an exception: torch.AcceleratorError: CUDA error: device-side assert "
            "triggered"
        )
        os.kill(os.getpid(), signal.SIGQUIT)

    # ---- making it
    def run(self, request: Request) -> Iterator[str]:
        """Pieces of text as they come. The caller must exhaust or close it."""
        with self.lock:
            self.waiting += 1
        self.slots.acquire()
        with self.lock:
            self.waiting -= 1
            self.running[request.rid] = request
            self.prompted += request.prompt_tokens
            others = len(self.running) - 1
        logs.say(
            f"Prefill batch, #new-seq: 1, #new-token: {request.prompt_tokens}, #cached-token: 0, "
            f"{self._usage_prefill()}, #running-req: {others}, #queue-req: {self.waiting}, "
            "#pending-token: 0, cuda graph: False, input throughput (token/s): "
            f"{request.prompt_tokens / 0.05:.2f}"
        )
        try:
            yield from self._decode(request)
        finally:
            with self.lock:
                self.running.pop(request.rid, None)
                self.served += 1
                if self.args.speculative_algorithm and request.made:
                    self.drafted.append(request.accept)
            self.slots.release()

    def _decode(self, request: Request) -> Iterator[str]:
        step_tokens = max(1, round(request.accept))
        pause = SLOW_TOKEN_S if faults.SLOW in faults.active() else TOKEN_S
        interval = max(1, self.args.decode_log_interval)
        steps = 0
        while request.made < request.tokens:
            take = min(step_tokens, request.tokens - request.made)
            logs.wait(pause * take)
            text = "".join(request.pieces[request.made : request.made + take])
            request.made += take
            steps += 1
            with self.lock:
                self.generated += take
                leader = next(iter(self.running), None) == request.rid
                self.decoded += leader
                due = leader and self.decoded % interval == 0
            if due:
                self._decode_line(request)
            if text:
                yield text

    def _usage_prefill(self) -> str:
        if self.args.model_config.hybrid:
            return "full token usage: 0.00, mamba usage: 0.00"
        return "token usage: 0.00"

    def _decode_line(self, request: Request) -> None:
        with self.lock:
            now = time.monotonic()
            self.throughput = (self.generated - self.marked_tokens) / max(1e-6, now - self.marked)
            self.marked, self.marked_tokens = now, self.generated
            count = len(self.running)
            held = sum(r.prompt_tokens + r.made for r in self.running.values())
            waiting = self.waiting
        usage = held / self.info["max_total_num_tokens"]
        if self.args.model_config.hybrid:
            text = f"#full token: {held}, full token usage: {usage:.2f}, mamba num: {3 * count}, "
            text += "mamba usage: 0.00, "
        else:
            text = f"#token: {held}, token usage: {usage:.2f}, "
        if self.args.speculative_algorithm:
            text += f"accept len: {request.accept:.2f}, accept rate: {self.rate(request):.2f}, "
        logs.say(
            f"Decode batch, #running-req: {count}, {text}cuda graph: "
            f"{not self.args.disable_cuda_graph}, gen throughput (token/s): "
            f"{self.throughput:.2f}, #queue-req: {waiting}"
        )

    def rate(self, request: Request) -> float:
        """The accept rate; 0.5.9 counts the bonus token, later releases do not."""
        drafts = self.args.speculative_num_draft_tokens or 2
        if RELEASE < (0, 5, 10):
            return request.accept / drafts
        return (request.accept - 1) / max(1, drafts - 1)

    # ---- what is told of it
    def meta(self, request: Request) -> dict[str, Any]:
        """`meta_info` of /generate."""
        spent = time.monotonic() - request.begun
        if request.finish == "length":
            reason: dict[str, Any] = {"type": "length", "length": request.max_tokens}
        else:
            reason = {"type": "stop", "matched": EOS}
        found = {
            "id": request.rid,
            "finish_reason": reason,
            "prompt_tokens": request.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": request.made,
            "cached_tokens": 0,
            "e2e_latency": spent,
        }
        if self.args.speculative_algorithm:
            steps = max(1, round(request.made / request.accept))
            found |= {
                "spec_accept_rate": self.rate(request),
                "spec_accept_length": request.accept,
                "spec_verify_ct": steps,
            }
            drafts = steps * ((self.args.speculative_num_draft_tokens or 2) - 1)
            old = RELEASE < (0, 5, 10)
            found["spec_draft_token_num" if old else "spec_proposed_drafts"] = drafts
            accepted = round((request.accept - 1) * steps)
            found["spec_accept_token_num" if old else "spec_accepted_drafts"] = accepted
        return found

    def mean_accept(self) -> float | None:
        with self.lock:
            recent = self.drafted[-100:]
        return sum(recent) / len(recent) if recent else None
