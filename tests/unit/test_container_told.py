"""What doctor shows of a container, and what it warns of."""

from __future__ import annotations

import pytest

from deployer import gpu
from deployer.findings import Level, examine
from deployer.model import Facts, Where
from deployer.state import DeploymentState
from deployer.steps.container import ContainerStep
from deployer.steps.container_facts import ContainerFacts, GuestNodes
from deployer.steps.container_told import notes, warnings
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver import DriverStep
from deployer.steps.driver_facts import HostSmi
from tests.unit.hoststeps import deployment, facts
from tests.unit.test_step_container import (
    BARE,
    FULL,
    LIBRARIES,
    ON_HOST,
    PVE7,
    PVE8,
    guest,
    pct,
)
from tests.unit.test_step_driver import host
from tests.unit.test_step_gpus import NODES, on_nvidia

EMPTY = gpu.Node("/dev/nvidia-modeset", "file")
CAPS = gpu.Node("/dev/nvidia-caps", "other")
RAW = BARE + "".join(
    f"lxc.mount.entry: {node.path} {node.path[1:]} none bind,optional,create=file\n"
    for node in NODES
)
FOURTH = (gpu.Node("/dev/nvidia4", "char", 195, 4), 0o666)
SHUT = tuple((node, 0o600 if node.path == "/dev/nvidia0" else mode) for node, mode in ON_HOST)


def seen_by(one: ContainerFacts, inside: GuestNodes | None = None) -> Facts:
    return facts(on_nvidia(), LIBRARIES, CudaProof(0), one, inside or guest())


def told(one: ContainerFacts, inside: GuestNodes | None = None) -> list[tuple[str, str]]:
    return list(warnings(deployment(), seen_by(one, inside)))


def test_all_is_well() -> None:
    one = pct(FULL + "onboot: 1\n")
    assert notes(129, one, on_nvidia(), guest()) == [
        "container 129: running, privileged; pve-container 6.1.10 (devN, hot-plugged)",
        "nodes: /dev/nvidia0 195:0 dev0, /dev/nvidia1 195:1 dev1, /dev/nvidiactl 195:255 dev2, "
        "/dev/nvidia-uvm 509:0 dev3, /dev/nvidia-uvm-tools 509:1 dev4",
    ]
    assert told(one, GuestNodes((*NODES, CAPS))) == []
    plan = ContainerStep().plan(deployment(), seen_by(one), DeploymentState())
    assert plan.notes == tuple(notes(129, one, on_nvidia(), guest()))


def test_every_fact_is_shown() -> None:
    conf = FULL.replace("dev3", "dev9") + "lock: backup\nunprivileged: 1\n"
    conf += "[pve:pending]\nmemory: 9\ndelete: swap\n[one]\nmemory: 1\n[two]\nmemory: 1\n"
    one = pct(conf, "stopped", PVE8, ha="started", ha_status="service ct:129 (k, started)")
    shown = notes(129, one, on_nvidia(), guest([gpu.Node("/dev/nvidia0", "file"), *NODES[1:]]))
    assert shown[0] == (
        "container 129: stopped, unprivileged, does not start with the host (no onboot); "
        "pve-container 5.2.0 (devN, at a start)"
    )
    assert "/dev/nvidia-uvm 509:0 dev9" in shown[1]
    assert shown[2] == "! /dev/nvidia0: dev0; host 195:0, guest a regular file"
    assert shown[3:] == [
        "HA manager: wants it started (service ct:129 (k, started))",
        "lock: backup",
        "pending until its next start: -swap, memory",
        "snapshots: one, two",
    ]
    bare = notes(129, pct(RAW.replace("nvidia1", "nvidia7"), version=PVE7), on_nvidia(), None)
    assert "no devN: raw lines" in bare[0]
    assert bare[1].startswith(
        "nodes of the host (the guest was not looked at): /dev/nvidia0 195:0 raw, /dev/nvidiactl"
    )
    assert bare[2] == "! /dev/nvidia1: not configured; host 195:1, guest not looked at"
    assert notes(129, pct(None, ""), on_nvidia(), None) == []


