"""The gpus step: what it refuses, what it plans, and its look at a tree like a host's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deployer import gpu, proxmox
from deployer.errors import StepBlocked, StepFailed
from deployer.model import Plan, PlanState, ProbeOutput, Procedure, WriteFile
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps import gpus_persist
from deployer.steps.boot_facts import BootFacts, BootFile
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.gpus import GpusStep
from deployer.steps.gpus_binding import UnbindStuck
from deployer.steps.gpus_facts import (
    GpuFacts,
    Holder,
    Overrides,
    PciFunction,
    Pending,
    parse,
    parse_overrides,
    probes,
)
from deployer.steps.gpus_moves import unit_name
from tests.unit.hoststeps import (
    BOOT_ID,
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
    write,
)

DRIVER = HostDriver(loaded="", on_disk="580.126.09", kernel="6.8.12-1-pve")
BY_SHELL = pytest.mark.parametrize("shell", SHELLS[:2], ids=lambda shell: shell[0])
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
    audio = PciFunction(f"{address[:-1]}1", True, "0x10de", "0x1aef", "0x040300", "vfio-pci")
    return PciFunction(address, True, "0x10de", "0x2230", "0x030000", driver, "14", (audio,), minor)


def on_nvidia(**changes: object) -> GpuFacts:
    values: dict[str, object] = {
        "functions": (function(A, "nvidia", 0), function(B, "nvidia", 1)),
        "modules": ("nvidia", "nvidia_uvm"),
        "majors": (("nvidia", 195), ("nvidia-uvm", 509)),
        "nodes": NODES,
        "boot_id": BOOT_ID,
    }
    return GpuFacts(**{**values, **changes})  # type: ignore[arg-type]


def on_vfio(**changes: object) -> GpuFacts:
    functions = (function(A, "vfio-pci"), function(B, "vfio-pci"))
    return on_nvidia(**{"functions": functions, "modules": (), "nodes": (), **changes})


def plan(seen: GpuFacts, *others: object, **gpus: object) -> Plan:
    want = deployment(gpus={**REPORT, **gpus})
    return GpusStep().plan(want, facts(seen, *(others or (DRIVER,))), DeploymentState())


def look(tree: Tree, shell: list[str]) -> GpuFacts:
    one = probes([A, B], str(tree.root))[0]
    return one.parse(output(run_script(one.script, shell)))  # type: ignore[return-value]


def overrides(tree: Tree, shell: list[str]) -> Overrides:
    one = probes([A, B], str(tree.root))[1]
    return one.parse(output(run_script(one.script, shell)))  # type: ignore[return-value]


def test_nothing_to_do_says_what_it_saw() -> None:
    decided = plan(on_nvidia())
    assert decided.state is PlanState.NOTHING
    assert decided.reason == (f"{A} and {B} are bound to nvidia; /dev/nvidia0, /dev/nvidia1 exist")
    assert decided.notes[0] == f"{A} 10de:2230 on nvidia, group 14 with 0000:21:00.1 vfio-pci"


def test_it_is_proven_only_when_the_boot_id_has_changed() -> None:
    def reason(changed: str) -> str:
        state = DeploymentState(extra={"gpus": {"changed_boot": changed}})
        want = deployment(gpus=REPORT)
        return GpusStep().plan(want, facts(on_nvidia(), DRIVER), state).reason

    assert reason(BOOT_ID).endswith("; effective now, not proven across a reboot")
    assert reason("another").endswith("; proven across a reboot")


def test_vfio_is_rebound_and_the_audio_function_left_alone() -> None:
    decided = plan(on_vfio())
    (change,) = decided.changes
    assert isinstance(change.action, Procedure)
    assert f"echo nvidia > /sys/bus/pci/devices/{A}/driver_override" in change.action.steps
    assert f"echo {A} > /sys/bus/pci/drivers/vfio-pci/unbind" in change.action.steps
    assert "modprobe nvidia\n" in change.action.steps
    assert "21:00.1" not in change.action.steps
    assert f"{A} back to vfio-pci" in change.undo


def test_a_function_without_a_driver_is_only_probed() -> None:
    functions = (function(A, ""), function(B, "nvidia", 1))
    (change,) = plan(on_nvidia(functions=functions)).changes
    assert isinstance(change.action, Procedure)
    assert "unbind" not in change.action.steps
    assert f"echo {A} > /sys/bus/pci/drivers_probe" in change.action.steps
    assert B not in change.action.steps


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
    assert f"VM 101 starts at boot and takes {B}" in plan(on_nvidia(claims=(claim,))).notes


@pytest.mark.parametrize(
    ("one", "words", "fix"),
    [
        (PciFunction(A), "no PCI function", "lspci"),
        (
            PciFunction(A, True, "0x1022", "0x1", "0x060400", ""),
            "not an NVIDIA GPU",
            "named there by `id:`",
        ),
        (function(A, "nouveau"), "bound to nouveau", "blacklist nouveau in"),
        # A blacklist of nouveau does not stop it.
        (function(A, "nova_core"), "bound to nova_core", "blacklist nova_core and nova_drm in"),
        (function(A, "mystery"), "bound to mystery", "find out who bound it there"),
    ],
)
def test_what_is_never_touched(one: PciFunction, words: str, fix: str) -> None:
    decided = plan(on_vfio(functions=(one,)))
    assert decided.state is PlanState.BLOCKED
    assert words in decided.reason
    assert fix in decided.fix


@pytest.mark.parametrize(
    ("wanted", "state"), [("1234:1111", PlanState.CHANGES), ("10de:2230", PlanState.BLOCKED)]
)
def test_the_inventory_may_name_the_id(wanted: str, state: PlanState) -> None:
    emulated = PciFunction(A, True, "0x1234", "0x1111", "0x038000", "vfio-pci")
    want = deployment(gpus=REPORT)
    host = want.host.model_copy(
        update={"gpus": [one.model_copy(update={"id": wanted}) for one in want.host.gpus]}
    )
    object.__setattr__(want, "host", host)
    seen = facts(on_vfio(functions=(emulated,)), DRIVER)
    decided = GpusStep().plan(want, seen, DeploymentState())
    assert decided.state is state
    if state is PlanState.BLOCKED:
        assert "is not 10de:2230, as the inventory says" in decided.reason


def test_waits_for_the_driver() -> None:
    assert plan(on_vfio(), HostDriver(kernel="6.8")).state is PlanState.UNKNOWN


def test_a_look_that_timed_out_is_a_diagnosis() -> None:
    decided = plan(GpuFacts(timed_out=True))
    assert decided.state is PlanState.BLOCKED
    assert decided.stands
    assert "reboot" in decided.fix


STUCK = Pending(4242, "sh", "D", A, f"the unbind of {A} from vfio-pci")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pending": (STUCK,)}, "pid 4242 (sh, state D) has not returned"),
        ({"pending": (Pending(7, "qm", "S", "", "a write to unbind"),)}, "only a host reboot"),
        ({"changing": ("nvidia (going)",)}, "being loaded or unloaded: nvidia (going)"),
        ({"scanned": False}, "nobody knows who holds the GPUs"),
    ],
)
def test_what_is_under_way_forbids_everything(changes: dict[str, object], words: str) -> None:
    for seen in (on_vfio(**changes), on_nvidia(**changes)):
        decided = plan(seen)
        assert decided.state is PlanState.BLOCKED
        assert words in decided.reason


def test_a_write_to_a_device_of_no_concern_forbids_nothing() -> None:
    other = Pending(7, "sh", "S", "0000:00:1f.2", "a write to reset of 0000:00:1f.2")
    assert plan(on_nvidia(pending=(other,))).state is PlanState.NOTHING


def test_an_override_that_cannot_be_read_is_a_pending_change() -> None:
    gone = (function(A, ""), function(B, "vfio-pci"))
    late = ProbeOutput(124, f"reading {A}\n".encode(), b"", timed_out=True)
    decided = plan(on_vfio(functions=gone), DRIVER, parse_overrides(late))
    assert decided.state is PlanState.BLOCKED
    assert f"driver_override of {A} did not return within 10 s, and it is on no driver" in (
        decided.reason
    )
    assert "host reboot" in decided.fix
    # A host that was only slow has begun no read.
    slow = parse_overrides(ProbeOutput(124, b"", b"", timed_out=True))
    assert slow.problem == "the host gave no answer within 10 s"
    assert plan(on_vfio(), DRIVER, slow).state is PlanState.CHANGES


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
    want = deployment(gpus={"persist": "unit"})
    decided = GpusStep().plan(want, facts(on_nvidia(), DRIVER), DeploymentState())
    assert [change.title for change in decided.changes] == [
        "write /usr/local/sbin/deployer-gpus",
        "write /etc/systemd/system/deployer-gpus-qwen.service",
        "enable deployer-gpus-qwen.service",
    ]
    written = [one.action for one in decided.changes if isinstance(one.action, WriteFile)]
    files = tuple(BootFile(one.path, one.content) for one in written)
    unit = written[1].content.decode()
    assert "Before=pve-guests.service" in unit
    assert f"deployer-gpus 20 {A},nvidia,vfio-pci {B},nvidia,vfio-pci" in unit
    assert written[1].diff()[0] == "--- a/etc/systemd/system/deployer-gpus-qwen.service"
    boot = BootFacts(files=files, enabled=(unit_name("qwen"),))
    again = GpusStep().plan(want, facts(on_nvidia(), DRIVER, boot), DeploymentState())
    assert again.state is PlanState.NOTHING


@pytest.mark.parametrize("persist", ["unit", "change"])
def test_what_a_boot_unit_cannot_mend_is_warned_of(persist: str) -> None:
    want = deployment(gpus={"persist": persist})
    line = b'GRUB_CMDLINE_LINUX_DEFAULT="quiet module_blacklist=nvidia"\n'
    boot = BootFacts(files=(BootFile("/etc/default/grub", line),))
    told = gpus_persist.warnings(want, on_nvidia(), boot)
    if persist == "change":
        assert told == []
        return
    [(what, fix)] = told
    assert what.startswith("at the next boot of kpro5 nvidia is not loaded: /etc/default/grub:1:")
    assert "gpus.persist: change" in fix


STUCK_TEXT = b"kernel:\n[9] blocked\nthe unbind of X has not returned after 5 s; only a reboot"


@pytest.mark.parametrize(
    ("code", "said", "error", "words", "fix"),
    [
        (75, STUCK_TEXT, UnbindStuck, "has not returned after 5 s", "reboot kpro5"),
        (76, b"X is in use by pid 7 (kvm)\n", StepBlocked, "in use by pid 7", "stop the process"),
        (
            77,
            b"modprobe nvidia failed: modprobe: ERROR: could not insert 'nvidia': No such device\n"
            b"nvidia-persistenced is started\n",
            StepFailed,
            "could not insert 'nvidia': No such device",
            "dmesg | grep NVRM",
        ),
        (
            77,
            b"modprobe nvidia failed: modprobe: ERROR: could not insert 'nvidia': Key was rejected "
            b"by service\n",
            StepFailed,
            "Key was rejected by service",
            "Secure Boot",
        ),
        (
            77,
            b"modprobe nvidia failed: modprobe: FATAL: Module nvidia not found in directory /lib\n",
            StepFailed,
            "not found in directory",
            "dkms status",
        ),
        (
            77,
            b"modprobe -r nvidia failed: modprobe: FATAL: Module nvidia is in use.\n",
            StepFailed,
            "is in use",
            "/proc/*/fd",
        ),
        (
            77,
            b"X cannot be probed: sh: write error: Invalid argument\n",
            StepFailed,
            "Invalid argument",
            "a VM owns its IOMMU group",
        ),
        (
            77,
            b"X cannot be bound: sh: write error: Device or resource busy\n",
            StepFailed,
            "resource busy",
            "a VM owns its IOMMU group",
        ),
        (127, b"sh: 1: nope: not found\n", StepFailed, "not found", ""),
    ],
)
def test_apply_explains_the_script_s_end(
    code: int, said: bytes, error: type[Exception], words: str, fix: str
) -> None:
    want = deployment(gpus=REPORT)
    seen = facts(on_vfio(), DRIVER)
    decided = GpusStep().plan(want, seen, DeploymentState())
    door = Door(answers=[Answer(code, b"", said)])
    with pytest.raises(error, match=words) as told:
        GpusStep().apply(context(want, door), seen, decided)
    assert fix in told.value.fix  # type: ignore[attr-defined]


@BY_SHELL
def test_look_at_vfio(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    tree.process(4242, "kvm", "/dev/vfio/14", "/qemu.slice/101.scope", "/usr/bin/kvm -id 101 -x")
    tree.process(4243, "other", "/dev/vfio/vfio", "/")
    conf = tmp_path / "etc/pve/qemu-server"
    write(
        conf / "101.conf",
        "name: windows\nhostpci0: 0000:21:00,pcie=1\nonboot: 1\n[old]\nhostpci1: 41:00.0\n",
    )
    write(
        conf / "102.conf", "name: soon\n[old]\nonboot: 1\n[PENDING]\nhostpci0: host=41:00.0;41:00.1"
    )
    write(conf / "103.conf", "hostpci0: mapping=card,pcie=1\n")
    write(
        tmp_path / "etc/pve/mapping/pci.cfg",
        f"card\n\tmap id=10de:2230,node={os.uname().nodename.split('.')[0]},path=0000:41:00\n",
    )
    write(tmp_path / "run/qemu-server/pci-id-reservations", f"{B} 103 pid:4243\n{A} 9 pid:1\n")
    seen = look(tree, shell)
    assert seen.scanned and seen.boot_id == BOOT_ID
    assert [one.driver for one in seen.functions] == ["vfio-pci", "vfio-pci"]
    (audio,) = seen.functions[0].members
    assert (audio.address, audio.id, audio.driver) == ("0000:21:00.1", "10de:1aef", "vfio-pci")
    assert [one.address for one in seen.displays] == [A, B]
    assert seen.held_by(A) == (Holder(4242, "kvm", vm=101),)
    assert seen.held_by(B) == ()
    windows, soon, mapped = seen.claims
    assert windows.covers(A) and not windows.covers(B) and windows.onboot
    assert soon.covers(B) and not soon.onboot and not soon.running
    assert mapped.covers(B) and mapped.running
    assert seen.pending == ()


@BY_SHELL
def test_look_at_a_pending_unbind(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    tree.unbind(A)
    tree.process(50, "sh", "/sys/bus/pci/drivers/vfio-pci/unbind", "/", f"sh -c echo {A} > unbind")
    write(tmp_path / "proc/50/syscall", "1 0x7 0x55 0xd 0x0 0x0 0x0 0x7ffe 0x7f12\n")
    write(tmp_path / "proc/50/stat", "50 (s h) S 1 50 50 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0\n")
    (seen,) = look(tree, shell).pending
    assert str(seen) == f"a write to unbind of {A} by pid 50 (sh, state S) has not returned"
    # It is not read; the other one is.
    assert [address for address, _ in overrides(tree, shell).values] == [
        "0000:21:00.1",
        B,
        "0000:41:00.1",
    ]
    # Ours says which address and what; a mark of another boot or of a later process says nothing.
    marks = tmp_path / "run/deployer/gpus"
    write(marks / A, f"{BOOT_ID} 50 777 the unbind of {A} from vfio-pci\n")
    write(marks / B, f"{BOOT_ID} 50 778 the unbind of {B} from vfio-pci\n")
    write(marks / "0000:21:00.1", "another-boot 50 777 the unbind\n")
    (seen,) = look(tree, shell).pending
    assert (seen.address, seen.what) == (A, f"the unbind of {A} from vfio-pci")
    (marks / A).unlink()
    # A daemon that has the file open and is in another call waits for nothing.
    write(tmp_path / "proc/50/syscall", "232 0x3 0x55 0xd 0x0 0x0 0x0 0x7ffe 0x7f12\n")
    assert look(tree, shell).pending == ()
    # Where the kernel does not tell the call, state D does.
    (tmp_path / "proc/50/syscall").unlink()
    assert look(tree, shell).pending == ()
    write(tmp_path / "proc/50/stat", "50 (sh) D 1 50 50 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0\n")
    assert [one.state for one in look(tree, shell).pending] == ["D"]
    # One that names no function may be on any of them.
    write(tmp_path / "proc/50/cmdline", "sh")
    assert overrides(tree, shell).problem == "a write to a driver file by pid 50 has not returned"
    # A zombie waits for nothing.
    write(tmp_path / "proc/50/stat", "50 (sh) Z 1 50 50 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0\n")
    assert look(tree, shell).pending == ()
    assert overrides(tree, shell).of(B) == ""


@BY_SHELL
def test_look_at_a_device_fd_whose_group_fd_is_closed(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path)
    tree.process(60, "python3", "anon_inode:[vfio-device]", "/lxc/129/ns")
    seen = look(tree, shell)
    assert [str(holder) for holder in seen.held_by(A)] == [
        "pid 60 (python3) of container 129, which has some device of vfio open"
    ]
    assert seen.held_by(B) == seen.held_by(A)
    # Newer kernels tell.
    write(tmp_path / "proc/60/fdinfo/7", f"pos: 0\nvfio-device-syspath: /sys/devices/x/{B}\n")
    seen = look(tree, shell)
    assert seen.held_by(A) == ()
    assert [holder.sure for holder in seen.held_by(B)] == [True]


@BY_SHELL
def test_look_at_module_states(tmp_path: Path, shell: list[str]) -> None:
    tree = Tree(tmp_path, driver="nvidia")
    write(tmp_path / "sys/module/nvidia/initstate", "going\n")
    write(tmp_path / "sys/module/nvidia/refcnt", "15\n")
    seen = look(tree, shell)
    assert seen.changing == ("nvidia (going)",)
    assert seen.hidden_users == 15
    (tmp_path / "sys/module/nvidia/holders/nvidia_uvm").mkdir(parents=True)
    assert look(tree, shell).hidden_users == 0


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
    char(tmp_path / "modeset", 195, 254)
    char(tmp_path / "card0", 226, 0)
    tree.process(77, "python3", str(tmp_path / "elsewhere"), "/lxc/129/ns/x")
    seen = look(tree, shell)
    assert seen.ready
    assert [one.minor for one in seen.functions] == [0, 1]
    assert seen.held_by(B) == (Holder(77, "python3", container=129),)
    assert seen.held_by(A) == ()
    write(tree.pci / "devices" / A / "drm/card0/dev", "226:0\n")
    tree.process(78, "Xorg", str(tmp_path / "card0"), "/user.slice/x")
    tree.process(
        79,
        "nvidia-persiste",
        str(tmp_path / "modeset"),
        "/system.slice/nvidia-persistenced.service",
    )
    seen = look(tree, shell)
    assert [holder.pid for holder in seen.held_by(A)] == [78, 79]
    assert [holder.pid for holder in seen.held_by(B)] == [77, 79]
    assert seen.held_by(A)[1].is_persistenced
    assert seen.held_by(A)[1].way_out == "`systemctl stop nvidia-persistenced.service`"


def test_a_scan_that_was_cut_off_is_not_believed() -> None:
    device = f"link {A} driver vfio-pci\npci {A} 0x10de 0x2230 0x030000 -\n"
    whole = f"{device}scanned\n".encode()
    assert parse(ProbeOutput(0, whole, b""), [A]).scanned
    cut = parse(ProbeOutput(124, whole.removesuffix(b"scanned\n"), b"", timed_out=True), [A])
    assert not cut.scanned and cut.functions[0].driver == "vfio-pci"
