"""One server of two nodes: ranks, a world with doubles of their jobs, and what serves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from serverworld import (
    IDENTITY,
    READY,
    Clock,
    Context,
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

from deployer.cancel import Cancel
from deployer.deployment import Deployment, Node
from deployer.errors import GateFailed
from deployer.model import Facts, PlanState
from deployer.multinode_follower import Follower
from deployer.multinode_launch import NodesLaunch
from deployer.remote.jobs import JobStatus
from deployer.state import DeploymentState, Launch
from deployer.steps import launch_wait
from deployer.steps.launch import LaunchStep

HOSTS = ("kpro5", "kpro6")


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


LOST = "RuntimeError: [/gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:1"


OWN = "ValueError: the flux capacitor is cold"


ALONE = ["/opt/venvs/qwen/bin/python", "-m", "sglang.launch_server", "--port", "30000"]


def good(own: DeploymentState, argv: list[str]) -> None:
    own.launches = [
        Launch(id="old", variant="x", started=1.0, fingerprint="f", argv=argv, verdict="stopped")
    ]
    own.known_good = "old"


def serving(want: Deployment, launch: str = IDENTITY.id, *, listens: bool = True) -> Facts:
    job = server_job(want)
    job = dataclasses.replace(job, identity=dataclasses.replace(IDENTITY, id=launch))
    there: dict[str, Any] = {"owners": (owner(),), "listening": True} if listens else {}
    return facts(fact(job=job, **there))


GATE = GateFailed("it repeats itself", where="kpro5/qwen verify", fix="look", evidence=("e",))
