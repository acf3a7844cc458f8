from __future__ import annotations

from typing import Any

import pytest
from serverworld import (
    IDENTITY,
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

from deployer.errors import (
    ConnectionLost,
    RemoteCommandFailed,
    StepBlocked,
    StepFailed,
    Unreachable,
)
from deployer.events import JobStarted, Progress
from deployer.model import Facts, PlanState
from deployer.remote.jobs import StopProof
from deployer.sglang.argv import API_KEY_ENV
from deployer.sglang.compat import Problem
from deployer.sglang.weights import Tensors
from deployer.state import Launch
from deployer.steps import launch as launch_module
from deployer.steps import launch_wait
from deployer.steps.known_good import remember
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_restore import other_weights
from deployer.steps.server_wanted import LaunchNote
from deployer.steps.weights_facts import WeightsFact

WANT = deployment()
OOM = (
    b"[x] Load weight begin. a\nRuntimeError: Not enough memory. Please try to increase "
    b"--mem-fraction-static.\n[x] Received sigquit from a child process.\n"
)


def agent(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> list[dict[str, Any]]:
    """The agent gives these answers, the last one for ever; returns what it was asked."""
    left, asked = list(answers), []

    def ask(transport: object, want: object, commands: list[Any], **more: Any) -> list[Any]:
        asked.append({**commands[0], **more})
        return [left.pop(0) if len(left) > 1 else left[0]]

    monkeypatch.setattr(launch_wait, "ask", ask)
    return asked


def step() -> LaunchStep:
    clock = Clock()
    return LaunchStep(clock.now, clock.sleep)


def test_plans() -> None:
    plan = step().plan
    assert plan(WANT, facts(fact()), state()).state is PlanState.CHANGES
    assert plan(WANT, Facts(), state()).state is PlanState.UNKNOWN
    assert plan(WANT, facts(fact(venv=False)), state()).reason.endswith("built the engine")
    assert plan(WANT, facts(fact(weights=False)), state()).state is PlanState.UNKNOWN
    assert plan(WANT, facts(fact()), state(None)).state is PlanState.UNKNOWN
    serving = fact(job=server_job(WANT), owners=(owner(),), listening=True)
    assert plan(WANT, facts(serving), state()).state is PlanState.NOTHING
    starting = plan(WANT, facts(fact(job=server_job(WANT))), state())
    assert starting.changes[0].title.startswith(f"wait for launch {IDENTITY.id}")
    other = fact(job=server_job(WANT, mark="old"), owners=(owner(),), listening=True)
    assert plan(WANT, facts(other), state()).state is PlanState.UNKNOWN


def test_the_plan_shows_what_is_run() -> None:
    change = step().plan(WANT, facts(fact()), state()).changes[0]
    assert "exec /opt/venvs/qwen/bin/python -m sglang.launch_server" in change.action.describe()
    assert "--speculative-algorithm NEXTN" in change.action.describe()


def test_what_cannot_work_is_refused_with_the_change_needed() -> None:
    want = deployment(engine={"version": "0.5.9"})
    plan = step().plan(want, facts(fact(engine="0.5.9")), state())
    assert plan.state is PlanState.BLOCKED
    assert "0.5.10" in plan.fix
    reserved = deployment(serve={"args": {"port": 1}})
    assert step().plan(reserved, facts(fact()), state()).exit_code == 2


def test_a_launch_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, {**READY, "health": 503}, READY)
    own, jobs = state(), FakeJobs([Script(list(UP))])
    made, events = context(WANT, own, jobs)
    seen = facts(fact())
    step().apply(made, seen, step().plan(WANT, seen, own))
    start = jobs.started[0]
    launch = own.launches[0]
    assert start["name"] == "server-qwen"
    assert start["id"] == launch.id
    assert start["files"]["fingerprint"].decode().strip() == launch.fingerprint
    assert LaunchNote.parse(start["files"]["launch"].decode()) == LaunchNote("mtp")
    assert start["secrets"] is None
    assert (launch.pid, launch.start, launch.verdict) == (4242, 1000, "ready")
    assert [event.what for event in events if isinstance(event, Progress)] == [
        "loading weights",
        "warming up",
    ]


def test_the_ladder_where_the_class_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, READY)
    own = state()
    jobs = FakeJobs([Script([OOM], -9, True), Script(list(UP))])
    made, _ = context(WANT, own, jobs)
    seen = facts(fact())
    step().apply(made, seen, step().plan(WANT, seen, own))
    assert [launch.verdict for launch in own.launches] == ["failed: not-enough-memory", "ready"]
    note = LaunchNote.parse(jobs.started[1]["files"]["launch"].decode())
    assert (note.variant, note.fell_from, note.changes) == ("no-mtp", ("mtp",), ())
    assert note.instead_of == {"mtp": "not-enough-memory"}
    assert note.degraded == "degraded: no-mtp runs in place of mtp (not-enough-memory)"
    assert own.launches[1].instead_of == note.instead_of
    assert jobs.stopped == [own.launches[0].id]