@pytest.mark.parametrize(
    ("one", "inside", "what", "fix"),
    [
        (pct(FULL, quorate=False), None, "no quorum: /etc/pve is read-only", "pvecm status"),
        (
            pct(FULL, elsewhere=("VM 129 on kpro6",)),
            None,
            "used twice: there is VM 129 on kpro6",
            "remove the file",
        ),
        (
            pct(FULL, ha="started", ha_status="service ct:129 (kpro5, error)"),
            None,
            "HA manager has given container 129 up",
            "ha-manager set ct:129 --state started",
        ),
        (
            pct(FULL + "[pve:pending]\nmemory: 9\n"),
            None,
            "wait for its next start: memory",
            "pct pending 129",
        ),
        (pct(FULL + "no line of pct's\n"), None, "cannot read 1 line of", "correct or remove"),
        (pct(FULL, version=PVE7), None, "devN entries, which this Proxmox does not", "5.0.7"),
        (
            pct(FULL + "lxc.cgroup2.devices.allow: c 508:* rwm\n"),
            None,
            "majors that no driver of kpro5 has: c 508:* rwm",
            "majors of /proc/devices",
        ),
        (
            pct(FULL + "dev7: /dev/tty7\n"),
            None,
            "will not start again: dev7 (the host has no device /dev/tty7)",
            "pct set 129 --delete dev7",
        ),
        (
            pct(FULL + "dev7: /dev/nvidia4\n", devices=(*ON_HOST, FOURTH)),
            None,
            "also gets dev7 /dev/nvidia4",
            "add that GPU to the inventory",
        ),
        (
            pct(FULL + "lxc.mount.entry: /dev/nvidia-modeset dev/nvidia-modeset none bind\n"),
            None,
            "mounts /dev/nvidia-modeset, which kpro5 has not",
            "take the line out",
        ),
        (
            pct(RAW + "unprivileged: 1\n", devices=SHUT),
            None,
            "/dev/nvidia0 of kpro5 has mode 0600",
            "chmod 0666 /dev/nvidia0",
        ),
        (
            pct(FULL),
            GuestNodes((*NODES, EMPTY)),
            "/dev/nvidia-modeset is a regular file, not a device",
            "rm /dev/nvidia-modeset",
        ),
    ],
)
def test_what_will_hurt_is_said_with_an_action(
    one: ContainerFacts, inside: GuestNodes | None, what: str, fix: str
) -> None:
    [(said, action)] = told(one, inside)
    assert what in said and fix in action and "\n" not in said + action
    found = examine(deployment(), seen_by(one, inside), DeploymentState(), [ContainerStep()])
    [warned] = [found for found in found if found.level is Level.WARNING]
    assert (warned.where, warned.what, warned.fix) == ("kpro5/qwen container", said, action)


def test_a_cause_is_told_once() -> None:
    """A stuck nvidia-smi blocks the driver step, which says so; a stopped guest is no surprise."""
    stuck = facts(on_nvidia(), host(), HostSmi(124, "", timed_out=True), pct(FULL, "stopped"))
    found = examine(
        deployment(),
        Facts(stuck.values, {Where.GUEST: "connection refused"}),
        DeploymentState(),
        [DriverStep(), ContainerStep()],
    )
    assert [(one.level, one.where) for one in found] == [
        (Level.BLOCKED, "kpro5/qwen driver"),
        (Level.PENDING, "kpro5/qwen container"),
    ]


def test_unprivileged_containers_have_no_rules_to_be_stale() -> None:
    assert told(pct(FULL + "unprivileged: 1\nlxc.cgroup2.devices.allow: c 508:* rwm\n")) == []
    assert list(warnings(deployment(vmid=None), seen_by(pct(FULL, quorate=False)))) == []
