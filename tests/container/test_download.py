"""The shards step and its agent against a hub on loopback that misbehaves on command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shardbench import Bench, Hub, agent_pid, attached, children, jobs_of, running, until

from deployer import hub as hub_client
from deployer.agents.bundle import fetch_agent
from deployer.errors import StepFailed
from deployer.events import Note, Progress
from deployer.model import PlanState
from deployer.steps import shards_download
from deployer.steps.shards_download import _start, job_name
from deployer.steps.shards_facts import ShardsFact

pytestmark = pytest.mark.container
ROOT = Path(__file__).resolve().parents[2]
SHARD = "00002-of"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", shards=3, mb=2) as hub:
        yield hub


@pytest.fixture
def bench(hub: Hub, tmp_path: Path) -> Bench:
    return Bench(hub, tmp_path)


def test_a_fresh_download_ends_verified_and_a_second_run_does_nothing(
    bench: Bench, hub: Hub
) -> None:
    before = bench.plan()
    assert [change.title.split()[0] for change in before.changes] == ["fetch", "download"]
    bench.apply()
    after = bench.plan()
    assert after.state is PlanState.NOTHING, after
    assert "all verified (sha256)" in after.reason
    assert bench.right() and bench.saves == 1
    assert any(isinstance(event, Progress) and event.total > 0 for event in bench.events)
    assert hub.stats()["auth_leaks"] == 0


FAULTS: dict[str, list[dict[str, Any]]] = {
    "reset": [{"where": "cdn", "match": SHARD, "do": "reset", "after": 0.5, "times": 1}],
    "truncate": [{"where": "cdn", "match": SHARD, "do": "truncate", "after": 0.5, "times": 1}],
    "corrupt once": [{"where": "cdn", "match": SHARD, "do": "corrupt", "at": 0.5, "times": 1}],
    "range ignored": [
        {"where": "cdn", "match": SHARD, "do": "truncate", "after": 0.5, "times": 1},
        {"where": "cdn", "match": SHARD, "do": "norange", "ranged": True},
    ],
    "416": [
        {"where": "cdn", "match": SHARD, "do": "truncate", "after": 0.5, "times": 1},
        {"where": "cdn", "match": SHARD, "do": "status", "code": 416, "ranged": True, "times": 2},
    ],
    "429": [{"where": "cdn", "do": "status", "code": 429, "retry_after": 1, "times": 2}],
    "503": [{"where": "cdn", "match": SHARD, "do": "status", "code": 503, "times": 1}],
    "500 of the hub": [{"where": "hub", "match": SHARD, "do": "status", "code": 500, "times": 1}],
    "url expired": [{"where": "cdn", "match": SHARD, "do": "status", "code": 403, "times": 1}],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_passing_fault_costs_a_retry(bench: Bench, hub: Hub, name: str) -> None:
    hub.faults(FAULTS[name])
    bench.apply()
    assert bench.right()
    assert bench.plan().state is PlanState.NOTHING
    assert hub.stats()["auth_leaks"] == 0


def test_a_stalled_connection_costs_no_byte_twice(bench: Bench, hub: Hub) -> None:
    hub.faults([{"where": "cdn", "match": SHARD, "do": "stall", "at": 0.6, "times": 2}])
    bench.apply()
    assert bench.right()
    size = hub.repo.blobs[f"model-{SHARD}-00003.safetensors"].size
    assert hub.stats()["sent"][f"model-{SHARD}-00003.safetensors"] < size * 1.3


def test_a_frozen_worker_is_killed_on_the_target_and_told_once(bench: Bench, hub: Hub) -> None:
    hub.shared.set["bps"] = 500_000.0
    with running(bench):
        for worker in children(agent_pid(bench)):
            os.kill(worker, signal.SIGSTOP)
        hub.shared.set["bps"] = 0.0
    assert bench.right()
    told = [note for note in bench.notes() if "stalled at" in note]
    assert len(told) == 1 and "killed, going on with" in told[0], bench.notes()
    assert not [note for note in bench.notes() if "resuming" in note or "polled" in note]
    warned = [event for event in bench.events if isinstance(event, Note) and event.text in told]
    assert warned[0].level == "warning"


def test_a_frozen_supervisor_is_replaced_by_the_controller(
    bench: Bench, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_download, "mute_after", lambda stall_s: 3.0)
    hub.shared.set["bps"] = 500_000.0
    with running(bench):
        supervisor = agent_pid(bench)
        os.kill(supervisor, signal.SIGSTOP)
        hub.shared.set["bps"] = 0.0
    assert bench.right() and not Path(f"/proc/{supervisor}").exists()
    assert "gave no sign of life for 3 s and was killed" in "".join(bench.notes())


def test_one_exec_streams_the_whole_download(bench: Bench, hub: Hub) -> None:
    hub.shared.set["bps"] = 400_000.0
    before = bench.transport.runs
    bench.apply()
    told = [event for event in bench.events if isinstance(event, Progress)]
    assert len(told) >= 4 and any(event.parts for event in told)
    assert (
        told[-1].done == told[-1].total
        and told[-1].figures["files_done"] == told[-1].figures["files"]
    )
    # A look, the start, the stream, how it ended, old jobs.
    assert bench.transport.runs - before <= 5, bench.notes()
    assert not bench.notes()[1:]


CONTROLLER = """
import sys
from pathlib import Path
sys.path[:0] = [{container!r}, {tests!r}]
from types import SimpleNamespace
from test_download import Bench, SHARD
repo = SimpleNamespace(name={repo!r})
Bench(SimpleNamespace(url={url!r}, repo=repo), Path({folder!r})).apply("killed")
"""


def test_a_controller_killed_while_it_looks_on_ends_nothing(bench: Bench, hub: Hub) -> None:
    hub.shared.set["bps"] = 500_000.0
    here = Path(__file__).resolve()
    words = {
        "container": str(here.parent),
        "tests": str(here.parents[1]),
        "repo": hub.repo.name,
        "url": hub.url,
        "folder": str(bench.folder),
    }
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER.format(**words)], cwd=ROOT)
    agent = agent_pid(bench)
    until(lambda: attached(bench), "an attach process")
    controller.kill()
    controller.wait()
    until(lambda: not attached(bench), "the end of the attach process", 5)
    assert bench.facts().need(ShardsFact).running == agent
    with running(bench, "second"):
        until(lambda: jobs_of(bench), "the second run's job")
        hub.shared.set["bps"] = 0.0
    assert bench.right()
    assert [(event.pid, event.attached) for event in jobs_of(bench)] == [(agent, True)]


def test_wrong_bytes_twice_are_quarantined(bench: Bench, hub: Hub) -> None:
    hub.faults([{"where": "cdn", "match": SHARD, "do": "corrupt", "at": 0.5}])
    with pytest.raises(StepFailed, match=r"expected .* got .* twice"):
        bench.apply()
    names = {path.name for path in bench.model.iterdir()}
    assert f"model-{SHARD}-00003.safetensors" not in names
    assert f"model-{SHARD}-00003.safetensors.bad" in names
    hub.faults([])
    bench.apply("r2")
    assert bench.plan().state is PlanState.NOTHING


def test_gated_without_a_token_is_named_before_anything_runs(bench: Bench, hub: Hub) -> None:
    hub.shared.set["token"] = "hf_secret"
    with pytest.raises(hub_client.AccessGated, match="gated"):
        bench.apply()
    bench.token = "hf_secret"
    bench.apply("r2")
    assert bench.right() and hub.stats()["auth_leaks"] == 0
    assert "hf_secret" not in repr(bench.events)
    for path in (bench.folder / "jobs").rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path


def test_a_killed_agent_is_resumed_in_the_same_run(bench: Bench, hub: Hub) -> None:
    hub.shared.set["bps"] = 1_000_000.0
    with running(bench):
        os.kill(agent_pid(bench), signal.SIGKILL)
        hub.shared.set["bps"] = 0.0
    assert bench.right()
    total = sum(file.size for file in bench.state.manifest.files)  # type: ignore[union-attr]
    assert sum(hub.stats()["sent"].values()) < total * 1.5


def test_a_controller_that_died_finds_its_download_again(bench: Bench, hub: Hub) -> None:
    hub.shared.set["bps"] = 1_000_000.0
    manifest = hub_client.fetch_manifest(bench.want.playbook, None)
    bench.state.manifest = manifest
    context = bench.context("first")
    first, _ = _start(context, context.jobs(bench.want.guest), manifest, 0)
    agent_pid(bench)
    with running(bench, "second"):
        until(lambda: len(jobs_of(bench)) == 2, "the second run's job")
        hub.shared.set["bps"] = 0.0
    assert [(event.pid, event.attached) for event in jobs_of(bench)] == [
        (first.pid, False),
        (first.pid, True),
    ]
    assert bench.right()


def test_no_room_is_refused_with_numbers(bench: Bench) -> None:
    bench.margin = 1 << 60
    bench.state.manifest = hub_client.fetch_manifest(bench.want.playbook, None)
    plan = bench.plan()
    assert plan.state is PlanState.BLOCKED
    assert str(bench.model) in plan.reason and "margin needed" in plan.reason


def test_a_touched_shard_is_judged_again_and_a_damaged_one_replaced(bench: Bench, hub: Hub) -> None:
    bench.apply()
    shard = bench.model / f"model-{SHARD}-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    plan = bench.plan()
    assert plan.state is PlanState.CHANGES and plan.changes[0].title.startswith("verify 1 files")
    hub.faults([])
    bench.apply("r2")
    assert bench.right() and bench.plan().state is PlanState.NOTHING


def test_two_agents_never_run(bench: Bench, hub: Hub) -> None:
    hub.shared.set["bps"] = 1_000_000.0
    manifest = hub_client.fetch_manifest(bench.want.playbook, None)
    context = bench.context()
    jobs = context.jobs(bench.want.guest)
    job, _ = _start(context, jobs, manifest, 0)
    agent_pid(bench)
    folder = bench.folder / "jobs" / job_name(bench.want) / job.id
    second = bench.folder / "second"
    second.mkdir()
    (second / "manifest.json").write_bytes((folder / "manifest.json").read_bytes())
    done = run_agent(second)
    assert done.returncode == 15 and "another download" in done.stdout
    assert jobs.stop(job, grace_s=5).stopped


def run_agent(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "fetch.pyz").write_bytes(fetch_agent())
    return subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "fetch.pyz"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def agent_job(hub: Hub, folder: Path, **limits: float) -> Path:
    """A job folder for the bare agent, with shorter limits."""
    job = {
        "endpoint": hub.url,
        "repo": hub.repo.name,
        "commit": hub.repo.commit,
        "path": str(folder / "model"),
        "limits": {"backoff_s": 0.05, "recv_timeout_s": 1.0, "slow_window_s": 1.0, **limits},
        "files": [
            {"path": name, "size": blob.size, "sha256": blob.sha256, "blob_id": blob.oid}
            for name, blob in hub.repo.blobs.items()
        ],
    }
    (folder / "job").mkdir(exist_ok=True)
    (folder / "job" / "manifest.json").write_text(json.dumps(job))
    return folder / "job"


@pytest.mark.parametrize("do", [{"do": "stall"}, {"do": "drip", "bps": 1}, {"do": "hang"}])
def test_one_bad_connection_is_dropped_by_the_agent_itself(
    hub: Hub, tmp_path: Path, do: dict[str, Any]
) -> None:
    hub.faults([{"where": "cdn", "match": SHARD, "after": 0.5, "times": 1, **do}])
    done = run_agent(agent_job(hub, tmp_path))
    assert done.returncode == 0, done.stdout
    progress = json.loads((tmp_path / "job" / "progress").read_text())
    assert progress["bytes"] == progress["total"] and progress["retries"] >= 1


def test_endless_stalls_end_with_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    hub.faults([{"where": "cdn", "match": SHARD, "do": "hang"}])
    done = run_agent(agent_job(hub, tmp_path, recv_timeout_s=0.3, idle_tries=2))
    assert done.returncode == 14 and "gave up at 0 of" in done.stdout


def test_a_missing_file_and_a_dead_token_have_their_own_codes(hub: Hub, tmp_path: Path) -> None:
    folder = agent_job(hub, tmp_path)
    job = json.loads((folder / "manifest.json").read_text())
    job["files"].append({"path": "no.json", "size": 3, "sha256": "0" * 64, "blob_id": ""})
    (folder / "manifest.json").write_text(json.dumps(job))
    assert run_agent(folder).returncode == 12
    hub.shared.set["token"] = "hf_secret"
    assert run_agent(agent_job(hub, tmp_path), HF_TOKEN="hf_wrong").returncode == 11
