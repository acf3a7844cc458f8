"""One launch on several hosts: when it is whole, whose words are the cause, what is restored."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from nodesworld import ALONE, HOSTS, LOST, OWN, PLAIN, RANKS, Jobs, World, died, good, serving
from serverworld import (
    IDENTITY,
    READY,
    UP,
    FakeJobs,
    Script,
    context,
    fact,
    facts,
    server_job,
    state,
)

from deployer import multinode_launch
from deployer.cancel import Cancel
from deployer.deployment import Node
from deployer.errors import RemoteCommandFailed, StepFailed, Unreachable
from deployer.model import Facts, PlanState
from deployer.multinode_follower import Follower, job_of, marked, only_misses_a_peer
from deployer.multinode_node import NodeStop
from deployer.multinode_threads import raise_first, together
from deployer.remote.jobs import StopProof
from deployer.sglang.derive import Seen
from deployer.sglang.failure import Failure
from deployer.steps import launch_wait
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_wait import LaunchFailed
from deployer.steps.server_facts import ServerJob
from deployer.steps.server_wanted import LaunchNote, Rung, is_wanted


def test_all_get_one_id_and_are_ready_together(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    pruned: list[int] = []
    monkeypatch.setattr(
        Jobs, "prune", lambda self, name, keep: pruned.append(world.jobs.index(self)) or ()
    )
    world.run()
    assert sorted(pruned) == [0, 1], "old launches' folders go on every node"
    [mine], [theirs] = (jobs.started for jobs in world.jobs)
    assert mine["id"] == theirs["id"]
    assert "--node-rank 0" in mine["script"] and "--node-rank 1" in theirs["script"]
    assert [own.launches[-1].verdict for own in world.owns] == ["ready", "ready"]


@pytest.mark.parametrize(
    ("mine", "theirs", "cause"),
    [
        (Script([b"a\n"] * 90), died(OWN), f"rank 1 on kpro6: {OWN}"),
        (died(LOST), died("b", "c", OWN), f"rank 1 on kpro6: {OWN}"),
        (died("a", "b", "c", "d", OWN), died(LOST), OWN),
        (died(OWN), Script([b"a\n"]), OWN),
        (died(LOST), died("b", LOST), LOST),
    ],
)
def test_the_cause_is_the_nodes_own(
    monkeypatch: pytest.MonkeyPatch, mine: Script, theirs: Script, cause: str
) -> None:
    world = World(monkeypatch, mine, theirs)
    with pytest.raises(StepFailed) as caught:
        world.run()
    assert cause in caught.value.what, caught.value.what
    assert [len(jobs.stopped) for jobs in world.jobs] == [1, 1]
    assert all(own.launches[-1].verdict.startswith("failed") for own in world.owns)


def test_a_half_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([]), Script([*UP]))

    def refuses(*words: Any, **more: Any) -> Any:
        raise RemoteCommandFailed("no room")

    monkeypatch.setattr(world.jobs[0], "start", refuses)
    with pytest.raises(StepFailed, match="no room"):
        world.run()
    assert len(world.jobs[1].stopped) == 1


def test_each_node_is_ended_whatever_another_says(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, died(OWN), Script([*UP]))
    world.jobs[1].proof = StopProof(False, ("pid 9 in D",), "KILL")
    with pytest.raises(StepFailed, match=r"kpro6/qwen launch: launch .* could not be ended"):
        world.run()
    assert [len(jobs.stopped) for jobs in world.jobs] == [1, 1]


def test_a_follower_out_of_reach_for_long_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([b"a\n"] * 900), Script([]))
    gone = Unreachable("no route")

    def lost(*words: Any, **more: Any) -> Any:
        raise gone

    monkeypatch.setattr(world.jobs[1], "poll", lost)
    with pytest.raises(Unreachable, match="no route"):
        world.run()
    # Both live on: the next run joins them.
    assert [jobs.stopped for jobs in world.jobs] == [[], []]
    assert world.clock.time >= 1000 + launch_wait.LOST_S


def test_a_follower_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    monkeypatch.setattr(
        launch_wait, "ask", lambda t, want, c, **m: [{"ok": True} if want.follows else READY]
    )
    with pytest.raises(StepFailed, match="rank 1 on kpro6: it does not listen on port 30000"):
        world.run()
    assert world.clock.time >= 1000 + multinode_launch.LISTEN_S


def test_a_follower_whose_port_is_taken_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        b"[2026-11-30 19:14:32] Dummy health check server started in background thread at "
        b"0.0.0.0:30000\n[2026-11-30 19:14:32] [Errno 98] error while attempting to bind on "
        b"address ('0.0.0.0', 30000): address already in use\n"
    )
    world = World(monkeypatch, Script([*UP]), Script([*UP, said]))
    monkeypatch.setattr(
        launch_wait, "ask", lambda t, want, c, **m: [{"ok": True} if want.follows else READY]
    )
    with pytest.raises(StepFailed, match=r"rank 1 on kpro6: .Errno 98. error while") as caught:
        world.run()
    assert "serve.port" in caught.value.fix
    assert world.clock.time < 1000 + multinode_launch.LISTEN_S


def test_a_stranger_on_a_followers_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    held = {"ok": True, "alive": True, "listening": True, "owned": False, "members": []}
    held["owners"] = [{"pid": 77, "title": "nginx: master"}]
    monkeypatch.setattr(
        launch_wait, "ask", lambda t, want, c, **m: [held if want.follows else READY]
    )
    with pytest.raises(StepFailed, match="rank 1 on kpro6: port 30000 is held by pid 77: nginx"):
        world.run()
    assert world.clock.time < 1000 + multinode_launch.LISTEN_S


def test_what_served_is_started_again_on_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*ALONE, "--nnodes", "2"]
    for parts in (1, 2):
        world = World(monkeypatch, died(OWN), Script([b"a\n"]))
        for rank, own in enumerate(world.owns[:parts]):
            good(own, [*argv, "--node-rank", str(rank)])
        for jobs in world.jobs:
            jobs.scripts.append(Script([*UP]))
        with pytest.raises(StepFailed) as caught:
            world.run()
        if parts == 1:
            assert "kpro6/qwen has no record of its part" in caught.value.what
            assert [len(jobs.started) for jobs in world.jobs] == [1, 1]
        else:
            assert "(launch old) run again" in caught.value.what
            mine, theirs = (jobs.started[-1]["id"] for jobs in world.jobs)
            assert mine == theirs
            assert [own.launches[-1].verdict for own in world.owns] == ["ready", "ready"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_of_its_own_that_a_node_had_serves_again(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The first launch of all fails: what one host served alone before is not lost for it."""
    world = World(monkeypatch, died(OWN), Script([b"a\n"]))
    good(world.owns[rank], ALONE)
    for jobs in world.jobs:
        jobs.scripts.append(Script([*UP]))
    monkeypatch.setattr(LaunchStep, "adopted_again", lambda *words: "")
    with pytest.raises(StepFailed) as caught:
        world.run()
    assert caught.value.what.endswith("its gates were not run again")
    assert "(launch old) run again" in caught.value.what
    started = [len(jobs.started) for jobs in world.jobs]
    assert started == ([2, 1] if rank == 0 else [1, 2])
    assert "--nnodes" not in world.jobs[rank].started[-1]["script"]
    assert world.owns[rank].launches[-1].verdict == "ready"


