"""Each error text of `pct`: the lab's pct says it, and the tool knows what to do about it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from deployer.errors import RemoteCommandFailed, StepFailed
from deployer.model import Change, Plan, Shell, Where
from deployer.pct_errors import explain
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps.container import ContainerStep
from tests.unit.hoststeps import Door, context, deployment, facts
from tests.unit.pctlab import PctLab, load_lab
from tests.unit.test_step_container import FULL, guest, pct
from tests.unit.test_step_gpus import on_nvidia

BASE = "arch: amd64\nmemory: 512\nrootfs: local:101/x.raw,size=4G\n"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PctLab:
    return load_lab(monkeypatch, tmp_path)


def conf(text: str, *, running: bool = False) -> Callable[[PctLab], None]:
    """A container 101 with this configuration."""

    def prepare(lab: PctLab) -> None:
        lab.conf().write_text(text)
        if running:
            lab.running.add("101")

    return prepare


def broken(lab: PctLab) -> None:
    """A container that neither starts nor ends."""
    lab.conf().write_text(BASE)
    lab.broken = "lxc-start: 101: conf.c: run_buffer: 322 Script exited with status 255"


def broken_running(lab: PctLab) -> None:
    broken(lab)
    lab.running.add("101")


def taken(lab: PctLab) -> None:
    """The id of a VM; a template is there."""
    (lab.root / "etc/pve/qemu-server").mkdir()
    (lab.root / "etc/pve/qemu-server/101.conf").touch()
    (lab.root / "vz/template/cache").mkdir(parents=True)
    (lab.root / "vz/template/cache/d.tar").touch()


nothing = conf(BASE)
runs = conf(BASE, running=True)
locked = conf(BASE + "lock: backup\n")
snapped = conf(BASE + "\n[s1]\nmemory: 1\n")
MISSING = "Configuration file 'nodes/node1/lxc/101.conf' does not exist"
ROWS = [
    # set-up, words of pct, its exit code, its text, what the tool makes of it
    (lambda lab: None, "status 101", 2, MISSING, "no container 101"),
    (lambda lab: None, "config 101", 2, MISSING, "no container 101"),
    (lambda lab: None, "set 101 --memory 600", 2, MISSING, "no container 101"),
    (lambda lab: None, "exec 101 -- true", 2, MISSING, "no container 101"),
    (lambda lab: None, "push 101 /etc/hosts /x", 2, MISSING, "no container 101"),
    (lambda lab: None, "start 101", 255, MISSING, "no container 101"),
    (lambda lab: None, "stop 101", 255, "CT 101 not running", "does not run"),
    (lambda lab: None, "shutdown 101", 255, "CT 101 not running", "does not run"),
    (nothing, "exec 101 -- true", 255, "container '101' not running!", "does not run"),
    (nothing, "exec 101", 2, "missing command at ", "no command"),
    (runs, "start 101", 255, "CT 101 already running", "runs already"),
    (nothing, "stop 101", 255, "CT 101 not running", "does not run"),
    (nothing, "reboot 101", 255, "VM 101 not running", "does not run"),
    (locked, "set 101 --memory 600", 255, "CT is locked (backup)", "a task holds"),
    (locked, "start 101", 255, "CT is locked (backup)", "a task holds"),
    (nothing, "push 101 /etc/hosts /x", 255, "can only push files to a running CT", "not run"),
    (nothing, "pull 101 /x /y", 255, "can only pull files from a running VM at", "not run"),
    (broken, "start 101", 255, "startup for container '101' failed", "did not start"),
    (nothing, "set 101 --dev0 /dev/x", 2, "Device /dev/x does not exist", "not on the host"),
    (conf(BASE + "dev0: /dev/x\n"), "start 101", 255, "Device /dev/x does not", "not on the host"),
    (nothing, "set 101 --dev0 /dev/exregular", 255, "is not a device", "a file and no device"),
    (nothing, "set 101 --dev0 /tmp/x", 2, "/tmp/x is not a valid device path", "below /dev"),
    (nothing, "set 101 --dev0 mode=0666", 255, "Path has to be defined", "names no path"),
    (broken_running, "shutdown 101", 255, "container did not stop", "did not shut down"),
    (snapped, "snapshot 101 s1", 255, "snapshot name 's1' already used", "there already"),
    (
        conf(BASE + "mp0: /a,mp=/a\n"),
        "snapshot 101 s1",
        255,
        "snapshot feature is not available",
        "cannot be snapshotted",
    ),
    (nothing, "delsnapshot 101 s9", 255, "snapshot 's9' does not exist", "no snapshot s9"),
    (nothing, "rollback 101 s9", 255, "snapshot 's9' does not exist", "no snapshot s9"),
    (nothing, "set 101", 2, "no options specified", "nothing to set"),
    (nothing, "unlock 101", 255, "no lock found trying to remove any lock", "not locked"),
    (nothing, "set 101 --lxc.cap.drop x", 2, "Unknown option: lxc.cap.drop", "refuses an option"),
    (nothing, "config 101 extra", 2, "400 too many arguments", "refuses an option"),
    (nothing, "config", 255, "400 not enough arguments", "refuses an option"),
    (nothing, "frob 101", 255, "unknown command 'pct frob'", "lacks a command"),
    (
        nothing,
        f"set 101 --memory 600 --digest {'0' * 40}",
        255,
        "detected modified configuration - file changed by other user? Try again.",
        "somebody else changed",
    ),
    (
        conf(BASE + "protection: 1\nmp0: /a,mp=/a\n"),
        "set 101 --delete mp0",
        255,
        "protection mode enabled",
        "protected",
    ),
    (taken, "create 101 local:vztmpl/d.tar", 255, "VM 101 already exists on node", "is taken"),
    (nothing, "create 101 nope:vztmpl/d.tar", 2, "storage 'nope' does not exist", "no storage"),
    (nothing, "create 101 local:vztmpl/d.tar", 2, "does not exist", "there is no local:"),
    (conf("arch: amd64\n"), "start 101", 255, "missing 'rootfs' configuration", "has no rootfs"),
    (
        nothing,
        "set 101 --net0 name=eth0,bridge=vmbr9",
        2,
        "bridge 'vmbr9' does not exist",
        "no bridge vmbr9",
    ),
]  # fmt: skip
LIVE = [
    # Texts that this lab cannot make: they come from the cluster's file system and from pct itself.
    ("cluster not ready - no quorum?", "no quorum"),
    ("sh: 3: cannot create /etc/pve/lxc/129.conf.deployer.tmp: Permission denied", "no quorum"),
    ("please run as root", "needs root"),
    ("ipcc_send_rec[1] failed: Connection refused", "pve-cluster does not run"),
    ("can't lock file '/run/lock/lxc/pve-config-129.lock' - got timeout", "another process holds"),
]


@pytest.mark.parametrize(
    ("prepare", "command", "exit_code", "text", "meaning"), ROWS, ids=[row[1] for row in ROWS]
)
def test_the_lab_says_it_and_the_tool_knows_it(
    lab: PctLab,
    prepare: Callable[[PctLab], None],
    command: str,
    exit_code: int,
    text: str,
    meaning: str,
) -> None:
    prepare(lab)
    said = lab.run(*command.split())
    assert (said.exit, text in said.stderr.decode()) == (exit_code, True), said
    told = explain(said.stderr.decode().splitlines())
    assert told is not None
    assert meaning in told.cause
    assert told.fix


@pytest.mark.parametrize(("text", "meaning"), LIVE)
def test_texts_that_only_a_cluster_makes(text: str, meaning: str) -> None:
    told = explain(["perl: warning: Setting locale failed.", text])
    assert told is not None
    assert meaning in told.cause


def test_a_text_that_is_not_known() -> None:
    assert explain(["perl: warning: Setting locale failed.", "something else"]) is None


def test_a_held_lock(lab: PctLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.modules["ctconf"], "LOCK_WAIT_S", 0.0)
    lab.conf().write_text(BASE)
    (lab.root / "locks").mkdir()
    with (lab.root / "locks/pve-config-101.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said = lab.run("unlock", "101")
    told = explain(said.stderr.decode().splitlines())
    assert told is not None
    assert "another process holds" in told.cause


def test_a_failed_change_is_told_with_its_meaning() -> None:
    text = b"perl: warning: Setting locale failed.\nDevice /dev/nvidia-uvm does not exist\n"
    door = Door("kpro5", [Answer(255, b"", text)])
    seen = facts(on_nvidia(), pct(FULL, "stopped"), guest())
    step = ContainerStep()
    with pytest.raises(RemoteCommandFailed) as raised:
        step.apply(
            context(deployment(), door), seen, step.plan(deployment(), seen, DeploymentState())
        )
    assert "/dev/nvidia-uvm is not on the host" in raised.value.what
    assert "nvidia-modprobe" in raised.value.fix
    assert raised.value.evidence[-1].startswith("Device ")


def test_an_unknown_failure_keeps_its_lines() -> None:
    door = Door("kpro5", [Answer(1, b"", b"new text of pct\n")])
    seen = facts(on_nvidia(), pct(FULL, "stopped"))
    plan = Plan.change("x", Change("t", "r", Shell(Where.HOST, "pct start 129")))
    with pytest.raises(StepFailed) as raised:
        ContainerStep().apply(context(deployment(), door), seen, plan)
    assert raised.value.evidence == ("new text of pct",)
