"""The shards step's download: how it follows its job, and what its end means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.events import Bus, Event, Note, Progress
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Facts, Where
from deployer.playbook import Playbook
from deployer.remote.jobs import JobIdentity, JobStatus, StopProof
from deployer.state import DeploymentState, Manifest, ManifestFile
from deployer.steps import shards_download
from deployer.steps.base import StepContext
from deployer.steps.shards_download import Stalled, Watch, job_files, read_progress, size_text

FILES = [
    ManifestFile(path="a.safetensors", size=1000, sha256="1" * 64),
    ManifestFile(path="config.json", size=10, blob_id="c" * 40),
]
PATH = "/srv/models/it's"


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


def pinned(asked: str = "main") -> DeploymentState:
    manifest = Manifest(repo="acme/tiny", asked=asked, commit="a" * 40, files=FILES)
    return DeploymentState(manifest=manifest)


def identity(job_id: str = "j") -> JobIdentity:
    return JobIdentity("shards-tiny", job_id, 5, 6, "b", 5)


def status(moved: int, *, alive: bool = True, exit: int | None = None, **more: Any) -> JobStatus:
    row = {"bytes": moved, "total": 100, "moved": moved, "speed": 2_000_000, "files": 2, **more}
    log = b"12:00:00 error: a.safetensors: it broke\n" if exit else b""
    return JobStatus(identity(), alive, exit, log, 1, 0, json.dumps(row))


class FakeJobs:
    """Plays one list of statuses a start; a clock moves a second a status."""

    def __init__(self, *plays: list[JobStatus]) -> None:
        self.plays = list(plays)
        self.ids: list[str] = []
        self.now = 0.0
        self.stopped = 0
        self.secrets: object = None
        self.alive_id = ""

    def start(self, name: str, job_id: str, script: str, **more: Any) -> JobIdentity:
        self.ids.append(job_id)
        self.secrets = more["secrets"]
        return identity(self.alive_id or job_id)

    def follow(self, job: JobIdentity, **more: Any) -> JobStatus:
        for one in self.plays.pop(0):
            self.now += 1.0
            more["on_status"](one)
            last = one
        return last

    def stop(self, job: JobIdentity, **more: Any) -> StopProof:
        self.stopped += 1
        self.alive_id = ""
        return StopProof(True, (), "TERM")

    def prune(self, name: str, keep: int) -> tuple[str, ...]:
        return ()


def follow(
    jobs: FakeJobs,
    monkeypatch: pytest.MonkeyPatch,
    given: DeploymentState | None = None,
    **download: Any,
) -> list[Event]:
    events: list[Event] = []
    state = given or pinned()

    class Context(StepContext):
        def jobs(self, where: Where) -> Any:
            return jobs

    context = Context(
        want(**download),
        "r1",
        Bus(events.append),
        {},
        lambda: Facts(),
        state,
        lambda: None,
        "shards",
        {"HF_TOKEN": "hf_x"},
    )
    monkeypatch.setattr(
        shards_download, "Watch", lambda c, stall: Watch(c, stall, clock=lambda: jobs.now)
    )
    assert state.manifest is not None
    shards_download.download(context, state.manifest)
    return events


def test_a_job_that_brings_no_byte_is_killed_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(
        [status(40) for _ in range(9)],
        [status(60), status(100, alive=False, exit=0)],
    )
    events = follow(jobs, monkeypatch, stall_s=3)
    assert jobs.stopped == 1 and len(set(jobs.ids)) == 2
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == ["download stalled at 40 bytes of 100 bytes for 3 s; killed, resuming (1 of 5)"]
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert (last.done, last.total, last.unit) == (100, 100, "bytes")
    assert jobs.secrets == {"HF_TOKEN": "hf_x"}


def test_a_pause_that_the_hub_asked_for_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [status(40, pause=9) for _ in range(9)]
    events = follow(FakeJobs([*waiting, status(100, alive=False, exit=0)]), monkeypatch, stall_s=3)
    assert not [event for event in events if isinstance(event, Note)]


def test_stalls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(*([status(40) for _ in range(9)] for _ in range(3)))
    with pytest.raises(StepFailed, match="2 resumptions did not help"):
        follow(jobs, monkeypatch, stall_s=3, max_restarts=2)


def test_a_killed_and_a_vanished_job_are_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs(
        [status(40, alive=False, exit=-9)],
        [status(50, alive=False)],
        [status(100, alive=False, exit=0)],
    )
    events = follow(jobs, monkeypatch)
    texts = [event.text for event in events if isinstance(event, Note)]
    assert "killed by signal 9" in texts[0] and "vanished" in texts[1]


@pytest.mark.parametrize(("code", "fix"), [(10, "RAM"), (11, "HF_TOKEN"), (13, PATH), (3, "log")])
def test_an_exit_code_has_its_fix(monkeypatch: pytest.MonkeyPatch, code: int, fix: str) -> None:
    with pytest.raises(StepFailed, match="it broke") as caught:
        follow(FakeJobs([status(1, alive=False, exit=code)]), monkeypatch)
    assert fix in caught.value.fix


def test_a_vanished_commit_drops_the_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pinned()
    with pytest.raises(StepFailed, match="it broke") as caught:
        follow(FakeJobs([status(1, alive=False, exit=12)]), monkeypatch, state)
    assert state.manifest is None and "pin was dropped" in caught.value.fix


def test_a_job_of_another_list_is_stopped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs([status(100, alive=False, exit=0)])
    jobs.alive_id = "r0-0-00000000"
    follow(jobs, monkeypatch)
    assert jobs.stopped == 1 and len(jobs.ids) == 2


def test_the_job_carries_the_targets_endpoint_and_no_secret() -> None:
    state = pinned()
    assert state.manifest is not None
    files = job_files(want(target_endpoint="http://hub:8900"), state.manifest)
    job = json.loads(files["manifest.json"])
    assert job["endpoint"] == "http://hub:8900" and job["path"] == PATH
    assert b"HF_TOKEN" in files["fetch.pyz"]


def test_words_for_sizes_and_broken_progress() -> None:
    assert [size_text(n) for n in (0, 999, 1e6, 52.1e9, 2e12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 MB",
        "52.1 GB",
        "2.0 TB",
    ]
    assert read_progress("") == {} and read_progress("[1]") == {} and read_progress("{") == {}


def test_a_watch_without_any_progress_stalls() -> None:
    clock = iter([0.0, 1.0, 9.0])
    context = StepContext(want(), "r", Bus(), {}, Facts, DeploymentState(), lambda: None)
    watch = Watch(context, 5.0, clock=lambda: next(clock))
    quiet = JobStatus(identity(), True, None, b"", 1, 0, "")
    watch.see(quiet)
    with pytest.raises(Stalled):
        watch.see(quiet)
