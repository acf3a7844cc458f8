"""What waits for a server's requests before another step than `stop` ends it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import serverworld as world

from deployer.steps import stop_drain
from deployer.steps.base import StepContext


def context(drain_s: float) -> StepContext:
    want = world.deployment()
    stop = want.playbook.stop.model_copy(update={"drain_s": drain_s})
    book = want.playbook.model_copy(update={"stop": stop})
    jobs = SimpleNamespace(poll=lambda job: SimpleNamespace(alive=job == world.IDENTITY))
    made = SimpleNamespace(want=dataclasses.replace(want, playbook=book), jobs=lambda where: jobs)
    return cast(StepContext, made)


def test_our_launch_is_waited_for_as_long_as_the_playbook_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def drain(context: Any, job: Any, limit_s: float, alive: Any, *clock: Any) -> str:
        asked.append((job, limit_s, alive()))
        return "drained"

    monkeypatch.setattr(stop_drain, "drain", drain)
    want = world.deployment()
    runs = world.facts(world.fact(job=world.server_job(want), owners=(world.owner(),)))
    assert stop_drain.empty(context(30.0), runs) == "drained"
    assert asked == [(world.IDENTITY, 30.0, True)]
    assert stop_drain.empty(context(0.0), runs) == ""
    assert stop_drain.empty(context(30.0), world.facts(world.fact())) == ""
    dead = dataclasses.replace(world.server_job(want), alive=False)
    assert stop_drain.empty(context(30.0), world.facts(world.fact(job=dead))) == ""
    assert len(asked) == 1
