"""The driver step: versions of host and guest, and what it may install."""

from __future__ import annotations

from typing import Any

import pytest

from deployer.kernels import BootChoice, DkmsBuild, Kernel
from deployer.model import Plan, PlanState, RunJob, SendFile, Shell, Where
from deployer.state import DeploymentState
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver import DriverStep, warnings
from deployer.steps.driver_cuda import cuda_need, cuda_of_pins
from deployer.steps.driver_facts import (
    GuestDriver,
    HostDriver,
    HostGpu,
    HostKernels,
    HostSmi,
    Package,
    System,
    Userspace,
)
from deployer.steps.driver_install import host_flags
from deployer.steps.driver_table import headers_package, table
from deployer.steps.gpus_facts import GpuFacts, Holder
from tests.unit.hoststeps import PACKAGE, deployment, facts

WANTED = "580.126.09"
KERNEL, NEWER = "6.8.12-1-pve", "6.8.12-2-pve"
IDLE = (("nvidia", 1, 1), ("nvidia_uvm", 0, 0))
BUSY = (("nvidia", 3, 1), ("nvidia_uvm", 1, 0))
ALL = {"install": "host-and-guest", "package": PACKAGE}


def userspace(version: str = WANTED, smi: bool = True) -> Userspace:
    names = ("libcuda.so", "libnvidia-ml.so")
    return Userspace(tuple((name, version) for name in names), smi=smi)


def host(**changes: Any) -> HostDriver:
    values = {
        "loaded": WANTED,
        "flavour": "open",
        "on_disk": WANTED,
        "kernel": KERNEL,
        "references": BUSY,
        "gpus": (HostGpu("0000:21:00.0", "0x2230", "nvidia"),),
    }
    return HostDriver(**{**values, **changes})


def kernels(*more: Kernel, **changes: Any) -> HostKernels:
    values: dict[str, Any] = {
        "running": KERNEL,
        "kernels": (Kernel(KERNEL, module=WANTED, flavour="open"), *more),
        "dkms": (DkmsBuild("nvidia", WANTED, KERNEL, "installed"),),
        "has_dkms": True,
    }
    return HostKernels(**{**values, **changes})


def plan(*values: object, silent: str = "", vmid: int | None = 129, **driver: object) -> Plan:
    want = deployment(vmid=vmid, driver=driver)
    return DriverStep().plan(want, facts(*values, silent=silent), DeploymentState())


def told(*values: object, vmid: int | None = 129) -> list[str]:
    return [f"{what} -> {fix}" for what, fix in warnings(deployment(vmid=vmid), facts(*values))]


