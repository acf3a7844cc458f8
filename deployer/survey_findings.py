"""What of a surveyed machine stands in the way of a deployment, worst first. Pure.

The words are those of the steps; here it is only decided which of them can be said without a
playbook.
"""

from __future__ import annotations

from collections.abc import Iterator

from deployer import gpu
from deployer.findings import Finding, Level, in_order
from deployer.inventory import Host
from deployer.model import Plan
from deployer.names import listed
from deployer.nvidia_arch import wrong_flavour
from deployer.nvidia_texts import smi_verdict
from deployer.pct_config import printable
from deployer.remote.sshtry import Door
from deployer.steps.boot_sources import sources, stale_initrds
from deployer.steps.container_refuse import refuse_on
from deployer.steps.driver import host_warnings
from deployer.steps.gpus_facts import PciFunction
from deployer.steps.gpus_persist import claim_warnings
from deployer.steps.gpus_refuse import foreign_driver, refuse_claimed, refuse_held, refuse_look
from deployer.survey import Guest, Survey, candidates
from deployer.survey_guest import gpu_nodes


def findings(name: str, seen: Survey) -> list[Finding]:
    """All of them; `name` is the host's in the inventory."""
    found = [*_of_access(name, seen), *_of_driver(name, seen), *_of_gpus(name, seen)]
    for guest in seen.guests:
        found += _of_guest(name, seen, guest)
    found += _shared(seen)
    return in_order(found)


def in_vain(name: str, host: Host, seen: Survey) -> list[Finding]:
    """What the inventory says of a host without deployments, and the machine does not have."""
    found = [
        Finding(
            Level.PENDING,
            name,
            "no deployment is written for it yet",
            "add `deployments:` to it; see `deploy help inventory`",
        )
    ]
    if seen.eyes == "user":
        return found
    gpus = {one.address for one in seen.gpus.functions}
    for one in host.gpus:
        if one.address not in gpus and not seen.driver.timed_out:
            what = f"there is no GPU {one.address} of NVIDIA"
            fix = f"correct `gpus:` of {name}; there: {listed(sorted(gpus))}"
            found.append(Finding(Level.BLOCKED, name, what, fix))
    if host.kind == "proxmox" and not seen.machine.is_proxmox:
        fix = "write `kind: plain` in the inventory, or correct the address"
        found.append(Finding(Level.BLOCKED, name, "it is no Proxmox host", fix))
        return found
    if not seen.machine.mounted:
        return found
    there = {guest.vmid for guest in seen.guests}
    for vmid, box in host.containers.items():
        if vmid not in there and box.create is None:
            what = f"container {vmid} does not exist on {name}"
            fix = f"correct the vmid, or add `create:`; there: {listed(sorted(there))}"
            found.append(Finding(Level.BLOCKED, name, what, fix))
    return found


def _blocked(where: str, plan: Plan, level: Level = Level.BLOCKED) -> Finding:
    return Finding(level, where, plan.reason, plan.fix)


def _of_access(name: str, seen: Survey) -> Iterator[Finding]:
    machine = seen.machine
    if seen.eyes != "root":
        sudo = seen.eyes == "sudo"
        more = "it was looked at through `sudo -n`" if sudo else "much of it cannot be seen"
        yield Finding(
            Level.BLOCKED,
            name,
            f"{seen.user} is not root: {more}, and `deploy up` works as root",
            f"let your key log in as root (authorized_keys of root on {name}), then write "
            "`user: root`",
        )
    if machine.is_proxmox and not machine.pct:
        yield Finding(
            Level.BLOCKED,
            name,
            "Proxmox VE is installed, but there is no `pct`",
            f"on {name}: apt-get install pve-container",
        )
    elif machine.is_proxmox and not machine.mounted and seen.eyes != "user":
        yield Finding(
            Level.BLOCKED,
            name,
            "/etc/pve is not mounted: its containers cannot be seen",
            f"on {name}: systemctl status pve-cluster",
        )
    slow = [
        kind
        for kind, late in (
            ("the system", machine.timed_out),
            ("the driver", seen.driver.timed_out),
            ("the kernels", seen.kernels.timed_out),
            ("the boot configuration", seen.boot.timed_out),
        )
        if late
    ]
    if slow:
        what = f"a look at {' and '.join(slow)} ran over its deadline"
        yield Finding(Level.WARNING, name, what, f"look at `dmesg` on {name}: is the host sick?")


def _of_driver(name: str, seen: Survey) -> Iterator[Finding]:
    driver = seen.driver
    if driver.timed_out or not driver.gpus:
        return
    version = driver.loaded or driver.on_disk
    if not version:
        yield Finding(
            Level.BLOCKED,
            name,
            f"there is no nvidia module for kernel {driver.kernel}",
            "name the driver in the playbook (`driver.package`, `install: host-and-guest`), or "
            f"install it on {name} by hand",
        )
    if driver.loaded and (wrong := wrong_flavour(driver.devices, driver.flavour)):
        yield Finding(Level.BLOCKED, name, wrong, "`deploy plan` says how it is replaced")
    verdict = smi_verdict(seen.smi.exit, seen.smi.text, timed_out=seen.smi.timed_out)
    if seen.smi.asked and verdict is not None:
        what = f"nvidia-smi on {name}: {verdict.cause}"
        yield Finding(Level.BLOCKED, name, what, verdict.on(name))
    kernels = seen.kernels if version else None
    for what, fix in host_warnings(name, version, driver, kernels):
        yield Finding(Level.WARNING, name, what, fix)


