"""What the container step saw, a line each, and what will be in the way later. Pure.

`notes` are facts for `plan` and `doctor`; `warnings` come with an action each. What stands in the
way now is the plan's to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from deployer import gpu, pct_config, pct_edit, proxmox
from deployer.deployment import Deployment
from deployer.model import Facts
from deployer.pct_config import PctConfig, printable
from deployer.steps.container_changes import has_devn
from deployer.steps.container_devices import pending_of_others, strangers, unstartable
from deployer.steps.container_facts import ContainerFacts, GuestNodes
from deployer.steps.gpus_facts import GpuFacts

KINDS = {"missing": "missing", "file": "a regular file", "other": "no character device"}
WORLD = 0o006


def notes(
    vmid: int, seen: ContainerFacts, host: GpuFacts | None, guest: GuestNodes | None
) -> list[str]:
    """The container as pct and the guest show it."""
    if not seen.exists:
        return []
    config = seen.config()
    kind = "unprivileged" if config.unprivileged else "privileged"
    version = ".".join(map(str, seen.version)) or "of unknown version"
    boots = "" if config.current.flag("onboot") else ", does not start with the host (no onboot)"
    lines = [
        f"container {vmid}: {seen.status or 'status unknown'}, {kind}{boots}; "
        f"pve-container {version} ({_ways(seen.version)})"
    ]
    if host is not None and host.functions:
        lines += _nodes(config, seen, host, guest)
    if seen.ha:
        lines.append(f"HA manager: wants it {seen.ha}" + _known(seen.ha_status))
    if lock := printable(config.lock):
        lines.append(f"lock: {lock}" + _known(", ".join(seen.tasks)))
    if waits := pending_of_others(config):
        lines.append(f"pending until its next start: {', '.join(map(printable, waits))}")
    if config.snapshots:
        lines.append(f"snapshots: {', '.join(map(printable, config.snapshots))}")
    return lines


def warnings(want: Deployment, facts: Facts) -> Iterable[tuple[str, str]]:
    """(what, action), of what does not stop this run and will hurt later."""
    seen, host = facts.get(ContainerFacts), facts.get(GpuFacts)
    if want.vmid is None or seen is None or seen.timed_out:
        return
    place, box = want.host_name, f"container {want.vmid}"
    if not seen.quorate:
        yield (
            f"the cluster of {place} has no quorum: /etc/pve is read-only, no container can be "
            "changed or started",
            f"on {place}: pvecm status; bring the other nodes back",
        )
    if not seen.exists:
        return
    if seen.elsewhere:
        yield (
            f"the id of {box} is used twice: there is {', '.join(seen.elsewhere)}",
            "remove the file that is not in use: the cluster takes one of them for the other",
        )
    if "error" in seen.ha_status:
        yield (
            f"the HA manager has given {box} up: {seen.ha_status}",
            f"on {place}: ha-manager set ct:{want.vmid} --state disabled, mend what failed, then "
            f"ha-manager set ct:{want.vmid} --state started",
        )
    yield from _configuration(want.vmid, place, seen)
    if host is not None:
        guest = facts.get(GuestNodes) or GuestNodes()
        yield from _devices(want.vmid, place, seen, host, guest)


def _configuration(vmid: int, place: str, seen: ContainerFacts) -> Iterable[tuple[str, str]]:
    config, box, file = seen.config(), f"container {vmid}", f"/etc/pve/lxc/{vmid}.conf"
    if waits := pending_of_others(config):
        yield (
            f"{box} has changes that wait for its next start: {', '.join(map(printable, waits))}",
            f"on {place}: pct pending {vmid} shows them; a restart brings them",
        )
    if config.ignored:
        count = len(config.ignored)
        yield (
            f"pct cannot read {count} line{'s' if count > 1 else ''} of {file}, which will be gone "
            f"when it next writes: {printable(config.ignored[0])}",
            f"correct or remove them in {file} on {place}",
        )
    if seen.status == "running" and (bad := unstartable(seen)):
        keys = ",".join(one.split(" ")[0] for one in bad)
        yield (
            f"{box} runs, but will not start again: {', '.join(bad)}",
            f"bring the device back, or on {place}: pct set {vmid} --delete {keys}",
        )
    if config.current.devices() and not has_devn(seen.version):
        yield (
            f"{box} has devN entries, which this Proxmox does not know: they have no effect",
            "update pve-container to 5.0.7 or newer, or use raw lines",
        )
    stale = pct_edit.stale_rules(config.current, seen.majors) if seen.majors else {}
    if stale and not config.unprivileged:
        rules = ", ".join(printable(value) for values in stale.values() for value in values)
        yield (
            f"{box} allows devices of majors that no driver of {place} has: {rules}",
            f"take these lines out of {file}, or write the majors of /proc/devices; then "
            f"pct reboot {vmid}",
        )


def _devices(
    vmid: int, place: str, seen: ContainerFacts, host: GpuFacts, guest: GuestNodes
) -> Iterable[tuple[str, str]]:
    config, box, needed = seen.config(), f"container {vmid}", set(host.needed())
    after = config.after_restart()
    entries = {entry.path for entry in after.devices().values()}
    raw = set(pct_config.mounted_devices(after)) - entries
    if extra := strangers(seen, host):
        yield (
            f"{box} also gets {', '.join(extra)}, which the inventory does not give it",
            "add that GPU to the inventory, or take the entry out of its configuration",
        )
    for path in sorted(raw - needed):
        if path.startswith("/dev/nvidia") and host.node(path).kind == "missing":
            yield (
                f"{box} mounts {printable(path)}, which {place} has not: its next start fails, or "
                "leaves an empty file in its place",
                f"bring the node back, or take the line out of /etc/pve/lxc/{vmid}.conf",
            )
    for path in sorted(raw & needed):
        mode = seen.host_mode(path)
        if config.unprivileged and mode is not None and mode & WORLD != WORLD:
            yield (
                f"{path} of {place} has mode {mode:04o}: unprivileged {box} may not open it",
                f"on {place}: chmod 0666 {path}, or a devN entry with mode=0666 in place of raw "
                "lines",
            )
    for node in guest.nodes:
        if node.path in needed or node.same_device(host.node(node.path)):
            continue
        if not node.is_char and node.kind in ("file", "other") and not _folder(node):
            yield (
                f"in {box} {printable(node.path)} is {KINDS[node.kind]}, not a device",
                f"in {box}: rm {printable(node.path)}; then pct reboot {vmid} on {place}",
            )


def _folder(node: gpu.Node) -> bool:
    """`/dev/nvidia-caps` and its like hold nodes and are none."""
    return node.kind == "other" and node.path.startswith("/dev/nvidia-caps")


def _ways(version: tuple[int, ...]) -> str:
    if not has_devn(version):
        return "no devN: raw lines"
    return "devN, hot-plugged" if version >= proxmox.HOTPLUG_SINCE else "devN, at a start"


def _known(text: str) -> str:
    return f" ({printable(text)})" if text else ""


def _nodes(
    config: PctConfig, seen: ContainerFacts, host: GpuFacts, guest: GuestNodes | None
) -> list[str]:
    """Right nodes in one line, wrong ones in a line each with `!`."""
    after = config.after_restart()
    by_path = {entry.path: key for key, entry in after.devices().items()}
    raw = set(pct_config.mounted_devices(after))
    looked = guest if guest is not None and not guest.timed_out else None
    right, wrong = [], []
    for path in host.needed():
        entry = by_path.get(path) or ("raw" if path in raw else "not configured")
        there = host.node(path)
        inside = looked.node(path) if looked is not None else there
        if entry != "not configured" and inside.same_device(there):
            right.append(f"{path} {there.major}:{there.minor} {entry}")
        else:
            shown = "not looked at" if looked is None else _shown(inside)
            wrong.append(f"! {path}: {entry}; host {_shown(there)}, guest {shown}")
    head = "nodes" if looked is not None else "nodes of the host (the guest was not looked at)"
    return ([f"{head}: {', '.join(right)}"] if right else []) + wrong


def _shown(node: gpu.Node) -> str:
    return f"{node.major}:{node.minor}" if node.is_char else KINDS.get(node.kind, node.kind)
