"""`deploy doctor --rehash` and `--clean-partials`, from the words to the files of this machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from deployer import rehash as rehashing
from deployer import up
from deployer.agents.fetch.partials import HF_PLACE, OWN_HF
from deployer.catalog import Catalog
from deployer.cleaning import CleanPartials
from deployer.cli import doctor_files, status
from deployer.cli.main import group
from deployer.deployment import Deployment
from deployer.engine import Outcome
from deployer.errors import Unreachable
from deployer.model import Facts, Where
from deployer.remote.batch import gather
from deployer.remote.transport import Transport
from deployer.state import DeploymentState, HostState, Manifest, ManifestFile
from deployer.state_file import StateFile
from deployer.steps.base import Step
from tests.local_transport import LocalTransport, shell_path

INVENTORY = """\
hosts:
  box:
    kind: plain
    ssh: {address: 192.0.2.1}
    gpus: [{address: "0000:21:00.0"}]
    deployments:
      tiny: {playbook: tiny}
"""
PLAYBOOK = """\
model: {{repo: acme/tiny, path: {path}, served_name: tiny}}
driver: {{version: 580.126.09}}
engine: {{version: 0.5.11, lock: lock.txt, venv: /nonexistent/venv}}
"""
DATA = {"a.safetensors": b"a" * 300_000, "b.safetensors": b"b" * 200_000, "config.json": b"{}"}


class Session:
    """The double of HostSession whose host is this machine; no host lock is taken here."""

    transport: ClassVar[Transport]
    dark: ClassVar[bool] = False
    locks: ClassVar[list[str]] = []

    def __init__(self, host: str, entry: object, base: Path, note: object = None) -> None:
        if self.dark:
            raise Unreachable("no route to host", where=host)

    def wake(self) -> None:
        """Nothing waits on a connection here."""

    def transports(self, want: Deployment) -> Mapping[Where, Transport]:
        return {Where.HOST: self.transport, Where.GUEST: self.transport}

    def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
        return Facts(gather(self.transport, [p for step in steps for p in step.probes(want)]))

    def want_lock(self, run_id: str) -> None:
        self.locks.append(run_id)

    def entered(self, step: str) -> None:
        pass

    def close(self, on_problem: Callable[[str], None]) -> None:
        pass


class Box:
    """One deployment, its files, and the commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "it's a model"
        for name, text in (
            ("inventory/box.yaml", INVENTORY),
            ("playbooks/tiny.yaml", PLAYBOOK.format(path=json.dumps(str(self.model)))),
            ("playbooks/lock.txt", "sglang==0.5.11\n"),
        ):
            self.put(folder / name, text.encode())
        for name, data in DATA.items():
            self.put(self.model / name, data)
        files = [
            ManifestFile(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in DATA.items()
        ]
        self.pin(Manifest(repo="acme/tiny", asked="main", commit="a" * 40, files=files))

    def pin(self, manifest: Manifest | None) -> None:
        state = HostState(host="box", deployments={"tiny": DeploymentState(manifest=manifest)})
        StateFile(self.folder / ".deploy" / "state", "box").save(state)

    @staticmethod
    def put(path: Path, data: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def doctor(self, *words: str) -> Result:
        words = ("-i", str(self.folder / "inventory"), "doctor", "box", *words)
        done = CliRunner().invoke(group, words, standalone_mode=False)
        assert done.exception is None or isinstance(done.exception, KeyboardInterrupt), done.output
        return done

    def names(self) -> list[str]:
        paths = [path for path in self.model.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.model)) for path in paths)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    monkeypatch.setattr(up, "HostSession", Session)
    monkeypatch.setattr(rehashing, "HostSession", Session)
    (tmp_path / "tmp").mkdir()
    here = LocalTransport(shell_path("dash", tmp_path), env={"TMPDIR": str(tmp_path / "tmp")})
    monkeypatch.setattr(Session, "transport", here, False)
    monkeypatch.setattr(Session, "locks", [])
    return Box(tmp_path)


