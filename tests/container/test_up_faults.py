"""What goes wrong on the way, and what the user is told. Faults are those of docker/lab.sh.

The tests run in order: first those of a pristine host, then those that share one deployment.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Lab, Machine, Result
from project import BUILD, Listing, Project, address_of, complete, hub, pristine

pytestmark = pytest.mark.container

STALL_S = 6
READY_TIMEOUT_S = 10


def last_run(project: Project) -> list[dict[str, Any]]:
    """The events of the newest run record."""
    records = sorted((project.folder / ".deploy" / "runs").glob("*-kpro5.jsonl"))
    return [json.loads(line) for line in records[-1].read_text(encoding="utf-8").splitlines()]


def message(result: Result) -> str:
    """The error as a user sees it: from `deploy:` on."""
    _, mark, rest = result.err.partition("deploy: ")
    assert mark, result.err
    assert "Traceback" not in result.err
    return rest


@pytest.fixture(scope="module")
def project(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of this file; the host begins pristine."""
    pristine(lab)
    return Project(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def host(lab: Lab, project: Project) -> Machine:
    """kpro5."""
    return lab.hosts["kpro5"]


@pytest.fixture(scope="module")
def guest(lab: Lab, project: Project) -> Machine:
    """Its container 129."""
    return lab.guests["kpro5"]


@pytest.fixture
def fault(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    """The fault that the test is parametrised with; off again afterwards."""
    lab.fault(request.param)
    yield request.param
    lab.fault(request.param, on=False)


def with_fault(name: str) -> pytest.MarkDecorator:
    """A test under one fault."""
    return pytest.mark.parametrize("fault", [name], indirect=True)


# --- not reachable ----------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> Project:
    """A project whose way to the host the test spoils."""
    return Project(tmp_path / "elsewhere")


def test_wrong_key(project: Project, elsewhere: Project, tmp_path: Path) -> None:
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    for ssh in elsewhere.ssh():
        ssh["identity_file"] = str(key)
    elsewhere.write()
    done = elsewhere.deploy("up", "kpro5", timeout_s=30)
    assert done.exit == 3
    assert "key" in message(done)
    assert "other" in message(done), "names the key that was refused"


def test_closed_port(elsewhere: Project) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        elsewhere.ssh()[0]["port"] = port
        elsewhere.write()
        done = elsewhere.deploy("up", "kpro5", timeout_s=30)
    assert done.exit == 3
    assert f"127.0.0.1:{port} refuses the connection" in message(done)


def test_listener_that_never_answers(elsewhere: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        accepted: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(silent.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        elsewhere.ssh()[0].update(port=port, connect_timeout_s=2)
        elsewhere.write()
        began = time.monotonic()
        done = elsewhere.deploy("up", "kpro5", timeout_s=30)
        seconds = time.monotonic() - began
    assert done.exit == 3
    assert accepted
    assert seconds < 10
    assert f"127.0.0.1:{port}" in message(done)
    assert "banner" in message(done) or "never" in message(done) or "no answer" in message(done)


def test_guest_with_a_closed_port_names_the_guest(elsewhere: Project) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        elsewhere.ssh()[1]["port"] = port
        elsewhere.write()
        done = elsewhere.deploy("up", "kpro5", "--only", "venv", timeout_s=60)
    assert done.exit == 3
    assert "129" in message(done)
    assert str(port) in message(done)


# --- a pristine host with a fault -------------------------------------------------------------


@with_fault("gpu-held")
def test_gpu_held(project: Project, host: Machine, guest: Machine, fault: str) -> None:
    pid = host.read("/run/qemu-server/101.pid").strip()
    before = Listing.of(host, guest)
    done = project.deploy("up", "kpro5")
    assert done.exit == 1
    assert "VM 101" in message(done)
    assert f"pid {pid} " in message(done)
    assert host.driver("0000:21:00.0") == "vfio-pci"
    assert before.difference(Listing.of(host, guest)) == []


@with_fault("no-driver")
def test_no_driver(project: Project, host: Machine, guest: Machine, fault: str) -> None:
    before = Listing.of(host, guest)
    done = project.deploy("up", "kpro5")
    assert done.exit == 1
    assert "driver" in message(done)
    assert message(done).count("  -> ") == 1, "one action"
    assert "580.126.09" in message(done)
    assert before.difference(Listing.of(host, guest)) == []


# --- one deployment ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silent_death(lab: Lab, project: Project, guest: Machine) -> Result:
    """The first `up`: an old server serves, its log ends with a ready line, the new one dies."""
    assert guest.read("/root/sglang.log").rstrip().endswith("fired up and ready to roll!")
    old = guest.pids("tiny[-]old")
    assert old
    lab.fault("server-dies-silent")
    done = project.deploy("up", "kpro5")
    lab.fault("server-dies-silent", on=False)
    assert not set(guest.pids("tiny[-]old")) & set(old), "the old server was stopped"
    return done


def test_silent_death_beside_an_old_ready_line(
    project: Project, guest: Machine, silent_death: Result
) -> None:
    assert silent_death.exit == 1
    said = message(silent_death)
    assert "before it wrote a word" in said
    assert "exit code 3" in said
    assert "which this tool did not start, serves again" in silent_death.err
    assert guest.pids("tiny[-]old"), "it serves again"
    assert guest.pids("sglang[.]launch_server") == guest.pids("tiny[-]old")
    events = last_run(project)
    assert not [one for one in events if one.get("step") == "verify" and "gate" in one]
    began = [one for one in events if one["event"] == "job_started" and one["step"] == "launch"]
    [ended] = [one for one in events if one["event"] == "run_finished"]
    assert len(began) == 1, "no other variant is tried: it would only hide the cause"
    assert ended["time"] - began[0]["time"] < 10


@pytest.fixture(scope="module")
def deployed(project: Project, guest: Machine, silent_death: Result) -> Project:
    """The fault is gone; the same wish ends the old server again only when that is asked for."""
    refused = project.deploy("up", "kpro5")
    assert refused.exit == 1 and "`deploy up kpro5/tiny --retry`" in message(refused)
    assert guest.pids("tiny[-]old")
    done = project.deploy("up", "kpro5", "--retry").ok()
    for step in ("driver", "gpus", "container", "venv", "shards"):
        assert f"{step:<10} nothing to do" in done.err
    assert guest.pids("tiny[-]old") == []
    assert len(complete()) > 5
    return project


def verdict(project: Project) -> str:
    """Of the newest launch."""
    return str(project.state()["launches"][-1]["verdict"])


@with_fault("server-degenerate")
def test_degenerate_answers_fail_the_gate(deployed: Project, fault: str) -> None:
    done = deployed.deploy("restart", "kpro5")
    assert done.exit == 5
    assert "thinking" in message(done)
    assert "gate " in message(done)
    assert "speculation is not the broken side" in message(done)
    assert verdict(deployed).startswith("failed")
    failed = [one for one in last_run(deployed) if one.get("passed") is False]
    assert len(failed) == 1
    assert "thinking" in failed[0]["evidence"]


@with_fault("server-degenerate")
def test_degenerate_answers_fail_verify(deployed: Project, fault: str) -> None:
    done = deployed.deploy("verify", "kpro5")
    assert done.exit == 5
    assert "thinking" in message(done)


def test_gates_are_run_again_after_a_failure(deployed: Project) -> None:
    done = deployed.deploy("up", "kpro5").ok()
    assert "launch     nothing to do" in done.err
    assert "verify     done in " in done.err
    assert verdict(deployed) == "good"


@with_fault("server-degenerate-mtp")
def test_speculation_is_the_broken_side(deployed: Project, fault: str) -> None:
    done = deployed.deploy("restart", "kpro5", "--variant", "mtp")
    assert done.exit == 5
    assert "speculation is the broken side" in message(done)
    assert "serves now" in message(done)
    assert verdict(deployed) == "good"
    assert deployed.state()["launches"][-1]["variant"] == "no-mtp"
    assert len(complete()) > 5


@with_fault("server-dies-after-first")
def test_death_after_the_first_answer(deployed: Project, guest: Machine, fault: str) -> None:
    done = deployed.deploy("restart", "kpro5")
    assert done.exit == 5
    assert "died" in message(done)
    assert verdict(deployed).startswith("failed")
    assert guest.pids("sglang[.]launch_server") == []


@with_fault("server-never-ready")
def test_never_ready_ends_with_the_phase(deployed: Project, guest: Machine, fault: str) -> None:
    deployed.playbook(serve={"ready_timeout_s": READY_TIMEOUT_S})
    began = time.monotonic()
    done = deployed.deploy("restart", "kpro5")
    seconds = time.monotonic() - began
    deployed.playbook()
    assert done.exit == 1
    said = message(done)
    assert "not-ready-in-time" in said
    assert f"not ready after {READY_TIMEOUT_S} s" in said
    assert "[phase " in said and "[phase ready" not in said
    assert seconds < READY_TIMEOUT_S + 30
    assert guest.pids("sglang[.]launch_server") == [], "a failed launch holds no GPU memory"


def test_it_recovers(deployed: Project) -> None:
    deployed.deploy("up", "kpro5").ok()
    assert verdict(deployed) == "good"
    assert len(complete()) > 5


@with_fault("hub-stall")
def test_stall_is_noticed_and_resumed(deployed: Project, guest: Machine, fault: str) -> None:
    size = sum(file["size"] for file in deployed.state()["manifest"]["files"])
    guest.sh("rm -rf /srv/models/tiny-hybrid").ok()
    seen = len(hub("/_stats")["log"])
    done = deployed.deploy("up", "kpro5", "--only", "shards").ok()
    # Of the step alone: looks and logins take longer on a busy machine, and wait for no stall.
    [step] = [one for one in last_run(deployed) if one["event"] == "step_done"]
    # One silent connection is dropped by the agent itself, in half of the stall time.
    stalled = [row for row in done.err.splitlines() if "no byte for " in row]
    assert 1 <= len(stalled) <= 2, done.err
    for row in stalled:
        assert f"no byte for {STALL_S / 2:g} s at " in row and "reconnecting" in row
    assert step["seconds"] < len(stalled) * (STALL_S + 6) + 15
    ours = address_of("kpro5")
    log = [one for one in hub("/_stats")["log"][seen:] if one["client"] == ours]
    sent = sum(one["sent"] for one in log if one["where"] == "cdn")
    # The row of a connection that is cut off may lack its last piece.
    assert 0.99 * size <= sent <= 1.05 * size
    again = deployed.deploy("plan", "kpro5", "--exit-code")
    assert again.exit == 0, again.err


@pytest.mark.parametrize("fault", ["hub-reset", "hub-corrupt", "hub-busy"], indirect=True)
def test_download_survives(deployed: Project, guest: Machine, fault: str) -> None:
    guest.sh("rm -rf /srv/models/tiny-hybrid").ok()
    seen = len(hub("/_stats")["log"])
    deployed.deploy("up", "kpro5", "--only", "shards").ok()
    assert [one for one in hub("/_stats")["log"][seen:] if one["fault"]], "the fault never struck"
    wanted = {
        file["path"]: file["sha256"]
        for file in deployed.state()["manifest"]["files"]
        if file.get("sha256")
    }
    sums = guest.sh("cd /srv/models/tiny-hybrid && sha256sum -- *.safetensors").ok().out
    found = {row.split()[1]: row.split()[0] for row in sums.splitlines()}
    assert len(found) == 6
    assert found == {name: wanted[name] for name in found}


@with_fault("disk-full")
def test_disk_full(deployed: Project, fault: str) -> None:
    done = deployed.deploy("up", "kpro5")
    assert done.exit == 1
    said = message(done)
    assert "/srv/models" in said
    assert " MB" in said
    assert "  -> " in said


def test_space_again_nothing_to_do(deployed: Project) -> None:
    done = deployed.deploy("plan", "kpro5", "--exit-code")
    assert done.exit == 0, done.err


# --- last: only a reset brings the old key back -----------------------------------------------


def test_host_key_changed(lab: Lab, deployed: Project, host: Machine) -> None:
    def fingerprint() -> str:
        text = host.sh("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").ok().out
        return text.split()[1]

    recorded = fingerprint()
    known = (BUILD / "known_hosts").read_bytes()
    lab.fault("host-key-changed")
    try:
        offered = fingerprint()
        done = deployed.deploy("up", "kpro5", timeout_s=30)
        status = deployed.deploy("status", "kpro5", timeout_s=30)
    finally:
        pristine(lab)
    assert offered != recorded
    assert done.exit == 3
    assert recorded in message(done)
    assert offered in message(done)
    assert "Traceback" not in done.err
    assert status.exit == 3
    assert "UNREACHABLE" in status.out
    assert (BUILD / "known_hosts").read_bytes() == known
    assert fingerprint() == recorded
