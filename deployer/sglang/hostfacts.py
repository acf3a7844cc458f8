"""What the machine says about a launch that failed, and what it makes of the log's answer. Pure.

A log often ends with a consequence: a worker that the kernel killed is only "crashed" there. The
kernel's lines, the counters of the control group and the holders of GPU memory tell the cause.
Facts that were not seen change nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployer.sglang.failure import Failure

DIED = frozenset(
    {
        *("killed", "child-killed", "child-crashed", "worker-died", "crashed", "unknown"),
        *("exception", "nccl", "distributed-timeout", "silent", "phase-overdue", "watchdog"),
    }
)
"""Classes that name no more than the end of a process, or a rank that others miss."""
DEVICE = DIED | {"cuda-fault", "no-gpu", "graph-capture-failed"}
MEMORY = frozenset(
    {"not-enough-memory", "graph-capture-out-of-memory", "out-of-memory", "gpu-occupied"}
)
SHARED = frozenset({"nccl", "crashed", "unknown", "exception", "child-crashed", "worker-died"})
STORING = frozenset({"unknown", "exception", "died-silent", "silent"})
WEIGHED = DEVICE | MEMORY | SHARED | STORING
"""Classes on which the machine may have a word; for others it need not be asked."""
STRANGER_MIB = 1024
"""A desktop or a monitor that holds less is not what a model's launch fails for."""
SHM_KIB = 32 * 1024
DISK_KIB = 1024
BROKEN_XIDS = frozenset({48, 62, 64, 74, 79, 92, 95, 109, 110, 119, 120, 136, 140, 143, 154})
"""Xids of the device itself. 13, 31, 43, 45 are what a faulty program leaves behind."""
XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
OOM = re.compile(r"oom-kill:|Out of memory: Killed process|out of memory: Killed process")
KILLED = re.compile(r"Killed process (?P<pid>\d+) \((?P<comm>[^)]*)\)")
MEMCG = re.compile(r"task_memcg=(?P<path>[^,\s]*)")
OUR_COMM = re.compile(r"^(?:sglang|python|pt_main|nvcc|cicc|ptxas|cudafe|ninja)")


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of one of the deployment's GPUs, as the host sees it."""

    pid: int
    name: str
    mib: int
    address: str
    stranger: bool
    """It ran before the launch, or outside of its container."""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name}) holds {self.mib} MiB of GPU {self.address}"


@dataclass(frozen=True)
class Disk:
    """A folder that the server writes to: free KiB and inodes (None: the system counts none)."""

    path: str
    free_kib: int
    free_inodes: int | None = None

    @property
    def full(self) -> bool:
        """Can no file be written any more?"""
        return self.free_kib < DISK_KIB or self.free_inodes == 0


