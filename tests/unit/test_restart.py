"""`deploy restart`: what would refuse the new launch is known before the old one is stopped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from serverworld import (
    BOOT,
    IDENTITY,
    FakeJobs,
    FakeTransport,
    context,
    deployment,
    fact,
    facts,
    owner,
    server_job,
    state,
)
from test_launch_ladder import MTP, STORY, world

from deployer.errors import StepBlocked
from deployer.model import Facts, PlanState
from deployer.remote.transport import Answer
from deployer.restart import REASON, RestartLaunch, RestartStop, restart_steps
from deployer.steps.order import NAMES
from deployer.steps.server_facts import ServerJob
from deployer.steps.stop import StopStep

WANT = deployment(serve={"args": STORY})


def serving(job: ServerJob | None = None, **values: Any) -> dict[str, Any]:
    return {
        "job": job or server_job(WANT),
        "owners": (owner(),),
        "listening": True,
        **values,
    }


def test_the_steps_are_those_of_up() -> None:
    assert tuple(step.name for step in restart_steps()) == NAMES


def test_the_wanted_launch_is_stopped_once() -> None:
    stop = RestartStop()
    launch = RestartLaunch(stop)
    seen = world(**serving())
    plan = stop.plan(WANT, seen, state())
    assert (plan.state, plan.reason) == (PlanState.CHANGES, REASON)
    assert plan.changes[0].title.startswith(f"stop launch {IDENTITY.id}")
    assert launch.plan(WANT, seen, state()).state is PlanState.UNKNOWN
    gone = world()
    assert stop.plan(WANT, gone, state()).state is PlanState.NOTHING
    assert launch.plan(WANT, gone, state()).state is PlanState.CHANGES
    fresh = dataclasses.replace(server_job(WANT), identity=dataclasses.replace(IDENTITY, id="new"))
    after = world(**serving(fresh))
    assert stop.plan(WANT, after, state()).state is PlanState.NOTHING
    assert launch.plan(WANT, after, state()).state is PlanState.NOTHING


def test_without_a_server_it_is_up() -> None:
    stop = RestartStop()
    assert stop.plan(WANT, world(), state()).state is PlanState.NOTHING
    assert stop.plan(WANT, world(**serving()), state()).state is PlanState.NOTHING
    assert RestartStop().plan(WANT, Facts(), state()).state is PlanState.UNKNOWN
    assert RestartStop().plan(WANT, world(**serving()), state(None)).state is PlanState.UNKNOWN


def test_what_the_rules_refuse_is_not_stopped_for() -> None:
    want = deployment(serve={"args": STORY}, engine={"version": "0.5.9"})
    job = server_job(want)
    plan = RestartStop().plan(want, world(**serving(job, engine="0.5.9")), state())
    assert plan.state is PlanState.BLOCKED
    assert "0.5.10" in plan.fix


def test_nor_what_the_arithmetic_refuses() -> None:
    tiny = {**STORY, "mem-fraction-static": 0.3}
    want = deployment(serve={"args": tiny})
    for step, job in ((RestartStop(), server_job(want)), (StopStep(), server_job(WANT))):
        plan = step.plan(want, world(**serving(job)), state())
        assert plan.state is PlanState.BLOCKED
        assert "by SGLang's own arithmetic no variant will start" in plan.reason
        assert "mtp: " in plan.reason and "no-mtp: " in plan.reason
        assert "deploy down" in plan.fix
    # One variant that starts is enough, and without a server nothing is lost by trying.
    variants = [{"name": "mtp", "args": MTP}, {"name": "b", "args": {"mem-fraction-static": 0.88}}]
    better = deployment(serve={"args": tiny}, variants=variants)
    seen = world(**serving(server_job(better)))
    assert RestartStop().plan(better, seen, state()).state is PlanState.CHANGES
    idle = world(job=server_job(want, mark="old"))
    assert StopStep().plan(want, idle, state()).state is PlanState.CHANGES


def test_nor_what_the_parser_refuses() -> None:
    refusal = b"usage: sglang\nsglang: error: unrecognized arguments: --warp\n"
    guest = FakeTransport(lambda script: Answer(2, b"", refusal))
    jobs = FakeJobs()
    made, _ = context(WANT, state(), jobs, guest=guest)
    stop, seen = RestartStop(), world(**serving())
    with pytest.raises(StepBlocked) as caught:
        stop.apply(made, seen, stop.plan(WANT, seen, state()))
    assert "--warp" in caught.value.evidence[0]
    assert jobs.stopped == []


def test_a_stop_that_is_done() -> None:
    free = b"0000:21:00.0, 4\n0000:41:00.0, 4\n--\n++\n"
    host = FakeTransport(lambda script: Answer(0, free, b""))
    said = f"now_boot={BOOT}\nDEPLOYER_ARGV_ACCEPTED\n".encode()
    guest = FakeTransport(lambda script: Answer(0, said, b""))
    jobs = FakeJobs()
    made, events = context(WANT, state(), jobs, host=host, guest=guest)
    stop, seen = RestartStop(), world(**serving())
    stop.apply(made, seen, stop.plan(WANT, seen, state()))
    assert jobs.stopped == [IDENTITY.id]
    assert any("GPU memory back" in getattr(event, "text", "") for event in events)


def test_a_stranger_on_the_port_is_refused_as_ever() -> None:
    stranger = owner(77, "nginx: master")
    seen = facts(fact(owners=(stranger,), listening=True))
    plan = RestartStop().plan(WANT, seen, state())
    assert plan.state is PlanState.BLOCKED
    assert "pid 77" in plan.reason
