"""GPU memory as the host sees it (a guest's nvidia-smi cannot see pids)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deployer.errors import DeadlineExceeded
from deployer.remote.transport import Answer, Transport

SCRIPT = """\
limit=
if command -v timeout >/dev/null 2>&1; then limit='timeout 15'; fi
$limit nvidia-smi --query-gpu=pci.bus_id,memory.used --format=csv,noheader,nounits || exit
echo --
apps=$($limit nvidia-smi --query-compute-apps=gpu_bus_id,pid,process_name,used_memory \\
  --format=csv,noheader,nounits) || exit
printf '%s\\n' "$apps"
echo ++
for pid in $(printf '%s\\n' "$apps" | awk -F', *' '$2 ~ /^[0-9]+$/ { print $2 }' | sort -u); do
  printf '%s %s\\n' "$pid" "$(tr '\\0\\n' '  ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-120)"
  inside=$(awk '/^NSpid:/ { print $NF }' "/proc/$pid/status" 2>/dev/null)
  printf '=%s %s %s\\n' "$pid" "${inside:-$pid}" \\
    "$(sed -n 's/^0:://p' "/proc/$pid/cgroup" 2>/dev/null | head -n 1)"
done
"""


@dataclass(frozen=True)
class GpuApp:
    """A process that holds GPU memory, by its numbers on the host and in its own PID namespace.

    `mib` is None where the driver does not tell it (MIG, some virtual GPUs). `group` is its control
    group, '' when it could not be read.
    """

    address: str
    pid: int
    inside: int
    group: str
    mib: int | None

    def is_of(self, vmid: int | None, members: Collection[int]) -> bool:
        """Is it one of `members` of the container, or of the host where `vmid` is None?"""
        if vmid is None:
            return self.pid in members
        own = rf"(?:^|/)lxc(?:\.payload\.|/){vmid}(?:/|$)"
        return self.inside in members and re.search(own, self.group) is not None


@dataclass(frozen=True)
class GpuMemory:
    """Used MiB by PCI address, and who holds it. `known` False: it could not be read."""

    known: bool
    used: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[str, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    """MiB by PCI address that the holders account for."""
    problem: str = ""
    apps: tuple[GpuApp, ...] = ()

    def over(self, floor: int) -> tuple[str, ...]:
        """Addresses of GPUs that use more than `floor` MiB."""
        return tuple(address for address, mib in self.used.items() if mib > floor)

    def explained(self, floor: int) -> bool:
        """Without what the holders use, would every GPU be at its floor?"""
        return all(self.used[one] - self.held.get(one, 0) <= floor for one in self.over(floor))

    def told(self, addresses: Sequence[str]) -> str:
        """`0000:21:00.0 45000 MiB, ...`."""
        return ", ".join(f"{address} {self.used[address]} MiB" for address in addresses)


def read_gpu_memory(host: Transport, addresses: Sequence[str]) -> GpuMemory:
    """One look. Raises Unreachable when the host cannot be asked; a hung driver is `problem`."""
    try:
        return parse_gpu_memory(host.run(SCRIPT, timeout_s=45), addresses)
    except DeadlineExceeded:
        return GpuMemory(False, problem="nvidia-smi hangs: the driver is stuck")


def parse_gpu_memory(answer: Answer, addresses: Sequence[str]) -> GpuMemory:
    """Of these addresses, and of all of them: one that is not listed has proven nothing."""
    if answer.exit == 124:
        return GpuMemory(False, problem="nvidia-smi hangs: the driver is stuck")
    gpus, found, apps = answer.text.partition("--\n")
    if not found:
        told = (answer.error_text or answer.text).strip().split("\n")[-1]
        return GpuMemory(False, problem=told or f"nvidia-smi ended with {answer.exit}")
    used: dict[str, int] = {}
    for line in gpus.splitlines():
        bus, _, mib = (part.strip() for part in line.partition(","))
        address = pci_address(bus)
        if address in addresses and mib.isdigit():
            used[address] = int(mib)
    if unseen := [address for address in addresses if address not in used]:
        return GpuMemory(False, problem=f"nvidia-smi tells nothing of {', '.join(unseen)}")
    apps, _, lines = apps.partition("++\n")
    titles = {pid: title.strip() for pid, _, title in (x.partition(" ") for x in lines.split("\n"))}
    holders = []
    rows: list[GpuApp] = []
    held: dict[str, int] = {}
    for line in apps.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4 and pci_address(parts[0]) in addresses:
            name = titles.get(parts[1]) or parts[2]
            rows.append(_app(parts, titles.get(f"={parts[1]}", "")))
            holders.append(f"pid {parts[1]} ({name}) {parts[-1]} MiB on {parts[0]}")
            held_mib = int(parts[-1]) if parts[-1].isdigit() else 0
            held[pci_address(parts[0])] = held.get(pci_address(parts[0]), 0) + held_mib
    return GpuMemory(True, used, tuple(holders), held, apps=tuple(rows))


def _app(parts: list[str], told: str) -> GpuApp:
    """Of a row of nvidia-smi, and of the line `inside group` about its process."""
    inside, _, group = told.partition(" ")
    pid = int(parts[1]) if parts[1].isdigit() else 0
    mib = int(parts[-1]) if parts[-1].isdigit() else None
    return GpuApp(
        pci_address(parts[0]), pid, int(inside) if inside.isdigit() else pid, group.strip(), mib
    )


def pci_address(bus_id: str) -> str:
    """`00000000:21:00.0` -> `0000:21:00.0`, lower case."""
    text = bus_id.lower()
    domain, found, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}" if found else text
