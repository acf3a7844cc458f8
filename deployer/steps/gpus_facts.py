"""What the gpus step knows about a host's PCI functions: `GpuFacts` and `Overrides`.

`driver_override` and `uevent` are never read by the main probe: during a stuck unbind such a read
hangs and no signal ends it. The overrides have a probe of their own, with a short deadline, which
reads nothing while a write to a driver file is under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from deployer import gpu, proxmox
from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import words
from deployer.steps.driver_scripts import rooted
from deployer.steps.gpus_holders import Holder, Pending, hidden_users, holders, pending
from deployer.steps.gpus_probe import OVERRIDE_SCRIPT, OVERRIDE_TIMEOUT_S, SCRIPT, TIMEOUT_S

__all__ = ["GpuFacts", "Holder", "Overrides", "PciFunction", "Pending", "probes"]


@dataclass(frozen=True)
class PciFunction:
    """One PCI function. `driver` '' means none is bound; `minor` only under nvidia."""

    address: str
    present: bool = False
    vendor: str = ""
    device: str = ""
    pci_class: str = ""
    driver: str = ""
    group: str = ""
    """IOMMU group; '' when the IOMMU is off."""
    members: tuple[PciFunction, ...] = ()
    """Other functions of its slot and of its IOMMU group; bridges are left out."""
    minor: int | None = None

    @property
    def is_nvidia_gpu(self) -> bool:
        """Vendor 10de and a display class (0300 VGA, 0302 3D)."""
        return self.vendor == "0x10de" and self.pci_class[:6] in ("0x0300", "0x0302")

    def is_gpu(self, wanted_id: str | None) -> bool:
        """It has the id that the inventory names; without one, it is an NVIDIA GPU."""
        return self.id == wanted_id if wanted_id else self.is_nvidia_gpu

    @property
    def id(self) -> str:
        """`10de:2230`."""
        return f"{self.vendor[2:]}:{self.device[2:]}"

    @property
    def slot(self) -> str:
        """`0000:21:00`."""
        return self.address.rpartition(".")[0]


@dataclass(frozen=True)
class GpuFacts:
    """The wanted GPUs and everything around them that decides what may be done."""

    functions: tuple[PciFunction, ...] = ()
    modules: tuple[str, ...] = ()
    majors: tuple[tuple[str, int], ...] = ()
    """/proc/devices: name and character major."""
    nodes: tuple[gpu.Node, ...] = ()
    holders: tuple[tuple[str, Holder], ...] = ()
    """PCI address and who has it open, through vfio, /dev/nvidiaN or DRM."""
    claims: tuple[proxmox.Claim, ...] = ()
    pending: tuple[Pending, ...] = ()
    """Writes to driver files that have not returned."""
    changing: tuple[str, ...] = ()
    """Modules that are being loaded or unloaded."""
    displays: tuple[PciFunction, ...] = ()
    """All display functions of the host, the wanted ones included."""
    hidden_users: int = 0
    """Uses of the nvidia module that no process explains."""
    boot_id: str = ""
    scanned: bool = True
    """Whether the open files of all processes were looked at."""
    timed_out: bool = False

    def node(self, path: str) -> gpu.Node:
        """What lies at `path` on the host."""
        return next((node for node in self.nodes if node.path == path), gpu.Node(path, "missing"))

    def held_by(self, address: str) -> tuple[Holder, ...]:
        """Who has this GPU open."""
        return tuple(holder for held, holder in self.holders if held == address)

    def needed(self) -> tuple[str, ...]:
        """The nodes that the wanted GPUs need; those of GPUs without a minor are left out."""
        minors = [one.minor for one in self.functions if one.minor is not None]
        return gpu.needed_nodes(minors)

    def wrong_nodes(self) -> tuple[str, ...]:
        """Needed nodes that are missing on the host, no device, or of a stale major."""
        return tuple(path for path in self.needed() if not self._right(self.node(path)))

    def _right(self, node: gpu.Node) -> bool:
        name = PurePosixPath(node.path).name
        majors = dict(self.majors)
        if name in gpu.UVM_NODES:
            expected = majors.get("nvidia-uvm", node.major)
            return node.is_char and node.major == expected
        return node.is_char and node.major == gpu.NVIDIA_MAJOR

    @property
    def ready(self) -> bool:
        """Every wanted GPU is on nvidia, its minor is known and all nodes are right."""
        bound = all(one.driver == "nvidia" and one.minor is not None for one in self.functions)
        return bool(self.functions) and bound and not self.wrong_nodes()

    def all_functions(self) -> dict[str, PciFunction]:
        """The wanted functions and the members of their slots and groups, by address."""
        found = {member.address: member for one in self.functions for member in one.members}
        found.update({one.address: one for one in self.functions})
        return dict(sorted(found.items()))

    def others_with(self, ids: Iterable[str]) -> tuple[PciFunction, ...]:
        """Display functions that are not wanted and have one of these ids."""
        wanted, listed = {one.address for one in self.functions}, set(ids)
        return tuple(one for one in self.displays if one.address not in wanted and one.id in listed)


@dataclass(frozen=True)
class Overrides:
    """driver_override by address, '' when it is not set. A missing address is not known."""

    values: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    """Why they are not known."""
    stuck_at: str = ""
    """The function whose read did not return although no write was seen: something is under way all
    the same."""

    def of(self, address: str) -> str | None:
        """Of one function; None when it is not known."""
        return dict(self.values).get(address)


class _Lines:
    """The answer's lines by their first word."""

    def __init__(self, text: str) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)
        for line in text.splitlines():
            key, _, rest = line.partition(" ")
            self._found[key].append(rest)

    def fields(self, key: str, count: int) -> Iterable[list[str]]:
        """The lines of `key` in exactly `count` fields, the last with the rest of the line."""
        for rest in self._found.get(key, ()):
            parts = rest.split(" ", count - 1)
            yield parts + [""] * (count - len(parts))

    def plain(self, key: str) -> list[str]:
        """The lines of `key` as they are."""
        return list(self._found.get(key, ()))

    def one(self, key: str) -> str:
        """The first line of `key`, '' without one."""
        return next(iter(self._found.get(key, ())), "")