@dataclass(frozen=True)
class HostFacts:
    """None or empty: not seen. `kernel`: lines of the launch's time that speak of GPUs or memory.

    `container`: its number in the kernel's control groups, '' when the server runs on the host.
    """

    oom_kills: int | None = None
    """Kills in the target's control group since the launch began."""
    kernel: tuple[str, ...] = ()
    kernel_problem: str = ""
    container: str = ""
    gpus: tuple[str, ...] = ()
    """PCI addresses of the deployment."""
    gpu_free_mib: Mapping[str, int] = field(default_factory=dict)
    holders: tuple[Holder, ...] = ()
    shm_kib: int | None = None
    shm_free_kib: int | None = None
    disks: tuple[Disk, ...] = ()
    memory_free_kib: int | None = None
    nofile: str = ""
    members: tuple[str, ...] = ()
    """Processes of the launch that were still there: `pid state title`."""

    @property
    def broken_gpu(self) -> str:
        """The first kernel line that says that one of our GPUs has failed."""
        for line in self.kernel:
            xid = XID.search(line)
            if xid is None or int(xid["number"]) not in BROKEN_XIDS:
                continue
            bus = _bus(xid["bus"])
            if not self.gpus or any(_bus(address) == bus for address in self.gpus):
                return line
        return ""

    @property
    def oom_line(self) -> str:
        """The kernel's line about a kill for memory that was ours; '' when there is none."""
        ours = ""
        known = False
        for line in self.kernel:
            if not OOM.search(line):
                continue
            if memcg := MEMCG.search(line):
                known = True
                ours = line if self._our_memcg(memcg["path"], line) else ""
                continue
            killed = KILLED.search(line)
            if killed and (ours or not known) and OUR_COMM.match(killed["comm"]):
                return line
        return ours

    @property
    def strangers(self) -> tuple[Holder, ...]:
        """Others that hold enough GPU memory to matter."""
        return tuple(one for one in self.holders if one.stranger and one.mib >= STRANGER_MIB)

    def lines(self) -> tuple[str, ...]:
        """What of it a reader should see below the log's lines; nothing that is as it should be."""
        told = [f"kernel: {line}" for line in self.kernel[-5:]]
        if self.oom_kills:
            told.append(f"control group: {self.oom_kills} killed for memory since the launch began")
        told += [f"GPU: {one}" for one in self.strangers]
        if self.shm_free_kib is not None and self.shm_free_kib < SHM_KIB:
            told.append(f"/dev/shm: {self.shm_free_kib} KiB free of {self.shm_kib}")
        for disk in self.disks:
            if disk.full:
                inodes = "" if disk.free_inodes is None else f", {disk.free_inodes} inodes"
                told.append(f"{disk.path}: {disk.free_kib} KiB{inodes} free")
        told += [f"process: {line}" for line in self.members[:12]]
        return tuple(told)

    def _our_memcg(self, path: str, line: str) -> bool:
        if self.container:
            return bool(re.search(rf"/lxc(?:\.payload\.|/){self.container}(?:/|$)", path))
        task = re.search(r"\btask=([^,]*)", line)
        return bool(task and OUR_COMM.match(task[1]))


def weigh(failure: Failure, exit_code: int | None, facts: HostFacts) -> Failure:
    """The failure with the machine's word on it; the log's own class where it says nothing."""
    cls = failure.cls
    silent_kill = cls == "died-silent" and exit_code in (-9, 137)
    if cls in DEVICE and (line := facts.broken_gpu):
        return Failure(
            "gpu-broken",
            line,
            "a GPU has failed: reset or replace it (the host's `dmesg` has the Xid lines)",
            False,
        )
    if cls in DIED or silent_kill:
        line = facts.oom_line
        if line or facts.oom_kills:
            return Failure(
                "host-out-of-memory",
                line or f"the kernel killed {facts.oom_kills} of the container's processes",
                "the target's own memory (not the GPU's) is full: raise the container's memory",
                False,
            )
    if cls in MEMORY and facts.strangers:
        held = "; ".join(map(str, facts.strangers))
        said = f"; the server says: {failure.cause_line}" if failure.cause_line else ""
        return Failure(
            "gpu-occupied",
            f"{held}{said}"[:500],
            "end that process (this tool leaves it alone), or take other GPUs; the arguments may "
            "be right",
            False,
        )
    if cls in SHARED and facts.shm_free_kib is not None and facts.shm_free_kib < SHM_KIB:
        return Failure(
            "shared-memory-full",
            f"/dev/shm has {facts.shm_free_kib} KiB free of {facts.shm_kib}",
            "/dev/shm of the container is too small for NCCL: make it larger (8 GB or more)",
            False,
        )
    if cls in STORING and (full := [disk for disk in facts.disks if disk.full]):
        return Failure(
            "disk-full",
            f"{full[0].path} has {full[0].free_kib} KiB and {full[0].free_inodes} inodes free",
            "a file system of the target is full: `df -h` there, then free space",
            False,
        )
    if cls in ("killed", "child-killed"):
        return dataclasses.replace(failure, action=_not_the_kernel(facts, failure.action))
    return failure


def _not_the_kernel(facts: HostFacts, action: str) -> str:
    """What is left when no kill for memory was seen."""
    if facts.oom_kills == 0 and not facts.kernel_problem:
        return "no kill for memory was seen: a person or another program killed it"
    if facts.kernel_problem:
        return f"{action} (it could not be read from here: {facts.kernel_problem[:200]})"
    return action


def _bus(address: str) -> str:
    """`0000:21:00.0` and `0000:21:00` -> `0:21:0`."""
    parts = address.lower().partition(".")[0].split(":")
    return ":".join(part.lstrip("0") or "0" for part in parts)
