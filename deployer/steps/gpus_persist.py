"""What the next boot does with the GPUs, and what makes nvidia last. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deployer.deployment import Deployment
from deployer.model import Change, Plan, Shell, Where, WriteFile
from deployer.steps.boot_edit import edits
from deployer.steps.boot_facts import BootFacts
from deployer.steps.boot_sources import BootSource, sources, stale_initrds
from deployer.steps.gpus_facts import GpuFacts
from deployer.steps.gpus_moves import (
    BOOT_SCRIPT,
    UNIT_FOLDER,
    enable_script,
    unit_name,
    unit_text,
)
from deployer.steps.gpus_refuse import and_, claims_of
from deployer.steps.gpus_script import SCRIPT


def _found(seen: GpuFacts, boot: BootFacts) -> tuple[BootSource, ...]:
    return sources(boot, {one.address: one.id for one in seen.functions})


def forbidden(want: Deployment, seen: GpuFacts, boot: BootFacts) -> Plan | None:
    """Lines under which `modprobe nvidia` does nothing, where this run may not edit them."""
    for one in _found(seen, boot):
        if one.effect != "forbids":
            continue
        running = one.path == "/proc/cmdline"
        if running or ("/modprobe.d/" in one.path and want.playbook.gpus.persist != "change"):
            reboot = f", and reboot {want.host_name}" if running else ""
            return Plan.blocked(
                f"on {want.host_name} the nvidia module is forbidden by {one}",
                f"take it out of the boot configuration{reboot}"
                + ("" if running else "; or set gpus.persist: change in the playbook"),
            )
    return None


def persist(
    want: Deployment, seen: GpuFacts, boot: BootFacts, waiting: Sequence[str] = ()
) -> tuple[list[Change], list[Change]]:
    """(changes before the binding, changes after it), as far as `gpus.persist` allows.

    `waiting`: files edited earlier whose refresh did not end well.
    """
    allowed = want.playbook.gpus.persist
    if allowed == "report" or boot.timed_out:
        return [], []
    found = _found(seen, boot)
    after = _unit(want, boot, found)
    if allowed != "change":
        return [], after
    functions = {one.address: one.id for one in seen.functions}
    made = edits(boot, found, functions, _keep(seen), waiting)
    blocking = {one.path for one in found if one.effect == "forbids"}
    # What forbids the module must be gone before it is loaded.
    first = [
        change
        for change in made.changes
        if isinstance(change.action, WriteFile)
        and any(change.action.path.startswith(path) for path in blocking)
    ]
    return first, [*after, *(change for change in made.changes if change not in first)]


def _keep(seen: GpuFacts) -> dict[str, str]:
    """id -> address of another card of that id that is to stay on vfio-pci."""
    ids = {one.id for one in seen.functions}
    kept = {}
    for other in seen.others_with(ids):
        if other.driver == "vfio-pci" or any(one.covers(other.address) for one in seen.claims):
            kept[other.id] = other.address
    return kept


def _unit(want: Deployment, boot: BootFacts, found: tuple[BootSource, ...]) -> list[Change]:
    """Files of ours: a script and a unit that bring the GPUs to nvidia before guests start."""
    unit = unit_name(want.name)
    unit_path = f"{UNIT_FOLDER}/{unit}"
    text = unit_text(want.id, want.gpus, want.playbook.gpus.unbind_timeout_s)
    reason = "at boot the GPUs and their nodes must be ready before the guests start"
    if back := [one for one in found if one.effect in ("takes", "claims")]:
        reason += f", whatever {', '.join(dict.fromkeys(one.place for one in back))} does"
    changes = []
    for path, content, mode in ((BOOT_SCRIPT, SCRIPT, 0o755), (unit_path, text, 0o644)):
        old = boot.file(path)
        if old is None or _digest(old.content) != _digest(content.encode()):
            # The script is long and ours: its diff would hide the rest of the plan.
            before = None if path == BOOT_SCRIPT else (old.content if old else b"")
            file = WriteFile(Where.HOST, path, content.encode(), mode, before)
            changes.append(Change(f"write {path}", reason, file, f"rm {path}"))
    if changes or unit not in boot.enabled:
        action = Shell(Where.HOST, enable_script(unit))
        changes.append(Change(f"enable {unit}", reason, action, f"systemctl disable {unit}"))
    return changes


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def reboot_notes(want: Deployment, seen: GpuFacts, boot: BootFacts) -> list[str]:
    """Lines of the boot configuration that act on the GPUs, and who claims them, one each."""
    found = _found(seen, boot)
    lines = [f"at boot: {one}" for one in found]
    if want.playbook.gpus.persist == "change":
        functions = {one.address: one.id for one in seen.functions}
        lines += [f"at boot: {text}" for text in edits(boot, found, functions, _keep(seen)).left]
    lines += [
        f"at boot: the initramfs of kernel {kernel} is older than the files it is made from: "
        "`update-initramfs -u -k all`"
        for kernel in stale_initrds(boot, found)
    ]
    lines += [f"at boot: {path} is too large to be looked at" for path in boot.large]
    lines += [what for what, _ in warnings(want, seen, boot)]
    return lines


def warnings(
    want: Deployment, seen: GpuFacts | None, boot: BootFacts | None
) -> list[tuple[str, str]]:
    """(what, fix) of things that a run does not stop at."""
    if seen is None:
        return []
    told = claim_warnings(seen)
    if boot is None:
        return told
    if boot.timed_out:
        told.append(("the boot configuration could not be read in time", ""))
    if want.playbook.gpus.persist == "report" and not boot.has_unit(unit_name(want.name)):
        back = [one for one in _found(seen, boot) if one.effect in ("takes", "forbids")]
        if back:
            places = ", ".join(dict.fromkeys(one.place for one in back))
            told.append(
                (
                    f"the GPUs are lost to nvidia at the next boot through {places}",
                    "set gpus.persist: unit (or change) in the playbook",
                )
            )
    elif want.playbook.gpus.persist != "change":
        # A boot unit brings GPUs back from vfio-pci, but loads no module that is forbidden.
        for one in _found(seen, boot):
            if one.effect == "forbids" and one.path != "/proc/cmdline":
                told.append(
                    (
                        f"at the next boot of {want.host_name} nvidia is not loaded: {one}",
                        "take it out there and make the loader's configuration anew, or set "
                        "gpus.persist: change in the playbook",
                    )
                )
    return told


def claim_warnings(seen: GpuFacts) -> list[tuple[str, str]]:
    """(what, fix) of VMs that will take the GPUs, and of what shares their IOMMU groups."""
    told = []
    addresses = [one.address for one in seen.functions]
    for claim, taken in claims_of(seen, addresses):
        if claim.running:
            continue
        when = "starts at boot and takes" if claim.onboot else "takes, when it is started,"
        fix = f"`qm set {claim.vmid} --delete hostpciN` of {and_(taken)}"
        if claim.onboot:
            fix += f", or `qm set {claim.vmid} --onboot 0`"
        told.append((f"{claim.title()} {when} {and_(taken)}", fix))
    for one in seen.functions:
        for mate in one.members:
            if mate.slot != one.slot and mate.driver not in ("", "vfio-pci", "nvidia"):
                what = f"{mate.address} ({mate.driver}) shares IOMMU group {one.group}"
                told.append(
                    (f"{what} with {one.address}", "a VM cannot have one without the other")
                )
    return told
