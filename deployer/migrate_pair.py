"""Both sides of a migration and its journal: what the phases share."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from deployer.down import down_steps
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable, UsageError
from deployer.events import Bus, StepDone, StepStarted
from deployer.inventory import Cutover
from deployer.migrate_cutover import way_of
from deployer.migrate_gap import Gap
from deployer.migrate_journal import PHASES, entered, same, unknown, word
from deployer.migrate_mark import Marked, mark_path
from deployer.migrate_result import MigrateOptions, MigrateResult
from deployer.migrate_side import Side, with_drain
from deployer.migrate_way import Direction, Way
from deployer.model import Facts
from deployer.remote.lock_record import owner_here
from deployer.state import Migration


def route(rules: Cutover) -> str:
    """Where the traffic moves, when that must not change on the way; a hook may be corrected."""
    if rules.router is not None:
        return rules.router.url
    return rules.address.ip if rules.address is not None else ""


def _unread(problem: str, place: str, damaged: str) -> StepBlocked:
    fix = f"when no migration of it is under way, remove {damaged} there"
    return StepBlocked(
        f"the record of a migration cannot be read: {problem}",
        where=place,
        fix=fix if damaged else "was it written by a newer deploy? use that one",
    )


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
        self.marks: dict[str, Migration | None] = {}
        """The copies on the hosts that were seen, by the side's id, as this run has left them."""
        self.was_kept = False
        """The source, as far as the journal said."""
        self.free: frozenset[str] = frozenset()
        """Sides that were released by an earlier `--abort`: they may have another migration."""
        self.absent: set[str] = set()
        """Sides that cannot be reached and are not needed: their host's copy stays older."""

    def goes_on(self, record: Migration) -> None:
        """The record of one that is resumed, with what is asked for now: the later word counts."""
        options = self.options
        self.was_kept = record.keep_source
        retire = options.retire or (record.retire and not options.keep_source)
        keep = options.keep_source or (record.keep_source and not options.retire)
        asked = {"retire": retire, "keep_source": keep}
        self.record = record.model_copy(update=asked, deep=True)

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
        """All copies of the journal that can be seen.

        Raises StepBlocked for one that is not understood, or for one that is damaged when there is
        no other.
        """
        found: list[Migration] = []
        damaged: list[StepBlocked] = []
        for side in self.sides:
            own = side.own.migration
            if own is not None and (strange := unknown(own)):
                raise _unread(f"{strange} is not known", str(side.file.path), "")
            facts = looks.get(side.want.id)
            marked = facts.get(Marked) if facts is not None else None
            if marked is None:
                continue
            self.marks[side.want.id] = marked.record
            place = f"{side.want.host_name}:{mark_path(side.want)}"
            if marked.damaged:
                damaged.append(_unread(marked.problem, place, mark_path(side.want)))
            elif marked.problem:
                raise _unread(marked.problem, place, "")
            elif marked.record is not None:
                found.append(marked.record)
        found += self._in_state([one.id for one in found], certain=not damaged)
        if damaged and not found:
            raise damaged[0]
        for error in damaged:
            self.destination.note("journal", f"{error}; the other copies count", "warning")
        return found

    def _in_state(self, on_hosts: Collection[str], *, certain: bool) -> list[Migration]:
        """The copies here. One under way that no host knows was taken back by another controller,
        or never began: it is written there before anything is touched.
        """
        found = []
        everywhere = certain and all(side.want.id in self.marks for side in self.sides)
        for record in (side.own.migration for side in self.sides):
            if record is None:
                continue
            if everywhere and not record.outcome and record.id not in on_hosts:
                text = f"no host has the record of {word(record)}: it was taken back elsewhere"
                text += ", or had not begun"
                self.destination.note("journal", text)
                record = record.model_copy(update={"outcome": "aborted"})
            found.append(record)
        return found

    def lock(self, side: Side) -> Facts:
        """The host's lock, and what is seen under it.

        Raises LockHeld; StepBlocked when another run has written the journal since it was read.
        """
        side.session.want_lock(self.run_id)
        facts = side.gather()
        marked, name = facts.get(Marked), side.want.id
        if marked is not None and name in self.marks and not same(marked.record, self.marks[name]):
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
        for side in self.save_here():
            if side.want.id in self.absent:
                continue
            try:
                side.write_mark(self.record)
                self.marks[side.want.id] = self.record.model_copy(deep=True)
            except Unreachable as error:
                if side is not may_be_dark:
                    raise
                side.note("journal", f"its copy is not written: {error.what}", "warning")

    def save_here(self) -> list[Side]:
        """The copies of this machine alone, at once; the sides whose copies they are."""
        self.record.seq += 1
        self.result.record = self.record
        writing = [side for side in reversed(self.sides) if side.want.id not in self.free]
        for side in writing:
            side.own.migration = self.record.model_copy(deep=True)
            side.save()
        return writing

    def record_everywhere(self, record: Migration) -> None:
        """A run that was killed at its very end may have left an older copy."""
        for side in reversed(self.sides) if not self.options.dry_run else ():
            own, name = side.own.migration, side.want.id
            if own is not None and own.id == record.id and own != record:
                side.own.migration = record.model_copy()
                side.save()
            if record.outcome != "done" or name not in self.marks:
                continue
            there = self.marks[name]
            if there is None or (there.id == record.id and there.seq < record.seq):
                self.lock(side)
                side.write_mark(record)

    def finish(self, outcome: str) -> None:
        """The end, one way or the other. An aborted one leaves no record on the hosts.

        A side that has another migration by now keeps that one's.
        """
        record = self.record
        record.outcome, record.entered, record.released = outcome, time.time(), []
        if outcome != "aborted":
            self.save()
            return
        for side in reversed(self.sides):
            there = self.marks.get(side.want.id)
            if side.want.id not in self.free or (there is not None and there.id == record.id):
                side.remove_mark()
        record.seq += 1
        for side in reversed(self.sides):
            own = side.own.migration
            if side.want.id not in self.free or (own is not None and own.id == record.id):
                side.own.migration = record.model_copy()
                side.save()
        self.result.record = record

    def way(self) -> Way:
        """The cut-over that the inventory names, with the journal as it is now.

        Raises UsageError when the inventory has changed since the traffic moved in another way.
        """
        way, record = way_of(self.source, self.destination, self.record, self.save), self.record
        was = f"cutover.{record.way} {record.route}".rstrip()
        now = f"cutover.{way.rules.kind} {route(way.rules)}".rstrip()
        other = record.way not in ("", way.rules.kind)
        if record.cut and (other or (record.route and record.route != route(way.rules))):
            raise UsageError(
                f"the traffic was moved by {was}; the inventory has {now} now",
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
        want = with_drain(side.want, self.way().rules.drain_s)
        side.bring(down_steps(), want=want)
