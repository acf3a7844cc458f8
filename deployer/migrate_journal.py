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
    """A new migration. `why`: when there was one before."""

    why: str = ""


@dataclass(frozen=True)
class Resume:
    """The one that is under way, at its phase. `finished`: it was, and is to retire its source."""

    record: Migration
    finished: bool = False


@dataclass(frozen=True)
class TakeBack:
    """`--abort` of this one."""

    record: Migration


@dataclass(frozen=True)
class Nothing:
    """It was finished or taken back before."""

    record: Migration
    why: str


Decision = Begin | Resume | TakeBack | Nothing


@dataclass(frozen=True)
class Seen:
    """What was seen before the decision; None: not known.

    `source_serves`: as proven. `retired`: the source's container is stopped and its GPUs are on
    vfio-pci.
    """

    source_serves: bool | None = None
    retired: bool | None = None


def newest(records: Iterable[Migration | None]) -> Migration | None:
    """Of copies of one record the one with the highest `seq`; of several the last that began."""
    known = [record for record in records if record is not None]
    return max(known, key=lambda one: (one.started, one.id, one.seq), default=None)


def decide(
    records: Iterable[Migration | None],
    source: str,
    destination: str,
    seen: Seen,
    *,
    abort: bool,
    retire: bool,
) -> Decision:
    """What a run of `migrate source destination` does.

    Raises OtherMigration; UsageError when this one is being taken back, or when there is none to
    abort.
    """
    known = [record for record in records if record is not None]
    latest = [newest(one for one in known if one.id == each) for each in {one.id for one in known}]
    mine = [one for one in latest if one and (one.source, one.destination) == (source, destination)]
    # One that is under way counts, whatever the clocks of two controllers say.
    ours = newest(one for one in mine if not one.outcome) or newest(mine)
    others = [one for one in latest if one is not None and one not in mine]
    needed = {source, destination} - set(ours.released if ours and not ours.outcome else ())
    for other in others:
        if not other.outcome and needed & bound(other):
            raise OtherMigration(
                f"{word(other)} is under way, in phase {other.phase}{_by(other)}",
                where=f"{source} -> {destination}",
                fix=f"finish it (`deploy migrate {other.source} {other.destination}`), or take it "
                "back with --abort",
            )
    if ours is None or (ours.outcome == "aborted" and not abort):
        if not abort:
            return Begin()
        raise UsageError(
            "there is no migration to abort",
            where=f"{source} -> {destination}",
            fix="`deploy status` shows what serves",
        )
    if ours.outcome == "aborted":
        return Nothing(ours, f"{word(ours)} is taken back: nothing is left to do")
    came = [one for one in [ours, *others] if one.outcome != "aborted" and needed & bound(one)]
    later = newest(came) if ours.outcome else None
    if later is not None and later.id != ours.id and (abort or seen.source_serves is False):
        raise UsageError(
            f"{word(later)} came after it",
            where=f"{source} -> {destination}",
            fix="`deploy status` shows what serves; from there it moves with `deploy migrate`",
        )
    if abort:
        return TakeBack(ours)
    if ours.back:
        raise UsageError(
            f"{word(ours)} is being taken back{_by(ours)}",
            where=f"{source} -> {destination}",
            fix="run it with --abort to finish that; then it can begin anew",
        )
    if not ours.outcome:
        return Resume(ours)
    if seen.source_serves and not ours.keep_source:
        return Begin(f"{source} serves again since {word(ours)} was finished: it moves anew")
    if retire and (not ours.retire or ours.keep_source or seen.retired is False):
        # What was kept may have got traffic again: that moves first.
        phase = "cutover" if ours.keep_source else "stop"
        return Resume(ours.model_copy(update={"phase": phase, "outcome": ""}), finished=True)
    return Nothing(
        ours, f"{word(ours)} was finished at {_when(ours.entered)}; --abort would take it back"
    )


def bound(record: Migration) -> set[str]:
    """The deployments that it still needs."""
    return {record.source, record.destination} - set(record.released)


def word(record: Migration) -> str:
    """The migration, for people."""
    return f"the migration {record.source} -> {record.destination} ({record.id})"


def _by(record: Migration) -> str:
    return f" (written by {record.controller})" if record.controller else ""


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def after(phase: str) -> str:
    """The phase that follows; '' after the last."""
    at = PHASES.index(phase) + 1
    return PHASES[at] if at < len(PHASES) else ""


def entered(record: Migration, phase: str, controller: str, now: float) -> Migration:
    """The record as it is when `phase` begins. `now` in Unix seconds."""
    return record.model_copy(
        update={"phase": phase, "seq": record.seq + 1, "entered": now, "controller": controller}
    )


def same(one: Migration | None, other: Migration | None) -> bool:
    """Are they the same copy of one record, or both none?"""
    if one is None or other is None:
        return one is other
    return (one.id, one.seq) == (other.id, other.seq)


def unknown(record: Migration) -> str:
    """What in it this version does not know, '' when it knows all."""
    if record.phase not in PHASES:
        return f"phase {record.phase!r:.40}"
    return "" if record.outcome in ("", "done", "aborted") else f"outcome {record.outcome!r:.40}"
