"""May the download start? Real folders for what the probe sees; plain data for what it means."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployer.agents.fetch.holders import Holder
from deployer.agents.fetch.partials import HF_PLACE, OWN_HF, Partial
from deployer.model import Facts, Plan, PlanState, ProbeOutput, Where
from deployer.state import DeploymentState, Manifest, ManifestFile
from deployer.steps.shards import ShardsStep
from deployer.steps.shards_facts import Room, ShardsFact, Verified, look_script, shards_probe
from tests.unit.downloadworld import PATH, want

SHA = "1" * 64
FILES = [
    ManifestFile(path="a.safetensors", size=1000, sha256=SHA),
    ManifestFile(path="sub/b.safetensors", size=2000, sha256="2" * 64),
]
MANIFEST = Manifest(repo="acme/tiny", asked="main", commit="a" * 40, files=FILES)
ROOMY = Room("/srv", 10_000, 1000, 2000)
EMPTY = ShardsFact(near="/srv", rooms={"1": ROOMY}, places={"": "1"})
HF = f"{HF_PLACE}/xyz.{SHA}.0a1b2c3d.incomplete"


def plan(fact: ShardsFact, known: bool = True, **download: Any) -> Plan:
    state = DeploymentState(manifest=MANIFEST if known else None)
    return ShardsStep().plan(want(**download), Facts({ShardsFact: fact}), state)


def hf(prefix: int, used: int = 4096, etag: str = SHA, number: int = 0) -> Partial:
    return Partial("hf", f"{HF_PLACE}/{number}.incomplete", used, prefix, "", etag, 0)


def seen(root: Path) -> ShardsFact:
    probe = shards_probe(str(root), "/nonexistent", Where.GUEST)
    done = subprocess.run(["dash", "-c", probe.script], capture_output=True)
    fact = probe.parse(ProbeOutput(done.returncode, done.stdout, done.stderr))
    assert isinstance(fact, ShardsFact) and fact.problem == ""
    return fact


def put(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# ---- what the probe sees
def test_the_look_is_one_text_that_needs_only_the_standard_library(tmp_path: Path) -> None:
    text = look_script()
    assert "deployer.agents" not in text and len(text) < 40_000
    names = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert names <= set(sys.stdlib_module_names) | {"__future__"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", text, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and json.loads(done.stdout)["exists"]


def test_the_probe_sees_partials_maps_and_who_works_there(tmp_path: Path) -> None:
    root = tmp_path / "model"
    put(root / "a.safetensors.part", b"x" * 900)
    put(root / "a.safetensors.part.map", b'{"prefix": 100, "pieces": [[200, 300]]}')
    put(root / "c.safetensors.part", b"x" * 50)
    put(root / "c.safetensors.part.map", b"{")
    put(root / HF, b"x" * 700)
    put(root / OWN_HF / "sub" / "b.safetensors", b"x" * 20)
    held = put(root / "sub" / "b.safetensors.part", b"x")
    with held.open("r+b"):
        fact = seen(root)
    assert dict(fact.parts) == {"a.safetensors": 200, "c.safetensors": 0, "sub/b.safetensors": 1}
    assert [(p.client, p.path, p.prefix, p.name, p.etag) for p in fact.partials] == [
        ("hf", HF, 700, "", SHA),
        ("hf-xet", f"{OWN_HF}/sub/b.safetensors", 20, "sub/b.safetensors", ""),
    ]
    assert [(one.pid, one.path) for one in fact.holders] == [
        (os.getpid(), "sub/b.safetensors.part")
    ]
    assert fact.running == 0
    assert str(os.getpid()) in plan(fact).reason


def test_folders_on_other_file_systems_have_their_own_room(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == root.stat().st_dev:
        pytest.skip("no second file system here")
    other = shm / f"deployer-test-{os.getpid()}"
    put(other / "deep" / "b.safetensors", b"12345")
    try:
        (root / "sub").symlink_to(other)
        (other / "round").symlink_to(root)
        fact = seen(root)
    finally:
        for path in (other / "round", other / "deep" / "b.safetensors"):
            path.unlink()
        (other / "deep").rmdir()
        other.rmdir()
    assert fact.files["sub/deep/b.safetensors"][0] == 5 and len(fact.files) == 1
    assert fact.room_of("sub/deep/b.safetensors") == str(shm.stat().st_dev)
    assert fact.room_of("a") == fact.room_of("subway/a") == str(root.stat().st_dev)
    assert fact.links == ("sub", "sub/round") and dict(fact.outside) == {"sub": str(other)}
    refused = plan(replace(fact, rooms=dict.fromkeys(fact.rooms, ROOMY)))
    assert f"out of the model's folder, to {other}" in refused.reason
    assert set(fact.places) == {"", "sub"} and fact.rooms[fact.places["sub"]].free > 0


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_no_folder_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "taken"
    if kind == "file":
        put(path, b"1")
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        os.mkfifo(path)
    for root in (path, path / "models" / "x"):
        fact = seen(root)
        assert not fact.exists and fact.near == str(tmp_path)
        decided = plan(fact, known=False)
        assert decided.state is PlanState.BLOCKED
        assert f"{path} is a" in decided.reason and "not a folder" in decided.reason


def test_names_that_are_no_text_do_not_break_the_look(tmp_path: Path) -> None:
    put(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.part")), b"1")
    put(tmp_path / "a.safetensors", b"1" * 1000)
    fact = seen(tmp_path)
    row = replace(
        fact, record={"a.safetensors": Verified(1000, fact.files["a.safetensors"][1], SHA, "")}
    )
    decided = plan(replace(row, rooms={key: ROOMY for key in row.rooms}))
    assert "1 partial file, 1 bytes, useless" in decided.reason


def test_thousands_of_files_cost_little(tmp_path: Path) -> None:
    for number in range(2000):
        if number % 100 == 0:
            (tmp_path / str(number // 100)).mkdir()
        (tmp_path / str(number // 100) / str(number)).touch()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert len(seen(tmp_path).files) == 2000
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_a_folder_that_is_not_there_yet_is_no_obstacle(tmp_path: Path) -> None:
    fact = seen(tmp_path / "not" / "yet")
    assert fact.near == str(tmp_path) and not fact.problems
    assert plan(replace(fact, rooms={key: ROOMY for key in fact.rooms})).state is PlanState.CHANGES


# ---- what it means
def test_a_partial_of_another_client_needs_no_room_and_is_said() -> None:
    fact = replace(
        EMPTY, partials=(hf(700, used=700), hf(600, number=1)), rooms={"1": replace(ROOMY, free=0)}
    )
    assert plan(fact).state is PlanState.BLOCKED
    decided = plan(replace(fact, rooms={"1": replace(ROOMY, free=2400)}))
    assert decided.state is PlanState.CHANGES
    assert "download 2 files, 2.3 kB" in decided.changes[0].title
    assert "1 partial file (hf), 700 bytes, is taken over" in decided.reason
    assert (
        "1 partial file, 4.1 kB, useless: `deploy doctor box/tiny --clean-partials` removes it"
        in decided.reason
    )
    assert (
        "2.3 kB to download" in plan(replace(fact, rooms={"1": replace(ROOMY, free=2399)})).reason
    )


def test_a_full_length_file_of_aria2_counts_with_its_pieces_only() -> None:
    files = {"a.safetensors": (1000, 7), "a.safetensors.aria2": (50, 7)}
    one = Partial("aria2", "a.safetensors", 1000, 300, "a.safetensors", "", 1000)
    fact = replace(EMPTY, files=files, partials=(one,))
    assert fact.present(FILES[0]) == 0
    assert "download 2 files, 2.7 kB" in plan(fact).changes[0].title
    # Its blocks are there already: nothing but the other file needs room.
    assert plan(replace(fact, rooms={"1": replace(ROOMY, free=2100)})).state is PlanState.CHANGES


def test_each_file_system_is_asked_for_its_own_files() -> None:
    fact = replace(
        EMPTY,
        rooms={"1": replace(ROOMY, free=1100), "2": Room("/mnt/b", 2099, 1000, 2000)},
        places={"": "1", "sub": "2"},
        elsewhere=(("/data", 9999), ("/home", 10)),
    )
    short = plan(fact)
    assert short.state is PlanState.BLOCKED
    assert short.reason == "/mnt/b: 2.1 kB free, 2.0 kB to download and 100 bytes margin needed"
    assert short.fix == (
        "free 1 bytes at /mnt/b (`deploy gc box/tiny` shows what of ours may go), or set "
        "model.path below /data (10.0 kB free)"
    )
    enough = {**fact.rooms, "2": Room("/mnt/b", 2100, 1000, 2000)}
    assert plan(replace(fact, rooms=enough)).state is PlanState.CHANGES
    few = {**fact.rooms, "2": Room("/mnt/b", 2100, 100, 2000)}
    assert plan(replace(fact, rooms=few)).reason == "/mnt/b: only 100 inodes free, 101 needed"


def test_a_partial_on_another_file_system_is_copied_and_needs_room() -> None:
    fact = replace(
        EMPTY,
        partials=(
            Partial("hf-xet", f"{OWN_HF}/a.safetensors", 4096, 1000, "a.safetensors", "", 0),
        ),
        rooms={"1": replace(ROOMY, free=3099), "2": ROOMY},
        places={"": "1", ".deployer": "2"},
    )
    assert plan(fact).state is PlanState.BLOCKED
    assert plan(replace(fact, places={"": "1"})).state is PlanState.CHANGES


def test_useless_bytes_that_would_make_room_are_named() -> None:
    fact = replace(EMPTY, partials=(hf(9, 5000, "3" * 64),), rooms={"1": replace(ROOMY, free=200)})
    fix = plan(fact).fix
    assert "`deploy doctor box/tiny --clean-partials` frees 5.0 kB" in fix


@pytest.mark.parametrize("known", [True, False])
def test_a_live_stranger_blocks(known: bool) -> None:
    holder = Holder(77, "hf download acme/tiny", HF)
    decided = plan(replace(EMPTY, holders=(holder,)), known)
    assert decided.state is PlanState.BLOCKED
    assert "pid 77 (hf download acme/tiny)" in decided.reason
    assert decided.fix.startswith("wait for it, or stop it yourself")


def test_our_own_download_and_a_log_file_block_nothing() -> None:
    ours = (
        Holder(5, "python3 fetch.pyz", ".deployer/lock"),
        Holder(6, "python3 fetch.pyz range", "a.safetensors.part"),
        Holder(7, "rsync", ".deployer/incoming/sub/b.safetensors"),
        Holder(8, "sh -c serve", "serve.log"),
    )
    joined = plan(replace(EMPTY, running=5, holders=ours))
    assert joined.state is PlanState.CHANGES and "(pid 5) and is joined" in joined.reason
    assert plan(replace(EMPTY, holders=ours)).state is PlanState.BLOCKED


def test_verified_is_verified_whoever_writes_there() -> None:
    fact = replace(
        EMPTY,
        files={"a.safetensors": (1000, 7), "sub/b.safetensors": (2000, 8), "old.part": (9, 1)},
        record={
            "a.safetensors": Verified(1000, 7, SHA, ""),
            "sub/b.safetensors": Verified(2000, 8, "2" * 64, ""),
        },
        holders=(Holder(77, "hf", HF),),
        partials=(hf(10),),
    )
    decided = plan(fact)
    assert decided.state is PlanState.NOTHING
    assert "all verified (sha256); 2 partial files, 4.1 kB, useless" in decided.reason


@pytest.mark.parametrize(
    ("changed", "reason", "fix"),
    [
        ({"rooms": {"1": replace(ROOMY, readonly=True)}}, "mounted read-only", "read-write"),
        ({"writable": False}, "/srv is not writable", "rights"),
        (
            {"problems": {"": "Permission denied"}},
            f"{PATH}: Permission denied",
            PATH,
        ),
        ({"obstacle": "/srv is a file, not a folder"}, "/srv is a file", "move it away"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_obstacles_are_one_clear_line(
    changed: dict[str, Any], reason: str, fix: str, known: bool
) -> None:
    decided = plan(replace(EMPTY, **changed), known)
    assert decided.state is PlanState.BLOCKED
    assert reason in decided.reason and "\n" not in decided.reason
    assert fix in decided.fix


def test_only_folders_that_the_list_needs_can_be_in_the_way() -> None:
    refused = plan(replace(EMPTY, problems={"sub": "not writable", "other": "Input/output error"}))
    assert refused.reason == f"{PATH}/sub: not writable"
    assert plan(replace(EMPTY, problems={"other": "x"})).state is PlanState.CHANGES
    assert plan(replace(EMPTY, problems={"sub": "x"}), known=False).state is PlanState.CHANGES
    taken = plan(replace(EMPTY, files={"sub": (3, 7)}))
    assert taken.reason == f"{PATH}/sub is a file, and a folder is needed there"


def test_the_plan_names_the_methods_in_order_and_the_limits() -> None:
    def said(**download: Any) -> str:
        return str(plan(EMPTY, **download).changes[0].action.describe())

    peer = {"address": "10.0.0.2", "path": "/srv/m"}
    text = said(
        methods=["peer", "range", "mirror", "hf-xet"],
        peer=peer,
        mirrors=["https://m"],
        bwlimit_bytes_per_s=5_000_000,
        max_restarts=7,
    )
    order = [
        "rsync from root@10.0.0.2",
        "range requests to https://huggingface.co (4 at a time, at most 5.0 MB/s)",
        "range requests to https://m",
    ]
    assert [text.index(one) for one in order] == sorted(text.index(one) for one in order)
    for one in ("for 45 s", "below 100.0 kB/s over 120 s", "60 s", "2 kills", "at most 7 times"):
        assert one in text
    assert "hf-xet" not in text
    plain = said(floor_bytes_per_s=0)
    assert plain.index("range requests") < plain.index("hf-xet from the venv")
    assert "rsync" not in plain and "below" not in plain and "https://m" not in plain