def _of_gpus(name: str, seen: Survey) -> Iterator[Finding]:
    facts = seen.gpus
    for address in candidates(seen.driver, seen.machine)[1]:
        virtual = address in seen.machine.virtual
        what = "a virtual function" if virtual else "an address that an inventory cannot name"
        fix = "" if virtual else "only function 0 at a DOMAIN:BUS:SLOT of 4:2:2 digits is handled"
        yield Finding(Level.WARNING, address, f"left out: {what}", fix)
    if not facts.functions:
        return
    if refusal := refuse_look(name, facts, seen.overrides):
        yield _blocked(name, refusal)
    for one in facts.functions:
        yield from _of_gpu(name, seen, one)
    for what, fix in claim_warnings(facts):
        yield Finding(Level.WARNING, name, what, fix)
    if seen.boot.timed_out:
        return
    found = sources(seen.boot, {one.address: one.id for one in facts.functions})
    for source in found:
        if source.effect == "forbids" and not seen.driver.loaded:
            fix = f"take it out of the boot configuration of {name}, or set gpus.persist: change"
            yield Finding(Level.BLOCKED, name, f"the nvidia module is forbidden by {source}", fix)
        elif source.effect in ("forbids", "takes", "claims"):
            fix = "gpus.persist of the playbook says what `deploy up` does about it"
            yield Finding(Level.WARNING, name, f"at boot: {source}", fix)
    for kernel in stale_initrds(seen.boot, found):
        what = f"at boot: the initramfs of kernel {kernel} is older than the files it is made from"
        yield Finding(Level.WARNING, name, what, f"on {name}: update-initramfs -u -k all")


def _of_gpu(name: str, seen: Survey, one: PciFunction) -> Iterator[Finding]:
    holders = seen.gpus.held_by(one.address)
    if one.driver == "nvidia":
        if holders:
            who = ", ".join(str(holder) for holder in holders)
            ways = ", ".join(dict.fromkeys(holder.way_out for holder in holders))
            yield Finding(Level.WARNING, one.address, f"in use by {who}", ways)
        return
    if refusal := refuse_held(one, holders) or refuse_claimed(seen.gpus, one.address):
        yield _blocked(one.address, refusal)
    elif one.driver not in ("", "vfio-pci"):
        yield _blocked(one.address, foreign_driver(name, one))
    else:
        what = f"on {one.driver or 'no driver'}"
        yield Finding(Level.PENDING, one.address, what, "`deploy up` binds it to nvidia")


def _of_guest(name: str, seen: Survey, guest: Guest) -> Iterator[Finding]:
    where = f"container {guest.vmid}"
    if guest.template:
        return
    if guest.seen.timed_out:
        fix = f"run `pct status {guest.vmid}` on {name}"
        yield Finding(Level.WARNING, where, "pct did not answer in time", fix)
        return
    if refusal := refuse_on(name, guest.vmid, guest.seen):
        yield _blocked(where, refusal, Level.WARNING)
        return
    if guest.seen.ha:
        what = f"the HA manager owns it ({printable(guest.seen.ha)})"
        yield Finding(Level.WARNING, where, what, "its restarts go through `ha-manager`")
    look, tried = guest.look, guest.tried
    if look is None:
        return
    if look.problem:
        fix = f"look at `pct exec {guest.vmid} -- true` on {name}"
        yield Finding(Level.WARNING, where, look.problem, fix)
        return
    if tried is not None and tried.door is Door.LOCKED:
        fix = "add your public key to authorized_keys of root in it, or leave it to `pct exec`"
        yield Finding(Level.PENDING, where, f"its sshd answers, but {tried.text}", fix)
    elif tried is not None and tried.door is Door.STRANGER:
        what = f"{tried.place}: {tried.text}"
        yield Finding(Level.WARNING, where, what, "is its address used twice? `pct exec` is used")
    versions = look.driver.userspace.versions()
    loaded = seen.driver.loaded
    if versions and loaded and not all(gpu.same_version(one, loaded) for one in versions):
        what = f"its driver libraries are {' and '.join(versions)}, the module is {loaded}"
        fix = f"install exactly {loaded} in it; `deploy up` does it where driver.install allows"
        yield Finding(Level.WARNING, where, what, fix)


def _shared(seen: Survey) -> Iterator[Finding]:
    """Nodes of GPUs that several containers name: they share its memory and its time."""
    known = {f"/dev/nvidia{one.minor}": one.address for one in seen.gpus.functions}
    users: dict[str, list[Guest]] = {}
    for guest in seen.guests:
        for path in () if guest.template else gpu_nodes(guest.seen):
            users.setdefault(path, []).append(guest)
    for path, guests in sorted(users.items()):
        if len(guests) < 2:
            continue
        names = " and ".join(f"{one.vmid} ({one.seen.status or 'unknown'})" for one in guests)
        what = f"containers {names} both" if len(guests) == 2 else f"containers {names} all"
        yield Finding(
            Level.WARNING,
            known.get(path, path),
            f"{what} have {path}: what one of them loads, the others lack of its memory",
            "serve in one of them, and leave the GPU out of `gpus:` of the other",
        )
