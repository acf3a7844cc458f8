"""Who holds a host lock, and when that holder is proven dead."""

from __future__ import annotations

import base64
import dataclasses
import getpass
import hashlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deployer.locallock import UNSEEN, start_of

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LAST_S = 1e11
"""No clock of a controller says more; a time beyond it is none."""


@dataclass(frozen=True)
class LockRecord:
    """Who holds the lock. Pid, boot id, start (clock ticks) and namespace are the controller's."""

    owner: str
    """user@controller"""
    host: str
    pid: int
    boot: str
    start: int
    machine: str
    namespace: str
    run_id: str
    step: str
    since: float
    """Unix seconds, controller clock."""
    hardware: str = ""
    """Words that no other machine shares (`hardware`); '' in a record of an older version."""

    @classmethod
    def mine(cls, host: str, run_id: str, step: str = "") -> LockRecord:
        """A record of this process, now. `host` is the inventory name of what is locked."""
        me = this_controller()
        return cls(
            owner=owner_here(),
            host=host,
            pid=os.getpid(),
            boot=me.boot,
            start=start_of(os.getpid()) or 0,
            machine=me.machine,
            namespace=me.namespace,
            run_id=checked(run_id),
            step=step,
            since=time.time(),
            hardware=" ".join(sorted(me.hardware)),
        )

    def line(self) -> str:
        """One base64 word."""
        return base64.b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    def describe(self, age: float | None = None) -> str:
        """`root@desk (run r1, pid 77) since 2026-11-30 06:54:20 UTC, in step venv (for 12 min)`.

        `since` is by the holder's clock; `age`, seconds that the step has taken, by the target's.
        """
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        text = f"{self.owner} (run {self.run_id}, pid {self.pid}) since {since}"
        if self.step:
            text += f", in step {self.step}"
        return text if age is None else f"{text} (for {age_text(age)})"


def age_text(seconds: float) -> str:
    """`40 s`, `12 min`, `5 h`, `3 days`."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class Held:
    """Someone has the lock. `record` is None when what they wrote cannot be read.

    `age`: seconds since it was written, by the target's clock; None when that is not known.
    """

    record: LockRecord | None
    run_id: str = ""
    age: float | None = field(default=None, compare=False)

    def describe(self) -> str:
        """Who, since when, in which step; or that the file does not say."""
        if self.record is not None:
            return self.record.describe(self.age)
        told = f"run {self.run_id[:128]}" if self.run_id else "a file that does not say whose it is"
        return told if self.age is None else f"{told}, written {age_text(self.age)} ago"


def _no_process(pid: int) -> int | None:
    del pid
    return None


@dataclass(frozen=True)
class Controller:
    """This machine, as far as it can prove a lock stale. Empty texts prove nothing."""

    host: str
    machine: str
    boot: str
    namespace: str
    start_of: Callable[[int], int | None] = field(default=_no_process, compare=False)
    """Kernel start time of a live process here, None when there is none, UNSEEN when it is hidden
    from us."""
    hardware: frozenset[str] = frozenset()


def this_controller() -> Controller:
    """The machine that we run on."""
    return Controller(
        host=socket.gethostname(),
        machine=_first_line("/etc/machine-id"),
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        start_of=start_of,
        hardware=frozenset(hardware()),
    )


def owner_here() -> str:
    """user@machine of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def hardware(root: Path = Path("/sys/class")) -> Iterator[str]:
    """Short hashes of what a copy of this machine does not have: its own network cards' addresses
    and the serial of its board.

    Machine id and name of cloned machines are the same, as are those of containers of one image. An
    address that was set or drawn at random (addr_assign_type not 0) is left out, as is an interface
    without a device: a container's. Linux, Documentation/ABI/testing/sysfs-class-net.
    """
    serials = [_first_line(str(root / "dmi/id/product_uuid"))]
    for card in sorted((root / "net").glob("*/device")):
        if _first_line(str(card.parent / "addr_assign_type")) == "0":
            serials.append(_first_line(str(card.parent / "address")))
    for serial in serials:
        # 00000000-..., ffffffff-...: no serial was given.
        if len(set(re.sub(r"[^0-9a-z]", "", serial.lower()))) > 1:
            yield hashlib.sha256(serial.lower().encode()).hexdigest()[:16]


def is_stale(record: LockRecord, me: Controller) -> str | None:
    """Why the holder is proven dead, or None. Only a holder on this very machine can be proven."""
    if not record.boot or not me.boot:
        return None
    if record.boot != me.boot:
        # Another boot proves a reboot only where the machine is known to be the same.
        if not (record.machine == me.machine and record.owner.endswith(f"@{me.host}")):
            return None
        if not me.hardware & set(record.hardware.split()):
            return None
        return f"{me.host} has been rebooted since"
    if record.namespace != me.namespace or not me.namespace or not record.start:
        return None
    start = me.start_of(record.pid)
    if start is None:
        return f"pid {record.pid} on {me.host} is gone"
    if start not in (record.start, UNSEEN):
        return f"pid {record.pid} on {me.host} is another process now"
    return None


def parse_record(line: str) -> LockRecord | None:
    """A record from its base64 word; None when it is not one."""
    try:
        values = json.loads(base64.b64decode(line, validate=True))
        known = {item.name for item in dataclasses.fields(LockRecord)}
        record = LockRecord(**{key: value for key, value in values.items() if key in known})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    texts = (record.owner, record.host, record.boot, record.machine, record.namespace, record.step)
    if not all(isinstance(text, str) for text in (*texts, record.run_id, record.hardware)):
        return None
    numbers = (record.pid, record.start)
    if not all(isinstance(one, int) and 0 <= one < 2**63 for one in numbers):
        return None
    if not isinstance(record.since, int | float) or not math.isfinite(record.since):
        return None
    return record if 0 <= record.since < LAST_S and RUN_ID.fullmatch(record.run_id) else None


def checked(run_id: str) -> str:
    """`run_id`, when it is one. Raises ValueError."""
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(f"not a run id: {run_id!r}")
    return run_id


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, ValueError):
        # Not Linux, or not for us to read: nothing can be proven by it, as an empty text says.
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
