"""One server on several hosts: what is refused, when it is whole, whose words are the cause."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from serverworld import (
    BOOT,
    IDENTITY,
    MANIFEST,
    READY,
    UP,
    Clock,
    Context,
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

from deployer import kept_wish, multinode_launch, multinode_node, multinode_reverify
from deployer.cancel import Cancel
from deployer.catalog import Catalog
from deployer.cli.options import Options
from deployer.cli.status import _model
from deployer.cli.up import _by_server, _units
from deployer.crosscheck_nodes import ranks_of_a_node, refuse_nodes
from deployer.deployment import Deployment, Node
from deployer.engine import Outcome
from deployer.errors import (
    DocumentError,
    GateFailed,
    LockHeld,
    NotStarted,
    RemoteCommandFailed,
    StepBlocked,
    StepFailed,
    Unreachable,
    UsageError,
)
from deployer.events import Bus
from deployer.fleet import by_host, exit_code
from deployer.kept import Kept
from deployer.locallock import LocalLock
from deployer.model import Change, Facts, Plan, PlanState, Probe, Procedure, Where
from deployer.multinode import up_nodes
from deployer.multinode_back import NodesBack
from deployer.multinode_follower import Follower, job_of, marked, only_misses_a_peer
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_meet import KNOCK, LISTEN, heard, verdict
from deployer.multinode_node import NodeStop, node_steps
from deployer.multinode_threads import raise_first, together
from deployer.multinode_told import Failed
from deployer.multinode_verify import NodesVerify
from deployer.observe import deployment_document
from deployer.recipe import recipe_of
from deployer.remote.jobs import JobStatus, StopProof
from deployer.remote.transport import Answer
from deployer.restart import restart_steps
from deployer.reverify import verify_steps
from deployer.rollback import RollBack, then
from deployer.rollback_choice import unfit
from deployer.rollout import Rollout
from deployer.sglang.argv import command, server_argv
from deployer.sglang.derive import Seen
from deployer.sglang.failure import Failure
from deployer.state import DeploymentState, HostState, Launch, RolledBack
from deployer.state_file import StateFile
from deployer.steps import launch_wait
from deployer.steps.base import Step, StepContext
from deployer.steps.failed_want import failed_before
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_wait import LaunchFailed
from deployer.steps.rolled_back import wish_key
from deployer.steps.server_facts import ServerFact, ServerJob
from deployer.steps.server_wanted import LaunchNote, Rung, is_wanted
from deployer.steps.serving_fact import ServingFact, light_problem
from deployer.steps.stop import StopStep
from deployer.steps.verify import VerifyStep
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult

HOSTS = ("kpro5", "kpro6")
INVENTORY = """\
hosts:
  kpro5:
    ssh: {address: 192.0.2.5}
    gpus: [{address: "0000:21:00.0"}, {address: "0000:41:00.0"}]
    containers: {129: {ssh: {address: 192.0.2.129}}}
    deployments:
      big: {container: 129, playbook: big}
  kpro6:
    ssh: {address: 192.0.2.6}
    gpus: [{address: "0000:21:00.0"}, {address: "0000:41:00.0"}]
    deployments:
      big: {playbook: big}
      own: {playbook: own}
"""
PLAYBOOK = """\
model: {repo: acme/big, path: /srv/big, served_name: big}
driver: {version: 580.126.09}
engine: {version: 0.5.11, lock: lock.txt, venv: /opt/v}
serve: {port: 30100, args: {tp-size: 4}}
variants: [{name: fast}, {name: slow}]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "inventory").mkdir()
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "inventory" / "a.yaml").write_text(INVENTORY)
    (tmp_path / "playbooks" / "big.yaml").write_text(f"nodes: [kpro6, kpro5]\n{PLAYBOOK}")
    (tmp_path / "playbooks" / "own.yaml").write_text(PLAYBOOK.replace("30100", "30200"))
    (tmp_path / "playbooks" / "lock.txt").write_text("sglang==0.5.11\n")
    return tmp_path


