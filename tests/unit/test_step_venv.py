"""The venv step: what it sees, why it would build, and the job that does."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.inventory import DeploymentEntry, Host
from deployer.model import Facts, Plan, PlanState, ProbeOutput, RunJob, Where
from deployer.playbook import Playbook
from deployer.remote.transport import Answer
from deployer.state import DeploymentState, Launch, RolledBack
from deployer.steps.base import Step
from deployer.steps.venv import VenvStep, same_version, usable_uv
from deployer.steps.venv_build import build_path, has_hashes, lock_hash, lock_pins, sm
from deployer.steps.venv_facts import (
    _VERSIONS,
    ComputeFact,
    Uv,
    VenvFact,
    parse_compute,
    parse_venv,
)

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "venv"
LOCK = "# engine\nsglang==0.5.11\ntorch==2.11.0\n"
LINK = "/opt/deployer/venvs/it's"


def want(lock: str = LOCK, vmid: int | None = None, **engine: Any) -> Deployment:
    playbook = Playbook.model_validate(
        {
            "model": {"repo": "acme/tiny", "path": "/srv/m", "served_name": "m"},
            "driver": {"version": "580.1"},
            "engine": {"version": "0.5.11", "python": "3.11", "lock": "l", "venv": LINK, **engine},
        }
    )
    host = Host.model_validate({"ssh": {"address": "h"}, "gpus": [{"address": "0000:21:00.0"}]})
    return Deployment("box", "tiny", host, DeploymentEntry(playbook="p"), playbook, "p", lock)


RECORD = {"lock": lock_hash(LOCK), "version": "0.5.11", "capabilities": ["8.6"]}
GOOD = VenvFact(
    kind="link",
    target=f"{LINK}.builds/one",
    record=RECORD,
    python="3.11",
    versions={"sglang": "0.5.11", "torch": "2.11.0+cu130"},
    uvs=(Uv("/usr/bin/uv", (0, 9, 2)),),
    python3="3.11.2",
    ensurepip=True,
    apt=True,
)
MISSING = replace(GOOD, kind="none")
A6000 = ComputeFact({"0000:21:00.0": "8.6", "0000:41:00.0": "9.0"})


def plan(fact: VenvFact = GOOD, compute: ComputeFact = A6000, **engine: Any) -> Plan:
    facts = Facts({VenvFact: fact, ComputeFact: compute})
    return VenvStep().plan(want(**engine), facts, DeploymentState())


def job(decided: Plan) -> RunJob:
    action = decided.changes[-1].action
    assert isinstance(action, RunJob)
    return action


def test_nothing_when_lock_versions_and_gpu_are_the_proven_ones() -> None:
    decided = plan()
    assert decided.state is PlanState.NOTHING
    assert decided.reason == f"sglang 0.5.11 from lock {lock_hash(LOCK)[:8]}, proven on sm_86"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kind": "none"}, "nothing is at"),
        ({"record": {}}, "no record of a proof"),
        ({"python": "", "versions": {}, "broken": "No such file"}, "does not run: No such file"),
        ({"record": {**RECORD, "lock": "0" * 64}}, "the lock changed (00000000 ->"),
        ({"python": "3.12"}, "it is Python 3.12"),
        ({"versions": {"sglang": "0.5.9", "torch": "2.11.0"}}, "sglang 0.5.9 is installed"),
        ({"versions": {"sglang": "0.5.11", "torch": "2.9.1"}}, "torch 2.9.1 is installed"),
        ({"versions": {"sglang": "0.5.11"}}, "torch none is installed"),
        ({"record": {**RECORD, "capabilities": ["9.0"]}}, "proven on sm_90, the GPUs are sm_86"),
    ],
)
def test_what_differs_is_built_anew(changed: dict[str, Any], reason: str) -> None:
    decided = plan(replace(GOOD, **changed))
    assert decided.state is PlanState.CHANGES and reason in decided.reason
    assert len(decided.changes) == 1


def test_what_is_not_ours_is_left_alone() -> None:
    for kind in ("folder", "other"):
        decided = plan(replace(GOOD, kind=kind))
        assert decided.state is PlanState.BLOCKED and LINK in decided.reason


def test_unknown_while_the_guest_or_the_driver_is_silent() -> None:
    step = VenvStep()
    silent = step.plan(want(), Facts(silent={Where.HOST: "dark"}), DeploymentState())
    assert (silent.state, silent.reason) == (PlanState.UNKNOWN, "dark")
    no_driver = parse_compute(ProbeOutput(127, b"", b"sh: nvidia-smi: not found\n"))
    assert plan(GOOD, no_driver).state is PlanState.UNKNOWN
    assert "not found" in plan(GOOD, no_driver).reason


def test_a_build_never_goes_into_the_folder_in_use() -> None:
    first = build_path(want(), ["8.6"], "")
    assert first == f"{LINK}.builds/{lock_hash(LOCK)[:12]}-3.11-sm86"
    second = build_path(want(), ["8.6"], first)
    assert second == f"{first}-b"
    assert build_path(want(), ["8.6"], second) == first


def test_what_brings_uv() -> None:
    bare = replace(GOOD, kind="none", uvs=(), python3="", ensurepip=False)
    titles = [change.title for change in plan(bare).changes]
    assert titles[0] == "install python3 and python3-venv (apt)" and len(titles) == 2
    blocked = plan(replace(bare, apt=False))
    assert blocked.state is PlanState.BLOCKED and "install uv" in blocked.fix
    assert "UV=''" in job(plan(replace(bare, ensurepip=True))).script
    assert "UV=/usr/bin/uv" in job(plan(replace(GOOD, kind="none"))).script


def test_uv_versions() -> None:
    uvs = (Uv("/a", (0, 4, 30)), Uv("/b", (0, 10)))
    assert usable_uv(uvs, ">=0.5") == "/b"
    assert usable_uv(uvs, ">=0.4") == "/a"
    assert usable_uv(uvs, "==0.10") == "/b"
    assert usable_uv(uvs, ">=1") == "" and usable_uv((), ">=0.5") == ""
    assert usable_uv(uvs, "~=0.5") == ""
    assert usable_uv(uvs, ">=0.4", (0, 8)) == "/b"


def test_the_job_quotes_keeps_secrets_off_argv_and_says_what_to_prove() -> None:
    made = job(
        plan(
            replace(GOOD, kind="none"),
            index_url="https://u:secret@pypi.example/simple",
            find_links=["/srv/my wheels", "/b"],
            ca_bundle="/etc/ca.pem",
        )
    )
    assert "set -- --find-links '/srv/my wheels' --find-links /b\n" in made.script
    assert "secret" not in made.script and "secret" not in repr(made)
    settings = made.files["settings.sh"].decode()
    assert "UV_DEFAULT_INDEX='https://u:secret@pypi.example/simple'" in settings or (
        "UV_DEFAULT_INDEX=https://u:secret@pypi.example/simple" in settings
    )
    assert "SSL_CERT_FILE=/etc/ca.pem" in settings and "PIP_CERT=/etc/ca.pem" in settings
    proof = json.loads(made.files["proof.json"])
    assert proof["pins"] == {"sglang": "0.5.11", "torch": "2.11.0"}
    assert (proof["gpus"], proof["capabilities"]) == (1, ["8.6"])
    assert made.files["lock.txt"].decode() == LOCK
    for shell in (["dash", "-n"], ["busybox", "ash", "-n"]):
        assert subprocess.run([*shell, "-c", made.script]).returncode == 0


def test_local_wheels_go_before_the_index() -> None:
    made = job(plan(replace(GOOD, kind="none"), find_links=["/srv/my wheels", "/b"]))
    toml = tomllib.loads(made.files["uv.toml"].decode())
    assert toml["index-strategy"] == "unsafe-first-match"
    assert [(one["url"], one["format"]) for one in toml["index"]] == [
        ("/srv/my wheels", "flat"),
        ("/b", "flat"),
    ]
    assert "uv.toml" not in job(plan(replace(GOOD, kind="none"))).files


def test_the_builds_own_error_is_the_error() -> None:
    class Failing(Step):
        def apply(self, *_: Any) -> None:
            lines = ("+ x==1", "error: import sglang: boom", "error: the old one stays")
            raise StepFailed("job venv-tiny/1 ended with status 21", evidence=lines)

    class Both(VenvStep, Failing):
        pass

    context: Any = SimpleNamespace(jobs=lambda where: SimpleNamespace(find=lambda name: None))
    with pytest.raises(StepFailed, match="import sglang: boom; the old one stays"):
        Both().apply(context, Facts(), plan())


@pytest.mark.parametrize(
    ("other", "ended"),
    [
        ({}, False),
        ({"uv": ""}, False),
        ({"index_url": "https://gone.example/simple"}, True),
        ({"python": "3.12"}, True),
        ({"lock": "other==1.0\n"}, True),
        ({"find_links": ["/w"]}, True),
        ({"ca_bundle": "/etc/ca.pem"}, True),
    ],
)
def test_a_build_of_something_else_is_not_waited_for(other: dict[str, Any], ended: bool) -> None:
    """A killed run has left it at work; a rollback, or a corrected index, wants another one."""
    ours = job(plan(MISSING))
    uv = other.pop("uv", None)
    theirs = job(plan(MISSING, **other))
    script = theirs.script if uv is None else re.sub(r"(?m)^UV=.*$", "UV=''", theirs.script)
    assert (uv is None) or script != theirs.script
    stopped: list[str] = []
    proof = SimpleNamespace(stopped=True, how="TERM", survivors=())

    def stop(one: Any, grace_s: float) -> Any:
        stopped.append(one.id)
        return proof

    raw = script.encode() + b"\0" + theirs.files["settings.sh"]
    identity = SimpleNamespace(name="venv-tiny", id="1", pid=7)
    jobs = SimpleNamespace(
        root="/jobs",
        find=lambda name: SimpleNamespace(alive=True, identity=identity),
        transport=SimpleNamespace(run=lambda script, args: Answer(0, raw, b"")),
        stop=stop,
    )
    said: list[str] = []
    context: Any = SimpleNamespace(jobs=lambda where: jobs, note=said.append, want=None)
    VenvStep._end_other(context, ours)
    assert (stopped == ["1"]) is ended and bool(said) is ended


def test_builds_that_a_rollback_needs_stay() -> None:
    own = DeploymentState(known_good="g")
    own.rollback = RolledBack(to="t", mark="", left="l", wish="", commits=[], when=0.0)
    own.launches = [Launch(id=name, variant="x", started=0.0, venv=f"/b/{name}") for name in "gtlx"]
    facts = Facts({VenvFact: MISSING, ComputeFact: A6000})
    made = job(VenvStep().plan(want(), facts, own))
    assert json.loads(made.files["proof.json"])["needed"] == ["/b/g", "/b/t", "/b/l"]


def test_no_index_means_only_the_local_wheels() -> None:
    made = job(plan(replace(GOOD, kind="none"), index_url="none", find_links=["/w"]))
    assert "FLAGS=--no-index" in made.script
    assert b"DEFAULT_INDEX" not in made.files["settings.sh"] and "uv.toml" not in made.files


def test_pins_and_hashes_of_a_lock() -> None:
    text = (FIXTURES / "lock-with-hashes.txt").read_text()
    assert lock_pins(text) == {
        "sglang": "0.5.11",
        "typing-extensions": "4.15.0",
        "torch": "2.11.0+cu130",
        "uvicorn": "0.38.0",
    }
    assert has_hashes(text) and not has_hashes(LOCK)


def test_local_versions() -> None:
    assert same_version("2.11.0+cu130", "2.11.0")
    assert same_version("2.11.0", "2.11.0+cu130")
    assert not same_version("2.11.0+cu128", "2.11.0+cu130")
    assert sm(["9.0", "8.6", "8.6"]) == "sm_86+sm_90"


def test_the_probe_answer_of_a_proven_environment() -> None:
    fact = parse_venv(ProbeOutput(0, (FIXTURES / "proven.txt").read_bytes(), b""))
    assert fact.kind == "link" and fact.target.endswith("-sm86")
    assert fact.record["capabilities"] == ["8.6"] and fact.python == "3.11"
    assert fact.versions["typing-extensions"] == "4.15.0"
    assert fact.uvs == (Uv("/opt/deployer/uv/bin/uv", (0, 13, 9)),)
    assert fact.python3 == "3.11.2" and fact.ensurepip and fact.apt


def test_of_two_installed_the_one_that_is_imported_counts(tmp_path: Path) -> None:
    for place, version in (("first", "5.6.0"), ("second", "5.17.0")):
        info = tmp_path / place / f"transformers-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: transformers\nVersion: {version}\n")
    paths = [str(tmp_path / "first"), str(tmp_path / "second")]
    look = f"import sys; sys.path[:0] = {paths!r}; {_VERSIONS}"
    said = subprocess.run([sys.executable, "-c", look], capture_output=True, check=True)
    answer = parse_venv(ProbeOutput(0, b"kind=link\ninside=" + said.stdout, b""))
    assert answer.versions["transformers"] == "5.6.0"


def test_the_probe_answer_of_a_broken_one_and_of_none() -> None:
    broken = parse_venv(ProbeOutput(0, (FIXTURES / "broken-python.txt").read_bytes(), b""))
    assert "libpython3.11" in broken.broken and not broken.python
    none = parse_venv(ProbeOutput(0, b"kind=none\ntarget=/x\n", b""))
    assert none.kind == "none" and not none.problem
    assert parse_venv(ProbeOutput(0, b"", b"")).problem
    assert parse_venv(ProbeOutput(137, b"kind=none\n", b"", timed_out=True)).problem


def test_the_gpus_answer() -> None:
    rows = b"00000000:21:00.0, 8.6\n00000000:41:00.0, 9.0\n"
    assert parse_compute(ProbeOutput(0, rows, b"")) == A6000
    failed = b"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    assert "has failed" in parse_compute(ProbeOutput(9, failed, b"")).problem
    assert "hangs" in parse_compute(ProbeOutput(137, b"", b"", timed_out=True)).problem


def load_proof() -> ModuleType:
    path = ROOT / "deployer" / "agents" / "venv_proof.py"
    spec = importlib.util.spec_from_file_location("venv_proof_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


proof = load_proof()


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_90"], (8, 6), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["compute_80"], (9, 0), True),
        (["compute_90"], (8, 6), False),
        (["sm_120"], (12, 0), True),
        ([], (8, 6), False),
        (["gfx90a"], (9, 0), False),
    ],
)
def test_which_code_runs_where(archs: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert proof.runs_on(archs, capability) is runs


def test_proof_of_versions() -> None:
    assert proof.check_versions({}) == {}
    with pytest.raises(proof.Unproven, match="is locked and not installed") as caught:
        proof.check_versions({"no-such-distribution": "1"})
    assert caught.value.code == 20
    with pytest.raises(proof.Unproven, match="the lock says 0"):
        proof.check_versions({"pytest": "0"})


class Torch(ModuleType):
    """A stand-in: two GPUs, one of them asked for the sum of eight twos."""

    __version__ = "2.11.0+cu130"

    def __init__(self, archs: list[str], total: float = 16.0, available: bool = True) -> None:
        super().__init__("torch")
        self.cuda: Any = SimpleNamespace(
            is_available=lambda: available,
            get_arch_list=lambda: archs,
            device_count=lambda: 2,
            get_device_capability=lambda index: (8, 6),
        )
        self.version: Any = SimpleNamespace(cuda="13.0")
        self.total = total

    def ones(self, count: int, device: str) -> Any:
        torch = self

        class Tensor:
            def __mul__(self, other: int) -> Any:
                return self

            def sum(self) -> Any:
                return SimpleNamespace(item=lambda: torch.total)

        return Tensor()


@pytest.mark.parametrize(
    ("torch", "gpus", "code", "said"),
    [
        (Torch(["sm_90"]), 2, 22, "GPU 0 is sm_86"),
        (Torch(["sm_80"], total=0.0), 2, 23, "computes 0.0"),
        (Torch(["sm_80"], available=False), 2, 23, "sees no CUDA"),
        (Torch(["sm_80"]), 3, 23, "sees 2 GPUs, 3 are wanted"),
    ],
)
def test_a_build_that_does_not_fit_the_gpus_is_named(
    monkeypatch: pytest.MonkeyPatch, torch: Torch, gpus: int, code: int, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(proof.Unproven, match=said) as caught:
        proof.check_gpus(gpus)
    assert caught.value.code == code


def test_sm_80_code_is_proven_on_sm_86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(["sm_80", "sm_90"]))
    assert proof.check_gpus(2)["gpus"] == ["8.6", "8.6"]


def test_switch_replaces_the_link_and_keeps_one_old_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = tmp_path / "v.builds"
    for age, (name, capabilities) in enumerate(
        [("older", ["8.6"]), ("old", ["8.6"]), ("other-gpu", ["9.0"]), ("half", None), ("new", [])]
    ):
        (builds / name).mkdir(parents=True)
        if capabilities is not None:
            text = json.dumps({"capabilities": capabilities})
            (builds / name / "deployer.json").write_text(text)
        os.utime(builds / name, (age, age))
    link = tmp_path / "v"
    link.symlink_to(builds / "old")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proof.out").write_text(json.dumps({"capabilities": ["8.6"]}))
    (builds / "half" / "deployer.build").touch()
    (builds / "strange").mkdir()
    asked = {"build": str(builds / "new"), "link": str(link), "capabilities": ["8.6"]}
    proof.switch({**asked, "keep": 3, "needed": [str(builds / "other-gpu")]})
    assert link.resolve() == builds / "new"
    left = sorted(path.name for path in builds.iterdir())
    assert left == ["new", "old", "older", "other-gpu", "strange"]
    proof.switch(asked)
    assert sorted(path.name for path in builds.iterdir()) == ["new", "old", "strange"]
    assert json.loads((link / "deployer.json").read_text())["capabilities"] == ["8.6"]


def test_old_builds_are_known_by_their_real_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the builds is a symlink to another disk; state and processes know the other."""
    real = tmp_path / "disk"
    for name in ("needed", "used", "old", "new"):
        (real / name).mkdir(parents=True)
        (real / name / "deployer.json").write_text('{"capabilities": ["8.6"]}')
    (tmp_path / "v.builds").symlink_to(real)
    held = (real / "used" / "held").open("w+b")
    held.write(b"x")
    held.flush()
    builds = tmp_path / "v.builds"
    with held, mmap.mmap(held.fileno(), 1):
        removed = proof.prune(str(builds / "new"), ["8.6"], 1, [str(real / "needed")])
    assert removed == [str(builds / "old")]
    assert sorted(path.name for path in real.iterdir()) == ["needed", "new", "used"]


def test_a_build_that_cannot_be_removed_does_not_undo_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("old", "new"):
        (tmp_path / "b" / name).mkdir(parents=True)
        (tmp_path / "b" / name / "complete").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proof.out").write_text("{}")

    def full(path: str, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "makedirs", full)
    asked = {"build": str(tmp_path / "b" / "new"), "link": str(tmp_path / "v"), "capabilities": []}
    proof.switch({**asked, "keep": 1})
    assert (tmp_path / "v").resolve().name == "new" and (tmp_path / "b" / "old").exists()
    assert "old builds were not removed: " in capsys.readouterr().out


def test_switch_never_replaces_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b" / "new").mkdir(parents=True)
    (tmp_path / "v").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "proof.out").write_text("{}")
    asked = {"build": str(tmp_path / "b" / "new"), "link": str(tmp_path / "v"), "capabilities": []}
    with pytest.raises(proof.Unproven, match="is a folder"):
        proof.switch(asked)
