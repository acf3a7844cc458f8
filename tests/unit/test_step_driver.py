"""The driver step: versions of host and guest, and what it may install."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hoststeps import PACKAGE, SHELLS, deployment, facts, output, run_script, tool, write

from deployer.model import Plan, PlanState, RunJob, Shell, Where
from deployer.state import DeploymentState
from deployer.steps.driver import DriverStep
from deployer.steps.driver_facts import (
    GuestDriver,
    HostDriver,
    HostSmi,
    Userspace,
    guest_probe,
    host_probes,
)

WANTED = "580.126.09"
BY_SHELL = pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])


def userspace(version: str = WANTED, smi: bool = True) -> Userspace:
    names = ("libcuda.so", "libnvidia-ml.so")
    return Userspace(tuple((name, version) for name in names), smi=smi)


def host(**changes: object) -> HostDriver:
    values = {"loaded": WANTED, "flavour": "open", "on_disk": WANTED, "kernel": "6.8.12-1-pve"}
    return HostDriver(**{**values, **changes})  # type: ignore[arg-type]


def plan(*values: object, silent: str = "", vmid: int | None = 129, **driver: object) -> Plan:
    want = deployment(vmid=vmid, driver=driver)
    return DriverStep().plan(want, facts(*values, silent=silent), DeploymentState())


def test_all_right() -> None:
    decided = plan(host(), GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING
    assert decided.reason == (
        f"module {WANTED} (open) is loaded on kpro5; container 129 has driver libraries {WANTED}"
    )


def test_not_loaded_is_no_failure() -> None:
    decided = plan(host(loaded="", flavour=""), GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING
    assert "not loaded yet" in decided.reason


def test_a_stopped_container_is_looked_at_later() -> None:
    decided = plan(host(), silent="connection refused")
    assert decided.state is PlanState.NOTHING
    assert "looked at when it runs" in decided.reason


@pytest.mark.parametrize(
    ("seen", "reason", "fix"),
    [
        (host(loaded="580.95.05", on_disk="580.95.05"), "580.95.05 is loaded", "driver.version"),
        (host(loaded="580.95.05"), "waits to be loaded", "reboot kpro5"),
        (host(loaded="", on_disk=""), "no nvidia module for kernel 6.8.12-1-pve", "dkms"),
        (host(loaded="", on_disk="", secure_boot=True), "no nvidia module", "signed"),
        (host(loaded="", rivals=("nouveau",)), "nouveau is loaded", "blacklist nouveau"),
        (HostDriver(timed_out=True), "did not answer", "reboot"),
    ],
)
def test_blocked_with_one_action(seen: HostDriver, reason: str, fix: str) -> None:
    decided = plan(seen, GuestDriver(userspace()))
    assert decided.state is PlanState.BLOCKED
    assert reason in decided.reason
    assert fix in decided.fix


def test_no_module_on_disk_is_said_before_the_reboot_shows_it() -> None:
    decided = plan(host(on_disk=""), GuestDriver(userspace()))
    assert decided.state is PlanState.NOTHING
    assert "rebuild it" in decided.reason


@pytest.mark.parametrize(
    ("smi", "words"),
    [
        (HostSmi(124, "", timed_out=True), "no answer in time"),
        (HostSmi(18, "mismatch"), "its libraries are"),
    ],
)
def test_a_sick_host(smi: HostSmi, words: str) -> None:
    decided = plan(host(), smi, GuestDriver(userspace()))
    assert decided.state is PlanState.BLOCKED
    assert words in decided.reason


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


def test_the_library_that_is_linked_counts() -> None:
    both = (("libcuda.so", WANTED), ("libcuda.so", "570.1.2"), ("libnvidia-ml.so", WANTED))
    linked = (("libcuda.so", WANTED), ("libnvidia-ml.so", WANTED))
    assert Userspace(both, linked, True).is_version(WANTED)
    assert not Userspace(both, (), True).is_version(WANTED)


def test_host_install_needs_permission_and_nothing_loaded() -> None:
    missing = host(loaded="", on_disk="")
    decided = plan(missing, install="host-and-guest", package=PACKAGE)
    (change,) = decided.changes
    assert isinstance(change.action, RunJob)
    assert change.action.where is Where.HOST
    assert "--dkms" in change.action.script
    secured = host(loaded="", on_disk="", secure_boot=True)
    assert plan(secured, install="host-and-guest").state is PlanState.BLOCKED


def test_plain_host() -> None:
    decided = plan(host(userspace=userspace()), vmid=None)
    assert decided.state is PlanState.NOTHING
    assert plan(host(), vmid=None, install="never").state is PlanState.BLOCKED


def libraries(root: Path, version: str = WANTED) -> None:
    folder = root / "usr/lib/x86_64-linux-gnu"
    for name in ("libcuda.so", "libnvidia-ml.so"):
        write(folder / f"{name}.{version}", "")
        (folder / f"{name}.1").symlink_to(f"{name}.{version}")


@BY_SHELL
def test_look_at_a_host(tmp_path: Path, shell: list[str]) -> None:
    root, tools = tmp_path / "host", tmp_path / "bin"
    nvrm = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {WANTED}  Release\n"
    write(root / "proc/driver/nvidia/version", nvrm + "GCC version: gcc\n")
    write(root / "sys/module/nvidia/version", WANTED + "\n")
    (root / "sys/module/nouveau").mkdir()
    secure = root / "sys/firmware/efi/efivars/SecureBoot-8be4df61"
    secure.parent.mkdir(parents=True)
    secure.write_bytes(b"\x06\0\0\0\x01")
    libraries(root)
    tool(tools, "modinfo", f'[ "$4" = version ] && echo {WANTED}\n')
    tool(tools, "nvidia-smi", "exit 0\n")
    one = host_probes(str(root))[0]
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, HostDriver)
    assert (seen.loaded, seen.on_disk, seen.flavour) == (WANTED, WANTED, "open")
    assert seen.rivals == ("nouveau",)
    assert seen.secure_boot is True
    assert seen.userspace.is_version(WANTED)


@BY_SHELL
def test_look_at_a_bare_host(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    tool(tools, "modinfo", "echo 'modinfo: ERROR: Module nvidia not found.' >&2; exit 1\n")
    bare, smi = host_probes(str(tmp_path))
    seen = bare.parse(output(run_script(bare.script, shell, tools)))
    assert isinstance(seen, HostDriver)
    assert (seen.loaded, seen.on_disk, seen.secure_boot) == ("", "", None)
    asked = smi.parse(output(run_script(smi.script, shell, tools)))
    assert isinstance(asked, HostSmi)
    assert not asked.asked


@BY_SHELL
def test_look_at_a_guest(tmp_path: Path, shell: list[str]) -> None:
    tools = tmp_path / "bin"
    libraries(tmp_path)
    tool(tools, "nvidia-smi", "exit 0\n")
    one = guest_probe(str(tmp_path))
    seen = one.parse(output(run_script(one.script, shell, tools)))
    assert isinstance(seen, GuestDriver)
    assert seen.userspace.is_version(WANTED)


def install_script(tmp_path: Path, digest: str) -> str:
    package = tmp_path / "NVIDIA.run"
    package.write_text(f'echo "$@" >{tmp_path}/flags\n')
    actual = hashlib.sha256(package.read_bytes()).hexdigest()
    chosen = {"file": str(package), "sha256": actual if digest == "right" else "0" * 64}
    decided = plan(host(loaded="", on_disk=""), install="host-and-guest", package=chosen)
    (change,) = decided.changes
    assert isinstance(change.action, RunJob)
    return change.action.script


@BY_SHELL
@pytest.mark.parametrize("digest", ["right", "wrong"])
def test_a_package_runs_only_after_its_hash(tmp_path: Path, shell: list[str], digest: str) -> None:
    done = run_script(install_script(tmp_path, digest), shell)
    ran = (tmp_path / "flags").exists()
    assert (done.returncode == 0, ran) == ((True, True) if digest == "right" else (False, False))
    assert digest == "right" or b"was not run" in done.stderr
    # The host's own file is never removed.
    assert (tmp_path / "NVIDIA.run").exists()


@BY_SHELL
def test_the_copy_is_checked_inside_the_guest(tmp_path: Path, shell: list[str]) -> None:
    package = tmp_path / "NVIDIA.run"
    package.write_text("exit 0\n")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    chosen = {"file": str(package), "sha256": digest}
    copy = plan(host(), GuestDriver(), package=chosen).changes[0].action
    assert isinstance(copy, Shell)
    script = copy.script.replace("/var/lib/deployer", str(tmp_path / "guest"))
    tools = tmp_path / "bin"
    tool(tools, "pct", '[ "$1 $2 $3" = "exec 129 --" ] || exit 9\nshift 3\nexec "$@"\n')
    done = run_script(script, shell, tools)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / f"guest/driver/NVIDIA-{WANTED}.run").read_text() == "exit 0\n"
    # A copy that lost bytes although everything exited 0.
    tool(tools, "pct", 'shift 3\n[ "$1" = sh ] && { "$@" </dev/null; exit 0; }\nexec "$@"\n')
    lost = run_script(script, shell, tools)
    assert lost.returncode == 1
    assert b"sha256" in lost.stderr
