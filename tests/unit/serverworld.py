"""A deployment, a clock that costs no time, and doubles of the jobs and of the agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployer.deployment import Deployment
from deployer.events import Bus, Event
from deployer.inventory import Host
from deployer.model import Facts, Where
from deployer.playbook import ArgValue, Playbook
from deployer.remote.jobs import JobIdentity, JobStatus, StopProof
from deployer.remote.transport import Answer
from deployer.state import DeploymentState, Manifest
from deployer.steps.base import StepContext
from deployer.steps.server_facts import PortOwner, ServerFact, ServerJob
from deployer.steps.server_wanted import LaunchNote, fingerprint

BOOT = "f134fadd-f7ce-427f-87fc-5628b2e07360"
IDENTITY = JobIdentity("server-qwen", "20261130-065012-ab12", 4242, 1000, BOOT, 4240)
MANIFEST = Manifest(repo="acme/tiny", asked="main", commit="c0ffee", files=[])
READY = {
    "do": "ready",
    "ok": True,
    "alive": True,
    "owned": True,
    "listening": True,
    "owners": [{"pid": 4242, "title": "python"}],
    "members": [{"pid": 4242, "start": 1000, "title": "python"}],
    "models": {"status": 200, "ids": ["tiny"], "error": ""},
    "health": 200,
}
"""The serve agent's word for a server that serves."""
UP = [b"[x] Load weight begin. a\n", b"[x] INFO: Uvicorn running on http://0.0.0.0:30000\n"]
"""The log of a launch that comes up."""
MTP: dict[str, ArgValue] = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
    "mamba-scheduler-strategy": "extra_buffer",
}


def deployment(variant: str | None = None, **changes: Any) -> Deployment:
    """kpro5/qwen with the variants mtp and no-mtp; `changes` replace keys of playbook sections."""
    document: dict[str, Any] = {
        "model": {"repo": "acme/tiny", "path": "/srv/models/tiny", "served_name": "tiny"},
        "driver": {"version": "580.126.09"},
        "engine": {"version": "0.5.11", "lock": "x.txt", "venv": "/opt/venvs/qwen"},
        "serve": {"args": {"tp-size": 2, "context-length": 32768}},
        "variants": [{"name": "mtp", "args": MTP}, {"name": "no-mtp"}],
    }
    for section, values in changes.items():
        whole = isinstance(values, list)
        document[section] = values if whole else {**document.get(section, {}), **values}
    host = Host.model_validate(
        {
            "ssh": {"address": "192.0.2.5"},
            "gpus": [{"address": "0000:21:00.0"}, {"address": "0000:41:00.0"}],
            "containers": {129: {}},
            "deployments": {"qwen": {"container": 129, "playbook": "tiny"}},
        }
    )
    playbook = Playbook.model_validate(document)
    entry = host.deployments["qwen"]
    return Deployment("kpro5", "qwen", host, entry, playbook, "tiny", "torch==2.11.0", variant)


def state(manifest: Manifest | None = MANIFEST) -> DeploymentState:
    """A state whose weights are pinned."""
    return DeploymentState(manifest=manifest)


def server_job(
    want: Deployment,
    variant: str = "mtp",
    *,
    alive: bool = True,
    mark: str | None = None,
    fell_from: tuple[str, ...] = (),
    members: tuple[int, ...] = (4242, 4250),
    stuck: tuple[int, ...] = (),
    verdict: str = "",
) -> ServerJob:
    """Our job, by default the wanted one."""
    return ServerJob(
        IDENTITY,
        alive,
        "",
        fingerprint(want, MANIFEST, variant) if mark is None else mark,
        LaunchNote(variant, fell_from),
        verdict,
        members if alive or members != (4242, 4250) else (),
        stuck,
    )


def owner(
    pid: int = 4242, command: str = "python -m sglang.launch_server", job: str = ""
) -> PortOwner:
    """A listener on the port."""
    return PortOwner(pid, 1000, 4240, 1, job, command)


def fact(**values: Any) -> ServerFact:
    """The guest with engine and weights in place, and no server."""
    base: dict[str, Any] = {
        "boot": BOOT,
        "venv": True,
        "engine": "0.5.11",
        "weights": True,
        "model_type": "qwen3_5",
        "driver": "580.126.09",
    }
    return ServerFact(**{**base, **values})


def facts(*values: object) -> Facts:
    """Facts by their types."""
    return Facts({type(value): value for value in values})


@dataclass
class Clock:
    """Time that passes only by sleeping."""

    time: float = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass
class Script:
    """What one launch does: the log pieces of its polls, then it dies (or lives on)."""

    logs: list[bytes]
    exit: int | None = None
    dies: bool = False


@dataclass
class FakeJobs:
    """The double of Jobs: each start takes the next script."""

    scripts: list[Script] = field(default_factory=list)
    started: list[dict[str, Any]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    proof: StopProof = field(default_factory=lambda: StopProof(True, (), "TERM"))
    root: str = "/var/lib/deployer/jobs"
    running: Script | None = None

    def start(self, name: str, job_id: str, script: str, **more: Any) -> JobIdentity:
        self.started.append({"name": name, "id": job_id, "script": script, **more})
        self.running = self.scripts.pop(0)
        return JobIdentity(name, job_id, 4242, 1000, BOOT, 4240)

    def poll(self, job: JobIdentity, *, inode: int = 0, offset: int = 0) -> JobStatus:
        run = self.running or Script([])
        log = run.logs.pop(0) if run.logs else b""
        alive = bool(run.logs) or bool(log) or not run.dies
        return JobStatus(job, alive, None if alive else run.exit, log, 7, offset + len(log), "")

    def stop(self, job: JobIdentity, **more: Any) -> StopProof:
        self.stopped.append(job.id)
        return self.proof

    def prune(self, name: str, keep: int) -> tuple[str, ...]:
        return ()


@dataclass
class FakeTransport:
    """Answers scripts through a function."""

    answer: Callable[[str], Answer] = lambda script: Answer(0, b"", b"")
    scripts: list[str] = field(default_factory=list)
    stdins: list[bytes] = field(default_factory=list)
    name: str = "kpro5"

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        self.scripts.append(script)
        self.stdins.append(stdin)
        return self.answer(script)

    def close(self) -> None:
        """Nothing to end."""


class Context(StepContext):
    """A context whose jobs are the doubles."""

    fake_jobs: FakeJobs

    def jobs(self, where: Where) -> Any:
        return self.fake_jobs


def context(
    want: Deployment,
    own: DeploymentState,
    jobs: FakeJobs,
    *,
    host: FakeTransport | None = None,
    guest: FakeTransport | None = None,
    environ: dict[str, str] | None = None,
) -> tuple[Context, list[Event]]:
    """A context and the list of what it emits."""
    events: list[Event] = []
    made = Context(
        want=want,
        run_id="r1",
        bus=Bus(events.append),
        transports={Where.HOST: host or FakeTransport(), Where.GUEST: guest or FakeTransport()},
        reprobe=lambda: Facts(),
        state=own,
        save=lambda: None,
        step="test",
        environ=environ or {},
    )
    made.fake_jobs = jobs
    return made, events
