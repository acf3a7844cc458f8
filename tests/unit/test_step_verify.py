from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serverworld import (
    IDENTITY,
    Clock,
    FakeJobs,
    FakeTransport,
    Script,
    context,
    deployment,
    fact,
    facts,
    owner,
    server_job,
    state,
)

from deployer.errors import GateFailed, StepFailed
from deployer.events import Event, GateChecked
from deployer.model import Facts, PlanState, ProbeOutput
from deployer.remote.jobs import ROOT
from deployer.remote.transport import Answer
from deployer.state import Launch
from deployer.steps import verify_gates
from deployer.steps.verify import ServingFact, VerifyStep, light_script, parse_serving
from deployer.steps.verify_prompts import counted_up_to, long_prompt
from tests.local_transport import SHELLS, LocalTransport, shell_path

WANT = deployment(gates={"burst": 6, "parallel": 3})
OUTPUTS = Path(__file__).parent.parent / "fixtures" / "outputs"
ESSAY = (OUTPUTS / "good" / "essay.txt").read_text(encoding="utf-8")
SERVING = fact(job=server_job(WANT), owners=(owner(),), listening=True)
GOOD = ServingFact(IDENTITY.id, "good", 1_796_000_000.0, {}, "")
Reply = dict[str, Any]


def say(prompt: str) -> str:
    """A good model."""
    if "17 * 23" in prompt:
        return "391"
    if "capital" in prompt:
        return "Paris"
    if "Count" in prompt:
        return ", ".join(str(number) for number in range(1, 101))
    if "code word" in prompt:
        return "kingfisher"
    if " + " in prompt:
        left, right = prompt.removeprefix("What is ").split("?")[0].split(" + ")
        return str(int(left) + int(right))
    return ESSAY


def server(said: Callable[[str], str] = say, **changes: Reply) -> Callable[..., list[Reply]]:
    """The agent before a server that says `said`; `changes` replace its other answers."""
    members = [
        {"pid": 4242, "start": 1000, "title": "python -m sglang.launch_server"},
        {"pid": 4250, "start": 1001, "title": "sglang::scheduler_TP0"},
    ]
    ready = {
        "ok": True,
        "alive": True,
        "owned": True,
        "listening": True,
        "owners": [{"pid": 4242, "title": "x"}],
        "members": members,
        "models": {"status": 200, "ids": ["tiny"]},
        "health": 200,
    }

    def complete(prompt: str) -> Reply:
        text = said(prompt)
        return {
            "ok": True,
            "status": 200,
            "seconds": 2.0,
            "content": text,
            "reasoning": None,
            "finish_reason": "stop",
            "tokens": max(len(text.split()), 1),
            "error": "",
        }

    def ask(transport: object, want: object, commands: list[Reply], **more: Any) -> list[Reply]:
        do = commands[0]["do"]
        if do in changes:
            return [changes[do]]
        if do == "ready":
            return [ready]
        if do == "completion":
            return [complete(commands[0]["prompt"])]
        if do == "many":
            results = [
                {**complete(one["prompt"]), "number": number}
                for number, one in enumerate(commands[0]["requests"])
            ]
            return [{"ok": True, "results": results, "seconds": 3.0}]
        return [
            {"ok": True, "info": {"avg_spec_accept_length": 2.5, "speculative_num_draft_tokens": 4}}
        ]

    return ask


def run(
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[..., list[Reply]],
    jobs: FakeJobs | None = None,
    log: bytes = b"",
) -> tuple[list[Event], Any, FakeTransport]:
    monkeypatch.setattr(verify_gates, "ask", ask)
    clock, own = Clock(), state()
    own.launches.append(Launch(id=IDENTITY.id, variant="mtp", started=1.0, verdict="ready"))
    guest = FakeTransport(lambda script: Answer(0, log if "tail" in script else b"", b""))
    made, events = context(WANT, own, jobs or FakeJobs(), guest=guest)
    step = VerifyStep(clock.now, clock.sleep)
    seen = facts(SERVING, ServingFact())
    try:
        step.apply(made, seen, step.plan(WANT, seen, own))
    except GateFailed as error:
        return events, error, guest
    return events, own, guest


def test_all_gates_pass_and_the_verdict_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    events, own, guest = run(monkeypatch, server())
    gates = [event for event in events if isinstance(event, GateChecked)]
    assert [gate.gate for gate in gates] == [
        "identity",
        "answers",
        "quality",
        "counting",
        "burst",
        "long prompt",
        "speculation",
        "alive",
    ]
    assert all(gate.passed for gate in gates)
    launch = own.launches[0]
    assert (launch.verdict, own.known_good) == ("good", IDENTITY.id)
    assert launch.figures["accept_rate"] == 0.5
    assert launch.figures["tokens_per_s"] > 0
    record = json.loads(guest.stdins[-1])
    assert (record["verdict"], record["launch"]) == ("good", IDENTITY.id)


@pytest.mark.parametrize(
    ("said", "gate", "why"),
    [
        (lambda prompt: "42", "answers", "wrong answer"),
        (lambda prompt: "", "answers", "empty"),
        (
            lambda prompt: say(prompt) if len(say(prompt)) < 40 else "!" * 400,
            "quality",
            "only punctuation",
        ),
        (lambda prompt: "1, 2, 4" if "Count" in prompt else say(prompt), "counting", "to 2"),
        (lambda prompt: "the " * 90 if " + " in prompt else say(prompt), "burst", "in a row"),
    ],
)
def test_a_bad_model_fails_with_evidence(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[str], str], gate: str, why: str
) -> None:
    events, error, guest = run(monkeypatch, server(said))
    assert isinstance(error, GateFailed)
    assert error.exit_code == 5
    assert f"gate {gate!r} failed" in error.what
    assert why in error.what
    last = [event for event in events if isinstance(event, GateChecked)][-1]
    assert (last.gate, last.passed) == (gate, False)
    assert json.loads(guest.stdins[-1])["verdict"].startswith("failed")


