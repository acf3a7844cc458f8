"""`deploy status` and `deploy doctor` against scripted sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deployer import gpu
from deployer.cli import status as module
from deployer.cli.main import group
from deployer.cli.plain import number
from deployer.cli.status import duration
from deployer.errors import AuthenticationRefused, Unreachable
from deployer.locallock import start_of
from deployer.model import Facts, Where
from deployer.observe import ClockFact, GpuLinks, LockSeen
from deployer.remote.machine import Machine
from deployer.steps.base import Step
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.server_facts import ServerFact
from deployer.steps.serving_fact import ServingFact
from deployer.steps.shards_facts import ShardsFact
from tests.unit.hoststeps import A, B, facts
from tests.unit.test_observe import LAUNCH, OURS, STRANGER, job

SAMPLES = Path(__file__).parents[2]
ROWS = tuple(
    gpu.SmiGpu(index, "u", "NVIDIA RTX A6000", "580.126.09", 49140, 43244, "8.6", address)
    for index, address in enumerate((A, B))
)
HOST = (
    HostDriver(loaded="580.126.09", flavour="open"),
    HostSmi(0, "", ROWS),
    GpuLinks(((A, "nvidia"), (B, "nvidia"))),
    LockSeen(),
    ContainerFacts(status="running"),
)
SERVING = facts(
    *HOST,
    ClockFact(1000 + 100 * 7320, 100),
    ServerFact(job=job(), listening=True, owners=(OURS,), engine="0.5.11"),
    ServingFact(LAUNCH, "good", 5.0, {"tokens_per_s": 2.0}, ""),
    ShardsFact(files={"a": (3, 7)}),
)
Answer = Facts | Exception | Callable[[Sequence[Step]], Facts]


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """The samples, with a `.deploy` of its own beside them."""
    folder = tmp_path / "inventory"
    folder.mkdir()
    for file in (SAMPLES / "inventory").glob("*.yaml"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder.parent / "playbooks").symlink_to(SAMPLES / "playbooks")
    return folder


@pytest.fixture
def deploy(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`deploy(WORDS..., kpro5=ANSWER)`: what the look at a host gives."""
    answers: dict[str, Answer] = {}

    class Session:
        def __init__(self, host_name: str, host: Any, base: Path) -> None:
            self.answer = answers[host_name]

        def look(self, want: Any, steps: Sequence[Step]) -> Facts:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer if isinstance(self.answer, Facts) else self.answer(steps)

        def wake(self) -> None:
            pass

        def close(self, on_problem: Any) -> None:
            pass

    monkeypatch.setattr(module, "HostSession", Session)

    def run(*words: str, **looks: Answer) -> Result:
        answers.update(looks)
        done = CliRunner().invoke(group, ["-i", str(inventory), *words], standalone_mode=False)
        assert done.exception is None, done.exception
        return done

    return run


def test_a_serving_host_as_text(deploy: Callable[..., Result]) -> None:
    done = deploy("status", "kpro5", kpro5=SERVING)
    assert done.return_value == 0
    text = done.stdout
    assert text.splitlines()[0] == "kpro5  nvidia 580.126.09 open"
    assert "gpu        0000:21:00.0  nvidia  NVIDIA RTX A6000  43244 / 49140 MiB" in text
    assert "container  129 running" in text
    assert f"launch     {LAUNCH} (mtp) serving, pid 70, up 2 h 02 min" in text
    assert "port       listening on 30000, answers" in text
    assert "verdict    good, judged 1970-01-01 00:00:05Z (2 tokens/s alone)" in text
    assert "weights    1 files, not compared" in text


def test_an_unreachable_host_does_not_hide_the_others(deploy: Callable[..., Result]) -> None:
    dark = Unreachable("no route to host", where="kpro5", fix="is it on?")
    done = deploy("status", "--all", kpro5=dark, kpro6=SERVING)
    assert done.return_value == 3
    assert done.stdout.startswith("kpro5  UNREACHABLE: no route to host\n  -> is it on?\nkpro6  ")
    assert "kpro6/qwen" in done.stdout


def test_an_unforeseen_error_of_one_host_does_not_hide_the_others(
    deploy: Callable[..., Result],
) -> None:
    done = deploy("status", "--all", kpro5=ZeroDivisionError("x"), kpro6=SERVING)
    assert done.return_value == 1
    assert done.stdout.startswith("kpro5  NOT SEEN: unexpected ZeroDivisionError: x\n  -> ")
    assert "kpro6/qwen" in done.stdout


def test_two_names_of_one_machine_are_told(deploy: Callable[..., Result]) -> None:
    seen = Facts({**SERVING.values, Machine: Machine("b", "1:2")})
    done = deploy("status", "--all", kpro5=seen, kpro6=seen)
    assert done.return_value == 0
    assert "deploy: kpro6: kpro5 and kpro6 are one machine, and both claim " in done.stderr
    assert "kpro6/qwen" in done.stdout


