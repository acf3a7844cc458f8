"""What every gate works with: the launch, ways to ask it, and how a fault is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deployer.playbook import ArgValue, Gates
from deployer.remote.jobs import JobIdentity
from deployer.steps.base import StepContext
from deployer.steps.gates_judge import Fault, Record, raw_fault, without_answer
from deployer.steps.gates_memory import GpuUse
from deployer.steps.server_agent import ask

MARGIN_S = 30.0
"""More than a request's own time, for the way to the target and back."""


@dataclass(frozen=True)
class Asked:
    """One question, and what is wrong with an answer to it."""

    request: Record
    judged: Callable[[Record], Fault | None]


class GateFault(Exception):
    """A gate is not passed. `asked` are questions that show it, for another server to answer."""

    def __init__(self, fault: Fault, asked: Sequence[Asked] = ()) -> None:
        super().__init__(fault.why)
        self.fault = fault
        self.asked = tuple(asked)


@dataclass
class Bench:
    """One launch under test. Gates leave here what later gates need."""

    context: StepContext
    job: JobIdentity
    variant: str
    args: Mapping[str, ArgValue]
    """The server's arguments, of the variant that runs."""
    model_type: str | None = None
    api_key: str = ""
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    figures: dict[str, float] = field(default_factory=dict)
    members: dict[int, int] = field(default_factory=dict)
    """Pid and start time of the server's own processes."""
    info: Record = field(default_factory=dict)
    """What /server_info told: the arguments as the server resolved them."""
    context_tokens: int = 0
    """Longest prompt with its answer; 0: not told."""
    thinks: bool = False
    essays: list[tuple[Asked, tuple[str, ...]]] = field(default_factory=list)
    """Long answers, each as its thoughts and its content; what is empty is left out."""
    memory: GpuUse | None = None
    """Used MiB by GPU before the load; None: not known."""

    @property
    def rules(self) -> Gates:
        """The thresholds."""
        return self.context.want.playbook.gates

    @property
    def served(self) -> str:
        """The model's name for clients."""
        return self.context.want.playbook.model.served_name

    @property
    def parser(self) -> str:
        """The reasoning parser; '' when none is set."""
        return str(self.info.get("reasoning_parser") or self.args.get("reasoning-parser") or "")

    @property
    def version(self) -> str:
        """SGLang's, as the server tells it, else as the playbook wants it."""
        return str(self.info.get("version") or self.context.want.playbook.engine.version)

    @property
    def max_tokens(self) -> int:
        """Tokens of a long answer; of a small context no more than three quarters."""
        most = self.rules.max_tokens
        return min(most, max(16, self.context_tokens * 3 // 4)) if self.context_tokens else most

    def who(self) -> Record:
        """The launch, for the agent."""
        job = self.job
        return {"pid": job.pid, "start": job.start, "boot": job.boot, "session": job.session}

    def one(self, command: Record, timeout_s: float) -> Record:
        """The agent's answer to one command."""
        want = self.context.want
        transport = self.context.on(want.guest)
        return ask(transport, want, [command], timeout_s=timeout_s, api_key=self.api_key)[0]

    def request(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float | None = 0.0,
        *,
        thinking: bool | None = None,
        stream: bool = False,
        timeout_s: float | None = None,
    ) -> Record:
        """A chat completion. Temperature None: the model's own sampling (no parameter is sent)."""
        made: Record = {
            "do": "completion",
            "model": self.served,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "timeout_s": timeout_s or self.rules.request_timeout_s,
        }
        if temperature is not None:
            made["temperature"] = temperature
        if thinking is not None:
            made["chat_template_kwargs"] = {"enable_thinking": thinking}
        if stream:
            made["stream"] = True
        return made

    def answer(self, request: Record) -> Record:
        """What comes back for one request, whatever it is."""
        return self.one(request, float(request["timeout_s"]) + MARGIN_S)

    def ask(self, asked: Asked) -> Record:
        """A good answer. Raises GateFault.

        One that is cut while the model thinks is asked for again with room to think.
        """
        return self.settle(asked, self.answer(asked.request))

    def settle(self, asked: Asked, answer: Record) -> Record:
        """The answer when it is good, or a second one. Raises GateFault with the true cause."""
        fault = asked.judged(answer)
        if fault is not None and fault.kind == "thinking":
            # Greedy sampling is known to turn long thoughts in circles: the model's own here.
            roomy = {**asked.request, "max_tokens": self.room(answer), "temperature": None}
            answer = self.answer(roomy)
            fault = asked.judged(answer)
            if fault is not None and fault.kind == "thinking":
                fault = replace(
                    fault,
                    kind="output",
                    why=f"{fault.why}; it still thinks after {answer.get('tokens')} tokens",
                    fix="raise gates.think_tokens if the model needs that long",
                )
        if fault is not None and without_answer(answer):
            raw = self.answer({**asked.request, "separate_reasoning": False})
            fault = raw_fault(asked.judged, raw, answer, fault, self.parser, self.model_type)
        if fault is not None:
            raise GateFault(fault, (asked,))
        return answer

    def room(self, answer: Record) -> int:
        """Tokens that may be spent on thinking and answering, within the context."""
        room = self.rules.think_tokens
        if self.context_tokens:
            prompt = int(answer.get("prompt_tokens") or 0) + 16
            room = min(room, self.context_tokens - prompt)
        return max(room, 16)

    def many(self, asked: Sequence[Asked], parallel: int) -> tuple[list[Record], float]:
        """The answers, settled, in order, and the seconds that all took. Raises GateFault."""
        longest = max(float(one.request["timeout_s"]) for one in asked)
        deadline = longest * (1 + len(asked) / parallel)
        result = self.one(
            {
                "do": "many",
                "requests": [one.request for one in asked],
                "parallel": parallel,
                "deadline_s": deadline,
            },
            deadline + longest + MARGIN_S,
        )
        found = {int(one["number"]): one for one in result.get("results", [])}
        # The first that fails in time, not in order, would only hide what it fails by.
        settled = [self.settle(asked[number], found[number]) for number in sorted(found)]
        if len(found) < len(asked):
            why = f"only {len(found)} of {len(asked)} requests came back"
            raise GateFault(Fault("request", why), [asked[0]])
        return settled, max(float(result["seconds"]), 0.001)

    def note(self, text: str, level: str = "info") -> None:
        """One line for the user."""
        self.context.note(text, level)