def test_a_server_that_dies_during_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"ok": True, "status": 0, "seconds": 0.1, "error": "RemoteDisconnected: closed"}
    log = b"[x] CUDA error: an illegal memory access was encountered\n[x] SIGQUIT received.\n"
    jobs = FakeJobs(running=Script([], -9, True))
    _, error, _ = run(monkeypatch, server(completion=gone), jobs, log)
    assert "the server died during this gate (exit -9)" in error.what
    assert "cuda-fault" in error.what
    assert any("illegal memory access" in line for line in error.evidence)


def test_a_worker_lost_after_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, calls = server(), []

    def ask(transport: object, want: object, commands: list[Reply], **more: Any) -> list[Reply]:
        answer = usual(transport, want, commands)
        if commands[0]["do"] == "ready":
            calls.append(1)
            if len(calls) == 2:
                answer = [{**answer[0], "members": answer[0]["members"][:1]}]
        return answer

    _, error, _ = run(monkeypatch, ask)
    assert "worker processes ended: 4250" in error.what


def test_drafts_always_accepted_with_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"ok": True, "info": {"avg_spec_accept_length": 4.0, "speculative_num_draft_tokens": 4}}
    events, own, _ = run(monkeypatch, server(server_info=info))
    assert own.known_good == IDENTITY.id
    assert "suspiciously high" in str(events)

    def repetitive(prompt: str) -> str:
        one = "the tide comes in and the tide goes out and "
        start = "the moon pulls the water up and the sun does so too but less and so "
        return (
            say(prompt)
            if "tides" not in prompt
            else " ".join((one if number % 2 else start) + f"{number}" for number in range(9))
        )

    _, error, _ = run(monkeypatch, server(repetitive, server_info=info))
    assert isinstance(error, GateFailed)


def test_plans() -> None:
    step = VerifyStep()
    plan = step.plan(WANT, facts(SERVING, GOOD), state())
    assert plan.state is PlanState.NOTHING
    assert IDENTITY.id in plan.reason
    for serving in (
        ServingFact(),
        ServingFact("another", "good", 1.0, {}, ""),
        ServingFact(IDENTITY.id, "good", 1.0, {}, "a short request failed: 503"),
        ServingFact(IDENTITY.id, "failed: x", 1.0, {}, "not asked"),
    ):
        assert step.plan(WANT, facts(SERVING, serving), state()).state is PlanState.CHANGES
    assert step.plan(WANT, facts(fact(), GOOD), state()).state is PlanState.UNKNOWN
    assert step.plan(WANT, Facts(), state()).state is PlanState.UNKNOWN
    assert step.gates_plan(WANT, facts(SERVING, GOOD)).state is PlanState.CHANGES
    assert step.gates_plan(WANT, facts(fact())).state is PlanState.BLOCKED


def test_apply_without_a_launch() -> None:
    made, _ = context(WANT, state(), FakeJobs())
    with pytest.raises(StepFailed, match="no launch runs"):
        VerifyStep().apply(made, facts(fact()), VerifyStep().plan(WANT, facts(fact()), state()))


@pytest.mark.parametrize("shell", SHELLS)
def test_the_light_probe_runs(shell: str, tmp_path: Path) -> None:
    folder = tmp_path / "server-qwen" / "l1"
    folder.mkdir(parents=True)
    (tmp_path / "server-qwen" / "current").symlink_to("l1")
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    want = deployment(engine={"venv": str(tmp_path / "venv")}, serve={"port": 1})
    script = light_script(want).replace(ROOT, str(tmp_path))
    transport = LocalTransport(shell_path(shell, tmp_path))

    def look() -> ServingFact:
        answer = transport.run(script)
        return parse_serving(ProbeOutput(answer.exit, answer.stdout, answer.stderr), "tiny")

    assert look() == ServingFact(problem="not asked")
    verdict = {"verdict": "good", "launch": "l1", "verified": 5.0, "figures": {"a": 1.0}}
    for name, text in {
        "verdict": json.dumps(verdict),
        "pid": "999999999",
        "start": "1",
        "session": "999999999",
        "boot": "0-0",
    }.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    assert look() == ServingFact("l1", "good", 5.0, {"a": 1.0}, "its process is gone")


def test_the_light_answers() -> None:
    good = {
        "do": "light",
        "ok": True,
        "alive": True,
        "owned": True,
        "models": {"status": 200, "ids": ["tiny"]},
        "completion": {"status": 200, "content": "Hello"},
    }

    def problem(**changes: Any) -> str:
        text = "job=l1\nverdict=\n" + json.dumps({**good, **changes})
        return parse_serving(ProbeOutput(0, text.encode(), b""), "tiny").problem

    assert problem() == ""
    assert "own its port" in problem(owned=False)
    assert "other" in problem(models={"status": 200, "ids": ["other"]})
    assert "503" in problem(completion={"status": 503})
    assert "empty" in problem(completion={"status": 200, "content": ""})
    assert parse_serving(ProbeOutput(124, b"", b"", True), "tiny").problem


def test_counting() -> None:
    assert counted_up_to("1, 2, 3, 4") == 4
    assert counted_up_to("From 1 to 100: 1 2 3 5") == 3
    assert counted_up_to("nothing") == 0
    assert len(long_prompt(4500).split()) >= 4500
