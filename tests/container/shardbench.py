"""One deployment whose guest is this machine, and what its download leaves in /proc."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hub import Hub
from local_transport import LocalTransport, shell_path

from deployer.deployment import Deployment
from deployer.errors import DeployError
from deployer.events import Bus, Event, JobStarted, Note
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Facts, Plan, PlanState, ProbeOutput, Where
from deployer.playbook import Playbook
from deployer.remote.jobs import Jobs
from deployer.remote.transport import Transport
from deployer.state import DeploymentState
from deployer.steps.base import StepContext
from deployer.steps.shards import ShardsStep
from deployer.steps.shards_facts import ShardsFact


class LocalContext(StepContext):
    """Jobs below the test's own folder."""

    root = ""

    def jobs(self, where: Where) -> Jobs:
        return Jobs(self.on(where), self.root)


@dataclass
class Bench:
    """One deployment whose guest is this machine."""

    hub: Hub
    folder: Path
    stall_s: float = 2.0
    margin: int = 1000
    token: str = ""
    events: list[Event] = field(default_factory=list)
    state: DeploymentState = field(default_factory=DeploymentState)
    saves: int = 0

    def __post_init__(self) -> None:
        self.eyes = LocalTransport(shell_path("dash", self.folder))
        self.transport: Transport = self.eyes
        self.step = ShardsStep()

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def want(self) -> Deployment:
        playbook = Playbook.model_validate(
            {
                "model": {
                    "repo": self.hub.repo.name,
                    "path": str(self.model),
                    "served_name": "tiny",
                },
                "download": {
                    "endpoint": self.hub.url,
                    "stall_s": self.stall_s,
                    "margin_bytes": self.margin,
                },
                "driver": {"version": "580.1"},
                "engine": {"version": "0.5.11", "lock": "l.txt", "venv": "/nonexistent/venv"},
            }
        )
        host = Host.model_validate({"ssh": {"address": "h"}, "gpus": [{"address": "0000:21:00.0"}]})
        entry = DeploymentEntry(playbook="p")
        return Deployment("box", "tiny", host, entry, playbook, "p", "")

    def facts(self) -> Facts:
        (probe,) = self.step.probes(self.want)
        answer = self.eyes.run(probe.script)
        fact = probe.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
        return Facts({type(fact): fact})

    def plan(self) -> Plan:
        return self.step.plan(self.want, self.facts(), self.state)

    def context(self, run_id: str = "r1") -> StepContext:
        def save() -> None:
            self.saves += 1

        context = LocalContext(
            self.want,
            run_id,
            Bus(self.events.append),
            {Where.HOST: self.transport, Where.GUEST: self.transport},
            self.facts,
            self.state,
            save,
            "shards",
            {"HF_TOKEN": self.token} if self.token else {},
        )
        context.root = str(self.folder / "jobs")
        return context

    def apply(self, run_id: str = "r1") -> None:
        facts = self.facts()
        plan = self.step.plan(self.want, facts, self.state)
        assert plan.state is PlanState.CHANGES, plan
        self.step.apply(self.context(run_id), facts, plan)

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    def right(self) -> bool:
        return all(
            hashlib.sha256((self.model / file.path).read_bytes()).hexdigest()
            == self.hub.repo.blobs[file.path].sha256
            for file in self.state.manifest.files  # type: ignore[union-attr]
        )


def agent_pid(bench: Bench) -> int:
    """The agent's pid, once it holds the lock and a byte has come."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        fact = bench.facts().need(ShardsFact)
        if fact.running and sum(fact.parts.values()) > 200_000:
            return fact.running
    raise TimeoutError("the agent never ran")


def children(pid: int) -> list[int]:
    """The processes that `pid` has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def jobs_of(bench: Bench) -> list[JobStarted]:
    return [event for event in bench.events if isinstance(event, JobStarted)]


def attached(bench: Bench) -> list[int]:
    """The attach processes of this bench's jobs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"attach" in words and any(str(bench.folder).encode() in word for word in words):
            found.append(int(entry.parent.name))
    return found


def until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not in time: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def running(bench: Bench, run_id: str = "r1") -> Iterator[None]:
    """The step runs in a thread meanwhile; its end is awaited, its error is raised."""
    failed: list[DeployError] = []

    def run() -> None:
        try:
            bench.apply(run_id)
        except DeployError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(90)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
