"""The lock of a host on this machine: two runs of one user do not meet on one host.

The kernel holds it and frees it when its owner dies, however it dies. The record beside it only
tells who holds it; it decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from deployer.errors import LockHeld, LockUnknown
from deployer.names import shown

UNSEEN = -1
"""In place of a start time that is hidden from us."""
RECORD_S = 1.0
"""How long after it took the lock a run may take to write who it is."""


@dataclass(frozen=True)
class Owner:
    """Who holds the lock. `since` in Unix seconds."""

    pid: int
    since: float
    command: str
    run_id: str
    step: str = ""
    start: int = 0
    """Kernel start time of the process, clock ticks: a pid alone may be another's by now."""

    @property
    def alive(self) -> bool:
        """Is the process that wrote the record running on this machine?"""
        return self.start > 0 and start_of(self.pid) in (self.start, UNSEEN)

    def describe(self, now: float) -> str:
        """`pid 4711 (deploy up kpro5), run 1a2b, at step shards, since 06:54:01 (12 min)`."""
        clock = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.since))
        minutes = max(0, int(now - self.since)) // 60
        step = f", at step {self.step}" if self.step else ""
        return f"pid {self.pid} ({self.command}), run {self.run_id}{step}, since {clock} " + (
            f"({minutes} min)" if minutes else "(just now)"
        )


class LocalLock:
    """`<dir>/locks/<host>.lock`; `dir` is the `.deploy` folder. A context manager."""

    def __init__(self, dir: Path, host: str, *, command: str, run_id: str) -> None:
        self.path = dir / "locks" / f"{host}.lock"
        self.record = dir / "locks" / f"{host}.owner.json"
        self._host = host
        pid = os.getpid()
        self._owner = Owner(pid, time.time(), command, run_id, "look", start_of(pid) or 0)
        # It brings asyncio along, which who only reads records has no need of.
        from filelock import FileLock

        self._lock = FileLock(self.path, timeout=0, thread_local=False)

    def acquire(self) -> None:
        """Takes the lock without waiting. Raises LockHeld, or LockUnknown when it cannot ask."""
        from filelock import Timeout

        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise self._held() from None
        except (OSError, NotImplementedError) as error:
            raise LockUnknown(
                f"the lock of {self._host} could not be asked for: {error}",
                where=shown(self.path),
                fix="move it away if it is no plain file; the inventory must lie on a filesystem "
                "with locks that you may write to",
            ) from error
        self._owner = replace(self._owner, since=time.time())
        try:
            self._write()
        except LockUnknown:
            self.release()
            raise

    def enter(self, step: str) -> None:
        """Records the step that the run is at. Raises LockUnknown; the lock stays held."""
        self._owner = replace(self._owner, step=step)
        self._write()

    def release(self) -> None:
        """Gives the lock back; nothing happens when it is not held."""
        if self._lock.is_locked:
            # A record that stays behind decides nothing; the lock must be given back in any case.
            with contextlib.suppress(OSError):
                self.record.unlink()
            self._lock.release()

    def _write(self) -> None:
        temporary = self.record.with_name(f"{self.record.name}.new")
        try:
            temporary.write_text(json.dumps(asdict(self._owner)), encoding="utf-8")
            temporary.replace(self.record)
        except OSError as error:
            raise LockUnknown(
                f"the owner of the lock of {self._host} cannot be recorded: {error}",
                where=shown(self.record),
                fix="free space or correct the permissions",
            ) from error

    def _held(self) -> LockHeld:
        owner, until = read_owner(self.record), time.monotonic() + RECORD_S
        # The one that holds it may be about to write; what is there can be a dead run's.
        while (owner is None or not owner.alive) and time.monotonic() < until:
            time.sleep(0.02)
            owner = read_owner(self.record)
        who = owner.describe(time.time()) if owner else "a run that has not written its record yet"
        return LockHeld(
            f"{self._host} is in use by {who}",
            where=shown(self.path),
            fix="wait for it to end, or stop that run (Ctrl-C, or TERM to its pid): the lock goes "
            "with the process",
        )

    def __enter__(self) -> LocalLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def read_owner(record: Path) -> Owner | None:
    """The record of a lock's owner, None when there is none or it cannot be read."""
    try:
        data = json.loads(record.read_bytes())
        since = float(data["since"])
        time.localtime(since)
        return Owner(
            int(data["pid"]),
            since,
            str(data["command"]),
            str(data["run_id"]),
            str(data["step"]),
            int(data.get("start", 0)),
        )
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, RecursionError):
        return None


def start_of(pid: int) -> int | None:
    """Kernel start time (clock ticks) of a running process of this machine, None without one.

    UNSEEN when there is one and /proc hides it from us (mount option hidepid).
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return UNSEEN if pid > 0 and _exists(pid) else None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
