"""The straight path: from a pristine host to a proven endpoint, and what one does with it.

The tests of this file run in order and share one deployment.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import Lab, Machine, Result, run
from project import Listing, Project, SshdLog, complete, pristine

pytestmark = pytest.mark.container

STEPS = ("driver", "gpus", "container", "venv", "shards", "stop", "launch", "verify")


@dataclass(frozen=True)
class Box:
    """A project, the machines of kpro5, and what the plan on the pristine host said."""

    project: Project
    host: Machine
    guest: Machine

    def listing(self) -> Listing:
        """The host and the guest as they are now."""
        return Listing.of(self.host, self.guest)


@pytest.fixture(scope="module")
def bare(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Box:
    """Pristine."""
    host, guest = pristine(lab)
    return Box(Project(tmp_path_factory.mktemp("path")), host, guest)


@dataclass(frozen=True)
class Planned:
    """Three plans of a pristine host, with the host before and after."""

    text: Result
    document: Result
    coded: Result
    changed: list[str]


@pytest.fixture(scope="module")
def planned(bare: Box) -> Planned:
    """What `up --dry-run` and `plan` say before anything was done."""
    before = bare.listing()
    text = bare.project.deploy("up", "kpro5", "--dry-run")
    document = bare.project.deploy("--json", "up", "kpro5", "--dry-run")
    coded = bare.project.deploy("plan", "kpro5", "--exit-code")
    return Planned(text, document, coded, before.difference(bare.listing()))


@dataclass(frozen=True)
class Deployed:
    """The box after its one full `up`."""

    box: Box
    first: Result


@pytest.fixture(scope="module")
def deployed(planned: Planned, bare: Box) -> Iterator[Deployed]:
    """The one full run of this file."""
    yield Deployed(bare, bare.project.deploy("up", "kpro5").ok())


def test_dry_run_shows_every_step(planned: Planned) -> None:
    assert planned.text.exit == 0, planned.text.err
    lines = planned.text.err.splitlines() + planned.text.out.splitlines()
    for step in STEPS:
        assert [row for row in lines if f" {step} " in f"{row} "], f"{step} is missing"
    assert "unknown until" in planned.text.out
    assert "nothing was changed" in planned.text.out
    assert "    | " in planned.text.out.replace("kpro5/tiny     ", ""), "what would run is shown"


def test_dry_run_changes_nothing(planned: Planned) -> None:
    assert planned.changed == []


def test_dry_run_json_is_one_document(planned: Planned) -> None:
    assert planned.document.exit == 0, planned.document.err
    [deployment] = json.loads(planned.document.out)["deployments"]
    assert tuple(step["step"] for step in deployment["steps"]) == STEPS
    states = {step["step"]: step["state"] for step in deployment["steps"]}
    assert states["gpus"] == "changes"
    assert "unknown" in states.values()
    assert {"title", "reason", "runs"} <= set(deployment["steps"][1]["changes"][0])


def test_plan_exit_code_is_6(planned: Planned) -> None:
    assert planned.coded.exit == 6, planned.coded.err


def test_first_up_reports_every_step(deployed: Deployed) -> None:
    for step in ("gpus", "container", "venv", "shards", "stop", "launch", "verify"):
        assert f"{step:<10} done in " in deployed.first.err, step
    assert "verdict: good" in deployed.first.err


def test_endpoint_answers_from_outside(deployed: Deployed) -> None:
    assert len(complete()) > 5


def test_second_up_has_nothing_to_do(deployed: Deployed) -> None:
    box = deployed.box
    logs = [SshdLog(box.host), SshdLog(box.guest)]
    before = box.listing()
    for log in logs:
        log.clear()
    again = box.project.deploy("up", "kpro5").ok()
    counts = [log.counted() for log in logs]
    assert before.difference(box.listing()) == []
    for step in STEPS:
        [row] = [row for row in again.err.splitlines() if f" {step:<10} " in row]
        said, _, reason = row.partition("nothing to do: ")
        assert said and len(reason) > 5, row
    for connections, sessions in counts:
        assert connections == 1
        assert 1 <= sessions <= 2


def test_plan_exit_code_is_0_when_nothing_is_left(deployed: Deployed) -> None:
    done = deployed.box.project.deploy("plan", "kpro5", "--exit-code")
    assert done.exit == 0, done.err
    assert "nothing to do" in done.out


def test_verify_again(deployed: Deployed) -> None:
    done = deployed.box.project.deploy("verify", "kpro5").ok()
    assert "ok  " in done.err


def test_status(deployed: Deployed) -> None:
    text = deployed.box.project.deploy("status", "kpro5").ok().out
    assert "0000:21:00.0  nvidia" in text
    assert "serving, pid " in text
    assert "good" in text
    document = json.loads(deployed.box.project.deploy("--json", "status", "kpro5").ok().out)
    [host] = document["hosts"]
    assert [one["driver"] for one in host["gpus"]] == ["nvidia", "nvidia"]
    [tiny] = host["deployments"]
    assert tiny["state"] == "serving"
    assert tiny["verdict"] == "good"
    assert tiny["answers"] is True
    assert tiny["uptime_s"] > 0
    assert tiny["launch"] == deployed.box.project.state()["launches"][-1]["id"]


def test_logs_are_those_of_the_launch(deployed: Deployed) -> None:
    done = deployed.box.project.deploy("logs", "kpro5", "-n", "1000").ok()
    assert "The server is fired up and ready to roll!" in done.out
    assert "tiny-old" not in done.out
    two = deployed.box.project.deploy("logs", "kpro5/tiny", "-n", "2").ok()
    assert len(two.out.splitlines()) == 2


def test_history(deployed: Deployed) -> None:
    text = deployed.box.project.deploy("history", "kpro5").ok().out
    [row] = [row for row in text.splitlines() if row.startswith("* ")]
    assert "mtp" in row
    assert " good " in row
    document = json.loads(deployed.box.project.deploy("--json", "history", "kpro5").ok().out)
    own = document["kpro5/tiny"]
    assert own["known_good"] == own["launches"][-1]["id"]
    assert own["launches"][-1]["figures"]


def test_doctor_finds_nothing(deployed: Deployed) -> None:
    done = deployed.box.project.deploy("doctor", "kpro5").ok()
    assert "BLOCKED" not in done.out
    assert "pending" not in done.out


def test_restart_makes_a_new_launch(deployed: Deployed) -> None:
    before = deployed.box.project.state()["launches"][-1]["id"]
    deployed.box.project.deploy("restart", "kpro5").ok()
    first, second = deployed.box.project.state()["launches"][-2:]
    assert first["id"] == before
    assert first["verdict"] == "stopped"
    assert second["verdict"] == "good"
    assert len(deployed.box.guest.pids("sglang[.]launch_server")) >= 1
    assert len(complete()) > 5


def test_killed_server_is_launched_again(deployed: Deployed) -> None:
    box = deployed.box
    box.guest.sh('kill -9 "$1"', str(box.project.state()["launches"][-1]["pid"])).ok()
    done = box.project.deploy("up", "kpro5").ok()
    assert "launch     done in " in done.err
    assert "shards     nothing to do" in done.err
    assert len(complete()) > 5


def test_down_leaves_nothing(deployed: Deployed) -> None:
    box = deployed.box
    done = box.project.deploy("down", "kpro5").ok()
    assert "stop " in done.err
    assert box.guest.pids("[s]glang") == []
    with pytest.raises(OSError):
        complete()
    with socket.socket() as probe:
        probe.settimeout(5)
        listeners = box.guest.sh("ss -Hltn 2>/dev/null || cat /proc/net/tcp").out
    assert ":30000" not in listeners and ":7530 00000000:0000 0A" not in listeners
    again = box.project.deploy("down", "kpro5").ok()
    assert "nothing to do" in again.err
    document = json.loads(box.project.deploy("--json", "status", "kpro5").ok().out)
    assert document["hosts"][0]["deployments"][0]["state"] == "stopped"


def test_up_after_a_reboot_only_launches(lab: Lab, deployed: Deployed) -> None:
    """The GPUs are on nvidia again before the guest starts; the old server came back with it."""
    run(["docker", "restart", "-t", "1", "deployer-lab-kpro5"]).ok()
    lab.lab("up", timeout_s=90)
    done = deployed.box.project.deploy("up", "kpro5").ok()
    for step in ("driver", "gpus", "container", "venv", "shards"):
        assert f"{step:<10} nothing to do" in done.err
    assert "launch     done in " in done.err
    assert len(complete()) > 5


def test_stopped_guest_is_said_and_started(deployed: Deployed) -> None:
    box = deployed.box
    box.host.sh("pct stop 129", timeout_s=30).ok()
    status = box.project.deploy("status", "kpro5")
    assert "129 stopped" in status.out
    assert "0000:21:00.0  nvidia" in status.out, "the host is still seen"
    planned = box.project.deploy("plan", "kpro5", "--exit-code")
    assert planned.exit == 6
    assert "start container 129" in planned.out


def test_runs_are_recorded(deployed: Deployed) -> None:
    folder: Path = deployed.box.project.folder / ".deploy" / "runs"
    records = sorted(folder.glob("*-kpro5.jsonl"))
    assert records
    for record in records:
        for line in record.read_text(encoding="utf-8").splitlines():
            json.loads(line)
