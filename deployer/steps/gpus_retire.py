"""GPUs back to vfio-pci, with all functions of their slots: `migrate --retire`, and by hand.

Pure plan, then the guarded script. Zero holders are proven first: an unbind of a GPU in use never
returns. Functions of other slots in the same IOMMU group are listed and left alone; a VM needs them
on vfio-pci as well, and only a person can say whether a disk controller may go there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import Change, Facts, Plan, PlanState, Shell, Where, WriteFile
from deployer.state import DeploymentState
from deployer.steps.base import StepContext
from deployer.steps.boot_edit import put_back
from deployer.steps.boot_facts import BootFacts
from deployer.steps.boot_sources import sources
from deployer.steps.gpus_apply import run_plan
from deployer.steps.gpus_binding import Binding
from deployer.steps.gpus_facts import GpuFacts, Overrides, PciFunction
from deployer.steps.gpus_moves import Move, disable_script, unit_name
from deployer.steps.gpus_refuse import (
    and_,
    refuse_claimed,
    refuse_held,
    refuse_look,
    refuse_match,
)
from deployer.steps.gpus_state import edited, to_refresh

SLOT_DRIVERS = ("snd_hda_intel", "xhci_hcd", "nvidia-gpu", "ucsi_ccg", "i2c_nvidia_gpu")
"""Drivers of the other functions of a GPU's slot (audio, USB, UCSI) that they may be taken from."""


