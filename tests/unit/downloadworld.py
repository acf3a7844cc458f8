"""A download job as the controller meets it: a target that plays lines of `attach`, and time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployer.deployment import Deployment
from deployer.events import Bus, Event, Note, Progress
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Facts, Where
from deployer.playbook import Playbook
from deployer.remote.jobs import JobIdentity, JobStatus, StopProof
from deployer.remote.transport import Answer
from deployer.state import DeploymentState, Manifest, ManifestFile
from deployer.steps.base import StepContext

FILES = [
    ManifestFile(path="a.safetensors", size=1000, sha256="1" * 64),
    ManifestFile(path="config.json", size=10, blob_id="c" * 40),
]
PATH = "/srv/models/it's"
INODE = 7


def want(**download: Any) -> Deployment:
    playbook = Playbook.model_validate(
        {
            "model": {"repo": "acme/tiny", "path": PATH, "served_name": "m"},
            "download": {"margin_bytes": 100, **download},
            "driver": {"version": "580.1"},
            "engine": {"version": "0.5.11", "lock": "l.txt", "venv": "/opt/v"},
        }
    )
    host = Host.model_validate({"ssh": {"address": "h"}, "gpus": [{"address": "0000:21:00.0"}]})
    return Deployment("box", "tiny", host, DeploymentEntry(playbook="p"), playbook, "p", "")


def manifest() -> Manifest:
    return Manifest(repo="acme/tiny", asked="main", commit="a" * 40, files=list(FILES))


def identity(job_id: str = "j") -> JobIdentity:
    return JobIdentity("shards-tiny", job_id, 5, 6, "b", 5)


@dataclass
class World:
    """The target and the clock. An exec plays one list: bytes, seconds of silence, or an error.

    `log` is the job's whole log so far and `ended` its exit; `line` makes a line of `attach`.
    """

    events: list[Event] = field(default_factory=list)
    execs: list[list[object]] = field(default_factory=list)
    log: bytes = b""
    earlier: bytes = b""
    """The log as it is when a running job is joined."""
    now: float = 0.0
    tick: int = 0
    ended: list[int | None] = field(default_factory=list)
    """The exit of each job, as the job mechanism knows it; None: vanished."""
    ids: list[str] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    alive_id: str = ""
    stopped: int = 0
    survivors: tuple[str, ...] = ()
    secrets: object = None
    polled: int = 0
    root: str = "/jobs"

    # ---- what the target says
    def line(
        self, log: str = "", *, alive: bool = True, exit: int | None = None, **row: Any
    ) -> bytes:
        """The next line of `attach`; a tick further unless `tick` is given."""
        self.tick += 1
        self.log += log.encode()
        figures = {"tick": self.tick, "bytes": 40, "total": 100, "speed": 2_000_000, **row}
        told = {
            "alive": alive,
            "exit": exit,
            "inode": INODE,
            "offset": len(self.log),
            "log": log,
            "progress": json.dumps(figures) + "\n",
        }
        return json.dumps(told).encode() + b"\n"

    def end(self, exit: int | None, log: str = "", **row: Any) -> bytes:
        """The last line of a job."""
        self.ended.append(exit)
        return self.line(log, alive=False, exit=exit, **row)

    # ---- Transport
    @property
    def name(self) -> str:
        return "box"

    @property
    def transport(self) -> World:
        return self

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        assert on_stdout is not None
        self.asked.append(tuple(args))
        out = b""
        for item in self.execs.pop(0):
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, Answer):
                return item
            if isinstance(item, float):
                self.now += item
                continue
            assert isinstance(item, bytes)
            self.now += 1.0
            out += item
            on_stdout(item)
        return Answer(0, out, b"")

    def close(self) -> None:
        return

    # ---- Jobs
    def start(self, name: str, job_id: str, script: str, **more: Any) -> JobIdentity:
        self.ids.append(job_id)
        self.secrets = more["secrets"]
        return identity(self.alive_id or job_id)

    def find(self, name: str, *, tail_bytes: int, job_id: str) -> JobStatus:
        log = self.earlier[-tail_bytes:]
        return JobStatus(identity(job_id), True, None, log, INODE, len(self.earlier), "")

    def follow(self, job: JobIdentity, **more: Any) -> JobStatus:
        self.polled += 1
        ended = self.ended.pop(0)
        log = self.log[more["offset"] :]
        status = JobStatus(job, False, ended, log, INODE, len(self.log), "")
        more["on_status"](status)
        return status

    def stop(self, job: JobIdentity, **more: Any) -> StopProof:
        self.stopped += 1
        self.alive_id = ""
        return StopProof(not self.survivors, self.survivors, "TERM")

    def prune(self, name: str, keep: int) -> tuple[str, ...]:
        return ()

    # ---- the controller
    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def context(self, state: DeploymentState | None = None, **download: Any) -> StepContext:
        world = self

        class Context(StepContext):
            def jobs(self, where: Where) -> Any:
                return world

        return Context(
            want(**download),
            "r1",
            Bus(self.events.append),
            {},
            lambda: Facts(),
            state or DeploymentState(manifest=manifest()),
            lambda: None,
            "shards",
            {"HF_TOKEN": "hf_x"},
        )

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]
