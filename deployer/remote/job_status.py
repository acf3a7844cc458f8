"""What a job is, as its target tells it; and the probe that asks (DESIGN section 4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from deployer import errors
from deployer.model import Probe, ProbeOutput, Where
from deployer.remote import job_scripts
from deployer.shell import quote

ROOT = "/var/lib/deployer/jobs"
TAIL_BYTES = 4096

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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


def status_script(name: str, root: str = ROOT, tail_bytes: int = TAIL_BYTES) -> str:
    """Read-only sh text that tells of the newest job of `name`; for `parse_status`."""
    check_words(name)
    return f"set -- {quote(root)} {quote(name)} {tail_bytes}\n{job_scripts.FIND}"


def parse_status(name: str, raw: bytes) -> JobStatus | None:
    """The answer of `status_script`: None when there never was a job of `name`.

    Raises RemoteCommandFailed when the answer is not one.
    """
    if raw == b"none\n":
        return None
    header, found, log = raw.partition(b"\n\n")
    pairs = (line.partition(" ") for line in header.decode("utf-8", "replace").split("\n"))
    values = {key: value for key, _, value in pairs}
    try:
        if not found:
            raise ValueError("it has no end")
        identity = JobIdentity(
            name,
            values["id"],
            int(values["pid"]),
            int(values["start"]),
            values["boot"],
            int(values["session"]),
        )
        ended = _parse_exit(values["exit"])
        return JobStatus(
            identity,
            values["alive"] == "yes" and ended is None,
            ended,
            log,
            int(values["inode"]),
            int(values["from"]) + len(log),
            values["progress"],
        )
    except (KeyError, ValueError) as error:
        raise errors.RemoteCommandFailed(
            f"the record of job {name} is damaged: {error}",
            fix=f"look at {ROOT}/{name} on the target",
            evidence=tuple(header.decode("utf-8", "replace").splitlines()[:12]),
        ) from error


def _parse_exit(text: str) -> int | None:
    if not text:
        return None
    kind, _, number = text.partition(" ")
    if kind not in ("code", "signal"):
        raise ValueError(f"not an exit: {text!r}")
    return int(number) if kind == "code" else -int(number)


def job_probe(
    name: str, where: Where, fact_type: Callable[[JobStatus | None], object], root: str = ROOT
) -> Probe:
    """A probe whose fact is `fact_type(JobStatus | None)`: the newest job of `name`.

    Its `log` is the end of the job's log. An unreadable answer raises and is never "no job".
    """

    def parse(output: ProbeOutput) -> object:
        if output.timed_out or output.exit != 0:
            raise errors.RemoteCommandFailed(
                f"job {name} could not be looked at"
                + (" in time" if output.timed_out else f" (exit {output.exit})"),
                evidence=tuple(output.error_text.splitlines()[-5:]),
            )
        return fact_type(parse_status(name, output.stdout))

    return Probe(f"job {name}", where, status_script(name, root), parse)


def check_words(*names: str) -> None:
    """Raises ValueError for what cannot be a job's name or id."""
    for name in names:
        if not WORD.fullmatch(name):
            raise ValueError(f"not a job name or id: {name!r}")
