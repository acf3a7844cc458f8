"""A whole run on several hosts: locks, one failure, a refusal, a dry run, one commit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from nodesworld import HOSTS, PLAIN, RANKS
from serverworld import MANIFEST, fact, facts, owner, server_job, state

from deployer import multinode_node, multinode_work
from deployer.deployment import Deployment
from deployer.engine import Outcome
from deployer.errors import LockHeld, NotStarted, StepBlocked, StepFailed
from deployer.events import Bus
from deployer.fleet import exit_code
from deployer.locallock import LocalLock
from deployer.model import Change, Facts, Plan, Probe, Procedure, Where
from deployer.multinode import up_nodes
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_node import NodeStop
from deployer.rollout import Rollout
from deployer.state import DeploymentState, HostState, RolledBack
from deployer.state_file import StateFile
from deployer.steps.base import Step, StepContext
from deployer.steps.launch import LaunchStep
from deployer.steps.stop import StopStep
from deployer.steps.verify import VerifyStep
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult


class Session:
    """The double of HostSession: facts by host, and who was asked what."""

    facts: ClassVar[dict[str, Facts]] = {}
    told: ClassVar[list[str]] = []

    def __init__(self, host: str, *words: Any) -> None:
        self.host = host
        self.locks = False

    def transports(self, want: Deployment) -> dict[Any, Any]:
        return {}

    def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
        self.told.append(f"look {self.host}{' locked' if self.locks else ''}")
        return self.facts[self.host]

    def want_lock(self, run_id: str) -> None:
        self.locks = True

    def entered(self, step: str) -> None:
        self.told.append(f"{step} {self.host}")

    def wake(self) -> None:
        """Nothing to close."""

    def close(self, on_problem: object) -> None:
        self.told.append(f"close {self.host}")


class Prepares(Step):
    """Has something to do until it ran; fails on `fails`."""

    name = "driver"
    fails = ""
    blocked = False

    def __init__(self) -> None:
        self.done = False

    def probes(self, want: Deployment) -> list[Probe]:
        return []

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        if self.blocked and want.host_name == self.fails:
            return Plan.blocked("no such driver", "another one", stands=True)
        if self.done:
            return Plan.nothing("as wanted")
        return Plan.change("work", Change("work", "work", Procedure(Where.HOST, "work")))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        if context.want.host_name == self.fails:
            raise StepFailed("no room", where=context.want.id)
        self.done = True


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[DeploymentResult]]:
    monkeypatch.setattr(multinode_node, "HostSession", Session)
    monkeypatch.setattr(Session, "told", [])
    monkeypatch.setattr(Session, "facts", dict.fromkeys(HOSTS, facts(fact())))
    monkeypatch.setattr(Prepares, "fails", "")
    monkeypatch.setattr(Prepares, "blocked", False)

    def run(**more: Any) -> list[DeploymentResult]:
        options = UpOptions(
            base=tmp_path / "inventory",
            steps=lambda: [Prepares(), StopStep(), LaunchStep(), VerifyStep()],
            environ={},
            **more,
        )
        # Rank order is not name order.
        wants = [dataclasses.replace(RANKS[1 - rank], node=RANKS[rank].node) for rank in (0, 1)]
        return up_nodes(wants, options, Bus())

    return run


def saved(tmp_path: Path, **parts: DeploymentState) -> None:
    for host, own in parts.items():
        StateFile(tmp_path / ".deploy" / "state", host).save(
            HostState(host=host, deployments={"qwen": own})
        )


Up = Callable[..., list[DeploymentResult]]


def test_one_nodes_failure_is_told_with_it_and_nothing_is_launched(up: Up) -> None:
    Prepares.fails = "kpro5"
    first, second = up()
    assert isinstance(second.error, StepFailed) and second.error.what == "no room"
    assert isinstance(first.error, NotStarted) and "kpro5/qwen failed" in first.error.what
    assert exit_code([first.error, second.error]) == 1
    # Prepared at once, and locked in name order before.
    told = Session.told
    assert told.index("look kpro5 locked") < told.index("look kpro6 locked")
    assert {"driver kpro5", "driver kpro6"} <= set(told)
    assert not any(one.startswith(("stop", "launch")) for one in told)
    assert sorted(told[-2:]) == ["close kpro5", "close kpro6"]


def test_a_refusal_that_stands_comes_before_any_change(up: Up) -> None:
    Prepares.fails, Prepares.blocked = "kpro5", True
    first, second = up()
    assert isinstance(second.error, StepBlocked) and "no such driver" in second.error.what
    assert isinstance(first.error, NotStarted)
    assert not any(one.startswith("driver") for one in Session.told)


def test_a_dry_run_and_a_no_leave_all_as_it_is(up: Up, tmp_path: Path) -> None:
    results = up(dry_run=True)
    assert [list(one.outcome.plans) for one in results if one.outcome is not None] == [
        ["driver", "stop", "launch", "verify"],
        ["driver", "stop", "launch"],
    ]
    assert list(tmp_path.iterdir()) == []
    asked: list[str] = []

    def no(want: Deployment, outcome: Outcome) -> bool:
        asked.append(want.id)
        return False

    results = up(confirm=no)
    assert [one.declined for one in results] == [True, True] and asked == ["kpro6/qwen"]
    assert not any("locked" in one for one in Session.told)


def test_a_held_lock_is_told_for_all(up: Up, tmp_path: Path) -> None:
    lock = LocalLock(tmp_path / ".deploy", "kpro6", command="deploy up kpro6", run_id="r")
    with lock:
        results = up()
    assert [type(one.error) for one in results] == [LockHeld, LockHeld]
    assert Session.told == []
    for host in HOSTS:
        [record] = (tmp_path / ".deploy" / "runs").glob(f"*-{host}.jsonl")
        assert '"exit_code": 4' in record.read_text().splitlines()[-1]


def test_all_nodes_load_the_commit_of_rank_0(up: Up, tmp_path: Path) -> None:
    other = MANIFEST.model_copy(update={"commit": "beef"})
    saved(tmp_path, kpro5=state(other), kpro6=state())
    Prepares.fails = "kpro5"
    up()
    for host in HOSTS:
        own = StateFile(tmp_path / ".deploy" / "state", host).load().deployments["qwen"]
        assert own.manifest is not None and own.manifest.commit == MANIFEST.commit


def test_a_rollback_that_was_cut_off_does_not_keep_its_weights(up: Up, tmp_path: Path) -> None:
    other = MANIFEST.model_copy(update={"commit": "beef"})
    parts = {}
    for host in HOSTS:
        own = state(other)
        own.rollback = RolledBack(
            to="l1", mark="m", left="l2", wish="w", commits=["beef"], when=1.0, manifest=MANIFEST
        )
        parts[host] = own
    saved(tmp_path, **parts)
    Prepares.fails = "kpro5"
    up()
    for host in HOSTS:
        own = StateFile(tmp_path / ".deploy" / "state", host).load().deployments["qwen"]
        assert own.manifest is not None and own.manifest.commit == MANIFEST.commit


def test_a_server_of_nodes_counts_among_the_failures(up: Up) -> None:
    """--max-failures: its failure holds others up, and theirs holds it up, before any change."""
    wants = [dataclasses.replace(RANKS[1 - rank], node=RANKS[rank].node) for rank in (0, 1)]
    other = dataclasses.replace(PLAIN, host_name="kpro7")
    Prepares.fails = "kpro5"
    rollout = Rollout([other, wants[0]], max_failures=1)
    up(rollout=rollout)
    assert rollout.refusal("kpro7") is not None
    rollout = Rollout([other, wants[0]], max_failures=1)
    rollout.ended(other.id, StepFailed("no"), acted=True)
    Session.told.clear()
    results = up(rollout=rollout)
    assert [type(one.error) for one in results] == [NotStarted, NotStarted]
    assert "kpro7 failed, and --max-failures is 1" in str(results[0].error)
    assert not any("locked" in one or "driver" in one for one in Session.told)


@pytest.mark.parametrize("survives", [False, True])
def test_a_stop_that_fails_brings_back_what_it_ended_on_all(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: bool
) -> None:
    """Unless a part of it lives on: then there is nothing to bring back to."""
    saved(tmp_path, kpro5=state(), kpro6=state())
    jobs = {
        want.host_name: dataclasses.replace(server_job(want), fingerprint="other") for want in RANKS
    }
    held = {"owners": (owner(),), "listening": True}
    monkeypatch.setattr(
        Session, "facts", {host: facts(fact(job=job, **held)) for host, job in jobs.items()}
    )
    monkeypatch.setattr(multinode_work, "meet", lambda nodes: None)
    monkeypatch.setattr(Prepares, "apply", lambda self, *words: setattr(self, "done", True))
    ended: list[str] = []

    def stops(self: Any, context: Any, *words: Any) -> None:
        host = context.want.host_name
        if host == "kpro6" or not survives:
            Session.facts[host] = facts(fact())
        ended.append(host)
        if host == "kpro5":
            raise StepFailed("GPU memory did not come back", where=host)

    monkeypatch.setattr(NodeStop, "apply", stops)
    monkeypatch.setattr(NodesLaunch, "restore", lambda *words: "it serves again")
    results = up()
    assert ended == ["kpro6", "kpro5"], "rank 0 first"
    assert isinstance(results[0].error, NotStarted)
    told = str(results[1].error)
    assert told.startswith("kpro5: GPU memory did not come back")
    assert told.endswith("; it serves again") is not survives
