"""Reasons to touch no PCI function, in both directions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployer import proxmox
from deployer.model import Plan
from deployer.steps.gpus_facts import GpuFacts, Holder, Overrides, PciFunction

RIVALS = {
    "nouveau": "nouveau",
    "nova_core": "nova_core and nova_drm",
    "nvidiafb": "nvidiafb",
}
"""Other drivers that take NVIDIA GPUs, and what to blacklist against them. A blacklist of nouveau
does not stop nova_core, which claims Turing to Ada on newer kernels."""


def refuse_look(host: str, seen: GpuFacts | None, overrides: Overrides | None) -> Plan | None:
    """What the look itself forbids: no answer, a pending write, a module under way."""
    if seen is None or (seen.timed_out and not any(one.present for one in seen.functions)):
        return Plan.blocked(
            f"the PCI devices of {host} did not answer in time",
            f"look at `dmesg` on {host}: a stuck unbind needs a host reboot",
            stands=True,
        )
    ours = seen.all_functions()
    for one in seen.pending:
        if one.address and one.address not in ours:
            continue
        holders = seen.held_by(one.address)
        who = f", held by {', '.join(str(holder) for holder in holders)}" if holders else ""
        ways = ", ".join(dict.fromkeys(holder.way_out for holder in holders))
        return Plan.blocked(
            f"{one}{who}: an unbind is stuck on {host}; only a host reboot clears it, and nothing "
            "else is tried",
            (f"{ways}, and look again; when it stays, " if ways else "") + f"reboot {host}",
            stands=True,
        )
    if overrides is not None and overrides.stuck_at in ours:
        driver = ours[overrides.stuck_at].driver or "no driver"
        return Plan.blocked(
            f"{overrides.problem}, and it is on {driver}: a change of its driver is under way or "
            f"stuck on {host}",
            f"`dmesg | tail` on {host} tells which; when it stays, only a host reboot clears it",
            stands=True,
        )
    if seen.changing:
        return Plan.blocked(
            f"on {host} a module is being loaded or unloaded: {', '.join(seen.changing)}",
            f"wait for it; when it stays, only a reboot of {host} clears it",
        )
    if not seen.scanned:
        return Plan.blocked(
            f"the open files of all processes on {host} could not be looked at in time, so nobody "
            "knows who holds the GPUs",
            f"look for a network file system that hangs on {host} (`dmesg`, `mount -t nfs,cifs`)",
        )
    return None


def refuse_match(host: str, one: PciFunction, ids: Mapping[str, str]) -> Plan | None:
    """An address that is not there, or is not the GPU that the inventory means."""
    fix = f"correct its gpus in the inventory: `lspci -Dnn | grep -i nvidia` on {host}"
    if not one.present:
        return Plan.blocked(f"{host} has no PCI function {one.address}", fix)
    wanted = ids.get(one.address)
    if one.is_gpu(wanted):
        return None
    found = f"vendor {one.vendor}, device {one.device}, class {one.pci_class}"
    if wanted:
        what = f"{one.address} on {host} is not {wanted}, as the inventory says ({found})"
        return Plan.blocked(what, fix)
    return Plan.blocked(
        f"{one.address} on {host} is not an NVIDIA GPU ({found})",
        f"{fix}; a GPU of another id is named there by `id:`",
    )


def refuse_held(one: PciFunction, holders: Sequence[Holder]) -> Plan | None:
    """A GPU that somebody has open: its unbind would never return."""
    if not holders:
        return None
    who = ", ".join(str(holder) for holder in holders)
    ways = ", ".join(dict.fromkeys(holder.way_out for holder in holders))
    return Plan.blocked(
        f"{one.address} is bound to {one.driver or 'no driver'} and in use by {who}",
        f"{ways}; an unbind of a GPU in use would never return",
    )


def refuse_claimed(seen: GpuFacts, address: str) -> Plan | None:
    """A VM that runs with it, or is starting."""
    for claim in seen.claims:
        if claim.running and claim.covers(address):
            return Plan.blocked(
                f"{address} belongs to running {claim.title()}",
                f"shut it down (`qm shutdown {claim.vmid}`) and take the hostpci line out of it",
            )
    return None


def foreign_driver(host: str, one: PciFunction) -> Plan:
    """Bound to a driver that this tool does not take a GPU from."""
    if name := RIVALS.get(one.driver):
        return Plan.blocked(
            f"{one.address} is bound to {one.driver}",
            f"on {host}: blacklist {name} in /etc/modprobe.d, update-initramfs -u -k all, reboot; "
            "do not reinstall the nvidia driver for this",
        )
    return Plan.blocked(
        f"{one.address} is bound to {one.driver}",
        f"on {host}: find out who bound it there, unbind it by hand or blacklist {one.driver}",
    )


def claims_of(seen: GpuFacts, addresses: Sequence[str]) -> list[tuple[proxmox.Claim, list[str]]]:
    """VMs that would take some of these GPUs at their next start, with which."""
    found = []
    for claim in seen.claims:
        taken = [address for address in addresses if claim.covers(address)]
        if taken:
            found.append((claim, taken))
    return found


def and_(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