def test_a_follower_that_is_lost_at_the_start_leaves_no_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    third = dataclasses.replace(RANKS[1], host_name="kpro7", node=Node(2, HOSTS, "x:1"))
    lost = Follower(context(third, state(), FakeJobs([]))[0], LaunchStep(), facts(fact()))

    def dark(*words: Any) -> None:
        raise Unreachable("dark", where="kpro7")

    monkeypatch.setattr(lost, "start", dark)
    world.step.followers = [world.follower, lost]
    with pytest.raises(Unreachable, match="dark"):
        world.run()
    assert [len(jobs.started) for jobs in world.jobs] == [0, 1]
    assert len(world.jobs[1].stopped) == 1


@pytest.mark.parametrize(
    ("mine", "theirs", "expected", "reason"),
    [
        (serving(RANKS[0]), serving(RANKS[1]), PlanState.NOTHING, "alive on kpro5, kpro6"),
        (serving(RANKS[0]), serving(RANKS[1], "x"), PlanState.UNKNOWN, "on kpro5, kpro6"),
        (serving(RANKS[0]), facts(fact()), PlanState.UNKNOWN, "what runs on kpro5"),
        (facts(fact()), serving(RANKS[1]), PlanState.UNKNOWN, "what runs on kpro6"),
        (facts(fact()), facts(fact()), PlanState.CHANGES, "no server runs"),
        (facts(fact()), facts(fact(venv=False)), PlanState.UNKNOWN, "kpro6: unknown until venv"),
        (
            serving(RANKS[0], listens=False),
            serving(RANKS[1], listens=False),
            PlanState.CHANGES,
            "still starting",
        ),
        (serving(RANKS[0]), serving(RANKS[1], listens=False), PlanState.CHANGES, "still starting"),
    ],
)
def test_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, mine: Facts, theirs: Facts, expected: PlanState, reason: str
) -> None:
    world = World(monkeypatch, Script([]), Script([]))
    world.follower.facts = theirs
    plan = world.step.plan(RANKS[0], mine, world.owns[0])
    assert plan.state is expected and reason in plan.reason, plan.reason


