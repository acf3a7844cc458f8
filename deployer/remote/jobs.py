"""Detached jobs on a target (DESIGN section 4). Contract; the implementation follows it.

Below /var/lib/deployer/jobs/<name>/<id>/: `script`, `log`, `pid`, `start` (kernel start time in
clock ticks, field 22 of /proc/PID/stat), `boot` (boot id), `session`, `exit` ("code N" or
"signal N", written when it ends), `progress` (JSON line, written by the job itself), and the job's
own files. `current` is a symlink in <name>/ to the newest <id>. Rotated logs are `log.1` (newest)
and up; offsets count every byte ever logged, so a reader survives rotation.

The script runs in its folder with JOB (the folder) and DEPLOYER_JOB (<name>/<id>) in its
environment.
A status above 128 is read as a signal, as sh reports it.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex

from deployer import errors
from deployer.remote import job_marks, job_scripts, job_start
from deployer.remote.job_status import (
    ROOT,
    TAIL_BYTES,
    WORD,
    JobIdentity,
    JobStatus,
    check_words,
    job_probe,
    parse_status,
    status_script,
)
from deployer.remote.transport import Answer, Transport
from deployer.shell import assignments

__all__ = [
    "ROOT",
    "JobIdentity",
    "JobOverdue",
    "JobStatus",
    "Jobs",
    "StopProof",
    "job_probe",
    "new_job_id",
    "parse_status",
    "status_script",
]

KEEP_LOGS = 3
ROTATE_EVERY_S = 10
LOST_S = 60.0
"""How long `follow` keeps asking a target that does not answer."""

_OWN_FILES = frozenset({"script", "wrapper", "enter", "secrets", "log", "pid", "start", "boot"}) | {
    *("session", "leader", "exit", "progress", "cgroup")
}


@dataclass(frozen=True)
class StopProof:
    """What was seen after a stop: nothing of the job's session is left, or who is."""

    stopped: bool
    survivors: tuple[str, ...]
    how: str
    """`already gone`, `TERM`, `KILL`, `stuck in D state`."""


class JobOverdue(errors.DeadlineExceeded):
    """The target answers, but a job runs too long or stands still. The job was left running."""