def select(tree: Path, *words: str, **more: Any) -> list[Deployment]:
    return Catalog.load(tree / "inventory").select(list(words), **more)


def replaced(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_one_node_means_all_in_rank_order(tree: Path) -> None:
    for word in ("kpro5", "kpro5/big", "kpro6/big"):
        assert [want.id for want in select(tree, word)] == ["kpro6/big", "kpro5/big"]
    alone, servers = _by_server(select(tree, "kpro6"))
    assert [want.id for want in alone] == ["kpro6/own"]
    assert [[want.id for want in one] for one in servers] == [["kpro6/big", "kpro5/big"]]
    assert [want.id for want in select(tree, "kpro5/big", whole=False)] == ["kpro5/big"]
    with pytest.raises(UsageError, match="without kpro5/big"):
        select(tree, all_=True, limit=["!kpro5"])
    with pytest.raises(UsageError, match="migrate is not for a server of several nodes") as caught:
        refuse_nodes(select(tree, "kpro5/big"), "migrate")
    assert "`deploy down kpro6/big`" in caught.value.fix
    refuse_nodes(select(tree, "kpro6/own"), "migrate")


def test_a_server_waits_for_its_own_hosts_alone(tree: Path) -> None:
    alone, servers = _by_server(select(tree, "kpro6"))
    units, after = _units(by_host(alone), servers)
    assert {name: [w.id for w in wants] for name, wants in units.items()} == {
        "kpro6": ["kpro6/own"],
        "kpro6+kpro5/big": ["kpro6/big", "kpro5/big"],
    }
    assert after == {"kpro6+kpro5/big": ["kpro6"]}
    other = [dataclasses.replace(want, host_name=f"x{want.host_name}") for want in servers[0]]
    _, after = _units(by_host(alone), [*servers, other, servers[0]])
    assert list(after.values())[1] == [], "other hosts: nothing to wait for"


def test_each_node_is_told_its_place(tree: Path) -> None:
    first, second = select(tree, "kpro5/big")
    assert (first.follows, second.follows) == (False, True)
    flags = "--nnodes 2 --node-rank {} --dist-init-addr 192.0.2.6:20000"
    for rank, want in enumerate((first, second)):
        assert flags.format(rank) in " ".join(server_argv(want))
    replaced(
        tree, "inventory/a.yaml", "{playbook: big}", "{playbook: big, node_address: 'fd00::6'}"
    )
    assert select(tree, "kpro5")[0].serve_args()["dist-init-addr"] == "[fd00::6]:20000"
    [own] = select(tree, "kpro6/own")
    assert own.node is None and "nnodes" not in own.serve_args()


@pytest.mark.parametrize(
    ("file", "old", "new", "what"),
    [
        ("playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5]", "expected at least two hosts, found 1"),
        ("playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5, kpro5]", "kpro5 is listed twice"),
        ("playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5, kpro7]", "no host `kpro7`"),
        ("playbooks/big.yaml", "tp-size: 4", "tp-size: 3", "is 3, which 2 nodes cannot share"),
        ("playbooks/big.yaml", "name: slow", "name: slow, args: {tp-size: 5}", "is 5, which"),
        ("playbooks/big.yaml", "tp-size: 4", "tp: 1", "is 1, which 2 nodes cannot share"),
        (
            "playbooks/big.yaml",
            "tp-size: 4",
            "tp-size: 2, pp-size: 3",
            "tp-size is 2 and pp-size 3, which 2 nodes cannot share",
        ),
        ("playbooks/big.yaml", "tp-size: 4", "tp-size: 4, dp-size: 2", "with enable-dp-attention"),
        (
            "inventory/a.yaml",
            ', {address: "0000:41:00.0"}',
            "",
            "kpro5/big has 1 GPU, and 2 of the 4 ranks run on each of the 2 nodes",
        ),
        ("playbooks/big.yaml", "name: slow", "name: slow, args: {tp-size: false}", "is 1, which"),
        ("playbooks/big.yaml", "tp-size: 4", "tp-size: 4, pp-size: 0", "and pp-size 0, which"),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, node_address: '192.0.2.6:20000'}",
            "node_address: 192.0.2.6:20000 is no address: a port has no place in it",
        ),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, node_address: '[::]'}",
            "is none that another machine can reach",
        ),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, node_address: 'fe80::1%eth0'}",
            "has a zone",
        ),
        ("playbooks/big.yaml", "tp-size: 4", "nnodes: 2", "serve.args.nnodes: `nodes` sets it"),
        (
            "playbooks/big.yaml",
            "name: slow",
            "name: slow, args: {nccl-init-addr: 'a:1'}",
            "`nodes` sets it",
        ),
        ("playbooks/big.yaml", "30100", "20003", "port 20003 of the server is one of 20000 to"),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, port: 20005}",
            "port 20005 of the server is one of",
        ),
        ("inventory/a.yaml", "      big: {playbook: big}\n", "", "`kpro6` has no deployment `big`"),
        ("inventory/a.yaml", "{playbook: big}", "{playbook: own}", "`kpro6` has no deployment"),
        ("inventory/a.yaml", "{playbook: big}", "{playbook: big, variant: slow}", "two variants"),
        (
            "inventory/a.yaml",
            "{playbook: big}",
            "{playbook: big, replica: {router: {url: 'http://r'}}}",
            "which are no replicas",
        ),
        ("inventory/a.yaml", "own: {playbook: own}", "own: {playbook: big}", "no deployment `own`"),
    ],
)
def test_what_does_not_fit(tree: Path, file: str, old: str, new: str, what: str) -> None:
    replaced(tree, file, old, new)
    with pytest.raises(DocumentError) as caught:
        select(tree, "kpro5", "kpro6")
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("tp", "pp", "nodes", "ranks"),
    [
        (4, 1, 2, 2),
        (4, 2, 2, 4),
        (2, 4, 2, 4),
        (8, 2, 4, 4),
        (1, 2, 2, 1),
        (1, 1, 2, None),
        (2, 3, 2, None),
        (3, 2, 4, None),
        (2, 2, 3, None),
        (6, 1, 4, None),
    ],
)
def test_ranks_come_out_even_or_not(tp: int, pp: int, nodes: int, ranks: int | None) -> None:
    assert ranks_of_a_node(tp, pp, nodes) == ranks