def test_all_right() -> None:
    decided = plan(host(), kernels(), GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING
    assert decided.reason == (
        f"module {WANTED} (open) is loaded on kpro5; container 129 has driver libraries {WANTED}"
    )


def test_not_loaded_is_no_failure() -> None:
    decided = plan(host(loaded="", flavour=""), kernels(), GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING
    assert "not loaded yet" in decided.reason


def test_a_stopped_container_is_looked_at_later() -> None:
    decided = plan(host(), silent="connection refused")
    assert decided.state is PlanState.NOTHING
    assert "looked at when it runs" in decided.reason


# --- the table of the four places --------------------------------------------------------------


def test_the_four_places_as_one_table() -> None:
    seen = kernels(Kernel(NEWER, headers=False), Kernel("6.5.1-1-pve", module="550.1.2"))
    want = deployment()
    rows = table(want, host(), seen, GuestDriver(userspace("580.95.05")))
    assert [(row.place, row.version, row.right) for row in rows] == [
        ("module loaded on kpro5", WANTED, True),
        (f"module of kernel {NEWER}", "", False),
        (f"module of kernel {KERNEL}", WANTED, True),
        ("module of kernel 6.5.1-1-pve", "550.1.2", False),
        ("libraries in kpro5", "", False),
        ("libraries in container 129", "580.95.05", False),
    ]
    notes = plan(host(), seen, GuestDriver(userspace("580.95.05")), install="never").notes
    assert notes[0].split() == ["module", "loaded", "on", "kpro5", WANTED, "open"]
    assert notes[1].startswith(f"! module of kernel {NEWER}")
    assert notes[1].endswith("none        boots next, no headers")
    assert "not 580.126.09" in notes[5]
    assert notes[6] == "  GPUs: 10de:2230 Ampere; no Secure Boot"
    assert all(len(line) < 100 for line in notes)


@pytest.mark.parametrize(
    ("proof", "line"),
    [
        (CudaProof(0, "CUDA_SUCCESS", 2, (13, 0)), "  {} cuInit succeeds, 2 GPUs, CUDA 13.0"),
        (CudaProof(999, "CUDA_ERROR_UNKNOWN"), "! {} cuInit answers 999 (CUDA_ERROR_UNKNOWN)"),
        (CudaProof(skipped="no Python"), "  {} not asked: no Python"),
        (CudaProof(stale=(508, 511)), "! {} cuda-stale-uvm"),
        (CudaProof(timed_out=True), "! {} cuda-hangs"),
    ],
)
def test_what_cuda_says_stands_below(proof: CudaProof, line: str) -> None:
    notes = plan(host(), kernels(), GuestDriver(userspace()), proof).notes
    assert notes[-1] == line.format("CUDA in container 129:")


def test_the_table_names_an_older_pin_and_dkms() -> None:
    seen = kernels(
        Kernel(NEWER, module=WANTED),
        choice=BootChoice(pin=KERNEL),
        dkms=(DkmsBuild("nvidia", WANTED, NEWER, "built"),),
    )
    rows = {row.place: row.note for row in table(deployment(), host(), seen, None)}
    assert rows[f"module of kernel {NEWER}"] == "dkms: built"
    assert "boots next: pinned (/etc/kernel/proxmox-boot-pin)" in rows[f"module of kernel {KERNEL}"]
    assert rows["libraries in container 129"] == "not looked at"


# --- refusals, each with one action --------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "reason", "fix"),
    [
        (host(loaded="580.95.05", on_disk="580.95.05"), "580.95.05 is loaded", "driver.version"),
        (host(loaded="580.95.05"), "waits to be loaded", "reboot kpro5"),
        (host(loaded="", on_disk=""), f"no nvidia module for kernel {KERNEL}", "dkms"),
        (host(loaded="", on_disk="", secure_boot=True), "no nvidia module", "signed"),
        (host(loaded="", rivals=("nouveau",)), "nouveau is loaded", "blacklist nouveau"),
        (host(loaded="", rivals=("nova_core",)), "nova_core is", "nova_core and nova_drm"),
        (HostDriver(timed_out=True), "did not answer", "reboot"),
        (
            host(flavour="proprietary", gpus=(HostGpu("0000:21:00.0", "0x2bb1"),)),
            "needs the open module",
            "install 580.126.09",
        ),
    ],
)
def test_blocked_with_one_action(seen: HostDriver, reason: str, fix: str) -> None:
    decided = plan(seen, kernels(), GuestDriver(userspace()))
    assert decided.state is PlanState.BLOCKED
    assert reason in decided.reason
    assert fix in decided.fix


@pytest.mark.parametrize(
    ("seen", "changed", "driver", "reason", "fix"),
    [
        (host(loaded="580.95.05", on_disk=""), {}, {}, "in use (nvidia, nvidia_uvm)", "pid 42"),
        (
            host(loaded="", on_disk="", rivals=("nouveau",)),
            {},
            {},
            "which the installer refuses",
            "update-initramfs",
        ),
        (
            host(loaded="", on_disk=""),
            {"kernels": (Kernel(KERNEL, headers=False),)},
            {},
            f"headers of the running kernel {KERNEL} are missing",
            f"proxmox-headers-{KERNEL}",
        ),
        (host(loaded="", on_disk=""), {"has_dkms": False}, {}, "dkms is missing", "install dkms"),
        (
            host(loaded="", on_disk="", secure_boot=True),
            {"mok_enrolled": False},
            {},
            "Secure Boot would reject",
            "mokutil --import",
        ),
        (
            host(
                loaded="",
                on_disk="",
                system=System((Package("nvidia-kernel-dkms", "535.1"), Package("x-nvidia", "1"))),
            ),
            {},
            {},
            "packages of a driver are installed (nvidia-kernel-dkms 535.1)",
            "apt-get purge nvidia-kernel-dkms",
        ),
        (
            host(
                loaded="",
                on_disk="",
                system=System(free=(("/usr", 10**9, "a:/"), ("/var", 10**9, "a:/"))),
            ),
            {},
            {},
            "/usr and /var has 1.0 GB free, the installation needs 2.7 GB",
            "free space",
        ),
        (
            host(loaded="", on_disk="", gpus=(HostGpu("0000:21:00.0", "0x1b80"),)),
            {},
            {"version": "595.45.04"},
            "branch 580 or older",
            "driver.version",
        ),
    ],
)
def test_no_installation_now(
    seen: HostDriver, changed: dict[str, Any], driver: dict[str, Any], reason: str, fix: str
) -> None:
    gpus = GpuFacts(holders=(("0000:21:00.0", Holder(42, "python", container=130)),))
    decided = plan(seen, kernels(**changed), gpus, **{**ALL, **driver})
    assert decided.state is PlanState.BLOCKED, decided
    assert reason in decided.reason
    assert fix in decided.fix


@pytest.mark.parametrize(
    ("changed", "secure", "reason"),
    [
        ({"signed": ()}, True, "not signed"),
        ({"signed": (KERNEL,), "mok_enrolled": False}, True, "not enrolled"),
        ({"signed": (KERNEL,), "mok_enrolled": True}, True, ""),
        ({"signed": (KERNEL,)}, True, ""),
        ({"signed": ()}, False, ""),
    ],
)
def test_secure_boot(changed: dict[str, Any], secure: bool, reason: str) -> None:
    seen = host(loaded="", secure_boot=secure)
    decided = plan(seen, kernels(**changed), GuestDriver(userspace()))
    assert (decided.state is PlanState.BLOCKED) == bool(reason)
    assert reason in decided.reason
    if reason:
        assert "mokutil --import" in decided.fix


@pytest.mark.parametrize(
    ("smi", "words"),
    [
        (HostSmi(124, "", timed_out=True), "no answer in time"),
        (HostSmi(18, "mismatch"), "its libraries are"),
        (HostSmi(15, "Unable to determine the device handle for GPU0000:21:00.0"), "is lost"),
        (HostSmi(255, "Unable to determine the device handle for GPU0000:21:00.0"), "is lost"),
        (HostSmi(16, ""), "needs a reset"),
        (HostSmi(14, ""), "infoROM"),
        (HostSmi(8, ""), "power cable"),
    ],
)
def test_a_sick_host(smi: HostSmi, words: str) -> None:
    decided = plan(host(), kernels(), smi, GuestDriver(userspace()))
    assert decided.state is PlanState.BLOCKED
    assert words in decided.reason
    assert decided.fix


def test_a_mismatch_of_equal_versions_is_another_copy() -> None:
    seen = host(userspace=userspace())
    decided = plan(seen, kernels(), HostSmi(18, "mismatch"), GuestDriver(userspace()))
    assert f"module and libraries are {WANTED}" in decided.reason
    assert "ldconfig -p" in decided.fix


@pytest.mark.parametrize("code", [0, 6, 12, 127, 200])
def test_what_is_other_steps_work(code: int) -> None:
    decided = plan(host(), kernels(), HostSmi(code, ""), GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING


# --- the driver that the engine needs --------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "cuda"),
    [
        ({"torch": "2.11.0+cu130"}, 13),
        ({"torch": "2.9.1+cu128"}, 12),
        ({"torch": "2.9.1", "nvidia-cuda-runtime-cu12": "12.8.90"}, 12),
        ({"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96"}, 13),
        ({"torch": "2.11.0"}, 0),
    ],
)
def test_cuda_of_a_lock(pins: dict[str, str], cuda: int) -> None:
    assert cuda_of_pins(pins)[0] == cuda


def test_the_engine_needs_a_driver() -> None:
    want = deployment()
    need = cuda_need(want)
    assert need is not None and need.driver == "580"
    assert need.refuses(WANTED) == need.refuses("580.65.06") == ""
    decided = plan(host(loaded="575.51.03", on_disk="575.51.03"), version="575.51.03")
    assert (decided.state, decided.stands) == (PlanState.BLOCKED, True)
    assert "needs driver >= 580" in decided.reason
    assert "driver.version 580" in decided.fix


# --- the next boot -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newer", "choice", "words", "fix"),
    [
        (Kernel(NEWER), BootChoice(), "will lose the GPUs", f"dkms install nvidia/{WANTED}"),
        (Kernel(NEWER, headers=False), BootChoice(), "will lose", f"proxmox-headers-{NEWER}"),
        (Kernel(NEWER, module="550.1.2"), BootChoice(), "will load driver 550.1.2", "dkms install"),
        (Kernel(NEWER), BootChoice(grub_default="9"), "is not known", "kernel list"),
    ],
)
def test_the_next_boot_will_lose_the_gpu(
    newer: Kernel, choice: BootChoice, words: str, fix: str
) -> None:
    seen = kernels(newer, choice=choice)
    decided = plan(host(), seen, GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING
    assert words in decided.reason and fix in decided.reason
    warned = told(host(), seen, GuestDriver(userspace()))[0]
    assert words in warned and fix in warned


def test_a_pin_keeps_the_kernel_that_has_the_module() -> None:
    seen = kernels(Kernel(NEWER), choice=BootChoice(pin=KERNEL))
    assert "boot" not in plan(host(), seen, GuestDriver(userspace())).reason
    (warned,) = told(host(), seen)
    assert f"also bootable, but without nvidia module {WANTED}: kernel {NEWER}" in warned


def test_the_next_kernel_gets_its_module_when_that_is_allowed() -> None:
    decided = plan(host(), kernels(Kernel(NEWER)), GuestDriver(userspace()), **ALL)
    (change,) = decided.changes
    assert isinstance(change.action, RunJob) and change.action.name == "driver-dkms"
    assert f"KERNEL={NEWER}" in change.action.script
    assert change.undo == f"dkms uninstall nvidia/{WANTED} -k {NEWER}"
    without = kernels(Kernel(NEWER, headers=False))
    assert plan(host(), without, GuestDriver(userspace()), **ALL).state is PlanState.NOTHING


def test_headers_have_the_distribution_s_name() -> None:
    assert headers_package("6.8.12-1-pve") == "proxmox-headers-6.8.12-1-pve"
    assert headers_package("5.15.35-1-pve") == "pve-headers-5.15.35-1-pve"
    assert headers_package("6.1.0-57-amd64") == "linux-headers-6.1.0-57-amd64"


# --- installing ----------------------------------------------------------------------------------


def test_host_install() -> None:
    missing = host(loaded="", on_disk="", references=())
    decided = plan(missing, kernels(kernels=(Kernel(KERNEL),)), **ALL)
    (change,) = decided.changes
    assert isinstance(change.action, RunJob)
    assert (change.action.where, change.action.name) == (Where.HOST, "driver-host")
    assert "--dkms --no-x-check --skip-module-load --kernel-module-type=open" in (
        change.action.script
    )
    assert change.undo == "nvidia-uninstall --silent"


def test_an_idle_old_module_is_unloaded_first() -> None:
    old = host(loaded="580.95.05", on_disk="580.95.05", references=IDLE)
    unload, install = plan(old, kernels(), **ALL).changes
    assert isinstance(unload.action, Shell) and "modprobe -r" in unload.action.script
    assert isinstance(install.action, RunJob)
    waiting = host(loaded="580.95.05", references=IDLE)
    (only,) = plan(waiting, kernels(), **ALL).changes
    assert only.title == "unload the nvidia module 580.95.05 on kpro5"
    refused = plan(host(loaded="580.95.05", references=()), kernels(), **ALL)
    assert refused.state is PlanState.BLOCKED, "unknown references count as use"


def test_host_install_by_apt() -> None:
    pins = ["nvidia-driver=580.126.09-1", "nvidia-kernel-dkms=580.126.09-1"]
    decided = plan(
        host(loaded="", on_disk="", system=System((Package("nvidia-driver", "535.1"),))),
        kernels(),
        install="host-and-guest",
        packages=pins,
        package=None,
    )
    (change,) = decided.changes
    assert isinstance(change.action, RunJob) and change.action.name == "driver-host"
    assert f"PACKAGES='{' '.join(pins)}'" in change.action.script
    assert "apt-mark hold" in change.action.script
    assert "apt-mark unhold nvidia-driver nvidia-kernel-dkms" in change.undo


def test_a_package_of_this_machine_is_sent() -> None:
    chosen = {"local": "/home/me/N.run", "sha256": "b" * 64}
    send, install = plan(
        host(loaded="", on_disk=""), kernels(), install="host-and-guest", package=chosen
    ).changes
    assert send.action == SendFile(
        Where.HOST, "/home/me/N.run", f"/var/lib/deployer/driver/NVIDIA-{WANTED}.run", "b" * 64
    )
    assert isinstance(install.action, RunJob) and "OWNED=yes" in install.action.script
    inside, _ = plan(host(), kernels(), GuestDriver(), install="guest", package=chosen).changes
    assert isinstance(inside.action, SendFile) and inside.action.where is Where.GUEST


def test_an_url_is_fetched_where_it_is_installed() -> None:
    chosen = {
        "url": "https://mirror.example/N.run",
        "sha256": "b" * 64,
        "ca_bundle": "/etc/ca.pem",
        "proxy": "http://proxy.example:3128",
    }
    (change,) = plan(host(), kernels(), GuestDriver(), install="guest", package=chosen).changes
    assert isinstance(change.action, RunJob) and change.action.where is Where.GUEST
    for text in ("URL=https://mirror.example/N.run", "CA_BUNDLE=/etc/ca.pem", "--proxy"):
        assert text in change.action.script


@pytest.mark.parametrize(
    ("version", "flavour", "flag"),
    [
        ("580.126.09", "proprietary", "--kernel-module-type=proprietary"),
        ("550.54.14", "open", "--kernel-module-build-directory=kernel-open"),
        ("550.54.14", "proprietary", "--skip-module-load"),
    ],
)
def test_flags_by_age(version: str, flavour: str, flag: str) -> None:
    assert host_flags(version, flavour).endswith(flag)


# --- the guest -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Userspace(), "no driver libraries"),
        (userspace("580.126.10"), "580.126.10, not 580.126.09"),
        (Userspace((("libcuda.so", WANTED),), smi=True), "libnvidia-ml.so missing"),
        (userspace(smi=False), "nvidia-smi is not installed"),
    ],
)
def test_the_guest_must_equal_it(seen: Userspace, words: str) -> None:
    refused = plan(host(), GuestDriver(seen), install="never")
    assert refused.state is PlanState.BLOCKED
    assert words in refused.reason
    decided = plan(host(), GuestDriver(seen), package=PACKAGE)
    copy, install = [change.action for change in decided.changes]
    assert isinstance(copy, Shell) and copy.where is Where.HOST
    assert "sha256sum" in copy.script and "/srv/NVIDIA.run" in copy.script
    assert isinstance(install, RunJob) and install.where is Where.GUEST
    assert "--silent --no-kernel-modules" in install.script