def parse(output: ProbeOutput, addresses: Sequence[str], root: str = "") -> GpuFacts:
    """The answer of SCRIPT."""
    lines = _Lines(output.text)
    devices = _devices(lines)
    functions = tuple(_function(devices, address) for address in addresses)
    seen = GpuFacts(functions=functions).all_functions()
    nodes = gpu.parse_nodes([line.removeprefix(root) for line in lines.plain("devnode")])
    modules = list(lines.fields("module", 2))
    return GpuFacts(
        functions=functions,
        modules=tuple(name for name, _ in modules),
        majors=tuple((name, int(number)) for number, name in lines.fields("major", 2)),
        nodes=tuple(nodes.values()),
        holders=holders(
            lines.fields,
            {address: one.driver for address, one in seen.items()},
            {one.address: one.group for one in functions if one.group},
            {one.address: one.minor for one in functions if one.minor is not None},
        ),
        claims=_claims(lines),
        pending=pending(lines.fields, [one.address for one in seen.values() if not one.driver]),
        changing=tuple(f"{name} ({state})" for name, state in modules if state not in ("live", "")),
        displays=tuple(one for one in devices.values() if one.pci_class.startswith("0x03")),
        hidden_users=hidden_users(lines.fields),
        boot_id=lines.one("bootid"),
        scanned="scanned" in output.text.splitlines()[-1:],
        timed_out=output.timed_out,
    )


def _devices(lines: _Lines) -> dict[str, PciFunction]:
    """All PCI functions of the host that are no bridges."""
    links = {(address, name): to for address, name, to in lines.fields("link", 3)}
    minors = dict(lines.fields("minor", 2))
    found = {}
    for address, vendor, device, pci_class, bridge in lines.fields("pci", 5):
        if bridge == "+":
            continue
        driver = links.get((address, "driver"), "")
        minor = gpu.device_minor(minors.get(address, "")) if driver == "nvidia" else None
        group = links.get((address, "iommu_group"), "")
        found[address] = PciFunction(
            address, True, vendor, device, pci_class, driver, group, minor=minor
        )
    return found


def _function(devices: dict[str, PciFunction], address: str) -> PciFunction:
    one = devices.get(address)
    if one is None:
        return PciFunction(address)
    members = tuple(
        other
        for _, other in sorted(devices.items())
        if other is not one
        and (other.slot == one.slot or (one.group != "" and other.group == one.group))
    )
    return replace(one, members=members)


def _claims(lines: _Lines) -> tuple[proxmox.Claim, ...]:
    node_name = lines.one("node").split(".")[0]
    mappings = proxmox.parse_mappings("\n".join(lines.plain("mapping")), node_name)
    conf = [(int(vmid), line) for vmid, line in lines.fields("conf", 2) if vmid.isdigit()]
    running = [int(vmid) for vmid, _ in lines.fields("vm", 2) if vmid.isdigit()]
    now = int(lines.one("now") or 0)
    reserved = proxmox.parse_reservations(lines.fields("reserved", 4), now)
    return proxmox.parse_claims(conf, mappings, running, reserved)


def parse_overrides(output: ProbeOutput) -> Overrides:
    """The answer of OVERRIDE_SCRIPT."""
    lines = _Lines(output.text)
    if pid := lines.one("pending"):
        return Overrides(problem=f"a write to a driver file by pid {pid} has not returned")
    values = {
        address: "" if value == "(null)" else value
        for address, value in lines.fields("override", 2)
    }
    known = tuple(sorted(values.items()))
    if not output.timed_out:
        return Overrides(known)
    begun = [address for address in lines.plain("reading") if address not in values]
    if not begun:
        return Overrides(known, f"the host gave no answer within {OVERRIDE_TIMEOUT_S:g} s")
    problem = (
        f"reading driver_override of {begun[-1]} did not return within {OVERRIDE_TIMEOUT_S:g} s"
    )
    return Overrides(known, problem, begun[-1])


def probes(addresses: Sequence[str], root: str = "") -> list[Probe]:
    """Of the host. Without root not all holders are seen."""
    asked = f"set -- {words(addresses)}\n"
    parser = partial(parse, addresses=tuple(addresses), root=root)
    return [
        Probe("gpus", Where.HOST, rooted(asked + SCRIPT, root), parser, TIMEOUT_S),
        Probe(
            "gpus.overrides",
            Where.HOST,
            rooted(asked + OVERRIDE_SCRIPT, root),
            parse_overrides,
            OVERRIDE_TIMEOUT_S,
        ),
    ]
