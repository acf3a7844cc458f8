"""Both sides of a migration, what one run asks for, and its journal: what the phases share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer.down import down_steps
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable, UsageError
from deployer.events import Bus, StepDone, StepStarted
from deployer.migrate_cutover import way_of
from deployer.migrate_gap import Gap
from deployer.migrate_journal import PHASES, entered, newest
from deployer.migrate_preflight import Obstacle
from deployer.migrate_side import Marked, Side, mark_path, with_drain
from deployer.migrate_way import Direction, Way
from deployer.model import Facts
from deployer.remote.lock_record import owner_here
from deployer.state import Migration


@dataclass(frozen=True)
class MigrateOptions:
    """What the user asked for. `confirm` sees the plan's lines; False changes nothing."""

    base: Path
    environ: Mapping[str, str]
    dry_run: bool = False
    abort: bool = False
    retire: bool = False
    keep_source: bool = False
    confirm: Callable[[list[str]], bool] | None = None
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def deploy_dir(self) -> Path:
        """State, locks and run records."""
        return self.base.resolve().parent / ".deploy"


@dataclass
class MigrateResult:
    """How it ended. `done`: one line; `lines`: what a dry run shows."""

    error: DeployError | None = None
    done: str = ""
    lines: list[str] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    record: Migration | None = None
    declined: bool = False

    @property
    def exit_code(self) -> int:
        """0, or the error's code."""
        return self.error.exit_code if self.error is not None else 0

    def document(self) -> dict[str, Any]:
        """The JSON form, less the error."""
        return {
            "done": self.done,
            "plan": self.lines,
            "obstacles": [one.__dict__ for one in self.obstacles],
            "migration": self.record.model_dump() if self.record is not None else None,
        }