def test_only_libraries_of_the_loaded_module_go_into_the_guest() -> None:
    decided = plan(host(), kernels(), GuestDriver(kernel_module="580.95.05"), package=PACKAGE)
    assert decided.state is PlanState.BLOCKED
    assert "module 580.95.05 is loaded on kpro5" in decided.reason


@pytest.mark.parametrize(
    ("system", "words", "fix"),
    [
        (System((Package("libnvidia-compute-550", "550.1"),)), "libnvidia-compute-550", "purge"),
        (System(free=(("/usr", 10**8, "r:/"), ("/var", 10**8, "r:/"))), "0.1 GB free", "more disk"),
    ],
)
def test_a_guest_where_nothing_can_be_installed(system: System, words: str, fix: str) -> None:
    decided = plan(host(), kernels(), GuestDriver(system=system), package=PACKAGE)
    assert decided.state is PlanState.BLOCKED
    assert words in decided.reason
    assert fix in decided.fix


def test_the_library_that_is_linked_counts() -> None:
    both = (("libcuda.so", WANTED), ("libcuda.so", "570.1.2"), ("libnvidia-ml.so", WANTED))
    linked = (("libcuda.so", WANTED), ("libnvidia-ml.so", WANTED))
    assert Userspace(both, linked, True).is_version(WANTED)
    assert not Userspace(both, (), True).is_version(WANTED)


