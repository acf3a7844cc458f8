from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gateworld import Model, ready
from serverworld import (
    IDENTITY,
    READY,
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
from deployer.model import Facts, PlanState, ProbeOutput
from deployer.remote.jobs import ROOT
from deployer.reverify import Reverify
from deployer.steps import launch_wait, verify, verify_gates
from deployer.steps.serving_fact import ServingFact, light_script, parse_serving
from deployer.steps.verify import VerifyStep
from tests.local_transport import SHELLS, LocalTransport, shell_path

WANT = deployment(gates={"burst": 6, "parallel": 3, "min_tokens": 40})
SERVING = fact(job=server_job(WANT), owners=(owner(),), listening=True)
GOOD = ServingFact(IDENTITY.id, "good", 1_796_000_000.0, {}, "")


def test_a_good_launch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _, guest, clock = ready(monkeypatch, Model())
    step, own, seen = VerifyStep(clock.now, clock.sleep), made.state, facts(SERVING, ServingFact())
    step.apply(made, seen, step.plan(WANT, seen, own))
    launch = own.launches[0]
    assert (launch.verdict, own.known_good) == ("good", IDENTITY.id)
    assert launch.figures["accept_rate"] == 0.5
    record = json.loads(guest.stdins[-1])
    assert (record["verdict"], record["launch"]) == ("good", IDENTITY.id)
    assert record["figures"]["ttft_s"] == 0.25


def test_a_bad_launch_is_recorded_and_verify_leaves_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(lambda request, reply: {**reply, "content": "!" * 400})
    made, _, guest, clock = ready(monkeypatch, model)
    judged = fact(job=server_job(WANT, verdict="{}"), owners=(owner(),), listening=True)
    step, seen = Reverify(clock.now, clock.sleep), facts(judged, GOOD)
    with pytest.raises(GateFailed) as caught:
        step.apply(made, seen, step.plan(WANT, seen, made.state))
    assert caught.value.exit_code == 5
    assert made.state.launches[0].verdict.startswith("failed: gate 'answers'")
    assert json.loads(guest.stdins[-1])["verdict"].startswith("failed")
    assert made.fake_jobs.stopped == []
    assert made.fake_jobs.started == []


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


class Loading:
    """`deploy verify` on a launch without a verdict whose log is `script`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
        self.gates: list[int] = []
        clock, jobs = Clock(), FakeJobs()
        jobs.running = script
        self.jobs, self.own = jobs, state()
        monkeypatch.setattr(launch_wait, "ask", lambda *words, **more: [self.answer(clock)])
        monkeypatch.setattr(
            verify_gates.Gates, "run", lambda gates: self.gates.append(int(clock.time)) or {}
        )
        self.guest = FakeTransport()
        self.context, _ = context(WANT, self.own, jobs, guest=self.guest)
        self.step = Reverify(clock.now, clock.sleep)
        self.seen = facts(fact(job=server_job(WANT)), ServingFact())

    def answer(self, clock: Clock) -> dict[str, Any]:
        return READY if clock.time > 1060 else {**READY, "owned": False, "listening": False}

    def verify(self) -> None:
        plan = self.step.plan(WANT, self.seen, self.own)
        assert "still loads and is waited for" in plan.reason
        self.step.apply(self.context, self.seen, plan)


def test_a_launch_that_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [b"[x] Load weight begin. a\n", *([b"."] * 50), b"[x] INFO: Uvicorn running on h\n"]
    loading = Loading(monkeypatch, Script(bars))
    loading.verify()
    assert loading.gates and loading.gates[0] > 1060
    assert loading.own.known_good == IDENTITY.id


def test_a_launch_that_dies_while_it_loads_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"[x] Load weight begin. a\nRuntimeError: Not enough memory. Please try to increase x\n"
    loading = Loading(monkeypatch, Script([text], -9, True))
    with pytest.raises(StepFailed, match="not-enough-memory") as caught:
        loading.verify()
    assert (caught.value.exit_code, caught.value.where) == (1, "kpro5/qwen verify")
    assert loading.gates == [] and loading.jobs.stopped == []
    assert loading.own == state()
    assert verify.WRITE_VERDICT not in loading.guest.scripts


def test_a_launch_that_hangs_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(monkeypatch, Script([b"[x TP0] Init torch distributed begin.\n"]))
    monkeypatch.setattr(loading, "answer", lambda clock: {**READY, "owned": False})
    with pytest.raises(StepFailed, match="it was left as it is"):
        loading.verify()
    assert loading.gates == [] and loading.jobs.stopped == [] and loading.own == state()
