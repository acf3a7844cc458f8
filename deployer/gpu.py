"""NVIDIA knowledge without I/O: driver versions, /proc texts, nvidia-smi answers, device nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NVIDIA_MAJOR = 195
"""Character major of /dev/nvidiaN and /dev/nvidiactl; fixed. The major of uvm is dynamic."""
UVM_NODES = ("nvidia-uvm", "nvidia-uvm-tools")
LIBRARIES = ("libcuda.so", "libnvidia-ml.so")
SMI_QUERY = (
    "--query-gpu=index,uuid,name,driver_version,memory.total,memory.used,compute_cap,pci.bus_id "
    "--format=csv,noheader,nounits"
)

_NVRM = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_MINOR = re.compile(r"^Device Minor:\s*(\d+)\s*$", re.MULTILINE)
_LIBRARY = re.compile(r"(?:^|/)(lib[a-z-]+\.so)\.(\d+(?:\.\d+)+)$")
_BUS_ID = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?$")


def version_key(text: str) -> tuple[int, ...]:
    """A driver version as int tuple, so that 580.126.09 > 580.95.05; () when it is none."""
    if not re.fullmatch(r"\d+(\.\d+)*", text):
        return ()
    return tuple(int(part) for part in text.split("."))


def same_version(one: str, other: str) -> bool:
    """Whether two versions are equal in all components (580.126.9 equals 580.126.09)."""
    return version_key(one) != () and version_key(one) == version_key(other)


def module_version(nvrm: str) -> str:
    """The version in /proc/driver/nvidia/version, open or proprietary wording; '' when absent."""
    found = _NVRM.search(nvrm)
    return found.group(1) if found else ""


def module_flavour(nvrm: str) -> str:
    """`open`, `proprietary`, or '' when the text names no module."""
    if not _NVRM.search(nvrm):
        return ""
    return "open" if "Open Kernel Module" in nvrm else "proprietary"


def device_minor(information: str) -> int | None:
    """The N of /dev/nvidiaN, from /proc/driver/nvidia/gpus/ADDRESS/information.

    It is not nvidia-smi's index, which renumbers when a GPU leaves.
    """
    found = _MINOR.search(information)
    return int(found.group(1)) if found else None


def library_version(path: str) -> tuple[str, str]:
    """(`libcuda.so`, `580.126.09`) of a library path; ('', '') when it carries no version."""
    found = _LIBRARY.search(path)
    return (found.group(1), found.group(2)) if found else ("", "")


def pci_address(text: str) -> str:
    """A bus id as sysfs writes it: `00000000:21:00.0` and `21:00.0` become `0000:21:00.0`.

    Without a function the answer has none (`0000:21:00`); '' when the text is no bus id.
    """
    found = _BUS_ID.match(text.strip().lower())
    if not found:
        return ""
    domain, bus, slot, function = found.groups()
    address = f"{int(domain or '0', 16):04x}:{bus:0>2}:{slot:0>2}"
    return f"{address}.{function}" if function is not None else address


@dataclass(frozen=True)
class SmiGpu:
    """One row of nvidia-smi. Memory in MiB; None where it answered `[N/A]` or the like."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    compute_cap: str
    address: str


def parse_smi(text: str) -> tuple[SmiGpu, ...]:
    """Rows of `nvidia-smi` with SMI_QUERY; lines of another form (warnings, errors) are left out.

    The name may hold commas: fields are split from both ends.
    """
    rows = []
    for line in text.splitlines():
        head = line.strip().split(", ", 2)
        tail = head[2].rsplit(", ", 5) if len(head) == 3 else []
        if len(tail) != 6 or not head[0].isdigit():
            continue
        name, driver, total, used, capability, bus = tail
        rows.append(
            SmiGpu(
                index=int(head[0]),
                uuid=head[1],
                name=name,
                driver=driver,
                memory_total_mib=int(total) if total.isdigit() else None,
                memory_used_mib=int(used) if used.isdigit() else None,
                compute_cap=capability,
                address=pci_address(bus),
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class Node:
    """What lies at a path below /dev. `kind` is char|file|other|missing; numbers are decimal."""

    path: str
    kind: str
    major: int = -1
    minor: int = -1

    @property
    def is_char(self) -> bool:
        """A character device, and not a file that merely has its name."""
        return self.kind == "char"

    def same_device(self, other: Node) -> bool:
        """Both are character devices with the same numbers."""
        return (
            self.is_char
            and other.is_char
            and (self.major, self.minor) == (other.major, other.minor)
        )


def parse_nodes(lines: Sequence[str]) -> dict[str, Node]:
    """`PATH|FILE TYPE|MAJOR:MINOR` (hex, as `stat -c '%n|%F|%t:%T'` prints) by path."""
    nodes = {}
    for line in lines:
        path, _, rest = line.partition("|")
        kind, _, numbers = rest.partition("|")
        major, _, minor = numbers.partition(":")
        if kind == "character special file":
            nodes[path] = Node(path, "char", int(major or "0", 16), int(minor or "0", 16))
        elif kind in ("regular file", "regular empty file"):
            nodes[path] = Node(path, "file")
        elif kind:
            nodes[path] = Node(path, "other")
    return nodes


def needed_nodes(minors: Sequence[int]) -> tuple[str, ...]:
    """The device nodes that CUDA needs for the GPUs with these minors."""
    gpus = [f"/dev/nvidia{minor}" for minor in minors]
    return (*gpus, "/dev/nvidiactl", *(f"/dev/{name}" for name in UVM_NODES))