class Pair:
    """The source, the destination, and the record of one migration as this run writes it."""

    def __init__(
        self,
        source: Side,
        destination: Side,
        options: MigrateOptions,
        bus: Bus,
        run_id: str,
        result: MigrateResult,
    ) -> None:
        self.source, self.destination = source, destination
        self.options, self.bus, self.run_id, self.result = options, bus, run_id, result
        self.record = Migration(
            id=run_id,
            source=source.want.id,
            destination=destination.want.id,
            phase=PHASES[0],
            retire=options.retire,
            keep_source=options.keep_source,
        )
        self.controller = owner_here()
        self.read: Migration | None = None
        """The newest copy of any journal when this run decided."""

    def agreed(self) -> bool:
        """Asks, where somebody can be asked."""
        if self.options.confirm is None or self.options.confirm(self.result.lines):
            return True
        self.result.declined = True
        self.result.done = "declined; nothing was changed"
        return False

    @property
    def name(self) -> str:
        """`kpro6/qwen -> kpro5/qwen`."""
        return f"{self.source.want.id} -> {self.destination.want.id}"

    @property
    def sides(self) -> tuple[Side, Side]:
        """The source, the destination."""
        return self.source, self.destination

    def records(self, looks: Mapping[str, Facts]) -> list[Migration]:
        """All copies of the journal that can be seen. Raises StepBlocked for one that is unread."""
        found = [side.own.migration for side in self.sides]
        for side in self.sides:
            marked = looks[side.want.id].get(Marked) if side.want.id in looks else None
            if marked is not None and marked.problem:
                raise StepBlocked(
                    f"the record of a migration cannot be read: {marked.problem}",
                    where=f"{side.want.host_name}:{mark_path(side.want)}",
                    fix="was it written by a newer deploy? use that one",
                )
            found.append(marked.record if marked is not None else None)
        return [one for one in found if one is not None]

    def lock(self, side: Side) -> Facts:
        """The host's lock, and what is seen under it.

        Raises LockHeld; StepBlocked when another run has written the journal since it was read.
        """
        side.session.want_lock(self.run_id)
        facts = side.gather()
        marked = facts.get(Marked)
        if marked is not None and newest([self.read, marked.record]) != self.read:
            raise StepBlocked(
                "another run has worked on the migration in the meantime",
                where=self.name,
                fix="run the same command again: it looks anew",
            )
        return facts

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self.record = entered(self.record, phase, self.controller, time.time())
        self.save()
        for side in self.sides:
            side.on_step(f"migrate {phase}")

    def save(self, *, may_be_dark: Side | None = None) -> None:
        """All copies, the controller's first: none on a host is newer.

        Raises Unreachable, but not for `may_be_dark`, whose copy then stays older.
        """
        self.record.seq += 1
        self.result.record = self.record
        for side in reversed(self.sides):
            side.own.migration = self.record.model_copy()
            side.save()
        for side in reversed(self.sides):
            try:
                side.write_mark(self.record)
            except Unreachable as error:
                if side is not may_be_dark:
                    raise
                side.note("journal", f"its copy is not written: {error.what}", "warning")

    def record_everywhere(self, record: Migration, looks: Mapping[str, Facts]) -> None:
        """A run that was killed at its very end may have left an older copy on a host."""
        for side in reversed(self.sides):
            marked = looks[side.want.id].get(Marked) if side.want.id in looks else None
            if marked is not None and marked.record != record and not self.options.dry_run:
                side.write_mark(record)

    def finish(self, outcome: str) -> None:
        """The end, one way or the other. An aborted one leaves no record on the hosts."""
        self.record.outcome, self.record.entered = outcome, time.time()
        if outcome == "aborted":
            for side in reversed(self.sides):
                side.remove_mark()
            self.record.seq += 1
            for side in reversed(self.sides):
                side.own.migration = self.record.model_copy()
                side.save()
            self.result.record = self.record
        else:
            self.save()

    def way(self) -> Way:
        """The cut-over that the inventory names, with the journal as it is now.

        Raises UsageError when the inventory has changed since the traffic moved in another way.
        """
        way = way_of(self.source, self.destination, self.record, self.save)
        if self.record.cut and self.record.way not in ("", way.rules.kind):
            raise UsageError(
                f"the traffic was moved by cutover.{self.record.way}; the inventory has "
                f"cutover.{way.rules.kind} now",
                where=self.name,
                fix="put it back in the inventory until this migration is finished or taken back",
            )
        return way

    @contextmanager
    def told(self, phase: str) -> Iterator[None]:
        """The phase as a step of the destination's run, and how long it took."""
        want, began = self.destination.want, time.monotonic()
        self.bus.emit(StepStarted(want.host_name, want.id, f"migrate:{phase}"))
        try:
            yield
        except DeployError as error:
            spent = round(time.monotonic() - began, 3)
            step = f"migrate:{phase}"
            self.bus.emit(StepDone(want.host_name, want.id, step, "failed", str(error), spent))
            raise
        spent = round(time.monotonic() - began, 3)
        self.record.figures[f"{phase}_s"] = spent
        self.bus.emit(StepDone(want.host_name, want.id, f"migrate:{phase}", "done", phase, spent))

    def moved(self, direction: Direction) -> Gap | None:
        """Moves the traffic and tells the gap. Raises StepFailed when it is open after `back`."""
        gap = self.way().move(direction)
        if gap is None:
            return None
        self.destination.note("cutover", str(gap), "warning" if gap.open else "info")
        self.record.figures["gap_s"] = round(gap.longest_s, 3)
        if gap.open and direction == "back":
            raise StepFailed(
                "clients still get no answer",
                where=self.record.source,
                fix="correct the cut-over, then --abort again",
                evidence=(str(gap),),
            )
        return gap

    def drain_and_stop(self, side: Side, direction: Direction | None) -> None:
        """Ends a server that gets no traffic any more; None: it never got any."""
        if direction is None:
            side.bring(down_steps())
            return
        way = self.way()
        if told := way.drained(direction, way.rules.drain_s):
            side.note("stop", told)
        want = with_drain(side.want, way.rules.drain_s)
        side.bring(down_steps(), want=want)
