"""The shards step's download: the job it starts, what restarts it, and what its end means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployer.errors import StepFailed
from deployer.events import Bus, JobStarted
from deployer.hub_manifest import CollidingFileNames, UnsafeFileName
from deployer.model import Facts
from deployer.state import DeploymentState, Manifest, ManifestFile
from deployer.steps.base import StepContext
from deployer.steps.shards_download import download, fix_of, job_files
from tests.unit.downloadworld import PATH, World, manifest, want


def run(world: World, state: DeploymentState | None = None, **settings: Any) -> None:
    context = world.context(state, **settings)
    download(context, manifest(), clock=world.clock, sleep=world.sleep)


def test_a_download_is_followed_to_its_end() -> None:
    world = World()
    world.execs = [[world.line(), world.end(0, bytes=100)]]
    run(world)
    last = world.progress[-1]
    assert (last.done, last.total, last.unit) == (100, 100, "bytes")
    assert world.secrets == {"HF_TOKEN": "hf_x"} and world.notes == []
    assert world.asked == [(f"/jobs/shards-tiny/{world.ids[0]}", "0", "0", "30")]


def test_a_killed_and_a_vanished_job_are_started_again() -> None:
    world = World()
    world.execs = [[world.end(-9)], [world.end(None)], [world.end(0)]]
    run(world)
    assert world.notes == [
        "the download was killed by signal 9 at 40 bytes of 100 bytes; resuming (1 of 5)",
        "the download vanished at 40 bytes of 100 bytes; resuming (2 of 5)",
    ]
    assert len(set(world.ids)) == 3 and world.stopped == 0


def test_restarts_are_bounded() -> None:
    world = World()
    world.execs = [[world.end(-9)], [world.end(-9, "12:00:00 last word\n")]]
    with pytest.raises(StepFailed, match=r"signal 9 .*; 1 restart did not help") as caught:
        run(world, max_restarts=1)
    assert caught.value.evidence == ("12:00:00 last word",)


def test_a_mute_supervisor_is_killed_with_proof_and_started_again() -> None:
    world = World()
    mute = [world.line(), *[world.line(tick=1) for _ in range(31)]]
    world.execs = [mute, [world.end(0)]]
    run(world, stall_s=5)
    assert world.stopped == 1 and world.notes == [
        "the download gave no sign of life for 30 s and was killed at 40 bytes of 100 bytes; "
        "resuming (1 of 5)"
    ]


def test_a_mute_supervisor_that_cannot_be_killed_ends_the_step() -> None:
    world = World(survivors=("pid 5 python3 (main, state D)",))
    world.execs = [[world.line(tick=1) for _ in range(40)]]
    with pytest.raises(StepFailed, match="mute download cannot be stopped: pid 5") as caught:
        run(world, stall_s=5)
    assert "reboot" in caught.value.fix


@pytest.mark.parametrize(
    ("code", "fix"),
    [(2, PATH), (10, "RAM"), (11, "HF_TOKEN"), (13, PATH), (14, "mirrors"), (3, "log"), (1, "log")],
)
def test_an_exit_code_has_its_fix(code: int, fix: str) -> None:
    world = World()
    world.execs = [[world.end(code, "12:00:00 error: a.safetensors: it broke\n")]]
    with pytest.raises(StepFailed, match="it broke") as caught:
        run(world)
    assert fix in caught.value.fix


def test_another_version_at_the_hub_needs_a_new_pin_not_another_run() -> None:
    world = World()
    said = "12:00:00 error: a: the hub now has another version (00); the old bytes are kept\n"
    world.execs = [[world.end(10, said)]]
    with pytest.raises(StepFailed, match="another version") as caught:
        run(world)
    assert "--repin" in caught.value.fix and "RAM" not in caught.value.fix


def test_every_code_of_the_agent_has_words_of_its_own() -> None:
    fixes = {fix_of(want(), code, has_token=True) for code in (2, *range(10, 19), 127)}
    assert len(fixes) == 11 and not any("job's log" in fix for fix in fixes)


def test_the_fix_fits_the_playbook() -> None:
    mirrors = {"mirrors": ["http://m"], "proxy": "http://p:3128", "target_endpoint": "http://t"}
    gave_up = fix_of(want(**mirrors), 14, has_token=False)
    assert "http://t through http://p:3128" in gave_up
    assert "download.peer" in gave_up and "download.mirrors" not in gave_up
    peer = {"peer": {"address": "h2", "path": "/m"}}
    assert ", or set" not in fix_of(want(**mirrors, **peer), 14, has_token=False)
    assert "set HF_TOKEN to a token" in fix_of(want(), 11, has_token=False)
    assert "as the user of the token" in fix_of(want(), 11, has_token=True)
    assert "set download.ca_bundle" in fix_of(want(), 16, has_token=False)
    assert "/etc/ca.pem" in fix_of(want(ca_bundle="/etc/ca.pem"), 16, has_token=False)


def test_a_vanished_commit_drops_the_pin() -> None:
    world, state = World(), DeploymentState(manifest=manifest())
    world.execs = [[world.end(12, "12:00:00 error: it broke\n")]]
    with pytest.raises(StepFailed, match="it broke") as caught:
        run(world, state)
    assert state.manifest is None and "pin was dropped" in caught.value.fix


def test_a_job_of_another_list_is_stopped_first() -> None:
    world = World(alive_id="r0-0-00000000")
    world.execs = [[world.end(0)]]
    run(world)
    assert world.stopped == 1 and len(world.ids) == 2 and "of other files" in world.notes[0]


def digest_of(world: World) -> str:
    return world.ids[0].rpartition("-")[2]


def test_a_running_job_of_the_same_list_is_joined_at_the_end_of_its_log() -> None:
    probe = World()
    probe.execs = [[probe.end(0)]]
    run(probe)
    world = World(alive_id=f"r0-0-{digest_of(probe)}")
    world.log = world.earlier = b"11:59:59 warning: told before\n12:00:00 war"
    world.execs = [[world.line("ning: cut in two\n"), world.end(14, "12:00:02 gone on\n")]]
    with pytest.raises(StepFailed) as caught:
        run(world)
    assert world.stopped == 0 and world.notes == ["cut in two"]
    (started,) = [event for event in world.events if isinstance(event, JobStarted)]
    assert started.attached
    assert world.asked[0][1:3] == ("7", str(len(world.earlier)))
    assert caught.value.evidence[0] == "11:59:59 warning: told before"


def told(**settings: Any) -> dict[str, Any]:
    job = json.loads(job_files(want(**settings), manifest())["manifest.json"])
    assert isinstance(job, dict)
    return job


def test_the_job_carries_the_targets_endpoint_and_no_secret() -> None:
    job = told(target_endpoint="http://hub:8900/")
    assert job["endpoint"] == "http://hub:8900" and job["path"] == PATH
    files = job_files(want(), manifest())
    assert b"HF_TOKEN" in files["fetch.pyz"] and b"HF_TOKEN" not in files["manifest.json"]


def test_the_job_carries_every_setting_that_changes_the_download() -> None:
    peer = {"address": "h2", "path": "/m"}
    job = told(mirrors=["http://m/"], peer=peer, proxy="http://p:1", bwlimit_bytes_per_s=7)
    assert job["mirrors"] == ["http://m"] and job["venv"] == "/opt/v"
    assert job["peer"] == {
        "address": "h2",
        "user": "root",
        "port": 22,
        "path": "/m",
        "identity_file": None,
    }
    assert job["limits"] == {
        "stall_s": 45.0,
        "floor_bytes_per_s": 100_000,
        "floor_window_s": 120.0,
        "phase_s": 60.0,
        "stalls_per_method": 2,
        "bwlimit_bytes_per_s": 7,
    }


def test_what_does_not_change_the_download_does_not_change_the_job() -> None:
    assert told(margin_bytes=1, max_restarts=9, token_env="OTHER") == told()
    only = {"methods": ["range"]}
    assert told(**only, mirrors=["http://m"], peer={"address": "h", "path": "/m"}) == told(**only)
    assert told(stall_s=9) != told()


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (["../x.json"], UnsafeFileName),
        (["/etc/x.json"], UnsafeFileName),
        (["a\nb.json"], UnsafeFileName),
        (["a.json", "a.json"], CollidingFileNames),
        (["a.json", "a.json/b.json"], CollidingFileNames),
    ],
)
def test_a_state_with_bad_names_reaches_no_target(paths: list[str], error: type[Exception]) -> None:
    files = [ManifestFile(path=path, size=1, sha256="1" * 64) for path in paths]
    bad = Manifest(repo="acme/tiny", asked="main", commit="a" * 40, files=files)
    world = World()
    with pytest.raises(error):
        download(world.context(), bad)
    assert world.ids == [] and world.asked == []


def test_progress_of_a_step_has_parts_and_figures_in_its_json() -> None:
    events: list[Any] = []
    bus = Bus(events.append)
    StepContext(want(), "r", bus, {}, Facts, DeploymentState(), lambda: None).progress("w", 1, 2)
    assert (events[0].to_dict()["parts"], events[0].to_dict()["figures"]) == ((), {})