def test_plain_host() -> None:
    decided = plan(host(userspace=userspace()), kernels(), vmid=None)
    assert decided.state is PlanState.NOTHING
    assert plan(host(), kernels(), vmid=None, install="never").state is PlanState.BLOCKED
    chosen = {"local": "/home/me/N.run", "sha256": "b" * 64}
    send, install = plan(host(), kernels(), vmid=None, install="guest", package=chosen).changes
    assert isinstance(send.action, SendFile)
    assert isinstance(install.action, RunJob) and install.action.where is Where.HOST


# --- warnings ------------------------------------------------------------------------------------


def test_a_healthy_machine_has_no_warnings() -> None:
    held = System((Package("nvidia-driver", "580.126.09-1", held=True),), unattended=True)
    good = CudaProof(code=0, devices=2)
    seen = (host(system=held), kernels(), GuestDriver(userspace(), WANTED), good, HostSmi(0, ""))
    assert told(*seen) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            (host(system=System((Package("libcuda1", "1"),), unattended=True)),),
            "unattended upgrades may change the driver on kpro5: libcuda1 -> on kpro5: apt-mark",
        ),
        ((host(system=System((Package("libcuda1", "1"),))),), "the next upgrade may change"),
        (
            (host(), GuestDriver(system=System((Package("nvidia-dkms-550", "1", True),)))),
            "a guest shares the host's kernel",
        ),
        ((host(rivals=("nouveau",)),), "it can take GPUs at boot"),
        (
            (host(userspace=userspace("570.1.2")),),
            f"on kpro5 driver libraries are 570.1.2, not {WANTED}: what uses GPU memory is",
        ),
        ((host(userspace=userspace(smi=False)),), "on kpro5 nvidia-smi is not installed"),
        ((host(log=("NVRM: GPU 0000:02:00.0: RmInitAdapter failed!",)),), "could not start a GPU"),
        (
            (
                host(
                    log=(
                        "NVRM: API mismatch: the client has the version 580.95.05, but",
                        f"NVRM: this kernel module has the version {WANTED}.",
                    )
                ),
            ),
            f"a program came to the module {WANTED} with libraries 580.95.05",
        ),
        ((host(), HostSmi(17, "")), "nvidia-smi on kpro5: the operating system or a cgroup"),
        (
            (host(), CudaProof(code=999, name="CUDA_ERROR_UNKNOWN")),
            "container 129: cuInit answers 999 (CUDA_ERROR_UNKNOWN): /dev/nvidia-uvm",
        ),
        ((host(), CudaProof(timed_out=True)), "cuInit gave no answer in time"),
        ((host(), CudaProof(library="libcuda.so.1: no such file")), "cannot be loaded"),
        ((host(), CudaProof(stale=(508, 511))), "major 508 here, the module has 511"),
    ],
)
def test_warnings(values: tuple[object, ...], words: str) -> None:
    (warned,) = told(*values)
    assert words in warned
    assert warned.partition(" -> ")[2]
