"""A wish that has failed does not end a good server again, until it changes or is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from serverworld import (
    MANIFEST,
    READY,
    UP,
    Clock,
    FakeJobs,
    Script,
    context,
    deployment,
    fact,
    facts,
    owner,
    server_job,
    state,
)

from deployer.errors import RemoteCommandFailed, StepFailed
from deployer.model import Facts, Plan, PlanState
from deployer.restart import RestartStop
from deployer.state import DeploymentState, Launch
from deployer.steps import launch_wait
from deployer.steps.failed_want import (
    KEPT,
    failed_before,
    forget_failure,
    remember_failure,
    want_key,
)
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_restore import as_launched, command_of
from deployer.steps.order import all_steps
from deployer.steps.server_wanted import fingerprint
from deployer.steps.stop import StopStep
from deployer.steps.venv_facts import VenvFact

WANT = deployment()
OOM = (
    b"[x] Load weight begin. a\nRuntimeError: Not enough memory. Please try to increase "
    b"--mem-fraction-static.\n[x] Received sigquit from a child process.\n"
)


def known_good(own: DeploymentState, mark: str = "good") -> None:
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint=mark, argv=["py", "--old"])
    good.verdict = "stopped"
    own.launches.append(good)
    own.known_good = "old"


def serving(mark: str = "good") -> Facts:
    """Another launch than the wanted one serves."""
    return facts(fact(job=server_job(WANT, mark=mark), owners=(owner(),), listening=True))


def fail_to_launch(own: DeploymentState, *scripts: Script, memory_step: str = "never") -> FakeJobs:
    want = deployment(serve={"memory_step": memory_step})
    clock, jobs = Clock(), FakeJobs(list(scripts))
    step = LaunchStep(clock.now, clock.sleep)
    made, _ = context(want, own, jobs)
    seen = facts(fact())
    with pytest.raises(StepFailed):
        step.apply(made, seen, step.plan(want, seen, own))
    return jobs


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*words: Any, **more: Any) -> list[Any]:
        return [READY]

    monkeypatch.setattr(launch_wait, "ask", ask)


@pytest.mark.parametrize(
    "other",
    [
        deployment(gates={"burst": 3}),
        deployment("no-mtp"),
        deployment("mtp"),
        deployment(serve={"args": {"tp-size": 1}}),
        deployment(stop={"grace_s": 9}),
    ],
)
def test_any_change_of_the_wish_is_another(other: Any) -> None:
    own = state()
    remember_failure(own, WANT, "x", 1)
    assert failed_before(own, WANT) is not None
    assert failed_before(own, other) is None
    own.manifest = MANIFEST.model_copy(update={"commit": "beef"})
    assert failed_before(own, WANT) is None
    own.manifest = None
    assert want_key(WANT, None) == "" and failed_before(own, WANT) is None


def test_one_record_a_wish_and_not_too_many() -> None:
    own = state()
    for number in range(KEPT + 5):
        want = deployment(gates={"burst": 3 + number})
        remember_failure(own, want, f"first\n{number}", 1)
        remember_failure(own, want, f"second\n{number}", 5)
    assert len(own.failed) == KEPT
    assert own.failed[-1].cause == f"second {KEPT + 4}"
    forget_failure(own, deployment(gates={"burst": 3 + KEPT + 4}))
    assert len(own.failed) == KEPT - 1


@pytest.mark.parametrize("code", [1, 5])
def test_the_server_that_serves_is_left_alone(code: int) -> None:
    own = state()
    known_good(own)
    before: Plan = StopStep().plan(WANT, serving(), own)
    assert before.state is PlanState.CHANGES
    remember_failure(own, WANT, "gate 'quality' failed: it repeats", code)
    plan = StopStep().plan(WANT, serving(), own)
    assert (plan.state, plan.exit_code, plan.changes) == (PlanState.BLOCKED, code, ())
    assert "gate 'quality' failed: it repeats; known-good launch 2026" in plan.reason
    assert "serves and was left alone" in plan.reason
    assert "\n" not in plan.reason
    assert "--retry" in plan.fix and "change the playbook" in plan.fix
    assert "known-good" not in StopStep().plan(WANT, serving("another"), own).reason
    loading = facts(fact(job=server_job(WANT, mark="good")))
    assert "runs and was left alone" in StopStep().plan(WANT, loading, own).reason


def test_who_asks_for_it_gets_it() -> None:
    own = state()
    known_good(own)
    remember_failure(own, WANT, "x", 5)
    assert StopStep(retry=True).plan(WANT, serving(), own).state is PlanState.CHANGES
    assert RestartStop().plan(WANT, serving(), own).state is PlanState.CHANGES


def test_with_no_server_to_lose_it_is_tried_again() -> None:
    own = state()
    known_good(own)
    remember_failure(own, WANT, "x", 5)
    assert StopStep().plan(WANT, facts(fact()), own).state is PlanState.NOTHING
    dead = facts(fact(job=server_job(WANT, mark="good", alive=False)))
    assert StopStep().plan(WANT, dead, own).state is PlanState.NOTHING
    wanted = facts(fact(job=server_job(WANT), owners=(owner(),), listening=True))
    assert StopStep().plan(WANT, wanted, own).state is PlanState.NOTHING
    adopts = deployment(stop={"old_server": "adopt"})
    remember_failure(own, adopts, "x", 5)
    lost = facts(fact(job=server_job(adopts), owners=(owner(7),), listening=True))
    assert StopStep().plan(adopts, lost, own).state is PlanState.CHANGES


def test_a_failed_launch_is_remembered_once_the_ladder_is_down() -> None:
    own = state()
    known_good(own)
    jobs = fail_to_launch(own, *(Script([OOM], -9, True) for _ in "12"), Script(list(UP)))
    assert "exec py --old" in jobs.started[-1]["script"]
    want = deployment(serve={"memory_step": "never"})
    found = failed_before(own, want)
    assert found is not None
    assert (found.exit_code, found.variant) == (1, "mtp")
    assert found.cause.startswith("not-enough-memory: RuntimeError: Not enough memory.")
    again = StopStep().plan(want, serving(), own)
    assert (again.state, again.exit_code) == (PlanState.BLOCKED, 1)
    assert again.fix.startswith(f"change the playbook ({found.fix}); `deploy up") and found.fix


def test_a_job_that_cannot_begin_is_no_failure_of_the_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    own, clock, jobs = state(), Clock(), FakeJobs([Script(list(UP))])
    known_good(own)
    start = jobs.start

    def fails_once(*words: Any, **more: Any) -> Any:
        monkeypatch.setattr(jobs, "start", start)
        raise RemoteCommandFailed("cannot write below /var/lib/deployer", where="kpro5")

    monkeypatch.setattr(jobs, "start", fails_once)
    step = LaunchStep(clock.now, clock.sleep)
    made, _ = context(WANT, own, jobs)
    seen = facts(fact())
    with pytest.raises(StepFailed, match=r"cannot write .*; the last known-good arguments"):
        step.apply(made, seen, step.plan(WANT, seen, own))
    assert own.launches[-1].verdict == "ready" and own.failed == []


@pytest.mark.parametrize("variant", ["mtp", "no-mtp"])
def test_known_good_that_is_one_of_the_failed_rungs_is_not_started_again(variant: str) -> None:
    own = state()
    want = deployment(serve={"memory_step": "never"})
    known_good(own, fingerprint(want, MANIFEST, variant))
    jobs = fail_to_launch(own, *(Script([OOM], -9, True) for _ in "12"), Script(list(UP)))
    assert len(jobs.started) == 2


def test_known_good_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build, environment, port and name; the wish has changed all four."""
    old = deployment(serve={"env": {"NCCL_DEBUG": "INFO"}, "port": 30001})
    own, jobs, clock = state(), FakeJobs([Script(list(UP))]), Clock()
    step = LaunchStep(clock.now, clock.sleep)
    made, _ = context(old, own, jobs)
    seen = facts(fact(), VenvFact("link", "/opt/venvs/.qwen-aaaa"))
    step.apply(made, seen, step.plan(old, seen, own))
    good = own.launches[0]
    good.verdict, own.known_good = "stopped", good.id
    assert (good.env, good.venv) == ({"NCCL_DEBUG": "INFO"}, "/opt/venvs/.qwen-aaaa")

    want = deployment(
        serve={"env": {"NCCL_P2P_DISABLE": "1"}, "memory_step": "never"},
        model={"repo": "acme/tiny", "path": "/srv/models/tiny", "served_name": "other"},
    )
    asked: list[int] = []

    def ask(transport: object, asked_of: Any, *words: Any, **more: Any) -> list[Any]:
        asked.append(asked_of.port)
        return [READY]

    monkeypatch.setattr(launch_wait, "ask", ask)
    jobs = FakeJobs([*(Script([OOM], -9, True) for _ in "12"), Script(list(UP))])
    made, _ = context(want, own, jobs)
    seen = facts(fact(), VenvFact("link", "/opt/venvs/.qwen-bbbb"))
    step = LaunchStep(clock.now, clock.sleep)
    with pytest.raises(StepFailed, match=r"run again as launch .* at port 30001 as model tiny"):
        step.apply(made, seen, step.plan(want, seen, own))
    script = jobs.started[-1]["script"]
    assert "PATH=/opt/venvs/.qwen-aaaa/bin:" in script
    assert "exec /opt/venvs/.qwen-aaaa/bin/python -m sglang.launch_server" in script
    assert "NCCL_DEBUG=INFO" in script and "NCCL_P2P_DISABLE" not in script
    assert asked[-1] == 30001
    again = own.launches[-1]
    assert (again.verdict, again.fingerprint, again.env) == ("ready", good.fingerprint, good.env)
    assert "/opt/venvs/qwen/bin/python" in jobs.started[0]["script"]


def test_a_record_of_an_older_version_is_started_with_what_is_known() -> None:
    launch = Launch(id="l", variant="mtp", started=1.0, argv=["py", "--old"])
    want = deployment(serve={"env": {"A": "1"}})
    then = as_launched(want, launch)
    assert (then.port, then.playbook.serve.env) == (want.port, {"A": "1"})
    assert then.playbook.model.served_name == "tiny"
    assert command_of(launch) == ["py", "--old"]


@pytest.mark.parametrize("retry", [False, True])
def test_retry_reaches_the_stop_step(retry: bool) -> None:
    [stop] = [step for step in all_steps(retry=retry) if isinstance(step, StopStep)]
    assert stop.retry is retry