def test_right_files_are_right_and_recorded(box: Box) -> None:
    done = box.doctor("--rehash")
    assert done.return_value == 0
    assert done.stdout.startswith("box/tiny: 3 of 3 files are right, 500.0 kB hashed in ")
    record = json.loads((box.model / ".deployer" / "verified.json").read_text())["files"]
    assert set(record) == set(DATA)
    assert not list((box.folder / "tmp").iterdir())


def test_a_wrong_a_short_and_a_missing_file_are_told_with_the_fix(box: Box) -> None:
    assert box.doctor("--rehash").return_value == 0
    facts = (box.model / "a.safetensors").stat()
    box.put(box.model / "a.safetensors", b"a" * 299_999 + b"!")
    os.utime(box.model / "a.safetensors", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    box.put(box.model / "b.safetensors", b"b" * 10)
    (box.model / "config.json").unlink()
    done = box.doctor("--rehash")
    assert done.return_value == 1
    assert "b.safetensors: wrong" in done.stderr and "config.json: missing" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("box/tiny: 0 of 3 files are right")
    assert "BLOCKED" in lines[1] and "a.safetensors: expected " in lines[1]
    assert "-> `deploy up box/tiny --only shards` fetches it again" in lines[2]
    assert "b.safetensors" in lines[3] and "(10 bytes)" in lines[3]
    assert "pending" in lines[5] and "config.json: no such file" in lines[5]
    record = json.loads((box.model / ".deployer" / "verified.json").read_text())["files"]
    assert "a.safetensors" not in record and "b.safetensors" not in record
    assert box.names().count("a.safetensors") == 1 and not list(box.model.glob("*.bad"))


def test_json_has_a_verdict_for_each_file_in_the_order_of_the_list(box: Box) -> None:
    box.put(box.model / "b.safetensors", b"!" * 200_000)
    done = box.doctor("--rehash", "--json")
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.return_value == 1
    [one] = document["deployments"]
    assert [(row["path"], row["ok"]) for row in one["files"]] == [
        ("a.safetensors", True),
        ("b.safetensors", False),
        ("config.json", True),
    ]
    assert one["files"][1]["got"] == hashlib.sha256(b"!" * 200_000).hexdigest()
    assert one["findings"][0]["level"] == "blocked" and one["error"] is None
    events = [json.loads(line) for line in box.doctor("--rehash", "--jsonl").stdout.splitlines()]
    assert [event["event"] for event in events[-1:]] == ["rehashed"]
    assert events[-1]["deployments"][0]["files"] == one["files"]
    assert {event["event"] for event in events} >= {"progress", "note"}


def test_what_cannot_be_hashed_is_an_error_not_a_verdict(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = box.put(box.model / ".deployer" / "lock", b"{}")
    with lock.open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = box.doctor("--rehash")
    assert done.return_value == 1 and "not checked" in done.stdout
    assert "another download holds the lock" in done.stdout
    box.pin(None)
    done = box.doctor("--rehash")
    assert done.return_value == 1 and "--only shards` fetches it" in done.stdout
    monkeypatch.setattr(Session, "dark", True)
    done = box.doctor("--rehash", "--json")
    assert done.return_value == 3
    assert json.loads(done.stdout)["deployments"][0]["findings"][0]["level"] == "unreachable"


@pytest.mark.parametrize("flag", ["--rehash", "--clean-partials"])
def test_without_a_python_on_the_target_it_says_so(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for tool in Path("/bin").iterdir():
        if not tool.name.startswith(("python", "pypy")):
            (bare / tool.name).symlink_to(tool)
    monkeypatch.setattr(Session, "transport", LocalTransport(str(bare)), False)
    done = box.doctor(flag, "--yes")
    assert done.return_value == 1
    assert "there is no python3 (3.9 or newer) on the target" in done.output


def litter(box: Box) -> None:
    """One of each: useful, useless, foreign, ours."""
    assert box.doctor("--rehash").return_value == 0
    sha = hashlib.sha256(DATA["b.safetensors"]).hexdigest()
    (box.model / "b.safetensors").unlink()
    box.put(box.model / HF_PLACE / f"x.{sha}.0a1b2c3d.incomplete", b"b" * 5000)
    box.put(box.model / HF_PLACE / f"x.{sha}.00000000.incomplete", b"b" * 50)
    box.put(box.model / HF_PLACE / f"y.{'3' * 64}.00000000.incomplete", b"c" * 70_000)
    box.put(box.model / HF_PLACE / "b.safetensors.lock", b"")
    box.put(box.model / OWN_HF / "a.safetensors", DATA["a.safetensors"])
    box.put(box.model / "old.safetensors.part", b"1" * 9)
    box.put(box.model / "a.safetensors.bad", b"1" * 9)
    box.put(box.model / "notes.txt", b"mine")


def test_nothing_is_removed_unasked(box: Box) -> None:
    litter(box)
    before = box.names()
    done = box.doctor("--clean-partials")
    assert done.return_value == 0 and box.names() == before
    assert "remove old.safetensors.part" in done.output
    assert "nothing was removed: add --yes" in done.output
    listed = json.loads(box.doctor("--clean-partials", "--json").stdout)
    [step] = listed["deployments"][0]["steps"]
    assert step["state"] == "changes" and len(step["changes"]) == 5
    assert not Session.locks


def test_what_was_listed_is_removed_and_nothing_else(box: Box) -> None:
    litter(box)
    done = box.doctor("--clean-partials", "--yes")
    assert done.return_value == 0, done.output
    assert "removed 5 files" in done.output and len(Session.locks) == 1
    left = [name for name in box.names() if not name.startswith(".deployer/")]
    sha = hashlib.sha256(DATA["b.safetensors"]).hexdigest()
    assert left == [
        f"{HF_PLACE}/x.{sha}.0a1b2c3d.incomplete",
        "a.safetensors",
        "config.json",
        "notes.txt",
    ]
    again = box.doctor("--clean-partials", "--yes")
    assert again.return_value == 0 and "no useless partial files" in again.output
    assert len(Session.locks) == 1


def test_the_question_shows_each_file(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    litter(box)
    [want] = Catalog.load(box.folder / "inventory").select(["box"])
    step = CleanPartials()
    facts = Session("box", None, box.folder).look(want, [step])
    state = StateFile(box.folder / ".deploy" / "state", "box").load().deployments["tiny"]
    outcome = Outcome({"partials": step.plan(want, facts, state)})
    assert doctor_files._ask(want, outcome) == "Remove these from box/tiny?"
    assert capsys.readouterr().err.count("  remove ") == 5


def test_a_live_download_forbids_cleaning(box: Box) -> None:
    litter(box)
    part = box.put(box.model / "b.safetensors.part", b"1")
    with part.open("r+b"):
        done = box.doctor("--clean-partials", "--yes")
    assert done.return_value == 1 and "another program downloads into" in done.output
    box.pin(None)
    done = box.doctor("--clean-partials", "--yes")
    assert done.return_value == 1 and "is not known yet" in done.output


def test_one_of_the_two_at_a_time(box: Box) -> None:
    words = ["-i", str(box.folder / "inventory"), "doctor", "box", "--rehash", "--clean-partials"]
    done = CliRunner().invoke(group, words, standalone_mode=False)
    assert "exclude each other" in str(done.exception)


def test_doctor_tells_of_useless_partials(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:

    class Looks(Session):
        def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
            return super().look(want, [step for step in steps if step.name == "shards"])

    monkeypatch.setattr(status, "HostSession", Looks)
    litter(box)
    box.put(box.model / "b.safetensors", DATA["b.safetensors"])
    assert box.doctor("--rehash").return_value == 0
    text = box.doctor().stdout
    assert "6 partial files" in text and "-> `deploy doctor box/tiny --clean-partials`" in text