def test_a_host_that_is_no_node(tree: Path) -> None:
    replaced(
        tree,
        "inventory/a.yaml",
        "hosts:\n",
        "hosts:\n  kpro4:\n    ssh: {address: a}\n"
        "    gpus: [{address: '0000:21:00.0'}]\n    deployments: {big: {playbook: big}}\n",
    )
    with pytest.raises(DocumentError, match="is for the nodes kpro6, kpro5"):
        select(tree, "kpro4")


def test_a_container_behind_pct_has_no_known_address(tree: Path) -> None:
    replaced(tree, "playbooks/big.yaml", "[kpro6, kpro5]", "[kpro5, kpro6]")
    replaced(tree, "inventory/a.yaml", "129: {ssh: {address: 192.0.2.129}}", "129: {}")
    with pytest.raises(DocumentError, match="how the others reach its container is not known"):
        select(tree, "kpro5")
    replaced(tree, "inventory/a.yaml", "container: 129,", "container: 129, node_address: ct,")
    assert select(tree, "kpro5")[1].serve_args()["dist-init-addr"] == "ct:20000"


# ---- the launch of all

PLAIN = deployment(nodes=list(HOSTS), serve={"args": {"tp-size": 4}})
RANKS = [
    dataclasses.replace(PLAIN, host_name=host, node=Node(rank, HOSTS, "192.0.2.5:20000"))
    for rank, host in enumerate(HOSTS)
]


class Jobs(FakeJobs):
    """Whose poll gives the end of the log again when asked from the start."""

    text = b""

    def poll(self, job: Any, *, inode: int = 0, offset: int = 0) -> JobStatus:
        status = super().poll(job, inode=inode, offset=min(offset, len(self.text)))
        self.text += status.log
        return dataclasses.replace(status, log=self.text[offset:], offset=len(self.text))


