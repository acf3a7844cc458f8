"""The engine against scripted steps: order, refusal, proof after apply, selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.errors import StepBlocked, StepFailed, Unreachable
from deployer.events import Bus, Event, StepDone, StepPlanned
from deployer.model import Change, Facts, Plan, PlanState, Probe, Shell, Where
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext

WHOLE = Selection()
CHANGE = Change("do it", "it is missing", Shell(Where.HOST, "true"))


class World:
    """What the scripted steps change and look at."""

    def __init__(self, **done: bool) -> None:
        self.done = done
        self.looks = 0
        self.log: list[str] = []

    def gather(self) -> Facts:
        """A look: facts are the world as it is now."""
        self.looks += 1
        return Facts({dict: dict(self.done)})


def step(world: World, name: str, *, after: str = "", acts: bool = True, blocked: str = "") -> Step:
    """A step that is done when world.done[name]; it may depend on step `after`."""

    class Scripted(Step):
        def probes(self, want: Deployment) -> list[Probe]:
            return []

        def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
            done = facts.need(dict)
            if blocked:
                return Plan.blocked(blocked, "mend it", 1)
            if done[name]:
                return Plan.nothing(f"{name} is fine")
            if after and not done[after]:
                return Plan.unknown(after)
            return Plan.change(f"{name} is missing", CHANGE)

        def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
            world.log.append(name)
            world.done[name] = acts

    scripted = Scripted()
    scripted.name = name  # type: ignore[misc]
    return scripted


class _Host:
    host_name = "h"
    id = "h/d"
    vmid = 129


def engine(world: World, steps: list[Step], gather: Callable[[], Facts] | None = None) -> Any:
    seen: list[Event] = []
    made = Engine(
        cast("Deployment", _Host()),
        steps,
        gather or world.gather,
        {},
        state=DeploymentState(),
        save=lambda: None,
        bus=Bus(seen.append),
        run_id="r",
        environ={},
    )
    return made, seen


def run(
    world: World, steps: list[Step], selection: Selection = WHOLE
) -> tuple[Outcome, list[Event]]:
    made, seen = engine(world, steps)
    outcome, facts = made.plan()
    made.apply(outcome, facts, selection)
    return outcome, seen


def test_a_plan_looks_once_and_changes_nothing() -> None:
    world = World(a=False, b=False)
    made, seen = engine(world, [step(world, "a"), step(world, "b", after="a")])
    outcome, _ = made.plan()
    assert world.looks == 1
    assert world.log == []
    assert [plan.state for plan in outcome.plans.values()] == [
        PlanState.CHANGES,
        PlanState.UNKNOWN,
    ]
    assert outcome.pending
    assert [e.step for e in seen if isinstance(e, StepPlanned)] == ["a", "b"]


def test_unknown_steps_are_planned_again_at_their_turn() -> None:
    world = World(a=False, b=False)
    outcome, _ = run(world, [step(world, "a"), step(world, "b", after="a")])
    assert world.log == ["a", "b"]
    assert outcome.changed == ["a", "b"]


def test_a_no_op_run_looks_once() -> None:
    world = World(a=True, b=True)
    outcome, seen = run(world, [step(world, "a"), step(world, "b")])
    assert world.looks == 1
    assert not outcome.pending
    assert [(e.step, e.outcome) for e in seen if isinstance(e, StepDone)] == [
        ("a", "nothing"),
        ("b", "nothing"),
    ]


def test_a_step_that_still_has_changes_has_failed() -> None:
    world = World(a=False, b=False)
    with pytest.raises(StepFailed, match=r"still not as wanted"):
        run(world, [step(world, "a", acts=False), step(world, "b")])
    assert world.log == ["a"]


def test_a_blocked_step_stops_the_run_before_anything_later() -> None:
    world = World(a=False, b=False)
    with pytest.raises(StepBlocked) as caught:
        run(world, [step(world, "a", blocked="a VM holds it"), step(world, "b")])
    assert caught.value.fix == "mend it"
    assert world.log == []


def test_a_refusal_that_no_step_lifts_comes_before_any_change() -> None:
    world = World(a=False, b=False)
    held = step(world, "b", blocked="a VM holds it")
    with pytest.raises(StepBlocked):
        run(world, [step(world, "a"), held])
    assert world.log == ["a"]
    world = World(a=False, b=False)
    first = step(world, "b", blocked="a VM holds it")
    first.refuses_first = True  # type: ignore[misc]
    with pytest.raises(StepBlocked):
        run(world, [step(world, "a"), first])
    assert world.log == []
    run(world, [step(world, "a"), first], Selection(only="a"))
    assert world.log == ["a"]


def test_a_plan_that_stands_is_told_first_whoever_else_is_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(a=False, b=False, c=False)
    later = step(world, "c")
    stands = Plan.blocked("the driver is too old", "a newer one", stands=True)
    monkeypatch.setattr(later, "plan", lambda want, facts, state: stands)
    with pytest.raises(StepBlocked, match="too old"):
        run(world, [step(world, "a"), step(world, "b", blocked="a VM holds it"), later])
    assert world.log == []


def test_only_and_from_choose_the_acting_steps() -> None:
    world = World(a=False, b=False, c=False)
    steps = [step(world, name) for name in "abc"]
    run(world, steps, Selection(only="b"))
    assert world.log == ["b"]
    run(world, steps, Selection(first="c"))
    assert world.log == ["b", "c"]


def test_only_a_step_that_depends_on_an_undone_one_says_so() -> None:
    world = World(a=False, b=False)
    with pytest.raises(StepFailed, match="unknown until a has run"):
        run(world, [step(world, "a"), step(world, "b", after="a")], Selection(only="b"))


def test_a_guest_that_stays_silent_is_unreachable() -> None:
    world = World(a=True, b=False)
    facts = Facts({dict: {"a": False, "b": False}}, {Where.GUEST: "connection refused"})
    made, _ = engine(world, [step(world, "b", after="a")], lambda: facts)
    outcome, seen = made.plan()
    with pytest.raises(Unreachable, match="connection refused"):
        made.apply(outcome, seen and facts, Selection())


def test_a_failed_step_undoes_with_the_facts_it_acted_upon() -> None:
    world = World(a=False)
    one = step(world, "a", acts=False)

    def undo(context: StepContext, facts: Facts, plan: Plan, error: StepFailed) -> None:
        world.log.append(f"undo {facts.need(dict)['a']} {len(plan.changes)}")
        error.add("the host is as it was")

    one.undo = undo  # type: ignore[assignment, method-assign]
    with pytest.raises(StepFailed, match=r"still not as wanted.*; the host is as it was") as told:
        run(world, [one])
    assert told.value.what.endswith("; the host is as it was")
    assert world.log == ["a", "undo False 1"]


def test_a_step_that_is_refused_after_others_have_acted_may_bring_back_what_they_ended() -> None:
    world = World(a=False, b=False)
    one, two = step(world, "a"), step(world, "b", blocked="the port is taken")

    def refused(context: StepContext, changed: list[str], error: StepFailed) -> None:
        world.log.append(f"refused {context.step} {changed}")
        error.add("what served before serves again")

    two.refused = refused  # type: ignore[assignment, method-assign]
    with pytest.raises(StepFailed, match="the port is taken; what served before serves again"):
        run(world, [one, two])
    assert world.log == ["a", "refused b ['a']"]
