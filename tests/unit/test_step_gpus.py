"""The gpus step: what it refuses, what it plans, and its look at a tree like a host's."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from deployer import gpu, proxmox
from deployer.errors import StepBlocked, StepFailed
from deployer.model import Plan, PlanState, Procedure
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.gpus import GpusStep
from deployer.steps.gpus_facts import GpuFacts, Holder, PciFunction, probe
from deployer.steps.gpus_script import unit_name
from tests.unit.hoststeps import (
    SHELLS,
    A,
    B,
    Door,
    Tree,
    context,
    deployment,
    facts,
    output,
    run_script,
)

DRIVER = HostDriver(loaded="", on_disk="580.126.09", kernel="6.8.12-1-pve")
BY_SHELL = pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
NODES = tuple(
    gpu.Node(f"/dev/{name}", "char", major, minor)
    for name, major, minor in (
        ("nvidia0", 195, 0),
        ("nvidia1", 195, 1),
        ("nvidiactl", 195, 255),
        ("nvidia-uvm", 509, 0),
        ("nvidia-uvm-tools", 509, 1),
    )
)
REPORT = {"persist": "report"}


def function(address: str, driver: str, minor: int | None = None) -> PciFunction:
    return PciFunction(address, True, "0x10de", "0x2230", "0x030000", driver, "14", (), minor)


def on_nvidia(**changes: object) -> GpuFacts:
    values: dict[str, object] = {
        "functions": (function(A, "nvidia", 0), function(B, "nvidia", 1)),
        "modules": ("nvidia", "nvidia_uvm"),
        "majors": (("nvidia", 195), ("nvidia-uvm", 509)),
        "nodes": NODES,
    }
    return GpuFacts(**{**values, **changes})  # type: ignore[arg-type]


def on_vfio(**changes: object) -> GpuFacts:
    functions = (function(A, "vfio-pci"), function(B, "vfio-pci"))
    return on_nvidia(**{"functions": functions, "modules": (), "nodes": (), **changes})


def plan(seen: GpuFacts, *others: object, **gpus: object) -> Plan:
    want = deployment(gpus={**REPORT, **gpus})
    return GpusStep().plan(want, facts(seen, *(others or (DRIVER,))), DeploymentState())


def look(tree: Tree, shell: list[str]) -> GpuFacts:
    one = probe([A, B], str(tree.root))
    return one.parse(output(run_script(one.script, shell)))  # type: ignore[return-value]


def test_nothing_to_do_says_what_it_saw() -> None:
    decided = plan(on_nvidia())
    assert decided.state is PlanState.NOTHING
    assert decided.reason == (f"{A} and {B} are bound to nvidia; /dev/nvidia0, /dev/nvidia1 exist")


def test_vfio_is_rebound_and_the_audio_function_left_alone() -> None:
    decided = plan(on_vfio())
    (change,) = decided.changes
    assert isinstance(change.action, Procedure)
    assert f"echo nvidia > /sys/bus/pci/devices/{A}/driver_override" in change.action.steps
    assert "modprobe nvidia" in change.action.steps
    assert "21:00.1" not in change.action.steps
    assert "vfio-pci" in change.undo


def test_rebind_never() -> None:
    decided = plan(on_vfio(), rebind="never")
    assert decided.state is PlanState.BLOCKED
    assert "gpus.rebind" in decided.reason


def test_a_holder_is_named() -> None:
    decided = plan(on_vfio(holders=((A, Holder(4242, "kvm", vm=101)),)))
    assert decided.state is PlanState.BLOCKED
    assert "pid 4242 (kvm) of VM 101" in decided.reason
    assert "qm shutdown 101" in decided.fix


def test_a_running_vm_claims_it() -> None:
    claim = proxmox.Claim(101, ("0000:41:00",), onboot=True, running=True, name="windows")
    decided = plan(on_vfio(claims=(claim,)))
    assert decided.state is PlanState.BLOCKED
    assert "VM 101 (windows)" in decided.reason


def test_a_vm_that_starts_at_boot_is_warned_about() -> None:
    claim = proxmox.Claim(101, ("0000:41:00",), onboot=True, running=False)
    assert f"VM 101 starts at boot and takes {B}" in plan(on_nvidia(claims=(claim,))).reason


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (PciFunction(A), "no PCI function"),
        (PciFunction(A, True, "0x1022", "0x1", "0x060400", ""), "not an NVIDIA GPU"),
        (function(A, "nouveau"), "bound to nouveau"),
    ],
)
def test_what_is_never_touched(one: PciFunction, words: str) -> None:
    decided = plan(on_vfio(functions=(one,)))
    assert decided.state is PlanState.BLOCKED
    assert words in decided.reason


def test_waits_for_the_driver() -> None:
    assert plan(on_vfio(), HostDriver(kernel="6.8")).state is PlanState.UNKNOWN


def test_a_look_that_timed_out_is_a_diagnosis() -> None:
    decided = plan(GpuFacts(timed_out=True))
    assert decided.state is PlanState.BLOCKED
    assert "reboot" in decided.fix


@pytest.mark.parametrize(
    "nodes",
    [
        NODES[:3],
        (*NODES[:3], gpu.Node("/dev/nvidia-uvm", "char", 510, 0), NODES[4]),
        (*NODES[1:], gpu.Node("/dev/nvidia0", "file")),
    ],
    ids=["missing", "stale-major", "regular-file"],
)
def test_wrong_nodes_are_made(nodes: tuple[gpu.Node, ...]) -> None:
    decided = plan(on_nvidia(nodes=nodes))
    assert [change.title for change in decided.changes] == ["make nodes"]


def test_a_gpu_that_nvidia_smi_lost() -> None:
    rows = gpu.parse_smi(f"0, GPU-1, A6000, 580.126.09, 49140, 1, 8.6, 0000{A}\n")
    decided = plan(on_nvidia(), DRIVER, HostSmi(0, "", rows))
    assert decided.state is PlanState.BLOCKED
    assert B in decided.reason


def test_persist_writes_files_of_ours_once() -> None:
    want = deployment(gpus={"persist": "change"})
    decided = GpusStep().plan(want, facts(on_nvidia(), DRIVER), DeploymentState())
    assert [change.title for change in decided.changes] == [
        "write /usr/local/sbin/deployer-gpus",
        "write /etc/systemd/system/deployer-gpus-qwen.service",
        "enable deployer-gpus-qwen.service",
    ]
    written = [change.action for change in decided.changes[:2]]
    ours = tuple(
        (one.path, hashlib.sha256(one.content).hexdigest())  # type: ignore[union-attr]
        for one in written
    )
    seen = on_nvidia(ours=ours, enabled=(unit_name("qwen"),))
    again = GpusStep().plan(want, facts(seen, DRIVER), DeploymentState())
    assert again.state is PlanState.NOTHING
    unit = written[1].content.decode()  # type: ignore[union-attr]
    assert "Before=pve-guests.service" in unit
    assert f"deployer-gpus 20 {A} {B}" in unit


def test_persist_names_what_it_works_against() -> None:
    boot = (proxmox.BootSource("/etc/modprobe.d/vfio.conf:2", "options vfio-pci ids=10de:2230"),)
    seen = facts(on_nvidia(boot=boot), DRIVER)
    decided = GpusStep().plan(deployment(), seen, DeploymentState())
    assert "/etc/modprobe.d/vfio.conf:2" in decided.changes[0].reason


def test_report_names_what_takes_it_back() -> None:
    boot = (proxmox.BootSource("/etc/modprobe.d/vfio.conf:2", "options vfio-pci ids=10de:2230"),)
    assert "/etc/modprobe.d/vfio.conf:2" in plan(on_nvidia(boot=boot)).reason


@pytest.mark.parametrize(("code", "error"), [(75, StepFailed), (76, StepBlocked), (77, StepFailed)])
def test_apply_explains_the_script_s_end(code: int, error: type[Exception]) -> None:
    want = deployment(gpus=REPORT)
    seen = facts(on_vfio(), DRIVER)
    decided = GpusStep().plan(want, seen, DeploymentState())
    door = Door(answers=[Answer(code, b"", b"0000:21:00.0 is in use by pid 7\n")])
    with pytest.raises(error, match="in use by pid 7"):
        GpusStep().apply(context(want, door), seen, decided)


@BY_SHELL
def test_look_at_vfio(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    tree.process(4242, "kvm", "/dev/vfio/14", "/qemu.slice/101.scope", "/usr/bin/kvm -id 101 -x")
    tree.process(4243, "other", "/dev/vfio/vfio", "/")
    folder = tmp_path / "etc"
    (folder / "pve/qemu-server").mkdir(parents=True)
    (folder / "pve/qemu-server/101.conf").write_text(
        "name: windows\nhostpci0: 0000:21:00,pcie=1\nonboot: 1\n[old]\nhostpci1: 41:00.0\n"
    )
    (folder / "modprobe.d").mkdir()
    (folder / "modprobe.d/vfio.conf").write_text("# ids=\noptions vfio-pci ids=10de:2230\n")
    (folder / "driverctl.d").mkdir()
    (folder / "driverctl.d" / B).write_text("vfio-pci\n")
    seen = look(tree, shell)
    assert [one.driver for one in seen.functions] == ["vfio-pci", "vfio-pci"]
    assert seen.functions[0].members == (("0000:21:00.1", "vfio-pci"),)
    assert seen.held_by(A) == (Holder(4242, "kvm", vm=101),)
    assert seen.held_by(B) == ()
    (claim,) = seen.claims
    assert claim.covers(A) and not claim.covers(B) and claim.onboot
    ids = {one.address: one.id for one in seen.functions}
    assert [str(one) for one in proxmox.takes_back(seen.boot, ids)] == [
        "/etc/modprobe.d/vfio.conf:2: options vfio-pci ids=10de:2230",
        f"/etc/driverctl.d/{B}:1: vfio-pci",
        "/proc/cmdline:1: vfio-pci.ids=10de:2230",
    ]


def char(path: Path, major: int, minor: int) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")


@BY_SHELL
def test_look_at_nvidia_finds_a_container_by_device_number(
    tmp_path: Path, shell: list[str]
) -> None:
    tree = Tree(tmp_path, driver="nvidia")
    for node in NODES:
        char(tmp_path / node.path[1:], node.major, node.minor)
    char(tmp_path / "elsewhere", 195, 1)
    tree.process(77, "python3", str(tmp_path / "elsewhere"), "/lxc/129/ns/x")
    seen = look(tree, shell)
    assert seen.ready
    assert [one.minor for one in seen.functions] == [0, 1]
    assert seen.held_by(B) == (Holder(77, "python3", container=129),)