class World:
    """Rank 0 with its step, and one follower; both have the double of Jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mine: Script, theirs: Script) -> None:
        self.clock = Clock()
        self.owns = [state(), state()]
        self.jobs = [Jobs([mine]), Jobs([theirs])]
        self.contexts: list[Context] = [
            context(want, own, jobs)[0]
            for want, own, jobs in zip(RANKS, self.owns, self.jobs, strict=True)
        ]
        self.follower = Follower(
            self.contexts[1], LaunchStep(self.clock.now, self.clock.sleep), facts(fact())
        )
        self.step = NodesLaunch([self.follower], Cancel(), self.clock.now, self.clock.sleep)
        monkeypatch.setattr(launch_wait, "ask", self.ask)

    def ask(self, transport: Any, want: Deployment, commands: Any, **more: Any) -> Any:
        if want.follows:
            return [{**READY, "models": {"status": 404, "ids": [], "error": ""}}]
        return [READY]

    def run(self) -> None:
        seen = facts(fact())
        plan = self.step.plan(RANKS[0], seen, self.owns[0])
        assert plan.state is PlanState.CHANGES, plan.reason
        self.step.apply(self.contexts[0], seen, plan)


def died(*lines: str, code: int = 1) -> Script:
    return Script([f"{line}\n".encode() for line in lines], code, dies=True)


def test_all_get_one_id_and_are_ready_together(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    world.run()
    [mine], [theirs] = (jobs.started for jobs in world.jobs)
    assert mine["id"] == theirs["id"]
    assert "--node-rank 0" in mine["script"] and "--node-rank 1" in theirs["script"]
    assert [own.launches[-1].verdict for own in world.owns] == ["ready", "ready"]


LOST = "RuntimeError: [/gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:1"
OWN = "ValueError: the flux capacitor is cold"


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
    said = b"Dummy health check server failed to start: [Errno 98] Address already in use\n"
    world = World(monkeypatch, Script([*UP]), Script([*UP, said]))
    monkeypatch.setattr(
        launch_wait, "ask", lambda t, want, c, **m: [{"ok": True} if want.follows else READY]
    )
    with pytest.raises(StepFailed, match=r"rank 1 on kpro6: Dummy .*: .Errno 98. Addr") as caught:
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


ALONE = ["/opt/venvs/qwen/bin/python", "-m", "sglang.launch_server", "--port", "30000"]


def good(own: DeploymentState, argv: list[str]) -> None:
    own.launches = [
        Launch(id="old", variant="x", started=1.0, fingerprint="f", argv=argv, verdict="stopped")
    ]
    own.known_good = "old"


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


def serving(want: Deployment, launch: str = IDENTITY.id, *, listens: bool = True) -> Facts:
    job = server_job(want)
    job = dataclasses.replace(job, identity=dataclasses.replace(IDENTITY, id=launch))
    there: dict[str, Any] = {"owners": (owner(),), "listening": True} if listens else {}
    return facts(fact(job=job, **there))


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


def test_one_verdict_is_every_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    world.run()
    launch = world.owns[0].launches[-1].id
    wrote: list[tuple[str, str]] = []
    record = VerifyStep._record

    def seen(self: Any, made: Any, *words: Any, **more: Any) -> None:
        wrote.append((made.want.host_name, words[0]))
        record(self, made, *words, **more)

    monkeypatch.setattr(VerifyStep, "_record", seen)
    verify = NodesVerify(world.step)
    verify._record(world.contexts[0], launch, "good", {"tps": 1.0}, required=True)
    # Rank 0 last: killed before it, the gates run again.
    assert wrote == [("kpro6", launch), ("kpro5", launch)]
    assert [own.known_good for own in world.owns] == [launch, launch]
    assert [own.launches[-1].verdict for own in world.owns] == ["good", "good"]


GATE = GateFailed("it repeats itself", where="kpro5/qwen verify", fix="look", evidence=("e",))


@pytest.mark.parametrize(
    ("rule", "known", "told", "stopped"),
    [
        ("restore", True, "the last known-good arguments (launch old) run again", 1),
        ("stop", False, "was stopped (gates.on_failure: stop)", 1),
        ("restore", False, "is left as it is", 0),
        ("leave", True, "it repeats itself", 0),
    ],
)
def test_after_a_failed_gate(
    monkeypatch: pytest.MonkeyPatch, rule: str, known: bool, told: str, stopped: int
) -> None:
    world = World(monkeypatch, Script([*UP]), Script([*UP]))
    argv = [*ALONE, "--nnodes", "2"]
    said = f"now_boot={BOOT}\n".encode()
    gpus = b"0000:21:00.0, 4\n0000:41:00.0, 4\n--\n++\n"
    for made in (*world.contexts, world.follower.context):
        gates = made.want.playbook.gates.model_copy(update={"on_failure": rule})
        playbook = made.want.playbook.model_copy(update={"gates": gates})
        made.want = dataclasses.replace(made.want, playbook=playbook)
        made.transports = {
            Where.HOST: FakeTransport(lambda script: Answer(0, gpus, b"")),
            Where.GUEST: FakeTransport(lambda script: Answer(0, said, b"")),
        }
        if known:
            rank = made.want.node.rank if made.want.node is not None else 0
            good(made.state, [*argv, "--node-rank", str(rank)])
    ends = rule == "leave"
    world.jobs[1].running = Script([], 1, dies=ends)
    seen = serving(world.contexts[0].want)
    world.follower.facts = serving(world.contexts[1].want)
    world.contexts[0].reprobe = lambda: seen

    def fails(self: Any, *words: Any) -> None:
        raise GATE

    monkeypatch.setattr(VerifyStep, "apply", fails)
    verify = NodesVerify(world.step, world.clock.now, world.clock.sleep)
    with pytest.raises(GateFailed) as caught:
        verify.apply(world.contexts[0], seen, Plan.nothing(""))
    assert told in caught.value.what and caught.value.evidence == ("e",)
    assert ("rank 1 on kpro6 had ended by then" in caught.value.what) is ends
    assert [len(jobs.stopped) for jobs in world.jobs] == [stopped, stopped]
    assert failed_before(world.owns[0], world.contexts[0].want) is not None


def test_a_follower_need_only_own_its_port() -> None:
    answer = {"ok": True, "alive": True, "owned": True, "models": {"status": 404, "ids": []}}
    assert light_problem(answer, "") == ""
    assert "/v1/models" in light_problem(answer, "tiny")
    assert light_problem({**answer, "owned": False}, "") == "it does not own its port"


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


# ---- a whole run


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


# ---- where they meet


class Met:
    """A node as `verdict` looks at it."""

    def __init__(self, want: Deployment, seen: Facts) -> None:
        self.want, self.host, self.facts = want, want.host_name, seen


@pytest.mark.parametrize(
    ("mine", "theirs", "runs", "host", "told"),
    [
        ("listened", "met", False, "", ""),
        ("taken 98", "open", True, "", ""),
        ("taken 98", "lost refused", False, "kpro5", "20000, is taken on rank 0 (98)"),
        ("taken 98", "lost timed out", True, "kpro6", "is not reached at 192.0.2.5:20000: timed"),
        ("listened", "lost No route to host", False, "kpro6", "No route to host; nothing was"),
        ("listened", "open", False, "kpro6", "answers something else than rank 0 on kpro5"),
        ("", "lost refused", False, "kpro6", "not reached"),
        ("listened", "", False, "", ""),
    ],
)
def test_whether_nodes_can_meet(mine: str, theirs: str, runs: bool, host: str, told: str) -> None:
    nodes: Any = [Met(RANKS[0], serving(RANKS[0]) if runs else facts(fact()))]
    nodes.append(Met(RANKS[1], facts(fact())))
    said = {
        name: heard(Answer(0, f"noise\n{word}\n".encode(), b"no python3"))
        for name, word in zip(HOSTS, (mine, theirs), strict=True)
    }
    problems = verdict(nodes, said)
    assert list(problems) == ([host] if host else [])
    assert not host or told in problems[host].what, problems[host].what


def test_a_knock_is_heard_and_what_is_in_its_place_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        listen = [sys.executable, "-I", "-c", LISTEN]
        knock = [sys.executable, "-I", "-c", KNOCK]

        def run(*words: str) -> str:
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout

        # Its own loopback is taken by another server, which says nothing.
        assert run(*listen, port, "1", "1", "w").startswith("taken ")
        assert run(*knock, "127.0.0.1", port, "1", "w") == "open\n"
    assert run(*knock, "127.0.0.1", port, "0.1", "w").startswith("lost ")
    assert "lost" in run(*knock, "no-such-host.invalid", port, "1", "w")
    server = subprocess.Popen([*listen, port, "5", "1", "w"], stdout=subprocess.PIPE, text=True)
    assert run(*knock, "127.0.0.1", port, "5", "w") == "met\n"
    assert server.communicate(timeout=5)[0] == "listened\n"


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


def test_status_says_who_answers() -> None:
    documents = [deployment_document(want, facts(fact()), state()) for want in RANKS]
    assert [one["node"] for one in documents] == [
        {"rank": rank, "of": 2, "answers": "kpro5/qwen"} for rank in (0, 1)
    ]
    assert _model({**documents[0], "endpoint": "http://a/v1"}) == (
        "tiny at http://a/v1 (rank 0 of 2 nodes)"
    )
    assert _model({**documents[1], "endpoint": ""}) == (
        "tiny, which kpro5/qwen answers (rank 1 of 2 nodes)"
    )


@pytest.mark.parametrize("verdict_", ["good", "failed: it repeats itself", ""])
def test_what_verify_says_is_every_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict_: str
) -> None:
    """Rank 0 is judged; a rank that was not judged is told as such, and keeps what it had."""
    launch = Launch(id=IDENTITY.id, variant="mtp", started=1.0, argv=["x"], verdict="good")
    for host in HOSTS:
        own = state()
        own.launches, own.known_good = [launch.model_copy()], launch.id
        StateFile(tmp_path / ".deploy" / "state", host).save(
            HostState(host=host, deployments={"qwen": own})
        )
    asked: list[list[str]] = []

    def up_host(host: str, wants: Any, options: UpOptions, bus: Bus) -> list[DeploymentResult]:
        [want], [step] = wants, options.steps()
        asked.append([host, type(step).__name__])
        file = StateFile(tmp_path / ".deploy" / "state", host)
        saved_ = file.load()
        own = saved_.deployments["qwen"]
        error: Any = None
        if isinstance(step, multinode_reverify.VerdictOfRank0):
            seen = Facts(
                {
                    **serving(want).values,
                    ServingFact: ServingFact(IDENTITY.id, "good", 1.0, {}, ""),
                }
            )
            plan = step.plan(want, seen, own)
            assert plan.state is (PlanState.NOTHING if verdict_ == "good" else PlanState.CHANGES)
            made = context(want, own, FakeJobs([]))[0]
            made.transports = {
                Where.GUEST: FakeTransport(lambda script: Answer(0, b"", b"")),
                Where.HOST: FakeTransport(lambda script: Answer(0, b"", b"")),
            }
            step.apply(made, seen, plan)
            assert step.plan(want, seen, own).state is PlanState.NOTHING
            assert step.plan(want, serving(want, "x"), own).state is not PlanState.NOTHING
            ended = fact(job=dataclasses.replace(server_job(want), alive=False))
            dead = Facts({**seen.values, ServerFact: ended})
            assert "has ended here" in step.plan(want, dead, own).reason
        elif verdict_:
            own.launches[-1].verdict, own.launches[-1].verified = verdict_, time.time()
            error = None if verdict_ == "good" else GATE
        else:
            error = Unreachable("dark")
        file.save(saved_)
        return [DeploymentResult(want.id, error=error)]

    monkeypatch.setattr(multinode_reverify, "up_host", up_host)
    options = UpOptions(base=tmp_path / "inventory", steps=verify_steps, environ={})
    results = multinode_reverify.verify_nodes(RANKS, options, Bus())
    assert [one.id for one in results] == ["kpro5/qwen", "kpro6/qwen"]
    assert asked[0] == ["kpro5", "Reverify"] and len(asked) == (2 if verdict_ else 1)
    if not verdict_:
        assert isinstance(results[1].error, NotStarted)
    owns = [
        StateFile(tmp_path / ".deploy" / "state", host).load().deployments["qwen"] for host in HOSTS
    ]
    assert [own.launches[-1].verdict for own in owns] == [verdict_ or "good"] * 2


def test_a_look_may_leave_one_node_out(tree: Path) -> None:
    options = Options(tree / "inventory", False, False, False, False, None, limit=("kpro5",))
    assert [want.id for want in options.select((), True, looks=True)] == ["kpro5/big"]
    with pytest.raises(UsageError, match="without kpro6/big"):
        options.select((), True)


# ---- going back


class Going:
    """A node as NodesBack.seen and failed look at it."""

    def __init__(self, want: Deployment, own: DeploymentState, seen: Facts) -> None:
        self.want, self.host, self.own, self.facts = want, want.host_name, own, seen
        self.saved = 0

    def save(self) -> None:
        self.saved += 1


def going_back(tmp_path: Path, *seen: Facts) -> tuple[NodesBack, list[Any]]:
    """Both have a launch `old` of variant no-mtp to go to, and what `seen` shows alive."""
    kept, parts, nodes = Kept(tmp_path / "kept"), [], list[Any]()
    for now, look in zip(RANKS, seen, strict=True):
        old = dataclasses.replace(now, variant="no-mtp")
        recipe = recipe_of(old, MANIFEST)
        argv = command(old, server_argv(old))
        part = Launch(
            id="old",
            variant="no-mtp",
            started=1.0,
            argv=argv,
            recipe=kept.add(recipe, old.lock_text),
            fingerprint=Rung("no-mtp").fingerprint(old, MANIFEST),
        )
        own = state()
        own.launches.append(part)
        parts.append(RollBack(now, part, recipe, kept, lambda: 7.0))
        nodes.append(Going(then(now, recipe, old.lock_text, part), own, look))
    back = NodesBack(parts)
    back.begin(nodes)
    return back, nodes


@pytest.mark.parametrize(
    ("mine", "theirs", "left"),
    [
        (serving(RANKS[0]), serving(RANKS[1]), IDENTITY.id),
        (serving(RANKS[0]), facts(fact()), ""),
        (serving(RANKS[0]), serving(RANKS[1], "x"), ""),
        (facts(fact()), facts(fact()), ""),
    ],
)
def test_what_served_before_is_one_launch_of_all(
    tmp_path: Path, mine: Facts, theirs: Facts, left: str
) -> None:
    back, nodes = going_back(tmp_path, mine, theirs)
    back.seen(nodes)
    assert [node.own.rollback.left for node in nodes] == [left, left]
    assert [node.own.rollback.mark for node in nodes] == [
        node.own.launches[0].fingerprint for node in nodes
    ], "the same command, rank and meeting place"
    # Killed, and the old launch is gone by half: what served before stays known.
    nodes[0].facts = facts(fact())
    back.seen(nodes)
    assert nodes[1].own.rollback.left == left
    # Rank 1 has begun the launch that is gone back to: that is none of before.
    job = server_job(nodes[1].want, "no-mtp", mark=nodes[1].own.rollback.mark)
    nodes[0].facts = nodes[1].facts = facts(fact(job=job))
    back.seen(nodes)
    assert nodes[0].own.rollback.left == left
    back.done(nodes)
    assert [(node.own.rollback.outcome, node.saved) for node in nodes] == [("done", 1)] * 2


def test_a_failed_rollback_of_nodes_tells_what_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, nodes = going_back(tmp_path, serving(RANKS[0]), serving(RANKS[1]))
    back.seen(nodes)
    options = UpOptions(base=tmp_path / "inventory")
    dark = Unreachable("dark", fix="look")
    back.failed(nodes, options, Failed({"kpro6": dark}))
    assert dark.fix == "look; `deploy rollback kpro5/qwen old` goes on"
    # No record of what served is left: nothing is guessed.
    gate = GateFailed("it repeats itself", fix="x")
    back.failed(nodes, options, Failed({"kpro5": gate}))
    assert f"launch {IDENTITY.id} is not in the state file of kpro5" in gate.what
    assert "`deploy up kpro5/qwen` launches the playbook" in gate.fix
    assert nodes[0].own.rollback.outcome == ""
    monkeypatch.setattr(NodesBack, "_back", lambda *words: "it serves again")
    gate = GateFailed("it repeats itself", fix="x")
    back.failed(nodes, options, Failed({"kpro5": gate}))
    assert (gate.what, gate.fix) == ("it repeats itself; it serves again", "x")


def test_another_place_is_no_place_to_go_back_to(tmp_path: Path) -> None:
    """Nodes were added, taken away or put in another order since; or one of them forgot it."""
    _, nodes = going_back(tmp_path, facts(), facts())
    places = [(want, node.own) for want, node in zip(RANKS, nodes, strict=True)]
    assert unfit(places, "old") == ""
    assert "kpro6/qwen has no record" in unfit([places[0], (RANKS[1], state())], "old")
    turned = [(places[1][0], places[0][1]), (places[0][0], places[1][1])]
    assert "was rank 0 of 2 nodes then, and is rank 1 of 2 nodes now" in unfit(turned, "old")
    part = nodes[0].own.launches[0]
    recipe = recipe_of(nodes[0].want, MANIFEST)
    with pytest.raises(StepBlocked, match=r"was rank 0 of 2 nodes, and .* is a server of its own"):
        then(PLAIN, recipe, "", part)
    alone = part.model_copy(update={"argv": ALONE})
    with pytest.raises(StepBlocked, match=r"was a server of its own, and .* is rank 0 of 2 nodes"):
        then(RANKS[0], recipe, "", alone)
    # Where they meet: at the address of now, at the port of then.
    moved = dataclasses.replace(RANKS[0], node=Node(0, HOSTS, "198.51.100.7:20100"))
    made = then(moved, recipe, "", part)
    assert made.serve_args()["dist-init-addr"] == "198.51.100.7:20000"


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


def test_a_restart_does_not_undo_a_rollback_of_nodes() -> None:
    steps, stop, _ = node_steps(restart_steps())
    assert stop.restarts and stop in steps
    assert not node_steps([StopStep(), LaunchStep()])[1].restarts
    own = state()
    own.rollback = RolledBack(
        to="old", mark="m", left="", wish=wish_key(RANKS[1]), commits=["c0ffee"], when=5.0
    )
    own.rollback.outcome = "done"
    seen = serving(RANKS[1])
    other = dataclasses.replace(seen.need(ServerFact).job, fingerprint="m")  # type: ignore[type-var]
    plan = stop.plan(RANKS[1], facts(fact(job=other)), own)
    assert plan.state is PlanState.BLOCKED and plan.stands, plan.reason


def test_a_playbook_that_cannot_be_read_leaves_the_nodes_known(tree: Path) -> None:
    first, second = select(tree, "kpro5/big")
    kept, told = Kept(tree / ".deploy" / "kept"), list[str]()
    for want in (first, second):
        own = state()
        recipe = kept.add(recipe_of(want, MANIFEST), want.lock_text)
        argv = command(want, server_argv(want))
        own.launches = [Launch(id="a", variant="fast", started=1.0, argv=argv, recipe=recipe)]
        StateFile(tree / ".deploy" / "state", want.host_name).save(
            HostState(host=want.host_name, deployments={"big": own})
        )
    (tree / "playbooks" / "big.yaml").write_text("nodes: [")
    found = kept_wish.select(
        Catalog.load(tree / "inventory"), "kpro5/big", tree / ".deploy", told.append
    )
    assert [want.id for want in found] == ["kpro6/big", "kpro5/big"]
    assert [want.node and want.node.rank for want in found] == [0, 1] and len(told) == 1
