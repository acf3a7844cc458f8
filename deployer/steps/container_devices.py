"""What a container's configuration lacks for its GPUs, and the changes that bring it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deployer import pct_config, pct_edit
from deployer.model import Change
from deployer.pct_config import PctConfig
from deployer.steps import container_changes as changes
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_facts import GpuFacts


@dataclass(frozen=True)
class Lacks:
    """`missing`: paths in no entry; `edit`: raw lines; `entries`: devN that pct sets."""

    missing: tuple[str, ...] = ()
    edit: pct_edit.Edit = field(default_factory=pct_edit.Edit)
    entries: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.edit or self.entries)


def lacks(seen: ContainerFacts, host: GpuFacts) -> Lacks:
    """By devN where pct knows it, else by raw lines; stale majors of raw lines are corrected.

    Raises ValueError when there are not enough devN indexes left.
    """
    config = seen.config()
    after = config.after_restart()
    entries = {entry.path for entry in after.devices().values()}
    mounted = set(pct_config.mounted_devices(after))
    missing = tuple(path for path in host.needed() if path not in entries | mounted)
    raw = [host.node(path) for path in host.needed() if path in mounted - entries]
    edit = pct_edit.Edit()
    numbered: tuple[tuple[int, str], ...] = ()
    if changes.has_devn(seen.version):
        indexes = pct_config.free_indexes(config, len(missing))
        numbered = tuple(zip(indexes, missing, strict=True))
    else:
        nodes = [host.node(path) for path in missing]
        devices = [pct_edit.RawDevice(node.path, node.major, node.minor) for node in nodes]
        edit = pct_edit.raw_edit(after, devices, unprivileged=config.unprivileged)
    if raw and not config.unprivileged:
        mended = pct_edit.mend(after, raw, seen.majors | {node.major for node in raw})
        edit = pct_edit.Edit(tuple(dict.fromkeys((*mended.add, *edit.add))), mended.replace)
    return Lacks(missing, edit, numbered)


def edits(vmid: int, seen: ContainerFacts, lack: Lacks) -> list[Change]:
    """The changes, each against the text that the one before leaves.

    Raises ValueError when the file would grow over what /etc/pve takes.
    """
    made = []
    text = seen.conf
    if lack.edit:
        named = ", ".join(lack.missing) if not lack.entries and lack.missing else ""
        reason = (
            f"{named} not in the configuration of container {vmid}; this Proxmox has no devN"
            if named
            else f"the rules of container {vmid} shut out what it mounts"
        )
        made.append(changes.edit_lines(vmid, text or "", lack.edit, reason))
        text = pct_edit.apply(text or "", lack.edit)
    if lack.entries:
        paths = dict(lack.entries)
        reason = f"{', '.join(paths.values())} not in the configuration of container {vmid}"
        made.append(changes.set_devices(vmid, text, paths, reason))
    return made


def unstartable(seen: ContainerFacts) -> list[str]:
    """devN entries with which the container does not start, `devN (why)` each.

    Either pct cannot parse the entry, or the host has not its node.
    """
    found = []
    for key, entry in sorted(seen.config().after_restart().devices().items()):
        if entry.fault:
            found.append(f"{key} ({pct_config.printable(entry.fault)})")
        elif not seen.on_host(entry.path):
            path = pct_config.printable(entry.path)
            found.append(f"{key} (the host has no device {path})")
    return found


def strangers(seen: ContainerFacts, host: GpuFacts) -> list[str]:
    """NVIDIA nodes in the configuration that the inventory does not give this container."""
    after = seen.config().after_restart()
    named = {entry.path: f"{key} {entry.path}" for key, entry in after.devices().items()}
    named |= {path: f"{path} (raw)" for path in pct_config.mounted_devices(after)}
    needed = {*host.needed(), "/dev/nvidia-modeset"}
    return sorted(
        pct_config.printable(text)
        for path, text in named.items()
        if path.startswith("/dev/nvidia")
        and path.removeprefix("/dev/nvidia")[:1].isdigit()
        and path not in needed
    )


def aside(vmid: int, seen: ContainerFacts, host: GpuFacts) -> str:
    """What was seen and left alone, for the end of a reason; '' when there is nothing."""
    config = seen.config()
    said = []
    if extra := strangers(seen, host):
        said.append(f"left alone: {', '.join(extra)}, which the inventory does not give it")
    stale = pct_edit.stale_rules(config.current, seen.majors) if seen.majors else {}
    if stale and not config.unprivileged:
        said.append(f"stale rules: {', '.join(v for values in stale.values() for v in values)}")
    if waits := pending_of_others(config):
        said.append(f"pending until its next start: {', '.join(waits)}")
    old = [v for k, v in config.current.raw if k.startswith("lxc.cgroup.devices.")]
    if old and not config.unprivileged:
        said.append(f"rules of cgroup v1, without effect on this host: {', '.join(old)}")
    if config.ignored:
        said.append(f"{len(config.ignored)} lines that pct cannot read and will drop")
    return "".join(f"; {text}" for text in said)


def pending_of_others(config: PctConfig) -> list[str]:
    """Keys whose change waits for a start."""
    return sorted({*config.pending.keys, *(f"-{key}" for key in config.delete)})
