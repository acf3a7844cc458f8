"""The shards step: what it sees and what it decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployer.deployment import Deployment
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Facts, Plan, PlanState, ProbeOutput, Where
from deployer.playbook import Playbook
from deployer.state import DeploymentState, Manifest, ManifestFile
from deployer.steps.shards import ShardsStep
from deployer.steps.shards_facts import Room, ShardsFact, Verified, parse_shards, shards_probe

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


SRV = Room("/srv", 10_000, 1000, 2000)
EMPTY = ShardsFact(near="/srv", rooms={"1": SRV}, places={"": "1"})


def room(free: int = 10_000, inodes: int = 1000, inodes_total: int = 2000) -> dict[str, Room]:
    return {"1": Room("/srv", free, inodes, inodes_total)}


WHOLE = replace(
    EMPTY,
    exists=True,
    files={"a.safetensors": (1000, 7), "config.json": (10, 8)},
    record={
        "a.safetensors": Verified(1000, 7, "1" * 64, ""),
        "config.json": Verified(10, 8, "f" * 64, "c" * 40),
    },
)


def plan(fact: ShardsFact, state: DeploymentState | None = None, **download: Any) -> Plan:
    return ShardsStep().plan(want(**download), Facts({ShardsFact: fact}), state or pinned())


def test_nothing_when_every_file_is_verified() -> None:
    decided = plan(WHOLE)
    assert decided.state is PlanState.NOTHING
    assert decided.reason == "2 files, 1.0 kB, all verified (sha256)"


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"config.json": (10, 8)}},
        {"files": {"a.safetensors": (1000, 9), "config.json": (10, 8)}},
        {"files": {"a.safetensors": (999, 7), "config.json": (10, 8)}},
        {"record": {"config.json": Verified(10, 8, "f" * 64, "c" * 40)}},
        {
            "record": {
                "a.safetensors": Verified(1000, 7, "2" * 64, ""),
                "config.json": Verified(10, 8, "f" * 64, "c" * 40),
            }
        },
    ],
)
def test_a_file_that_differs_in_anything_is_left(changed: dict[str, Any]) -> None:
    decided = plan(replace(WHOLE, **changed))
    assert decided.state is PlanState.CHANGES
    assert "1 files" in decided.changes[0].title


def test_without_a_list_the_plan_says_that_it_will_be_asked() -> None:
    decided = plan(EMPTY, DeploymentState())
    titles = [change.title for change in decided.changes]
    assert titles == [
        "fetch the file list of acme/tiny at main",
        f"download what {PATH} lacks",
    ]


def test_another_revision_asks_anew_and_the_same_branch_stays_pinned() -> None:
    assert len(plan(WHOLE, pinned("v2")).changes) == 2
    assert plan(WHOLE, pinned("main")).state is PlanState.NOTHING


def test_what_is_there_needs_no_room() -> None:
    nearly = replace(EMPTY, parts={"a.safetensors": 950}, rooms=room(160))
    assert plan(nearly).state is PlanState.CHANGES
    full = replace(EMPTY, rooms=room(1109), elsewhere=(("/mnt", 5000), ("/home", 10)))
    refused = plan(full)
    assert refused.state is PlanState.BLOCKED
    assert "1.1 kB free, 1.0 kB to download" in refused.reason and PATH in refused.reason
    assert "/mnt" in refused.fix and "/home" not in refused.fix
    assert plan(replace(EMPTY, rooms=room(1110))).state is PlanState.CHANGES


def test_inodes_count_where_the_file_system_has_them() -> None:
    assert plan(replace(EMPTY, rooms=room(inodes=5))).state is PlanState.BLOCKED
    assert plan(replace(EMPTY, rooms=room(inodes=0, inodes_total=0))).state is PlanState.CHANGES


def test_files_of_unknown_origin_are_verified_not_fetched() -> None:
    decided = plan(replace(WHOLE, record={}))
    assert decided.changes[0].title.startswith("verify 2 files")


def test_silence_no_python_and_a_hung_mount() -> None:
    silent = ShardsStep().plan(want(), Facts(silent={Where.HOST: "dark"}), pinned())
    assert (silent.state, silent.reason) == (PlanState.UNKNOWN, "dark")
    assert plan(ShardsFact(python=False)).state is PlanState.UNKNOWN
    hung = plan(parse_shards(ProbeOutput(137, b"", b"", timed_out=True)))
    assert hung.state is PlanState.BLOCKED and "hung mount" in hung.reason
    assert plan(replace(EMPTY, writable=False)).state is PlanState.BLOCKED


def run_probe(path: Path) -> ShardsFact:
    import subprocess

    probe = shards_probe(str(path), "/nonexistent", Where.GUEST)
    done = subprocess.run(["dash", "-c", probe.script], capture_output=True)
    fact = probe.parse(ProbeOutput(done.returncode, done.stdout, done.stderr))
    assert isinstance(fact, ShardsFact)
    return fact


def test_the_probe_sees_files_parts_record_and_space(tmp_path: Path) -> None:
    root = tmp_path / "it's a 'folder'"
    (root / ".deployer").mkdir(parents=True)
    (root / ".cache").mkdir()
    (root / ".cache" / "x").write_bytes(b"1")
    (root / "a.safetensors").write_bytes(b"12345")
    (root / "b.safetensors.part").write_bytes(b"123")
    (root / "c.safetensors.bad").write_bytes(b"1")
    facts = (root / "a.safetensors").stat()
    row = {"size": 5, "mtime_ns": facts.st_mtime_ns, "sha256": "1" * 64, "blob_id": ""}
    record = root / ".deployer" / "verified.json"
    record.write_text(json.dumps({"version": 1, "files": {"a.safetensors": row}}))
    fact = run_probe(root)
    assert fact.problem == "" and fact.exists and fact.rooms[fact.places[""]].free > 0
    assert fact.finished == ("a.safetensors",)
    assert fact.files["a.safetensors"] == (5, facts.st_mtime_ns)
    assert dict(fact.parts) == {"b.safetensors": 3} and fact.bad == ("c.safetensors.bad",)
    assert fact.verified(ManifestFile(path="a.safetensors", size=5, sha256="1" * 64))
    record.write_text("{")
    assert run_probe(root).record_error
    missing = run_probe(tmp_path / "no" / "where")
    assert not missing.exists and missing.near == str(tmp_path)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"Traceback\nKeyError: x", b"\xff\x00"])
def test_any_other_answer_is_a_problem(text: bytes) -> None:
    assert parse_shards(ProbeOutput(1, text, b"boom")).problem
    assert parse_shards(ProbeOutput(0, text, b"")).problem
