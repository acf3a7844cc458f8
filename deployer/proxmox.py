"""Proxmox and vfio knowledge without I/O: who claims a PCI function, what takes it back at boot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deployer.gpu import pci_address

DEVICES_SINCE = (5, 0, 7)
"""First pve-container with devN."""
HOTPLUG_SINCE = (6, 0, 4)
"""First pve-container that brings a new devN into a running container."""

_CGROUP_CT = re.compile(r"(?:^|/)lxc(?:\.payload\.|/)(\d{3,9})(?:/|$)", re.MULTILINE)
_CMDLINE_VM = re.compile(r"(?:^|\s)-id\s+(\d{3,9})(?:\s|$)")
_HOSTPCI = re.compile(r"^hostpci\d+:\s*(.*?)\s*$")


def package_version(text: str) -> tuple[int, ...]:
    """`6.1.10` or `5.0.7-1~bpo` as int tuple; () when it is no version."""
    found = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)", text.strip())
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def container_of(cgroup: str) -> int | None:
    """The container that a process belongs to, from /proc/PID/cgroup."""
    found = _CGROUP_CT.search(cgroup)
    return int(found.group(1)) if found else None


def vm_of(cmdline: str) -> int | None:
    """The VM of a QEMU process, from its command line."""
    found = _CMDLINE_VM.search(cmdline) if "qemu" in cmdline or "kvm" in cmdline else None
    return int(found.group(1)) if found else None


@dataclass(frozen=True)
class Claim:
    """A VM's hostpci line. `functions` are addresses; one without function means all of a slot."""

    vmid: int
    functions: tuple[str, ...]
    onboot: bool
    running: bool
    name: str = ""

    def covers(self, address: str) -> bool:
        """Whether starting this VM takes `address`."""
        return any(address == one or address.startswith(one + ".") for one in self.functions)

    def title(self) -> str:
        """`VM 100 (win)`."""
        return f"VM {self.vmid} ({self.name})" if self.name else f"VM {self.vmid}"


def hostpci_functions(value: str, mappings: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Addresses of one hostpci value; `mapping=NAME` is looked up in `mappings`."""
    found: list[str] = []
    for part in value.split(","):
        key, equals, rest = part.partition("=")
        if key == "mapping" and equals:
            found.extend(mappings.get(rest, ()))
        elif key == "host" or not equals:
            found.extend(pci_address(one) for one in (rest if equals else part).split(";"))
    return tuple(one for one in found if one)


def parse_mappings(text: str, node: str) -> dict[str, tuple[str, ...]]:
    """/etc/pve/mapping/pci.cfg: names to the addresses on `node`."""
    mappings: dict[str, tuple[str, ...]] = {}
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            name = line.split()[0].rstrip(":")
            mappings[name] = ()
        elif name and line.strip().startswith("map "):
            pairs = dict(
                part.partition("=")[::2] for part in line.strip()[len("map ") :].split(",")
            )
            if pairs.get("node", node) == node:
                paths = [pci_address(path) for path in pairs.get("path", "").split(";")]
                mappings[name] += tuple(path for path in paths if path)
    return mappings


def parse_claims(
    lines: Iterable[tuple[int, str]],
    mappings: Mapping[str, Sequence[str]],
    running: Iterable[int],
    reserved: Iterable[tuple[str, int]] = (),
) -> tuple[Claim, ...]:
    """Claims from (vmid, conf line) pairs of the current and pending parts of VM configurations.

    `reserved`: (address, vmid) of PCI reservations that count; such a VM is running or starting.
    """
    alive = set(running)
    functions: dict[int, list[str]] = {}
    for address, vmid in reserved:
        functions.setdefault(vmid, []).append(address)
        alive.add(vmid)
    onboot: set[int] = set()
    names: dict[int, str] = {}
    for vmid, line in lines:
        if match := _HOSTPCI.match(line):
            functions.setdefault(vmid, []).extend(hostpci_functions(match.group(1), mappings))
        elif re.match(r"^onboot:\s*(1|yes|on|true)\s*$", line):
            onboot.add(vmid)
        elif line.startswith("name:"):
            names[vmid] = line.partition(":")[2].strip()
    return tuple(
        Claim(vmid, tuple(found), vmid in onboot, vmid in alive, names.get(vmid, ""))
        for vmid, found in sorted(functions.items())
    )


def parse_reservations(lines: Iterable[Sequence[str]], now: int) -> list[tuple[str, int]]:
    """Entries of /run/qemu-server/pci-id-reservations that count.

    `lines` are (address, vmid, `pid:N` or `time:T`, `+` when that pid lives); `now` in seconds of
    the host's clock. PVE writes a pid when the VM runs, a time while it starts, and leaves stale
    ones behind (qemu-server, PCI.pm).
    """
    found = []
    for address, vmid, until, alive in lines:
        kind, _, number = until.partition(":")
        counts = alive == "+" if kind == "pid" else number.isdigit() and int(number) > now
        if counts and vmid.isdigit() and (known := pci_address(address)):
            found.append((known, int(vmid)))
    return found
