"""The four places that hold a driver version, as one table. Pure data.

Loaded module; module on disk of every kernel that may boot; libraries of the host; libraries of the
guest. They must be equal in all components; the plan names the one action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployer import gpu
from deployer.deployment import Deployment
from deployer.kernels import Kernel
from deployer.nvidia_arch import generation
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import GuestDriver, HostDriver, HostKernels, Userspace

RUNNING, NEXT = "running", "boots next"


@dataclass(frozen=True)
class Row:
    """One place. `version` '' when there is none; `right`: as wanted, None when not known."""

    place: str
    version: str
    right: bool | None
    note: str = ""


def table(
    want: Deployment,
    host: HostDriver,
    kernels: HostKernels | None,
    guest: GuestDriver | None,
) -> tuple[Row, ...]:
    """All places that were looked at, in the order in which they must agree."""
    wanted = want.playbook.driver.version
    name = want.host_name
    same = gpu.same_version(host.loaded, wanted)
    loaded = Row(
        f"module loaded on {name}",
        host.loaded,
        same if host.loaded else None,
        host.flavour or ("" if host.loaded else "not loaded"),
    )
    rows = [loaded, *_disk(host, kernels, wanted), _libraries(name, host.userspace, wanted)]
    if want.vmid is not None:
        place = f"container {want.vmid}"
        rows.append(
            Row(f"libraries in {place}", "", None, "not looked at")
            if guest is None or guest.timed_out
            else _libraries(place, guest.userspace, wanted)
        )
    return tuple(rows)


def _disk(host: HostDriver, kernels: HostKernels | None, wanted: str) -> list[Row]:
    if kernels is None or kernels.timed_out or not kernels.kernels:
        right = gpu.same_version(host.on_disk, wanted)
        return [Row(f"module of kernel {host.kernel}", host.on_disk, right, RUNNING)]
    boot = kernels.next_boot()
    shown = list(kernels.bootable())
    running = kernels.kernel(kernels.running)
    if running is not None and running not in shown:
        shown.append(running)
    return [_kernel_row(one, kernels, boot.kernel, boot.why, wanted) for one in shown]


def _kernel_row(one: Kernel, kernels: HostKernels, boots: str, why: str, wanted: str) -> Row:
    notes = [RUNNING] if one.name == kernels.running else []
    if one.name == boots:
        notes.append(NEXT if why in ("", "the newest") else f"{NEXT}: {why}")
    if not one.headers:
        notes.append("no headers")
    built = [build for build in kernels.dkms if build.kernel == one.name]
    notes += [f"dkms: {build.state}" for build in built if not build.state.startswith("installed")]
    if one.flavour:
        notes.append(one.flavour)
    right = gpu.same_version(one.module, wanted)
    return Row(f"module of kernel {one.name}", one.module, right, ", ".join(notes))


def _libraries(place: str, userspace: Userspace, wanted: str) -> Row:
    versions = userspace.versions()
    right = userspace.is_version(wanted)
    note = "" if right or not versions else userspace.describe(wanted)
    return Row(f"libraries in {place}", " and ".join(versions), right, note if not right else "")


def lines(
    want: Deployment, rows: Sequence[Row], host: HostDriver, proof: CudaProof | None = None
) -> tuple[str, ...]:
    """The table as text; `!` marks what is not as wanted. What CUDA itself said goes below."""
    width = max(len(row.place) for row in rows)
    column = max(len(row.version or "none") for row in rows)
    found = []
    for row in rows:
        mark = {True: " ", False: "!", None: " "}[row.right]
        text = f"{mark} {row.place:<{width}}  {row.version or 'none':<{column}}  {row.note}"
        found.append(text.rstrip())
    kinds = sorted({f"10de:{one.device[-4:]} {generation(one.device)}" for one in host.gpus})
    if kinds:
        secure = {True: "Secure Boot on", False: "Secure Boot off", None: "no Secure Boot"}
        found.append(f"  GPUs: {', '.join(kinds)}; {secure[host.secure_boot]}")
    if proof is not None:
        where = want.host_name if want.vmid is None else f"container {want.vmid}"
        mark = "!" if proof.cause is not None else " "
        found.append(f"{mark} CUDA in {where}: {_cuda(proof)}")
    return tuple(found)


def _cuda(proof: CudaProof) -> str:
    if proof.good:
        version = f", CUDA {proof.cuda[0]}.{proof.cuda[1]}" if proof.cuda else ""
        seen = "" if proof.devices is None else f", {proof.devices} GPUs"
        return f"cuInit succeeds{seen}{version}"
    if proof.skipped:
        return f"not asked: {proof.skipped}"
    if proof.code is not None:
        return f"cuInit answers {proof.code} ({proof.name or 'no name'})"
    return proof.cause.name if proof.cause is not None else "no answer"


def next_boot_problem(
    want: Deployment, host: HostDriver, kernels: HostKernels | None
) -> tuple[str, str]:
    """What the next boot will lose, and the action; ('', '') when nothing."""
    return lost_at_boot(want.host_name, want.playbook.driver.version, kernels)


def lost_at_boot(name: str, wanted: str, kernels: HostKernels | None) -> tuple[str, str]:
    """The same of a host that no inventory names; `wanted` is a driver version."""
    if kernels is None or kernels.timed_out:
        return "", ""
    boot = kernels.next_boot()
    if not boot.kernel:
        if all(gpu.same_version(one.module, wanted) for one in kernels.bootable()):
            return "", ""
        return f"which kernel boots next on {name} is not known ({boot.why})", (
            f"see `proxmox-boot-tool kernel list` and /etc/default/grub on {name}"
        )
    kernel = kernels.kernel(boot.kernel)
    if kernel is None or gpu.same_version(kernel.module, wanted):
        return "", ""
    which = f"kernel {kernel.name} ({boot.why})"
    if kernel.module:
        lost = f"the next boot of {name} will load driver {kernel.module}: {which}, not {wanted}"
    else:
        lost = f"the next boot of {name} will lose the GPUs: {which} has no nvidia module"
    if not kernel.headers:
        return lost, (
            f"on {name}: apt-get install {headers_package(kernel.name)}, then "
            f"dkms install nvidia/{wanted} -k {kernel.name}"
        )
    return lost, f"on {name}: dkms install nvidia/{wanted} -k {kernel.name}"


def lost_kernels(name: str, wanted: str, kernels: HostKernels | None) -> tuple[str, str]:
    """Bootable kernels besides the next one that lack the module; ('', '') when none does."""
    if kernels is None or kernels.timed_out:
        return "", ""
    boots = kernels.next_boot().kernel
    lacking = [
        one.name
        for one in kernels.bootable()
        if one.name not in (boots, kernels.running) and not gpu.same_version(one.module, wanted)
    ]
    if not lacking:
        return "", ""
    text = f"also bootable, but without nvidia module {wanted}: kernel {', '.join(lacking)}"
    return text, f"on {name}: dkms autoinstall -k KERNEL, or remove the kernel"


def headers_package(kernel: str) -> str:
    """The package with the headers of this kernel: Proxmox names its own, before 8 another way."""
    if kernel.endswith("-pve"):
        return f"{'pve' if kernel[:2] in ('4.', '5.') else 'proxmox'}-headers-{kernel}"
    return f"linux-headers-{kernel}"
