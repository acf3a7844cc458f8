"""Who has a GPU open and which writes to driver files are stuck, from the lines of the probe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deployer import proxmox

MODESET = "c3:fe"
"""195:254, /dev/nvidia-modeset: whoever has it open keeps every GPU of the driver in use."""
PERSISTENCED = "nvidia-persiste"
"""Name of nvidia-persistenced in /proc/PID/comm, which holds 15 characters."""

_GROUP = re.compile(r"/dev/vfio/(\d+|devices/vfio\d+)(?: \(deleted\))?$")
_UNIT = re.compile(r"/([^/\n]+\.service)(?:/|$)", re.MULTILINE)
_ADDRESS = re.compile(r"\b[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")

Fields = Callable[[str, int], Iterable[list[str]]]
"""(key, count) -> the probe's lines of that key in so many fields."""


@dataclass(frozen=True)
class Holder:
    """A process with a GPU open. `vm` / `container`: whose it is, None when of the host."""

    pid: int
    process: str
    vm: int | None = None
    container: int | None = None
    unit: str = ""
    """The systemd service of a process of the host."""
    sure: bool = True
    """False: it has a device of vfio open, and the kernel does not tell which."""

    @property
    def is_persistenced(self) -> bool:
        """nvidia-persistenced of the host, as a service that can be stopped and started."""
        own = self.vm is None and self.container is None
        return own and self.process == PERSISTENCED and self.unit == "nvidia-persistenced.service"

    @property
    def way_out(self) -> str:
        """The command or the words that free the GPU."""
        if self.vm is not None:
            return f"`qm shutdown {self.vm}`"
        if self.container is not None:
            return f"stop pid {self.pid} in container {self.container}"
        if self.unit and self.unit != "ssh.service":
            return f"`systemctl stop {self.unit}`"
        return f"stop pid {self.pid}"

    def __str__(self) -> str:
        what = f"pid {self.pid} ({self.process})"
        if self.vm is not None:
            what += f" of VM {self.vm}"
        elif self.container is not None:
            what += f" of container {self.container}"
        elif self.unit:
            what += f" of {self.unit}"
        return what if self.sure else f"{what}, which has some device of vfio open"


@dataclass(frozen=True)
class Pending:
    """A write to a driver file of sysfs that has not returned. `address` '' when not told."""

    pid: int
    process: str
    state: str
    """Of the kernel: D or S; a signal turns S into D and ends nothing."""
    address: str
    what: str

    def __str__(self) -> str:
        return (
            f"{self.what} by pid {self.pid} ({self.process}, state {self.state}) has not returned"
        )


def describe(fields: Fields, pid: int) -> Holder:
    """Who this process is."""

    def of(key: str) -> str:
        return "\n".join(rest for owner, rest in fields(key, 2) if owner == str(pid))

    vm = next((int(vmid) for vmid, owner in fields("vm", 2) if owner == str(pid)), None)
    vm = vm if vm is not None else proxmox.vm_of(of("cmd"))
    container = proxmox.container_of(of("cgroup"))
    unit = _UNIT.search(of("cgroup")) if vm is None and container is None else None
    return Holder(pid, of("comm") or "?", vm, container, unit.group(1) if unit else "")


def holders(
    fields: Fields,
    drivers: Mapping[str, str],
    groups: Mapping[str, str],
    minors: Mapping[str, int],
) -> tuple[tuple[str, Holder], ...]:
    """(address, who) for each function of `drivers`; all are keyed by address."""
    by_path = {f"/dev/vfio/{group}": address for address, group in groups.items()}
    for address, name in fields("vfiodev", 2):
        by_path[f"/dev/vfio/devices/{name}"] = address
    by_number: dict[str, list[str]] = {}
    for address, number in fields("number", 2):
        by_number.setdefault(_hex(number), []).append(address)
    for group, number in fields("groupnumber", 2):
        owners = [address for address, its in groups.items() if its == group]
        by_number.setdefault(_hex(number), []).extend(owners)
    for address, minor in minors.items():
        by_number.setdefault(f"c3:{minor:x}", []).append(address)
    by_number[MODESET] = [address for address, driver in drivers.items() if driver == "nvidia"]
    held: dict[tuple[str, int], bool] = {}
    for pid, _, path in fields("open", 3):
        path = path.removesuffix(" (deleted)")
        if path in by_path:
            held[by_path[path], int(pid)] = True
    for pid, number in fields("char", 2):
        for address in by_number.get(number, ()):
            held[address, int(pid)] = True
    for pid, address in fields("syspath", 2):
        if address in drivers:
            held[address, int(pid)] = True
    told = {pid for _, pid in held} | {int(pid) for pid, _ in fields("syspath", 2)}
    # Who has a group open has the devices of that group.
    told |= {int(pid) for pid, _, path in fields("open", 3) if _GROUP.search(path)}
    for pid, _, path in fields("open", 3):
        if path.startswith("anon_inode") and int(pid) not in told:
            for address, driver in drivers.items():
                if driver == "vfio-pci":
                    held.setdefault((address, int(pid)), False)
    found = []
    for (address, pid_), sure in held.items():
        who = describe(fields, pid_)
        found.append((address, who if sure else _unsure(who)))
    return tuple(found)


def _hex(number: str) -> str:
    """`195:1` of sysfs as stat prints it, `c3:1`."""
    major, _, minor = number.partition(":")
    return f"{int(major):x}:{int(minor):x}" if major.isdigit() and minor.isdigit() else number


def _unsure(who: Holder) -> Holder:
    return Holder(who.pid, who.process, who.vm, who.container, who.unit, sure=False)


def pending(fields: Fields, unbound: Sequence[str]) -> tuple[Pending, ...]:
    """Writes that have not returned, our own and others'. `unbound`: functions without a driver."""
    found: dict[int, Pending] = {}
    for address, pid, state, what in fields("marked", 4):
        found[int(pid)] = Pending(int(pid), _name(fields, pid), state, address, what)
    for pid, state, path in fields("write", 3):
        if int(pid) in found:
            continue
        cmd = "\n".join(rest for owner, rest in fields("cmd", 2) if owner == pid)
        named = _ADDRESS.findall(path) or _ADDRESS.findall(cmd)
        address = named[-1] if named else (unbound[0] if len(unbound) == 1 else "")
        what = f"a write to {path.rpartition('/')[2]}"
        if address:
            what += f" of {address}"
        found[int(pid)] = Pending(int(pid), _name(fields, pid), state, address, what)
    return tuple(found.values())


def _name(fields: Fields, pid: str) -> str:
    return next((comm for owner, comm in fields("comm", 2) if owner == pid), "?")


def hidden_users(fields: Fields) -> int:
    """Uses of the nvidia module that neither a module nor an open file of a process explains."""
    for count, dependents in fields("refs", 2):
        opened = any(number.startswith("c3:") for _, number in fields("char", 2))
        if count.isdigit() and dependents == "0" and not opened:
            return int(count)
    return 0
