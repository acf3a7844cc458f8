"""The journal of `deploy migrate`: which phase, on whose word, and what the next run may do. Pure.

The record is kept four times: in the state of both deployments, and on both hosts, so that another
controller recognises it. The newest copy counts; the machine itself is looked at in any case.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from deployer.errors import UsageError
from deployer.state import Migration

PHASES = ("prepare", "weights", "launch", "cutover", "settle", "stop", "retire")
"""After the preflight, which is not journaled: it touches nothing.

prepare: driver, GPUs, container and venv of the destination. weights: copied or downloaded there.
launch: started and proven there while the source serves. cutover: the traffic moves. settle: the
destination serves through it, the source still runs. stop: the source drains and ends. retire: its
container stops and its GPUs go back to vfio-pci.
"""
FOLDER = "/var/lib/deployer/migrations"
"""On a host: <deployment>.json."""


class OtherMigration(UsageError):
    """Another migration of one of the two is under way: in the way as other obstacles are."""


@dataclass(frozen=True)
class Begin:
    """A new migration."""


@dataclass(frozen=True)
class Resume:
    """The one that is under way, at its phase."""

    record: Migration


@dataclass(frozen=True)
class TakeBack:
    """`--abort` of this one."""

    record: Migration


@dataclass(frozen=True)
class Nothing:
    """It was finished before."""

    record: Migration
    why: str


Decision = Begin | Resume | TakeBack | Nothing


def newest(records: Iterable[Migration | None]) -> Migration | None:
    """Of copies of one record the one with the highest `seq`; of several the last that began."""
    known = [record for record in records if record is not None]
    return max(known, key=lambda one: (one.started, one.id, one.seq), default=None)


def decide(
    records: Iterable[Migration | None],
    source: str,
    destination: str,
    *,
    abort: bool,
    retire: bool,
    source_serves: bool | None,
) -> Decision:
    """What a run of `migrate source destination` does. `source_serves`: None when not known.

    Raises OtherMigration; UsageError when this one is being taken back, or when there is none to
    abort.
    """
    known = [record for record in records if record is not None]
    ids = {record.id for record in known}
    latest = [newest(one for one in known if one.id == each) for each in ids]
    ours = newest(one for one in latest if one and _is(one, source, destination))
    for other in latest:
        if other is not None and not other.outcome and not _is(other, source, destination):
            raise OtherMigration(
                f"{_word(other)} is under way, in phase {other.phase}",
                where=f"{source} -> {destination}",
                fix=f"finish it (`deploy migrate {other.source} {other.destination}`), or take it "
                "back with --abort",
            )
    if ours is None or ours.outcome == "aborted":
        if abort:
            raise UsageError(
                "there is no migration to abort",
                where=f"{source} -> {destination}",
                fix="`deploy status` shows what serves",
            )
        return Begin()
    if abort:
        later = newest(latest)
        if later is not None and later.id != ours.id:
            raise UsageError(
                f"{_word(later)} came after it",
                where=f"{source} -> {destination}",
                fix=f"migrate back: `deploy migrate {destination} {source}`",
            )
        return TakeBack(ours)
    if ours.back:
        raise UsageError(
            f"{_word(ours)} is being taken back",
            where=f"{source} -> {destination}",
            fix="run it with --abort to finish that; then it can begin anew",
        )
    if not ours.outcome:
        return Resume(ours)
    if retire and not ours.retire:
        return Resume(ours.model_copy(update={"phase": "stop", "outcome": ""}))
    if source_serves and not ours.keep_source:
        return Begin()
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ours.entered))
    return Nothing(ours, f"{_word(ours)} was finished at {when}; --abort would take it back")


def _is(record: Migration, source: str, destination: str) -> bool:
    return (record.source, record.destination) == (source, destination)


def _word(record: Migration) -> str:
    return f"the migration {record.source} -> {record.destination} ({record.id})"


def after(phase: str) -> str:
    """The phase that follows; '' after the last."""
    at = PHASES.index(phase) + 1
    return PHASES[at] if at < len(PHASES) else ""


def entered(record: Migration, phase: str, controller: str, now: float) -> Migration:
    """The record as it is when `phase` begins. `now` in Unix seconds."""
    return record.model_copy(
        update={"phase": phase, "seq": record.seq + 1, "entered": now, "controller": controller}
    )
