"""The state file: fresh, whole, kept, and never taken for empty when it is not readable."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployer.errors import DeployError, StateUnreadable
from deployer.state import SCHEMA, DeploymentState, HostState, Launch, Manifest, ManifestFile
from deployer.state_file import StateFile


def state(**attempts: int) -> HostState:
    launch = Launch(id="1", variant="mtp", started=1.5, argv=["python", "-m", "x"])
    manifest = Manifest(
        repo="a/b", asked="main", commit="c" * 40, files=[ManifestFile(path="f", size=1)]
    )
    entry = DeploymentState(manifest=manifest, launches=[launch], attempts=attempts)
    return HostState(host="kpro5", deployments={"qwen": entry})


def test_missing_is_fresh(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state", "kpro5")
    assert file.load() == HostState(host="kpro5")
    assert not file.path.exists()


def test_round_trip_keeps_the_previous_version(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state", "kpro5")
    for count in range(4):
        file.save(state(shards=count))
    assert file.load() == state(shards=3)
    kept = json.loads(file.previous.read_text())
    assert kept["deployments"]["qwen"]["attempts"] == {"shards": 2}
    assert sorted(path.name for path in file.path.parent.iterdir()) == [
        "kpro5.json",
        "kpro5.json.prev",
    ]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_save_after_the_file_was_moved_away(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    file.save(state(a=1))
    file.save(state(a=2))
    file.path.unlink()
    assert file.load() == HostState(host="kpro5")
    file.save(state(a=3))
    assert file.load() == state(a=3)
    assert "1" in file.previous.read_text()


def test_restored_by_copy_as_the_error_says(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    file.save(state(a=1))
    file.save(state(a=2))
    file.path.write_text("{")
    with pytest.raises(StateUnreadable) as caught:
        file.load()
    assert f"cp {file.previous} {file.path}" in caught.value.fix
    file.path.write_bytes(file.previous.read_bytes())
    assert file.load() == state(a=1)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "found None"),
        (b"null", "found None"),
        (b'{"host": "kpro5"}', f"expected schema_version 1 to {SCHEMA}, found None"),
        (b'{"schema_version": 0, "host": "kpro5"}', "found 0"),
        (b'{"schema_version": "1", "host": "kpro5"}', "found '1'"),
        (b'{"schema_version": 99, "host": "kpro5", "new": 1}', "has schema 99"),
        (b'{"schema_version": 1, "host": "kpro6"}', "belongs to host 'kpro6'"),
        (b'{"schema_version": 1, "host": "kpro5", "x": 1}', "x: Extra inputs"),
        (b'{"schema_version": 1, "host": "kpro5", "deployments": 1}', "deployments:"),
    ],
)
def test_unreadable_is_an_error_with_a_way_out(tmp_path: Path, raw: bytes, what: str) -> None:
    file = StateFile(tmp_path, "kpro5")
    file.path.write_bytes(raw)
    with pytest.raises(StateUnreadable) as caught:
        file.load()
    assert what in caught.value.what
    assert "deploy doctor" in caught.value.fix or "newer deployer" in caught.value.fix
    assert file.path.read_bytes() == raw


def test_a_figure_that_is_no_number_is_read_back(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    launch = Launch(id="1", variant="a", started=1, figures={"tps": math.inf, "x": math.nan})
    file.save(HostState(host="kpro5", deployments={"q": DeploymentState(launches=[launch])}))
    figures = file.load().deployments["q"].launches[0].figures
    assert figures["tps"] == math.inf
    assert math.isnan(figures["x"])


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    file.path.mkdir()
    with pytest.raises(StateUnreadable, match="directory"):
        file.load()


def test_unwritable_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(DeployError, match="cannot be written"):
        StateFile(tmp_path / "state", "kpro5").save(state())


def test_a_failed_save_leaves_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(tmp_path, "kpro5")
    file.save(state(a=1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeployError, match="No space left"):
        file.save(state(a=2))
    assert file.load() == state(a=1)


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        if not target.exists():
            raise FileNotFoundError(2, "no such file")
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    file = StateFile(tmp_path, "kpro5")
    file.save(state(a=1))
    file.save(state(a=2))
    assert file.load() == state(a=2)
    assert '"a":1' in file.previous.read_text().replace(" ", "")


WRITER = """
import sys
from pathlib import Path
from deployer.state import DeploymentState, HostState
from deployer.state_file import StateFile
file = StateFile(Path(sys.argv[1]), "kpro5")
entry = DeploymentState(extra={"filler": "x" * 200_000})
count = 0
while True:
    count += 1
    entry.attempts["n"] = count
    file.save(HostState(host="kpro5", deployments={"qwen": entry}))
    if count == 1:
        print("saving", flush=True)
"""


def test_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    for delay in (0.0, 0.003, 0.007, 0.011, 0.019, 0.03):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saving\n"
        time.sleep(delay)  # the moment of the kill is what varies
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        assert file.load().deployments["qwen"].attempts["n"] >= 1
        if file.previous.exists():
            assert json.loads(file.previous.read_text())["schema_version"] == SCHEMA
    file.save(state(a=1))
    assert file.load() == state(a=1)


SCHEMA_1 = {
    "schema_version": 1,
    "host": "kpro5",
    "deployments": {
        "qwen": {
            "manifest": {"repo": "a/b", "asked": "main", "commit": "c0ffee", "files": []},
            "launches": [
                {"id": "1", "variant": "mtp", "started": 1.5, "verdict": "good", "argv": ["py"]}
            ],
            "known_good": "1",
            "attempts": {},
            "extra": {},
        }
    },
}
"""As the first schema had it, without the keys that came later."""


def test_a_file_of_the_first_schema_is_read_written_as_ours_and_kept(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    raw = json.dumps(SCHEMA_1).encode()
    file.path.write_bytes(raw)
    state = file.load()
    own = state.deployments["qwen"]
    assert (own.known_good, own.launches[0].argv) == ("1", ["py"])
    assert (own.validated, own.failed) == ([], [])
    assert file.path.read_bytes() == raw
    file.save(state)
    assert json.loads(file.path.read_bytes())["schema_version"] == SCHEMA
    old = tmp_path / "kpro5.json.schema1"
    assert old.read_bytes() == raw
    file.save(file.load())
    assert old.read_bytes() == raw


def test_a_newer_file_is_refused_with_the_way_back(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "kpro5")
    newer = json.dumps({"schema_version": SCHEMA + 1, "host": "kpro5", "later": 1}).encode()
    file.path.write_bytes(newer)
    with pytest.raises(StateUnreadable, match=f"has schema {SCHEMA + 1}") as caught:
        file.load()
    assert caught.value.fix == "use the newer deployer that wrote it"
    kept = tmp_path / f"kpro5.json.schema{SCHEMA}"
    StateFile(tmp_path / "old", "kpro5").save(HostState(host="kpro5"))
    kept.write_bytes((tmp_path / "old" / "kpro5.json").read_bytes())
    with pytest.raises(StateUnreadable) as caught:
        file.load()
    assert f"cp {kept} {file.path}" in caught.value.fix
    assert file.path.read_bytes() == newer