def test_no_ladder_where_it_would_hide_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, READY)
    text = b"usage: sglang serve\nsglang serve: error: unrecognized arguments: --enable-warp\n"
    jobs = FakeJobs([Script([text], 2, True)])
    made, _ = context(WANT, state(), jobs)
    seen = facts(fact())
    with pytest.raises(StepFailed) as caught:
        step().apply(made, seen, step().plan(WANT, seen, state()))
    assert "bad-arguments" in caught.value.what
    assert "exit code 2" in caught.value.what
    assert "--enable-warp" in caught.value.evidence[-1]
    assert "serve.args" in caught.value.fix


def test_died_before_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, READY)
    made, _ = context(WANT, state(), FakeJobs([Script([], 3, True)]))
    seen = facts(fact())
    with pytest.raises(StepFailed, match="died-silent"):
        step().apply(made, seen, step().plan(WANT, seen, state()))


def test_known_good_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, READY)
    own = state()
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
    good.verdict = "stopped"
    own.launches.append(good)
    own.known_good = "old"
    jobs = FakeJobs([Script([], 3, True), Script(list(UP))])
    made, events = context(WANT, own, jobs)
    seen = facts(fact())
    with pytest.raises(StepFailed, match="the last known-good arguments"):
        step().apply(made, seen, step().plan(WANT, seen, own))
    assert "exec py --old" in jobs.started[1]["script"]
    assert own.launches[-1].verdict == "ready"
    assert any("gates were not run again" in getattr(event, "text", "") for event in events)


def test_a_known_good_launch_whose_weights_were_replaced_is_told_so() -> None:
    """The same folder has another commit by now; what passed was not this."""
    own = state()
    assert own.manifest is not None
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", verdict="stopped")
    good.argv = ["py", "--model-path", WANT.playbook.model.path]
    assert other_weights(WANT, own, good) == ""
    remember(own, WANT, good)
    assert other_weights(WANT, own, good) == ""
    own.manifest = own.manifest.model_copy(update={"commit": "beef"})
    told = other_weights(WANT, own, good)
    assert (
        "passed with the weights acme/tiny@c0ffee, and /srv/models/tiny has acme/tiny@beef" in told
    )
    assert "`deploy rollback kpro5/qwen old` brings those back" in told
    good.argv[2] = "/srv/models/other"
    assert other_weights(WANT, own, good) == ""


def test_known_good_is_started_again_when_the_rest_of_the_ladder_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    known = launch_module.problems_of
    problem = Problem("no", "this rung cannot work here", "another one", "seen")
    monkeypatch.setattr(
        launch_module,
        "problems_of",
        lambda want, fact, variant: (
            [problem] if variant == "no-mtp" else known(want, fact, variant)
        ),
    )
    own = state()
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
    good.verdict = "stopped"
    own.launches.append(good)
    own.known_good = "old"
    made, _ = context(WANT, own, FakeJobs([Script([OOM], -9, True), Script(list(UP))]))
    seen = facts(fact())
    with pytest.raises(StepFailed) as caught:
        step().apply(made, seen, step().plan(WANT, seen, own))
    assert "not-enough-memory" in caught.value.what
    assert "the last known-good arguments" in caught.value.what


def test_a_restore_that_cannot_start_does_not_hide_the_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    own = state()
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
    good.verdict = "stopped"
    own.launches.append(good)
    own.known_good = "old"
    jobs = FakeJobs([Script([], 3, True)])
    start = jobs.start

    def start_once(*words: Any, **more: Any) -> Any:
        if jobs.started:
            raise RemoteCommandFailed("no space left")
        return start(*words, **more)

    monkeypatch.setattr(jobs, "start", start_once)
    made, _ = context(WANT, own, jobs)
    seen = facts(fact())
    with pytest.raises(
        StepFailed, match=r"died-silent.*did not start again either.*no space"
    ) as it:
        step().apply(made, seen, step().plan(WANT, seen, own))
    assert "deploy rollback" not in it.value.what
    good.recipe = "known"
    jobs.started.clear()
    jobs.scripts[:] = [Script([], 3, True)]
    with pytest.raises(StepFailed, match=r"`deploy rollback kpro5/qwen old` brings its build"):
        step().apply(made, seen, step().plan(WANT, seen, own))


