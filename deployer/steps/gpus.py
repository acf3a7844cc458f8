"""Step `gpus`: the wanted PCI functions are on the driver nvidia, with their nodes, and stay so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from deployer import gpu
from deployer.deployment import Deployment
from deployer.errors import DeployError
from deployer.model import Change, Facts, Plan, Probe
from deployer.state import DeploymentState
from deployer.steps import boot_facts
from deployer.steps.base import Step, StepContext
from deployer.steps.boot_facts import BootFacts
from deployer.steps.driver_facts import HostDriver, HostSmi
from deployer.steps.gpus_apply import run_plan
from deployer.steps.gpus_binding import Binding
from deployer.steps.gpus_facts import GpuFacts, Overrides, PciFunction, probes
from deployer.steps.gpus_moves import Move, to_nvidia
from deployer.steps.gpus_persist import forbidden, persist, reboot_notes
from deployer.steps.gpus_refuse import (
    and_,
    foreign_driver,
    refuse_claimed,
    refuse_held,
    refuse_look,
    refuse_match,
)
from deployer.steps.gpus_state import proof, to_refresh
from deployer.steps.gpus_undo import undo


class GpusStep(Step):
    """vfio-pci -> nvidia for exactly the addresses of the inventory; function .1 is left alone."""

    name: ClassVar[str] = "gpus"
    refuses_first: ClassVar[bool] = True

    def probes(self, want: Deployment) -> list[Probe]:
        """The PCI functions, their overrides, and what the next boot does with them."""
        return [*probes(want.gpus), boot_facts.probe()]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Refuses before anything that could hang or take a GPU from its user."""
        seen, boot = facts.get(GpuFacts), facts.get(BootFacts) or BootFacts()
        if refusal := refuse_look(want.host_name, seen, facts.get(Overrides)):
            return refusal
        if seen is None:
            raise TypeError("refuse_look lets no missing facts pass")
        notes = [*_notes(seen, facts.get(Overrides)), *reboot_notes(want, seen, boot)]
        if refusal := _refuse(want, seen):
            return refusal.noted(*notes)
        moved = [one for one in seen.functions if one.driver != "nvidia"]
        driver = facts.get(HostDriver)
        wanted = want.playbook.driver.version
        if moved and driver and not (driver.loaded or gpu.same_version(driver.on_disk, wanted)):
            return Plan.unknown(
                "driver", f"no nvidia module for kernel {driver.kernel} yet: see step driver"
            ).noted(*notes)
        if "nvidia" not in seen.modules and (refusal := forbidden(want, seen, boot)):
            return refusal.noted(*notes)
        before, after = persist(want, seen, boot, to_refresh(state))
        changes = [*before, *_bind(want, seen, moved), *after]
        if changes:
            return Plan.change(_change_reason(seen, moved), *changes).noted(*notes)
        if lost := _unlisted(seen, facts.get(HostSmi)):
            return Plan.blocked(
                f"nvidia-smi on {want.host_name} does not list {and_(lost)}",
                f"look for `Xid` in `dmesg` on {want.host_name}; a lost GPU needs a host reboot",
            ).noted(*notes)
        return Plan.nothing(_reason(seen, state)).noted(*notes)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the changes in order; the binding by the guarded script."""
        run_plan(context, facts, plan)

    def undo(self, context: StepContext, facts: Facts, plan: Plan, error: DeployError) -> None:
        """Files, links and drivers as `facts` saw them; what differs is told, with the reason."""
        undo(context, facts, plan, error)


def _refuse(want: Deployment, seen: GpuFacts) -> Plan | None:
    """The first reason not to touch anything."""
    host = want.host_name
    ids = want.gpu_ids
    for one in seen.functions:
        if one.driver == "nvidia" and one.address not in ids:
            continue
        if refusal := refuse_match(host, one, ids):
            return refusal
        if one.driver == "nvidia":
            continue
        if refusal := refuse_held(one, seen.held_by(one.address)):
            return refusal
        if refusal := refuse_claimed(seen, one.address):
            return refusal
        if one.driver not in ("", "vfio-pci"):
            return foreign_driver(host, one)
        if want.playbook.gpus.rebind == "never":
            return Plan.blocked(
                f"{one.address} is bound to {one.driver or 'no driver'} and gpus.rebind is never",
                "bind it to nvidia by hand, or set gpus.rebind: allowed in the playbook",
            )
    return None


def _bind(want: Deployment, seen: GpuFacts, moved: Sequence[PciFunction]) -> list[Change]:
    """The changes that bind GPUs and make nodes; one script does both, once."""
    if not moved and seen.ready:
        return []
    binding = Binding(to_nvidia(want.gpus), want.playbook.gpus.unbind_timeout_s)
    sources = {one.address: one.driver for one in moved}
    moving = [
        to_nvidia([address])[0] if driver else _unbound(address)
        for address, driver in sources.items()
    ]
    loads = [name for name in ("nvidia", "nvidia_uvm") if name not in seen.modules]
    undo_text = "; ".join(
        f"{one.address} back to {one.driver or 'no driver'} by the same script, when nothing "
        "holds it"
        for one in moved
    )
    title = f"bind {and_([one.address for one in moved])} to nvidia" if moved else "make nodes"
    return [Change(title, _bind_reason(seen, moved), binding.action(moving, loads), undo_text)]


def _unbound(address: str) -> Move:
    return Move(address, "nvidia", "")


def _bind_reason(seen: GpuFacts, moved: Sequence[PciFunction]) -> str:
    if moved:
        return "; ".join(f"{one.address} is on {one.driver or 'no driver'}" for one in moved)
    unknown = [one.address for one in seen.functions if one.minor is None]
    if unknown:
        return f"the driver names no device minor of {and_(unknown)} yet"
    return f"{and_(seen.wrong_nodes())} missing, or not the device that the driver serves"


def _change_reason(seen: GpuFacts, moved: Sequence[PciFunction]) -> str:
    if moved or not seen.ready:
        return _bind_reason(seen, moved)
    return "the binding would not last across a reboot"


def _unlisted(seen: GpuFacts, smi: HostSmi | None) -> list[str]:
    """Wanted GPUs that a working nvidia-smi does not show."""
    if smi is None or not smi.asked or smi.exit != 0:
        return []
    listed = {one.address for one in smi.gpus}
    return [one.address for one in seen.functions if listed and one.address not in listed]


def _reason(seen: GpuFacts, state: DeploymentState) -> str:
    addresses = [one.address for one in seen.functions]
    nodes = ", ".join(f"/dev/nvidia{one.minor}" for one in seen.functions if one.minor is not None)
    verb = "is" if len(addresses) == 1 else "are"
    reason = f"{and_(addresses)} {verb} bound to nvidia; {nodes} exist"
    proven = proof(state, seen)
    return f"{reason}; {proven}" if proven else reason


def _notes(seen: GpuFacts, overrides: Overrides | None) -> list[str]:
    """The functions as they are, a line each."""
    lines = []
    for one in seen.functions:
        line = f"{one.address} {one.id if one.present else 'absent'} on {one.driver or 'no driver'}"
        value = overrides.of(one.address) if overrides else None
        if value:
            line += f", override {value}"
        if one.group:
            mates = ", ".join(f"{mate.address} {mate.driver or '-'}" for mate in one.members)
            line += f", group {one.group}" + (f" with {mates}" if mates else "")
        lines.append(line)
        lines.extend(f"  held by {holder}" for holder in seen.held_by(one.address))
    return lines