def retire_plan(want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
    """What brings the deployment's GPUs back to vfio-pci, for good. Pure.

    `facts` hold GpuFacts, Overrides and BootFacts, the answers of `GpusStep().probes(want)`;
    `state` what boot files held before `up` edited them: they are put back where `gpus.persist`
    is `change`, else it is told that they are edited.
    NOTHING: all functions of the slots are on vfio-pci and no boot unit of this deployment is left.
    BLOCKED: in use (named), a stuck unbind, a driver that nobody may take a function from; `fix`
    is the way out. CHANGES: for `apply_retire`; stop the deployment's server first.
    """
    host = want.host_name
    seen, boot = facts.get(GpuFacts), facts.get(BootFacts)
    if refusal := refuse_look(host, seen, facts.get(Overrides)):
        return refusal
    if seen is None:
        raise TypeError("refuse_look lets no missing facts pass")
    moving: list[PciFunction] = []
    for one in seen.functions:
        if refusal := refuse_match(host, one, want.gpu_ids):
            return refusal
        for function in (one, *(mate for mate in one.members if mate.slot == one.slot)):
            if function.driver == "vfio-pci":
                continue
            if refusal := _refuse(want, seen, function, is_gpu=function is one):
                return refusal
            moving.append(function)
    changes = []
    if moving:
        changes.append(_bind(want, seen, moving))
    unit = unit_name(want.name)
    if boot is not None and boot.has_unit(unit):
        reason = f"at boot {unit} would bring the GPUs to nvidia again"
        undo = f"deploy up {want.id} --only gpus"
        shell = Shell(Where.HOST, disable_script(unit))
        changes.append(Change(f"remove {unit}", reason, shell, undo))
    notes = _notes(seen)
    if boot is not None and not boot.timed_out:
        made, told = _at_boot(want, seen, boot, state)
        changes += made
        notes += told
    if changes:
        reason = "; ".join(f"{one.address} is on {one.driver or 'no driver'}" for one in moving)
        still = "at the next boot its GPUs would not be on vfio-pci"
        return Plan.change(reason or still, *changes).noted(*notes)
    slots = and_([one.slot for one in seen.functions])
    return Plan.nothing(f"all functions of {slots} are on vfio-pci").noted(*notes)


def _at_boot(
    want: Deployment, seen: GpuFacts, boot: BootFacts, state: DeploymentState
) -> tuple[list[Change], list[str]]:
    """(boot files that go back to what they held, what is to be known about the next boot)."""
    ours = {one.address: one.id for one in seen.functions}
    staying = {
        one.address: one.id
        for one in seen.displays
        if one.driver == "nvidia" and one.address not in ours
    }
    units = tuple(unit for unit in boot.enabled if unit != unit_name(want.name))
    kept, waiting = edited(state), to_refresh(state)
    made = put_back(replace(boot, enabled=units), kept, staying, waiting)
    changes, told = list(made.changes), list(made.left)
    if want.playbook.gpus.persist != "change":
        told += [
            f"{change.title}: not done, since gpus.persist is {want.playbook.gpus.persist}"
            for change in changes
            if isinstance(change.action, WriteFile)
        ]
        changes = []
    written = {one.action.path: one.action for one in changes if isinstance(one.action, WriteFile)}
    files = tuple(
        replace(file, content=written[file.path].content) if file.path in written else file
        for file in boot.files
    )
    after = sources(replace(boot, files=files, cmdline=""), ours)
    if not any(one.effect in ("takes", "forbids", "claims") for one in after):
        ids = ",".join(dict.fromkeys(ours.values()))
        told.append(
            f"nothing gives {and_(list(ours))} to vfio-pci at boot: nvidia takes what is free when "
            f"it is loaded (`options vfio-pci ids={ids}` in /etc/modprobe.d, then "
            "`update-initramfs -u -k all`, would keep it away)"
        )
    return changes, [f"at boot: {text}" for text in told]


def _refuse(
    want: Deployment, seen: GpuFacts, function: PciFunction, *, is_gpu: bool
) -> Plan | None:
    host, allowed = want.host_name, want.playbook.gpus.persistenced == "allowed"
    holders = seen.held_by(function.address)
    daemons = [holder for holder in holders if holder.is_persistenced]
    if not (allowed and daemons and len(daemons) == len(holders)) and (
        refusal := refuse_held(function, holders)
    ):
        if daemons and len(daemons) == len(holders):
            return Plan.blocked(
                refusal.reason, f"{refusal.fix}; or set gpus.persistenced: allowed in the playbook"
            )
        return refusal
    if refusal := refuse_claimed(seen, function.address):
        return refusal
    known = ("", "nvidia") if is_gpu else ("", *SLOT_DRIVERS)
    if function.driver not in known:
        return Plan.blocked(
            f"{function.address} on {host} is bound to {function.driver}, from which it is not "
            "taken",
            f"unbind it by hand on {host}, then run this again",
        )
    if is_gpu and function.driver == "nvidia" and seen.hidden_users:
        return Plan.blocked(
            f"the nvidia module of {host} is in use {seen.hidden_users} times, and neither a "
            "module nor an open file of a process explains it",
            f"an unbind could hang: reboot {host} with the GPUs on vfio-pci instead",
        )
    return None


def _bind(want: Deployment, seen: GpuFacts, moving: Sequence[PciFunction]) -> Change:
    moves = tuple(Move(one.address, "vfio-pci", one.driver) for one in moving)
    daemon = any(holder.is_persistenced for one in moving for holder in seen.held_by(one.address))
    binding = Binding(moves, want.playbook.gpus.unbind_timeout_s, daemon=daemon)
    undo = "; ".join(f"{one.address} to {one.driver or 'no driver'} the same way" for one in moving)
    loads = () if "vfio_pci" in seen.modules else ("vfio-pci",)
    return Change(
        f"bind {and_([one.address for one in moving])} to vfio-pci",
        "; ".join(f"{one.address} is on {one.driver or 'no driver'}" for one in moving),
        binding.action(moves, loads),
        undo,
    )


def _notes(seen: GpuFacts) -> list[str]:
    """Members of the IOMMU groups in other slots that are not on vfio-pci."""
    return [
        f"{mate.address} ({mate.id}, {mate.driver}) shares IOMMU group {one.group} with "
        f"{one.address}: a VM needs it on vfio-pci too; it is left alone"
        for one in seen.functions
        for mate in one.members
        if mate.slot != one.slot and mate.driver not in ("", "vfio-pci")
    ]


def apply_retire(context: StepContext, facts: Facts, plan: Plan) -> None:
    """Runs `plan`, looks again and proves it: all functions on vfio-pci.

    Raises UnbindStuck (only a host reboot clears it), StepBlocked (in use after all), StepFailed.
    The previous drivers are saved first (`gpus_state`).
    """
    run_plan(context, facts, plan)
    after = retire_plan(context.want, context.reprobe(), context.state)
    if after.state is not PlanState.NOTHING:
        raise StepFailed(
            f"still not as wanted after it ran: {after.reason}",
            where=context.want.id,
            fix=after.fix or f"look at `dmesg | tail` on {context.want.host_name}",
        )