def test_what_was_stopped_for_a_launch_that_cannot_be_tried_serves_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between stop and launch another process has taken the port, or the weights are gone."""
    agent(monkeypatch, READY)
    for changed, verdict, again in (
        (["venv", "stop"], "stopped", True),
        (["venv"], "stopped", False),
        (["stop"], "failed: died", False),
    ):
        own = state()
        good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
        good.verdict, own.known_good = verdict, "old"
        own.launches.append(good)
        jobs = FakeJobs([Script(list(UP))])
        made, _ = context(WANT, own, jobs)
        error = StepBlocked("the port is taken")
        step().refused(made, changed, error)
        assert ("run again as launch" in error.what) is again
        assert len(jobs.started) == again
    # Not even that can be asked for: the refusal is still what is told.
    keyed = deployment(serve={"api_key_env": "KEY"})
    made, _ = context(keyed, own, FakeJobs())
    step().refused(made, ["stop"], error)
    assert "the port is taken; and what served before was not started again: the env" in error.what


def test_a_lost_port_ends_the_wait_although_the_process_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    text = b"[x] ERROR:    [Errno 98] error while attempting to bind: address already in use\n"
    jobs = FakeJobs([Script([text])])
    made, _ = context(WANT, state(), jobs)
    seen = facts(fact())
    with pytest.raises(StepFailed, match="port-in-use"):
        step().apply(made, seen, step().plan(WANT, seen, state()))
    assert len(jobs.stopped) == 1


def test_a_port_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, {**READY, "owned": False, "owners": [{"pid": 9, "title": "nginx"}]})
    made, _ = context(WANT, state(), FakeJobs([Script(list(UP))]))
    seen = facts(fact())
    with pytest.raises(StepFailed, match="pid 9: nginx"):
        step().apply(made, seen, step().plan(WANT, seen, state()))


@pytest.mark.parametrize(
    ("serve", "cls"),
    [({"silence_timeout_s": 50}, "silent"), ({"ready_timeout_s": 40}, "not-ready-in-time")],
)
def test_deadlines(monkeypatch: pytest.MonkeyPatch, serve: dict[str, Any], cls: str) -> None:
    agent(monkeypatch, {**READY, "health": 503})
    want = deployment("no-mtp", serve={"args": {}, **serve})
    made, _ = context(want, state(), FakeJobs([Script(list(UP))]))
    seen = facts(fact())
    with pytest.raises(StepFailed, match=cls):
        step().apply(made, seen, step().plan(want, seen, state()))


def test_a_starting_launch_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = agent(monkeypatch, READY)
    own = state()
    jobs = FakeJobs(running=Script(list(UP)))
    made, events = context(WANT, own, jobs)
    seen = facts(fact(job=server_job(WANT)))
    step().apply(made, seen, step().plan(WANT, seen, own))
    assert jobs.started == []
    assert own.launches[0].id == IDENTITY.id
    assert [event.attached for event in events if isinstance(event, JobStarted)] == [True]
    assert asked[0]["session"] == IDENTITY.session


def test_a_cut_connection_during_the_wait_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, READY)
    jobs = FakeJobs([Script(list(UP))])
    poll, cuts = jobs.poll, [Unreachable("refused"), ConnectionLost("cut")]

    def cut_poll(job: Any, **more: Any) -> Any:
        if cuts:
            raise cuts.pop()
        return poll(job, **more)

    monkeypatch.setattr(jobs, "poll", cut_poll)
    own = state()
    made, _ = context(WANT, own, jobs)
    seen = facts(fact())
    step().apply(made, seen, step().plan(WANT, seen, own))
    assert own.launches[0].verdict == "ready"


def test_the_key_goes_as_a_secret_and_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    agent(monkeypatch, READY)
    want = deployment(serve={"api_key_env": "QWEN_KEY"})
    text = b"ValueError: bad key s3cret-key\n"
    jobs = FakeJobs([Script([text], 1, True)])
    own = state()
    made, events = context(want, own, jobs, environ={"QWEN_KEY": "s3cret-key"})
    seen = facts(fact())
    with pytest.raises(StepFailed) as caught:
        step().apply(made, seen, step().plan(want, seen, own))
    assert jobs.started[0]["secrets"] == {API_KEY_ENV: "s3cret-key"}
    told = [caught.value.what, *caught.value.evidence, str(events), own.model_dump_json()]
    assert not any("s3cret-key" in text for text in told)
    assert "s3cret-key" not in jobs.started[0]["script"]
    made, _ = context(want, own, FakeJobs())
    with pytest.raises(StepFailed, match="QWEN_KEY"):
        step().apply(made, seen, step().plan(want, seen, own))


def test_what_a_dead_launch_left_running_ends_before_the_next() -> None:
    """Also where the stop step does not act (--from launch): its workers hold the GPUs."""
    left = fact(job=server_job(WANT, alive=False, members=(4243,)))
    plan = step().plan(WANT, facts(left), state())
    assert (plan.state, plan.reason) == (
        PlanState.UNKNOWN,
        "unknown until stop has ended the other launch",
    )


def test_a_lost_connection_during_the_restore_does_not_hide_the_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    own = state()
    good = Launch(id="old", variant="mtp", started=1.0, fingerprint="f", argv=["py", "--old"])
    good.verdict = "stopped"
    own.launches.append(good)
    own.known_good = "old"
    jobs = FakeJobs([Script([], 3, True)])
    start = jobs.start

    def start_once(*words: Any, **more: Any) -> Any:
        if jobs.started:
            raise ConnectionLost("the connection is lost", where="kpro5")
        return start(*words, **more)

    monkeypatch.setattr(jobs, "start", start_once)
    made, _ = context(WANT, own, jobs)
    seen = facts(fact())
    with pytest.raises(StepFailed, match=r"died-silent.*did not start again either.*is lost"):
        step().apply(made, seen, step().plan(WANT, seen, own))


def test_the_known_good_launch_is_not_forgotten_for_many_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    own = state()
    for number in range(60):
        own.launches.append(Launch(id=f"n{number}", variant="mtp", started=1.0, verdict="failed"))
    own.known_good = "n3"
    made, _ = context(WANT, own, FakeJobs([Script(list(UP))]))
    seen = facts(fact())
    step().apply(made, seen, step().plan(WANT, seen, own))
    assert [one.id for one in own.launches[:2]] == ["n3", "n11"]
    assert own.launches[-1].verdict == "ready"
    assert len(own.launches) == 51


def test_what_left_the_session_of_a_dead_launch_is_ended_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    seen = facts(fact(job=server_job(WANT, alive=False)))
    jobs = FakeJobs([Script(list(UP))])
    made, _ = context(WANT, state(), jobs)
    step().apply(made, seen, step().plan(WANT, seen, made.state))
    assert (jobs.stopped, len(jobs.started)) == ([IDENTITY.id], 1)

    stuck = FakeJobs(proof=StopProof(False, ("pid 4300 python (marked, state D)",), "KILL"))
    made, _ = context(WANT, state(), stuck)
    with pytest.raises(StepFailed, match="could not be stopped"):
        step().apply(made, seen, step().plan(WANT, seen, made.state))
    assert stuck.started == []


@pytest.mark.parametrize(("failures", "survived"), [(4, True), (5, False)])
def test_an_agent_that_fails_for_a_while_does_not_end_the_wait(
    monkeypatch: pytest.MonkeyPatch, failures: int, survived: bool
) -> None:
    asked: list[Any] = []

    def ask(*words: Any, **more: Any) -> list[Any]:
        asked.append(words)
        if len(asked) <= failures:
            raise StepFailed("the agent on kpro5 ended with exit code 137")
        return [READY]

    monkeypatch.setattr(launch_wait, "ask", ask)
    jobs = FakeJobs([Script(list(UP))])
    made, _ = context(WANT, state(), jobs)
    seen = facts(fact())
    if survived:
        step().apply(made, seen, step().plan(WANT, seen, made.state))
        assert made.state.launches[-1].verdict == "ready"
    else:
        with pytest.raises(StepFailed, match="exit code 137"):
            step().apply(made, seen, step().plan(WANT, seen, made.state))
    assert jobs.stopped == []


def test_what_was_seen_of_the_weights_is_kept_with_the_launch_and_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent(monkeypatch, READY)
    own, jobs = state(), FakeJobs([Script(list(UP))])
    made, _ = context(WANT, own, jobs)
    one, seen = step(), facts(fact(), WeightsFact(Tensors({}), line='{"signature": "s"}'))
    assert "signature" not in one.probes(WANT)[0].script.partition("agent=")[0]
    one.apply(made, seen, one.plan(WANT, seen, own))
    assert jobs.started[0]["files"]["weights"] == b'{"signature": "s"}\n'
    assert """known='{"signature": "s"}'""" in one.probes(WANT)[0].script
