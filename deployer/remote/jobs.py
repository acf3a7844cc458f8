"""Detached jobs on a target (DESIGN section 4). Contract; the implementation follows it.

Below /var/lib/deployer/jobs/<name>/<id>/: `script`, `log`, `pid`, `start` (kernel start time in
clock ticks, field 22 of /proc/PID/stat), `boot` (boot id), `session`, `exit` ("code N" or
"signal N", written when it ends), `progress` (JSON line, written by the job itself), and the job's
own files. `current` is a symlink in <name>/ to the newest <id>.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deployer.remote.transport import Transport

ROOT = "/var/lib/deployer/jobs"


@dataclass(frozen=True)
class JobIdentity:
    """Boot id + pid + start time (clock ticks). Nothing is signalled or believed on a bare pid."""

    name: str
    id: str
    pid: int
    start: int
    boot: str
    session: int


@dataclass(frozen=True)
class JobStatus:
    """What a job is now. `exit`: 0..255, or -n for signal n, None while it runs or if unknown.

    `alive` False with `exit` None: it vanished without writing its end (kill -9, reboot).
    """

    identity: JobIdentity
    alive: bool
    exit: int | None
    log: bytes
    """New log bytes since the offset that was asked for."""
    inode: int
    offset: int
    """Where to ask from next."""
    progress: str
    """The job's last progress line, '' when none."""


@dataclass(frozen=True)
class StopProof:
    """What was seen after a stop: nothing of the job's session is left, or who is."""

    stopped: bool
    survivors: tuple[str, ...]
    how: str
    """`already gone`, `TERM`, `KILL`, `stuck in D state`."""


class Jobs:
    """The job mechanism of one target."""

    def __init__(self, transport: Transport, root: str = ROOT) -> None:
        self.transport = transport
        self.root = root

    def start(
        self,
        name: str,
        job_id: str,
        script: str,
        *,
        files: Mapping[str, bytes] | None = None,
        secrets: Mapping[str, str] | None = None,
        log_max_bytes: int = 64 * 1024 * 1024,
    ) -> JobIdentity:
        """Starts `script` detached and returns only after its live pid was read back.

        One of `name` that is alive is returned instead: a second is never started. `secrets` go by
        stdin into the environment of the script (a 0600 file removed once read).
        """
        raise NotImplementedError

    def find(self, name: str) -> JobStatus | None:
        """The newest job of `name`, alive or not; None when there never was one."""
        raise NotImplementedError

    def poll(self, job: JobIdentity, *, inode: int = 0, offset: int = 0) -> JobStatus:
        """One small exec: alive, exit, new log bytes, progress."""
        raise NotImplementedError

    def follow(
        self,
        job: JobIdentity,
        *,
        timeout_s: float,
        stall_s: float,
        on_status: Callable[[JobStatus], None] | None = None,
        every_s: float = 1.0,
    ) -> JobStatus:
        """Waits for the end. Raises DeadlineExceeded with the reason on timeout or stall."""
        raise NotImplementedError

    def stop(self, job: JobIdentity, *, grace_s: float, kill_s: float = 15.0) -> StopProof:
        """TERM to the group, deadline, KILL to the group and the rest of the session, proof."""
        raise NotImplementedError
