"""The gates: what a launch must pass before it counts as serving."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deployer.errors import GateFailed
from deployer.events import GateChecked
from deployer.remote.jobs import JobIdentity, JobStatus
from deployer.sglang.failures import classify, telling_lines
from deployer.sglang.quality import Verdict, judge, tokens
from deployer.shell import quote
from deployer.steps.base import StepContext
from deployer.steps.launch_wait import is_ready
from deployer.steps.server_agent import Record, ask
from deployer.steps.verify_prompts import (
    CODE_WORD,
    COUNT_TO,
    COUNTING,
    ESSAY,
    QUESTIONS,
    burst_answer,
    burst_prompts,
    counted_up_to,
    long_prompt,
)

HEALTHY_S = 180.0
"""How long a server that listens may still warm up."""
LOG_END = 256 * 1024
LONG_WORDS = 4500
"""About 6,500 tokens: past the first pages of the KV cache."""
SHORT_TOKENS = 160
DYING_S = 4.0
"""How long a crash takes from the first failed request to the end of the process."""
REPETITIVE = 0.6
"""Share of different four-word phrases below which an essay is suspect."""


@dataclass
class Gates:
    """Runs the gates of one launch in order; the first that fails ends them."""

    context: StepContext
    job: JobIdentity
    api_key: str = ""
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    figures: dict[str, float] = field(default_factory=dict)
    _members: dict[int, int] = field(default_factory=dict)
    _essays: list[str] = field(default_factory=list)

    def run(self) -> dict[str, float]:
        """The figures that were measured. Raises GateFailed."""
        for gate in (
            self.identity,
            self.answers,
            self.quality,
            self.counting,
            self.burst,
            self.long_prompt,
            self.speculation,
            self.alive,
        ):
            gate()
        return self.figures

    def identity(self) -> None:
        """Our pid owns the port, /v1/models says our model, /health is 200."""
        ends = self.now() + HEALTHY_S
        served = self.context.want.playbook.model.served_name
        while True:
            answer = self._one({"do": "ready", **self._who(), "timeout_s": 25}, 60)
            if is_ready(answer, served):
                break
            if not answer.get("alive"):
                self._fail("identity", "the server's process is gone", "")
            if answer.get("listening") and not answer.get("owned"):
                owners = [f"pid {one['pid']}: {one['title']}" for one in answer.get("owners", [])]
                self._fail("identity", "the port belongs to another process", "\n".join(owners))
            if self.now() >= ends:
                models = (answer.get("models") or {}).get("ids")
                self._fail(
                    "identity",
                    f"not healthy: /health {answer.get('health')}, models {models}",
                    str(answer.get("error", "")),
                )
            self.sleep(2.0)
        self._members = _server_members(answer, self.job)
        self._pass("identity", f"pid {self.job.pid} owns the port and serves {served}")

    def answers(self) -> None:
        """Questions with a known answer."""
        limit = self.context.want.playbook.gates.max_tokens
        for question in QUESTIONS:
            answer = self._complete("answers", question.prompt, limit, 0.0)
            self._judged("answers", question.prompt, answer)
            if not question.right(_whole(answer)):
                self._fail("answers", f"wrong answer to {question.prompt!r}", _whole(answer)[-400:])
        self._pass("answers", f"{len(QUESTIONS)} of {len(QUESTIONS)} right")

    def quality(self) -> None:
        """A long text, at temperature 0 and at the server's default."""
        gates = self.context.want.playbook.gates
        for temperature in (0.0, None):
            answer = self._complete("quality", ESSAY, gates.max_tokens, temperature)
            least = min(gates.min_tokens, gates.max_tokens)
            self._judged("quality", ESSAY, answer, least)
            self._essays.append(_whole(answer))
            if temperature == 0.0:
                count = float(answer.get("tokens") or 0)
                self.figures["tokens_per_s"] = _rate(count, answer)
        self._pass("quality", f"{self.figures['tokens_per_s']:g} tokens/s, one request")

    def counting(self) -> None:
        """Counting shows a lost or doubled token at once."""
        limit = max(self.context.want.playbook.gates.max_tokens, 4 * COUNT_TO)
        answer = self._complete("counting", COUNTING, limit, 0.0)
        reached = counted_up_to(answer.get("content") or "") or counted_up_to(_whole(answer))
        cut = answer.get("finish_reason") == "length"
        if reached < COUNT_TO and not (cut and (reached >= 20 or not answer.get("content"))):
            self._fail("counting", f"counts only to {reached}", _whole(answer)[-400:])
        self._pass("counting", f"counts to {reached}" + (" (cut by max_tokens)" if cut else ""))

    def burst(self) -> None:
        """Many requests, several at a time."""
        gates = self.context.want.playbook.gates
        deadline = gates.request_timeout_s * (1 + gates.burst / gates.parallel)
        result = self._one(
            {
                "do": "many",
                "parallel": gates.parallel,
                "requests": [
                    {
                        "prompt": prompt,
                        "model": self.context.want.playbook.model.served_name,
                        "max_tokens": min(SHORT_TOKENS, gates.max_tokens),
                        "temperature": 0.0,
                        "timeout_s": gates.request_timeout_s,
                    }
                    for prompt in burst_prompts(gates.burst)
                ],
                "deadline_s": deadline,
            },
            deadline + gates.request_timeout_s + 30,
        )
        answers: list[Record] = result.get("results", [])
        for answer in answers:
            self._usable("burst", answer)
            self._judged("burst", burst_prompts(gates.burst)[answer["number"]], answer)
        if len(answers) < gates.burst:
            self._fail("burst", f"only {len(answers)} of {gates.burst} requests came back", "")
        right = sum(burst_answer(one["number"]) in _whole(one) for one in answers)
        total = sum(float(one.get("tokens") or 0) for one in answers)
        self.figures["burst_tokens_per_s"] = round(total / max(result["seconds"], 0.001), 1)
        self._pass(
            "burst",
            f"{len(answers)} of {gates.burst}, {gates.parallel} at a time, {right} sums right, "
            f"{self.figures['burst_tokens_per_s']:g} tokens/s together",
        )

    def long_prompt(self) -> None:
        """A prompt past the first pages of the cache, as far as the context allows."""
        want = self.context.want
        room = want.serve_args().get("context-length")
        known = int(room) if isinstance(room, int) and not isinstance(room, bool) else 8192
        words = min(LONG_WORDS, max(50, int((known - SHORT_TOKENS) / 2.2)))
        prompt = long_prompt(words)
        answer = self._complete("long prompt", prompt, SHORT_TOKENS, 0.0)
        self._judged("long prompt", prompt, answer)
        found = CODE_WORD in _whole(answer).lower()
        self._pass(
            "long prompt", f"{words} words answered, code word {'found' if found else 'not found'}"
        )

    def speculation(self) -> None:
        """Drafts that are always accepted, together with repetition, mean a broken verification."""
        limit = self.context.want.playbook.gates.max_accept_rate
        answer = self._one({"do": "server_info", "timeout_s": 20}, 60)
        info: Record = answer.get("info") or {}
        length, drafts = (
            info.get("avg_spec_accept_length"),
            info.get("speculative_num_draft_tokens"),
        )
        if not isinstance(length, int | float) or not isinstance(drafts, int) or drafts < 2:
            self._pass("speculation", "no speculation, or no figures of it")
            return
        rate = (float(length) - 1) / (drafts - 1)
        self.figures["accept_length"] = round(float(length), 3)
        self.figures["accept_rate"] = round(rate, 3)
        worst = min((_variety(text) for text in self._essays), default=1.0)
        if rate >= limit and worst < REPETITIVE:
            self._fail(
                "speculation",
                f"accept rate {rate:.2f} with repetitive text ({worst:.0%} different phrases)",
                self._essays[0][-400:],
            )
        suspect = f", suspiciously high (limit {limit})" if rate >= limit else ""
        self._pass("speculation", f"accept length {length:.2f}, rate {rate:.2f}{suspect}")

    def alive(self) -> None:
        """Still the same processes, and still answering, a while after the load."""
        self.sleep(self.context.want.playbook.gates.alive_after_s)
        answer = self._one({"do": "ready", **self._who(), "timeout_s": 25}, 60)
        if not answer.get("alive"):
            self._fail("alive", "the server's process is gone", "")
        now = _server_members(answer, self.job)
        lost = [pid for pid, start in self._members.items() if now.get(pid) != start]
        if lost:
            self._fail("alive", f"worker processes ended: {', '.join(map(str, lost))}", "")
        if not is_ready(answer, self.context.want.playbook.model.served_name):
            self._fail("alive", f"/health says {answer.get('health')}", "")
        self._pass("alive", f"{len(now)} processes, none lost")

    def _who(self) -> Record:
        return {
            "pid": self.job.pid,
            "start": self.job.start,
            "boot": self.job.boot,
            "session": self.job.session,
        }

    def _one(self, command: Record, timeout_s: float) -> Record:
        want = self.context.want
        return ask(
            self.context.on(want.guest), want, [command], timeout_s=timeout_s, api_key=self.api_key
        )[0]

    def _complete(
        self, gate: str, prompt: str, max_tokens: int, temperature: float | None
    ) -> Record:
        want = self.context.want
        limit = want.playbook.gates.request_timeout_s
        command: Record = {
            "do": "completion",
            "model": want.playbook.model.served_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "timeout_s": limit,
        }
        if temperature is not None:
            command["temperature"] = temperature
        answer = self._one(command, limit + 30)
        self._usable(gate, answer)
        return answer

    def _usable(self, gate: str, answer: Record) -> None:
        if answer.get("status") != 200 or answer.get("error"):
            status = answer.get("status") or "no answer"
            self._fail(
                gate,
                f"a request failed: {status}",
                str(answer.get("error", ""))[:600],
                may_be_dying=True,
            )

    def _judged(self, gate: str, prompt: str, answer: Record, min_tokens: int = 0) -> None:
        verdict: Verdict = judge(
            prompt,
            answer.get("content"),
            answer.get("reasoning"),
            answer.get("finish_reason"),
            min_tokens=min_tokens,
            completion_tokens=answer.get("tokens"),
        )
        if not verdict.good:
            self._fail(gate, f"{verdict.why} (at character {verdict.position})", verdict.evidence)

    def _pass(self, gate: str, detail: str) -> None:
        self._emit(gate, True, detail, "")

    def _fail(self, gate: str, why: str, evidence: str, *, may_be_dying: bool = False) -> None:
        """Raises GateFailed; says it when the server died, with its own last words."""
        want = self.context.want
        lines = tuple(line for line in evidence.split("\n") if line.strip())
        fix = self._way_out()
        status = self._status(DYING_S if may_be_dying else 0.0)
        if not status.alive:
            log = self._log_end()
            failure = classify(log, status.exit, "ready")
            why = f"the server died during this gate (exit {status.exit}): {why}"
            if failure.cls != "unknown":
                why, fix = f"{why}; {failure.cls}: {failure.cause_line}", failure.action
            lines = (*lines, *telling_lines(log))
        if self.api_key:
            why = why.replace(self.api_key, "***")
            lines = tuple(line.replace(self.api_key, "***") for line in lines)
        self._emit(gate, False, why, "\n".join(lines))
        raise GateFailed(
            f"gate {gate!r} failed: {why}", where=f"{want.id} verify", fix=fix, evidence=lines
        )

    def _way_out(self) -> str:
        """The next variant after the one that was launched; the log when there is none."""
        want = self.context.want
        names = [variant.name for variant in want.playbook.variants]
        launches = self.context.state.launches
        launched = next((one.variant for one in launches if one.id == self.job.id), "")
        later = names[names.index(launched) + 1 :] if launched in names else []
        if later:
            return f"try the next variant: `deploy up {want.id} --variant {later[0]}`"
        return f"read `deploy logs {want.id}`: no other variant is left in the playbook"

    def _status(self, patience_s: float) -> JobStatus:
        """The job now; one that is about to die gets `patience_s` to do so."""
        ends = self.now() + patience_s
        while True:
            status = self.context.jobs(self.context.want.guest).poll(self.job)
            if not status.alive or self.now() >= ends:
                return status
            self.sleep(0.5)

    def _log_end(self) -> str:
        want = self.context.want
        log = f"{self.context.jobs(want.guest).root}/{self.job.name}/{self.job.id}/log"
        answer = self.context.on(want.guest).run(f"tail -c {LOG_END} {quote(log)}", timeout_s=30)
        return answer.text

    def _emit(self, gate: str, passed: bool, detail: str, evidence: str) -> None:
        want = self.context.want
        self.context.bus.emit(
            GateChecked(want.host_name, want.id, "verify", gate, passed, detail, evidence)
        )


def _whole(answer: Record) -> str:
    return f"{answer.get('reasoning') or ''}\n{answer.get('content') or ''}".strip()


def _rate(count: float, answer: Record) -> float:
    return round(count / max(float(answer.get("seconds") or 0), 0.001), 1)


def _variety(text: str) -> float:
    """The share of different four-word phrases."""
    words = tokens(text)
    phrases = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(phrases)) / len(phrases) if phrases else 1.0


def _server_members(answer: Record, job: JobIdentity) -> dict[int, int]:
    """The main process and SGLang's own workers, without compilers and helpers that come and go."""
    return {
        one["pid"]: one["start"]
        for one in answer.get("members", [])
        if one["pid"] == job.pid or str(one["title"]).startswith("sglang::")
    }