class Jobs:
    """The job mechanism of one target. `clock` and `sleep` are the controller's, in seconds."""

    def __init__(
        self,
        transport: Transport,
        root: str = ROOT,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rotate_every_s: int = ROTATE_EVERY_S,
    ) -> None:
        self.transport = transport
        self.root = root
        self._clock = clock
        self._sleep = sleep
        self._rotate_every_s = rotate_every_s

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
        check_words(name, job_id)
        settings = (log_max_bytes, KEEP_LOGS, self._rotate_every_s)
        answer = self.transport.run(
            job_start.START,
            args=(self.root, name, job_id, *map(str, settings)),
            stdin=_tar(script, files or {}, secrets or {}),
            timeout_s=60.0,
        )
        said, _, report = answer.stdout.partition(b"\n")
        status = parse_status(name, report) if answer.exit == 0 else None
        if said not in (b"started", b"attached") or status is None:
            raise self._failed(f"job {name}/{job_id} could not be started", answer)
        return status.identity

    def find(
        self, name: str, *, tail_bytes: int = TAIL_BYTES, job_id: str = ""
    ) -> JobStatus | None:
        """The newest job of `name` (or `job_id` of it), alive or not; None when there is none.

        `log` holds the last `tail_bytes` of its log and `offset` the log's end.
        """
        check_words(name, *([job_id] if job_id else []))
        args = (self.root, name, str(tail_bytes), *([job_id] if job_id else []))
        answer = self.transport.run(job_scripts.FIND, args=args)
        if answer.exit != 0:
            raise self._failed(f"job {name} could not be looked at", answer)
        return parse_status(name, answer.stdout)

    def poll(self, job: JobIdentity, *, inode: int = 0, offset: int = 0) -> JobStatus:
        """One small exec: alive, exit, new log bytes, progress."""
        answer = self.transport.run(
            job_scripts.POLL,
            args=(
                *(self.root, job.name, job.id, str(job.pid), str(job.start), job.boot),
                *(str(job.session), str(inode), str(offset), str(job_scripts.LOG_CHUNK)),
            ),
        )
        status = parse_status(job.name, answer.stdout) if answer.exit == 0 else None
        if status is None:
            raise self._failed(f"job {job.name}/{job.id} could not be looked at", answer)
        return status

    def follow(
        self,
        job: JobIdentity,
        *,
        timeout_s: float,
        stall_s: float,
        on_status: Callable[[JobStatus], None] | None = None,
        every_s: float = 1.0,
        inode: int = 0,
        offset: int = 0,
    ) -> JobStatus:
        """Waits for the end. Raises JobOverdue (DeadlineExceeded) with why on timeout or stall.

        `on_status` sees every log byte from `offset` on, also those of an ended job. A connection
        that is lost meanwhile is tried again for a minute; the job does not notice.
        """
        began = answered = moved = self._clock()
        progress = ""
        while True:
            try:
                status = self.poll(job, inode=inode, offset=offset)
            except errors.REFUSALS:
                raise
            except errors.Unreachable:
                now = self._clock()
                if now - answered >= LOST_S or now - began >= timeout_s:
                    raise
                self._sleep(every_s)
                continue
            now = answered = self._clock()
            inode, offset = status.inode, status.offset
            if status.log or status.progress != progress:
                moved, progress = now, status.progress
            if on_status is not None:
                on_status(status)
            if not status.alive and not status.log:
                return status
            if status.alive and now - began >= timeout_s:
                raise self._overdue(job, f"still runs after {timeout_s:g} s")
            if status.alive and now - moved >= stall_s:
                raise self._overdue(job, f"wrote no log or progress byte for {stall_s:g} s")
            if status.alive and len(status.log) < job_scripts.LOG_CHUNK:
                self._sleep(every_s)

    def stop(
        self, job: JobIdentity, *, grace_s: float, kill_s: float = 15.0, main_first: bool = False
    ) -> StopProof:
        """TERM to the group, deadline, KILL to the group and the rest of the session, proof.

        Processes that left the session are found by DEPLOYER_JOB in their environment.
        `main_first`: TERM goes to the script's own process only (a server that drains and stops its
        children itself); the others get theirs once it is gone.
        """
        if not self._survey(job, "none"):
            return StopProof(True, (), "already gone")
        left = self._survey(job, "main" if main_first else "TERM")
        deadline = self._clock() + grace_s
        pause = 0.05
        while left and self._clock() < deadline:
            self._sleep(pause)
            pause = min(pause * 2, 1.0)
            left = self._survey(job, "none")
            if main_first and left and not any(member.role == "main" for member in left):
                main_first = False
                left = self._survey(job, "TERM")
        if not left:
            return StopProof(True, (), "TERM")
        deadline = self._clock() + kill_s
        action = "KILL"
        while left and self._clock() < deadline:
            left = self._survey(job, action)
            if left:
                self._sleep(0.1)
                left = self._survey(job, "none")
                # The wrapper is spared once: it writes how the script ended.
                action = "KILLALL" if all(one.role == "wrapper" for one in left) else "KILL"
        if not left:
            return StopProof(True, (), "KILL")
        stuck = any(member.state == "D" for member in left)
        return StopProof(
            False, tuple(str(member) for member in left), "stuck in D state" if stuck else "KILL"
        )

    def prune(self, name: str, keep: int) -> tuple[str, ...]:
        """Removes all but the newest `keep` folders of `name`; returns the removed ids.

        The current job and any that is alive stay.
        """
        check_words(name)
        answer = self.transport.run(job_scripts.PRUNE, args=(self.root, name, str(keep)))
        if answer.exit != 0:
            raise self._failed(f"old jobs of {name} could not be removed", answer)
        return tuple(answer.text.split())

    def _survey(self, job: JobIdentity, action: str) -> tuple[_Member, ...]:
        answer = self.transport.run(
            job_marks.SURVEY,
            args=(
                *(self.root, job.name, job.id, str(job.pid), str(job.start), job.boot),
                *(str(job.session), action),
            ),
        )
        if answer.exit != 0 or not answer.stdout.endswith(b"end\n"):
            raise self._failed(f"what is left of job {job.name}/{job.id} is not known", answer)
        return tuple(
            _Member(int(parts[1]), parts[2], parts[3], parts[4] if len(parts) > 4 else "?")
            for parts in (line.split(" ", 4) for line in answer.text.splitlines())
            if parts[0] == "member"
        )

    def _failed(self, what: str, answer: Answer) -> errors.RemoteCommandFailed:
        lines = tuple(answer.error_text.splitlines()[-20:]) or (f"exit {answer.exit}",)
        return errors.RemoteCommandFailed(what, where=self.transport.name, evidence=lines)

    def _overdue(self, job: JobIdentity, why: str) -> JobOverdue:
        return JobOverdue(
            f"job {job.name}/{job.id} (pid {job.pid}) {why}", where=self.transport.name
        )


@dataclass(frozen=True)
class _Member:
    """A process of a job. `role`: main|wrapper|session|marked."""

    pid: int
    state: str
    role: str
    comm: str

    def __str__(self) -> str:
        return f"pid {self.pid} {self.comm} ({self.role}, state {self.state})"


def new_job_id() -> str:
    """A fresh id that sorts by time: `20261130-065420-3fa9`."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{token_hex(2)}"


def _tar(script: str, files: Mapping[str, bytes], secrets: Mapping[str, str]) -> bytes:
    """The files of a job's folder as they go over stdin."""
    taken = [name for name in files if name in _OWN_FILES or not WORD.fullmatch(name)]
    if taken:
        raise ValueError(f"not a name for a file of a job: {taken}")
    members: list[tuple[str, bytes, int]] = [
        ("wrapper", job_start.WRAPPER.encode(), 0o644),
        ("enter", job_start.ENTER.encode(), 0o644),
        ("script", script.encode("utf-8", "surrogateescape"), 0o644),
        *((name, content, 0o644) for name, content in files.items()),
    ]
    if secrets:
        members.append(("secrets", assignments(secrets).encode(), 0o600))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content, mode in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content), mode, int(time.time())
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