def test_what_starts_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([]), Script([]))
    for jobs in world.jobs:
        jobs.running = Script([*UP])
    seen = serving(RANKS[0], listens=False)
    world.follower.facts = serving(RANKS[1], listens=False)
    world.step.apply(world.contexts[0], seen, world.step.plan(RANKS[0], seen, world.owns[0]))
    assert [jobs.started for jobs in world.jobs] == [[], []]
    assert [own.launches[-1].id for own in world.owns] == [IDENTITY.id, IDENTITY.id]


def test_a_part_is_stopped_for_a_launch_of_all() -> None:
    stop, seen = NodeStop(), serving(RANKS[1])
    assert stop.plan(RANKS[1], seen, state()).state is PlanState.NOTHING
    stop.reason = "its nodes start and end together, and none runs on kpro5"
    plan = stop.plan(RANKS[1], seen, state())
    assert plan.state is PlanState.CHANGES and plan.reason == stop.reason
    assert stop.plan(RANKS[1], facts(fact()), state()).state is PlanState.NOTHING


def test_the_marks_of_a_note_are_each_nodes_own() -> None:
    manifest = state().manifest
    marks = (Rung("mtp").fingerprint(RANKS[0], manifest), "derived")
    note = LaunchNote("no-mtp", ("mtp", "mtp~mem-0.02"), ("oom", "oom"), marks)
    mark = Rung("no-mtp").fingerprint(RANKS[1], manifest)
    assert not is_wanted(RANKS[1], manifest, mark, note)
    own = marked(RANKS[1], manifest, note)
    assert is_wanted(RANKS[1], manifest, mark, own)
    assert own.marks[1] == ""


def test_all_are_tried_and_the_first_error_names_the_others() -> None:
    done: list[str] = []

    def fails() -> None:
        raise StepFailed("no", where="kpro5")

    def breaks() -> None:
        raise KeyError("x")

    works = {"kpro5": fails, "kpro6": lambda: done.append("kpro6"), "kpro7": breaks}
    errors = together(works, Cancel())
    assert done == ["kpro6"] and list(errors) == ["kpro5", "kpro7"]
    with pytest.raises(StepFailed, match=r"no; besides: .*KeyError"):
        raise_first(errors)
    raise_first({})
    job: ServerJob = server_job(RANKS[0])
    assert job_of(facts(fact(job=job))) == job
    own = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local"
    taken = LaunchFailed(Failure("x", own, "", False), 1, "distributed", (), Seen(None, None))
    assert not only_misses_a_peer(taken)
    for words in (
        "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
        'Failed to check the "should dump" flag on TCPStore, (maybe it has shut down too early)',
        "[/gloo/transport/tcp/pair.cc:799] connect [10.0.0.5]:33421: Connection refused",
    ):
        gone = LaunchFailed(Failure("x", words, "", False), 1, "ready", (), Seen(None, None))
        assert only_misses_a_peer(gone), words
    loop = "[/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:33421: Connection refused"
    own_name = LaunchFailed(Failure("x", loop, "", False), 1, "ready", (), Seen(None, None))
    assert not only_misses_a_peer(own_name)
    lost = LaunchFailed(Failure("x", LOST, "", False), 1, "weights", (), Seen(None, None))
    assert only_misses_a_peer(lost)


def test_a_part_of_what_ran_on_several_nodes_is_not_started_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`nodes` was taken out of the playbook, and the new server fails."""
    own, jobs = state(), Jobs([])
    good(own, [*ALONE, "--nnodes", "2", "--node-rank", "0"])
    monkeypatch.setattr(LaunchStep, "adopted_again", lambda *words: "")
    said = LaunchStep().restore(context(PLAIN, own, jobs)[0], "", ())
    assert "old was rank 0 of 2 nodes, and was not started again as a server of its own" in said
    assert jobs.started == []