def test_status_as_one_document(deploy: Callable[..., Result]) -> None:
    dark = Unreachable("no route to host", where="kpro5")
    done = deploy("status", "--all", "--json", kpro5=dark, kpro6=SERVING)
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.return_value == 3
    first, second = document["hosts"]
    assert (first["host"], first["reachable"], first["deployments"]) == ("kpro5", False, [])
    assert first["error"]["what"] == "no route to host"
    assert second["reachable"] is True
    assert second["deployments"][0]["state"] == "serving"
    assert second["deployments"][0]["endpoint"].endswith(":30000/v1")


def test_a_silent_guest_is_shown(deploy: Callable[..., Result]) -> None:
    quiet = Facts(facts(*HOST).values, {Where.GUEST: "connection refused"})
    done = deploy("status", "kpro5", kpro5=quiet)
    assert done.return_value == 0
    assert "129 running; the guest is silent: connection refused" in done.stdout
    assert "launch     unknown: connection refused" in done.stdout


def test_a_guest_that_refuses_leaves_its_host_to_be_seen(deploy: Callable[..., Result]) -> None:
    def answer(steps: Sequence[Step]) -> Facts:
        if len(steps) > 1:
            raise AuthenticationRefused("no key fits", where="kpro5/129")
        return facts(*HOST)

    done = deploy("status", "kpro5", kpro5=answer)
    assert done.return_value == 3
    assert "gpu        0000:21:00.0" in done.stdout
    assert "error      kpro5/129: no key fits" in done.stdout


def test_a_stranger_on_the_port(deploy: Callable[..., Result]) -> None:
    busy = facts(*HOST, ServerFact(owners=(STRANGER,), listening=True))
    done = deploy("status", "kpro5", kpro5=busy)
    assert "launch     none of ours" in done.stdout
    assert "held by a stranger: pid 26: python3 -m http.server" in done.stdout


def test_a_broken_state_file_hides_nothing(deploy: Callable[..., Result], inventory: Path) -> None:
    state = inventory.parent / ".deploy" / "state"
    state.mkdir(parents=True)
    (state / "kpro5.json").write_text("{")
    done = deploy("status", "kpro5", kpro5=SERVING)
    assert done.return_value == 0
    assert "serving" in done.stdout
    assert "state file cannot be used" in done.stderr
    done = deploy("doctor", "kpro5", kpro5=SERVING)
    assert done.return_value == 1
    assert done.stdout.splitlines()[1].startswith("  BLOCKED")


def test_doctor_says_the_worst_first_with_the_action(deploy: Callable[..., Result]) -> None:
    done = deploy("doctor", "kpro5", "--json", kpro5=SERVING)
    [host] = json.loads(done.stdout)["hosts"]
    levels = [one["level"] for one in host["findings"]]
    order = ["unreachable", "blocked", "warning", "pending", "unknown", "fine"]
    assert levels == sorted(levels, key=order.index)
    blocked = "blocked" in levels
    assert done.return_value == (1 if blocked else 0)
    assert all(one["fix"] for one in host["findings"] if one["level"] == "blocked")


def test_doctor_of_a_dark_host(deploy: Callable[..., Result]) -> None:
    dark = Unreachable("no route to host", where="kpro5", fix="is it on?")
    done = deploy("doctor", "kpro5", kpro5=dark)
    assert done.return_value == 3
    assert done.stdout.splitlines()[1].split() == [
        "UNREACHABLE",
        "kpro5",
        "no",
        "route",
        "to",
        "host",
    ]


def test_doctor_tells_of_a_run_on_this_machine(
    deploy: Callable[..., Result], inventory: Path
) -> None:
    locks = inventory.parent / ".deploy" / "locks"
    locks.mkdir(parents=True)
    owner = {
        "pid": os.getpid(),
        "since": 1.0,
        "command": "up kpro5",
        "run_id": "r1",
        "step": "venv",
        "start": start_of(os.getpid()),
    }
    (locks / "kpro5.owner.json").write_text(json.dumps(owner))
    text = deploy("doctor", "kpro5", kpro5=SERVING).stdout
    assert "a run on this machine is at work" in text
    assert "at step venv" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7320, "2 h 02 min"), (100_000, "1 d 03 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_figures_have_no_exponent() -> None:
    assert [number(one) for one in (57809833.0, 568.61, 2.0)] == ["57809833", "568.6", "2"]


@pytest.mark.parametrize(
    ("state", "pid", "words"),
    [
        ("serving", 70, "good"),
        ("stopped", None, "good"),
        ("dead", None, "was good while it ran"),
    ],
)
def test_a_verdict_on_what_has_ended_is_told_in_the_past(
    state: str, pid: int | None, words: str
) -> None:
    one = {"verdict": "good", "stopped": state == "stopped", "pid": pid, "verified": None}
    one["figures"] = {}
    assert module._verdict(one) == words
