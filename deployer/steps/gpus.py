"""Step `gpus`: the wanted PCI functions are on the driver nvidia, with their nodes, and stay so."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import ClassVar

from deployer import gpu, proxmox
from deployer.deployment import Deployment
from deployer.errors import RemoteCommandFailed, StepBlocked, StepFailed
from deployer.events import ChangeDone, ChangeStarted
from deployer.model import Change, Facts, Plan, Probe, Procedure, Shell, Where, WriteFile
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.gpus_facts import GpuFacts, PciFunction, probe
from deployer.steps.gpus_script import (
    BOOT_SCRIPT,
    FAILED,
    HELD,
    SCRIPT,
    STUCK,
    UNIT_FOLDER,
    apply_script,
    enable_script,
    unit_name,
    unit_text,
)


class GpusStep(Step):
    """vfio-pci -> nvidia for exactly the addresses of the inventory; function .1 is left alone."""

    name: ClassVar[str] = "gpus"
    refuses_first: ClassVar[bool] = True

    def probes(self, want: Deployment) -> list[Probe]:
        """The PCI functions and all that decides about them."""
        return [probe(want.gpus)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Refuses before anything that could hang or take a GPU from its user."""
        seen = facts.get(GpuFacts)
        if seen is None or seen.timed_out:
            return Plan.blocked(
                f"the PCI devices of {want.host_name} did not answer in time",
                f"look at `dmesg` on {want.host_name}: a stuck unbind needs a host reboot",
            )
        if refusal := _refuse(want, seen):
            return refusal
        moved = [one for one in seen.functions if one.driver != "nvidia"]
        driver = facts.get(HostDriver)
        wanted = want.playbook.driver.version
        if moved and driver and not (driver.loaded or gpu.same_version(driver.on_disk, wanted)):
            return Plan.unknown(
                "driver", f"no nvidia module for kernel {driver.kernel} yet: see step driver"
            )
        changes = _bind(want, seen, moved) + _persist(want, seen)
        if changes:
            return Plan.change(_change_reason(seen, moved), *changes)
        if lost := _unlisted(seen, facts.get(HostSmi)):
            return Plan.blocked(
                f"nvidia-smi on {want.host_name} does not list {_and(lost)}",
                f"look for `Xid` in `dmesg` on {want.host_name}; a lost GPU needs a host reboot",
            )
        return Plan.nothing(_reason(want, seen))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Binds with the guarded script, then writes what makes it last."""
        for change in plan.changes:
            if isinstance(change.action, Procedure):
                ids = (context.want.host_name, context.want.id)
                context.bus.emit(ChangeStarted(*ids, context.step, change.title))
                began = time.monotonic()
                self._bind(context, change)
                seconds = time.monotonic() - began
                context.bus.emit(ChangeDone(*ids, context.step, change.title, seconds))
        kept = tuple(one for one in plan.changes if not isinstance(one.action, Procedure))
        if kept:
            super().apply(context, facts, Plan.change(plan.reason, *kept))

    def _bind(self, context: StepContext, change: Change) -> None:
        want = context.want
        limit = want.playbook.gpus.unbind_timeout_s
        context.progress(change.title, 0, len(want.gpus), "GPUs")
        # Each GPU may take a few guarded writes of at most `limit` seconds.
        budget = 60.0 + 6 * limit * len(want.gpus)
        script = apply_script(want.gpus, limit)
        answer = context.on(Where.HOST).run(script, timeout_s=budget)
        if answer.exit == 0:
            context.progress(change.title, len(want.gpus), len(want.gpus), "GPUs")
            return
        said = tuple(answer.error_text.strip().splitlines())
        what = said[-1] if said else f"{change.title}: exit {answer.exit}"
        if answer.exit == STUCK:
            raise StepFailed(
                what,
                where=want.host_name,
                fix=f"reboot {want.host_name}; find out first who still holds the GPU",
                evidence=said,
            )
        if answer.exit == HELD:
            raise StepBlocked(
                what,
                where=want.host_name,
                fix="stop the process or its VM, then run this again",
                evidence=said,
            )
        fix = f"look at `dmesg | tail` on {want.host_name}"
        if "Key was rejected" in what:
            fix = "Secure Boot rejects the module: sign it, or turn Secure Boot off"
        error = StepFailed if answer.exit == FAILED else RemoteCommandFailed
        raise error(what, where=want.host_name, fix=fix, evidence=said)


def _refuse(want: Deployment, seen: GpuFacts) -> Plan | None:
    """The first reason not to touch anything."""
    host = want.host_name
    for one in seen.functions:
        if not one.present:
            return Plan.blocked(
                f"{host} has no PCI function {one.address}",
                f"correct its gpus in the inventory: `lspci -D | grep -i nvidia` on {host}",
            )
        if one.driver == "nvidia":
            continue
        if not one.is_nvidia_gpu:
            return Plan.blocked(
                f"{one.address} on {host} is not an NVIDIA GPU "
                f"(vendor {one.vendor}, class {one.pci_class})",
                f"correct its gpus in the inventory: `lspci -D | grep -i nvidia` on {host}",
            )
        if holders := seen.held_by(one.address):
            return _held(one, holders)
        if claim := _running_claim(seen, one.address):
            return Plan.blocked(
                f"{one.address} belongs to running {claim.title()}",
                f"shut it down (`qm shutdown {claim.vmid}`) and take the hostpci line out of it",
            )
        if one.driver not in ("", "vfio-pci"):
            return Plan.blocked(
                f"{one.address} is bound to {one.driver}",
                f"on {host}: blacklist {one.driver} in /etc/modprobe.d, update-initramfs -u, "
                "reboot",
            )
        if want.playbook.gpus.rebind == "never":
            return Plan.blocked(
                f"{one.address} is bound to {one.driver or 'no driver'} and gpus.rebind is never",
                "bind it to nvidia by hand, or set gpus.rebind: allowed in the playbook",
            )
    return None


def _held(one: PciFunction, holders: Sequence[object]) -> Plan:
    vms = sorted({vm for holder in holders if (vm := getattr(holder, "vm", None)) is not None})
    who = ", ".join(str(holder) for holder in holders)
    fix = (
        "shut down what holds it: " + ", ".join(f"`qm shutdown {vm}`" for vm in vms)
        if vms
        else "stop that process; an unbind of a GPU in use would never return"
    )
    return Plan.blocked(f"{one.address} is bound to {one.driver} and in use by {who}", fix)


def _running_claim(seen: GpuFacts, address: str) -> proxmox.Claim | None:
    claims = (claim for claim in seen.claims if claim.running and claim.covers(address))
    return next(claims, None)


def _bind(want: Deployment, seen: GpuFacts, moved: Sequence[PciFunction]) -> list[Change]:
    """The changes that bind GPUs and make nodes; one script does both, once."""
    if not moved and seen.ready:
        return []
    limit = want.playbook.gpus.unbind_timeout_s
    loaded = "nvidia" in seen.modules
    uvm = "nvidia_uvm" in seen.modules
    lines = []
    for one in moved:
        pci = f"/sys/bus/pci/devices/{one.address}"
        lines.append(f"echo nvidia > {pci}/driver_override")
        if one.driver:
            lines.append(
                f"echo {one.address} > /sys/bus/pci/drivers/{one.driver}/unbind"
                f"    # detached, at most {limit:g} s, driver link read back"
            )
    if not loaded:
        lines.append("modprobe nvidia")
    lines.extend(f"echo {one.address} > /sys/bus/pci/drivers_probe" for one in moved)
    if not uvm:
        lines.append("modprobe nvidia_uvm")
    lines.append("nvidia-modprobe -u -c MINOR...    # or mknod from /proc/devices")
    undo = "; ".join(
        f"echo vfio-pci > /sys/bus/pci/devices/{one.address}/driver_override, "
        f"unbind {one.address} from nvidia when nothing holds it, drivers_probe"
        for one in moved
        if one.driver == "vfio-pci"
    )
    title = f"bind {_and([one.address for one in moved])} to nvidia" if moved else "make nodes"
    action = Procedure(Where.HOST, "\n".join(lines))
    return [Change(title, _bind_reason(seen, moved), action, undo)]


def _bind_reason(seen: GpuFacts, moved: Sequence[PciFunction]) -> str:
    if moved:
        return "; ".join(f"{one.address} is on {one.driver or 'no driver'}" for one in moved)
    unknown = [one.address for one in seen.functions if one.minor is None]
    if unknown:
        return f"the driver names no device minor of {_and(unknown)} yet"
    return f"{_and(seen.wrong_nodes())} missing, or not the device that the driver serves"


def _change_reason(seen: GpuFacts, moved: Sequence[PciFunction]) -> str:
    if moved or not seen.ready:
        return _bind_reason(seen, moved)
    return "the binding would not last across a reboot"


def _persist(want: Deployment, seen: GpuFacts) -> list[Change]:
    """Files of ours: a script and a unit that bring the GPUs to nvidia before guests start."""
    if want.playbook.gpus.persist != "change":
        return []
    unit = unit_name(want.name)
    unit_path = f"{UNIT_FOLDER}/{unit}"
    text = unit_text(want.id, want.gpus, want.playbook.gpus.unbind_timeout_s)
    ours = dict(seen.ours)
    reason = "at boot the GPUs and their nodes must be ready before the guests start"
    if back := proxmox.takes_back(seen.boot, {one.address: one.id for one in seen.functions}):
        reason += f", whatever {', '.join(source.place for source in back)} does"
    changes = []
    for path, content, mode in ((BOOT_SCRIPT, SCRIPT, 0o755), (unit_path, text, 0o644)):
        if ours.get(path) != hashlib.sha256(content.encode()).hexdigest():
            file = WriteFile(Where.HOST, path, content.encode(), mode)
            changes.append(Change(f"write {path}", reason, file, f"rm {path}"))
    if changes or unit not in seen.enabled:
        action = Shell(Where.HOST, enable_script(unit))
        undo = f"systemctl disable {unit}"
        changes.append(Change(f"enable {unit}", reason, action, undo))
    return changes


def _unlisted(seen: GpuFacts, smi: HostSmi | None) -> list[str]:
    """Wanted GPUs that a working nvidia-smi does not show."""
    if smi is None or not smi.asked or smi.exit != 0:
        return []
    listed = {one.address for one in smi.gpus}
    return [one.address for one in seen.functions if listed and one.address not in listed]


def _reason(want: Deployment, seen: GpuFacts) -> str:
    addresses = [one.address for one in seen.functions]
    nodes = ", ".join(f"/dev/nvidia{one.minor}" for one in seen.functions if one.minor is not None)
    verb = "is" if len(addresses) == 1 else "are"
    reason = f"{_and(addresses)} {verb} bound to nvidia; {nodes} exist"
    ids = {one.address: one.id for one in seen.functions}
    for claim in seen.claims:
        taken = [address for address in addresses if claim.covers(address)]
        if taken and claim.onboot:
            reason += f"; warning: {claim.title()} starts at boot and takes {_and(taken)}"
    if want.playbook.gpus.persist == "report" and (back := proxmox.takes_back(seen.boot, ids)):
        lines = ", ".join(str(source) for source in back)
        reason += f"; warning: lost at the next boot through {lines}"
    return reason


def _and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
