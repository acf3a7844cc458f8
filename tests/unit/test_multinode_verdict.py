"""One verdict of several nodes: written on all, what follows a failed gate, what is shown."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
from nodesworld import ALONE, GATE, HOSTS, PLAIN, RANKS, World, good, serving
from serverworld import (
    BOOT,
    IDENTITY,
    UP,
    FakeJobs,
    FakeTransport,
    Script,
    context,
    fact,
    facts,
    server_job,
    state,
)

from deployer import multinode_reverify
from deployer.cli.doctor import nodes_findings
from deployer.cli.status import Look, _deployment_lines, _model
from deployer.errors import GateFailed, NotStarted, Unreachable
from deployer.events import Bus
from deployer.model import Facts, Plan, PlanState, Where
from deployer.multinode_verify import NodesVerify
from deployer.observe import deployment_document
from deployer.observe_nodes import join
from deployer.remote.transport import Answer
from deployer.reverify import verify_steps
from deployer.state import HostState, Launch
from deployer.state_file import StateFile
from deployer.steps.failed_want import failed_before
from deployer.steps.server_facts import ServerFact
from deployer.steps.serving_fact import ServingFact, light_problem
from deployer.steps.verify import VerifyStep
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult


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


def test_status_says_who_answers() -> None:
    documents = [deployment_document(want, facts(fact()), state()) for want in RANKS]
    assert [one["node"] for one in documents] == [
        {"rank": rank, "of": 2, "answers": "kpro5/qwen", "problem": ""} for rank in (0, 1)
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
    assert isinstance(results[1].error, NotStarted) is (verdict_ != "good")
    owns = [
        StateFile(tmp_path / ".deploy" / "state", host).load().deployments["qwen"] for host in HOSTS
    ]
    assert [own.launches[-1].verdict for own in owns] == [verdict_ or "good"] * 2


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (serving(RANKS[0]), serving(RANKS[1]), ""),
        (facts(fact()), facts(fact()), ""),
        (serving(RANKS[0]), Facts(), ""),
        (
            serving(RANKS[0]),
            facts(fact(job=dataclasses.replace(server_job(RANKS[1]), alive=False))),
            "kpro6/qwen has ended, and kpro5/qwen is one server with it",
        ),
        (serving(RANKS[0]), serving(RANKS[1], "x"), "they are not one launch: "),
        (
            serving(RANKS[0]),
            facts(fact()),
            f"they are not one launch: launch {IDENTITY.id} on kpro5/qwen, none on kpro6/qwen",
        ),
    ],
)
def test_status_tells_of_a_node_that_is_gone(mine: Facts, theirs: Facts, told: str) -> None:
    """Rank 0 of a server whose rank 1 has ended may still own its port for minutes."""
    documents = [
        deployment_document(want, look, state())
        for want, look in zip(RANKS, (mine, theirs), strict=True)
    ]
    other = deployment_document(PLAIN, facts(fact()), state())
    join([*documents, other])
    for one in documents:
        assert one["node"]["problem"].startswith(told) and bool(told) == bool(
            one["node"]["problem"]
        )
    looks = [
        Look(w.host_name, w.host, [(w, f)]) for w, f in zip(RANKS, (mine, theirs), strict=True)
    ]
    found = nodes_findings(looks)
    assert list(found) == (list(HOSTS) if told else [])
    shown = list(_deployment_lines({**documents[0], "endpoint": "e", "migration": None}))
    assert any("nodes      " in line for line in shown) is bool(told)
