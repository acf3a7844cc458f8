"""What a migration sees and decides before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deployer import migrate_retire
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable, UsageError
from deployer.migrate_adopted import strangers, told
from deployer.migrate_journal import (
    Begin,
    Decision,
    Nothing,
    OtherMigration,
    Resume,
    Seen,
    TakeBack,
    decide,
    newest,
)
from deployer.migrate_pair import Pair
from deployer.migrate_preflight import (
    Obstacle,
    destination_obstacles,
    differences,
    lock_obstacle,
    older_wish,
    one_machine,
    pair_obstacles,
    refused,
    source_obstacles,
)
from deployer.migrate_side import trouble
from deployer.model import Facts, Plan
from deployer.remote.lock_record import this_controller
from deployer.state import Migration
from deployer.steps.shards import pinned


class Outset:
    """The looks at both sides, the decision by the journal, and the preflight."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.source, self.destination = pair.source, pair.destination
        self.looks: dict[str, Facts] = {}
        self.problems: list[Obstacle] = []
        self.dark: dict[str, DeployError] = {}
        """Why a side could not be looked at, by its id."""
        self.finished = False
        """It was finished before, and its source is to be retired now."""
        self.begins = ""
        """What there was before it, when it begins anew."""

    def look(self) -> None:
        """At each side; one that cannot be looked at is an obstacle, not the end."""
        for side in self.pair.sides:
            try:
                self.looks[side.want.id] = side.gather()
            except DeployError as error:
                self.dark[side.want.id] = error

    def _problem(self, error: DeployError, where: str) -> None:
        place = error.where or where
        self.problems.append(Obstacle(place, error.what, error.fix, error.exit_code))

    def decide(self) -> Decision:
        """By all copies of the journal.

        What forbids to begin is an obstacle among the others; `--abort` raises it.
        """
        try:
            return self._decide()
        except UsageError as error:
            if self.pair.options.abort or not isinstance(error, OtherMigration):
                raise self._unseen(error) from error
            self._problem(error, self.pair.name)
            return Begin()
        except StepBlocked as error:
            if self.pair.options.abort:
                raise
            self._problem(error, self.pair.name)
            return Begin()

    def _unseen(self, error: DeployError) -> DeployError:
        """That there is no migration is not known while a host does not tell."""
        if not self.dark or not self.pair.options.abort:
            return error
        first, *others = self.dark.values()
        first.evidence += tuple(f"{other} -> {other.fix}" for other in others)
        return first

    def _decide(self) -> Decision:
        pair = self.pair
        records = pair.records(self.looks)
        decision = decide(
            records,
            self.source.want.id,
            self.destination.want.id,
            self._seen(),
            abort=pair.options.abort,
            retire=pair.options.retire,
        )
        if isinstance(decision, Begin) and decision.why:
            self.begins = decision.why
            self.destination.note("journal", decision.why)
        if isinstance(decision, Resume | TakeBack):
            record = newest(one for one in records if one.id == decision.record.id)
            seen = record or decision.record
            by = f", begun by {seen.controller}" if seen.controller != pair.controller else ""
            self.destination.note("journal", f"migration {seen.id}, in phase {seen.phase}{by}")
        self.finished = isinstance(decision, Resume) and decision.finished
        return decision

    def _seen(self) -> Seen:
        side, facts = self.source, self.looks.get(self.source.want.id)
        if facts is None:
            return Seen()
        return Seen(not trouble(side.want, facts), migrate_retire.is_retired(side, facts))

    def still_true(self, nothing: Nothing) -> None:
        """What the journal says is held against what is seen now.

        Raises what kept us from looking; StepFailed when who should serve does not.
        """
        done = nothing.record.outcome == "done"
        side = self.destination if done else self.source
        facts = self.looks.get(side.want.id)
        if facts is None:
            raise self.dark[side.want.id]
        if why := trouble(side.want, facts):
            other = "; or --abort" if done else ""
            raise StepFailed(
                f"{nothing.why}; but {side.want.id} does not serve as proven now: {why}",
                where=self.pair.name,
                fix=f"`deploy up {side.want.id}`{other}",
            )

    def preflight(self, *, resumed: bool) -> None:
        """Raises StepBlocked with every obstacle; shows the plan in a dry run."""
        pair, source, destination = self.pair, self.source, self.destination
        self.unreachable()
        found = list(self.problems)
        self.take_pin()
        me, record = this_controller(), pair.record
        old, new = self.looks.get(source.want.id), self.looks.get(destination.want.id)
        for side, facts in ((source, old), (destination, new)):
            if facts is not None:
                found += lock_obstacle(side.want.host_name, facts, me)
        if record.retire:
            found += migrate_retire.retire_obstacles(source.want)
        if old is not None and self.finished and not pair.was_kept:
            found += migrate_retire.restarted(source.want, old)
        elif old is not None and record.retire:
            found += migrate_retire.retire_users(source.want, old)
        if not record.cut:
            found += self.before_the_cut(old, new, record if resumed else None)
        found += one_machine(source.want, old, destination.want, new)
        found += self.way_obstacles(old, new)
        pair.result.obstacles = found
        if found:
            error = refused(found, source.want.id, destination.want.id)
            if record.cut:
                error.add(f"the traffic is at {destination.want.id}; --abort moves it back")
            raise error
        pair.result.lines = self.lines(new)

    def before_the_cut(
        self, old: Facts | None, new: Facts | None, record: Migration | None
    ) -> list[Obstacle]:
        """What the phases up to the cut-over need; what differs is told. No step of `up` comes
        after it.
        """
        source, destination = self.source, self.destination
        found = pair_obstacles(source.want, destination.want)
        if old is not None:
            found += source_obstacles(source.want, old)
        if new is not None:
            found += self.learnt()
            plans, own = self.plans(new), destination.own
            found += destination_obstacles(destination.want, new, own, plans, record)
        if old is not None and (line := older_wish(source.want, old, destination.own.manifest)):
            source.note("preflight", line, "warning")
        if old is not None and new is not None:
            for line in differences(source.want, old, destination.want, new):
                destination.note("preflight", line)
        return found

    def unreachable(self) -> None:
        """A side that cannot be looked at is an obstacle, but not a source that is kept and has
        lost the traffic already.
        """
        for name, error in self.dark.items():
            source = name == self.source.want.id
            if source and self.pair.record.cut and isinstance(error, Unreachable):
                if self.pair.record.keep_source:
                    text = f"it is left as it is (--keep-source): {error.what}"
                    self.source.note("preflight", text, "warning")
                    self.pair.absent.add(name)
                    continue
                ways = "--keep-source ends the migration without it"
                error.fix = f"{error.fix}; {ways}" if error.fix else ways
            self._problem(error, name.partition("/")[0])

    def way_obstacles(self, old: Facts | None, new: Facts | None) -> list[Obstacle]:
        """Of the cut-over."""
        if self.pair.record.phase in ("stop", "retire"):
            return []
        try:
            rows = self.pair.way().obstacles(old, new)
        except DeployError as error:
            return [Obstacle(error.where, error.what, error.fix, error.exit_code)]
        return [Obstacle(f"{self.destination.want.id} cutover", what, fix) for what, fix in rows]

    def learnt(self) -> list[Obstacle]:
        """What steps ask elsewhere before they plan: the model's list of files. Not saved yet."""
        side, found = self.destination, []
        for step in side.steps:
            context = dataclasses.replace(side.context(step.name), save=lambda: None)
            try:
                step.prepare(context)
            except DeployError as error:
                place = f"{side.want.id} {step.name}"
                found.append(Obstacle(place, error.what, error.fix, error.exit_code))
        return found

    def plans(self, facts: Facts) -> Mapping[str, Plan]:
        """Of all steps on the destination; shown as `deploy plan` does."""
        engine = self.destination.engine(self.destination.steps)
        if self.pair.options.dry_run:
            return engine.plan(facts)[0].plans
        return {
            step.name: step.plan(self.destination.want, facts, self.destination.own)
            for step in engine.steps
        }

    def take_pin(self) -> None:
        """The destination gets the source's list of files: a branch may have moved meanwhile."""
        pin = pinned(self.source.want, self.source.own)
        if pin is not None and self.destination.own.manifest != pin:
            model = self.destination.want.playbook.model
            if (pin.repo, pin.asked) == (model.repo, model.revision):
                self.destination.own.manifest = pin

    def lines(self, new: Facts | None) -> list[str]:
        """What follows the destination's steps, for a dry run and the question."""
        way, record = self.pair.way(), self.pair.record
        old, there = self.source.want.id, self.destination.want.id
        drain = f"drains {old} (at most {way.rules.drain_s:g} s) and stops it"
        lines = [
            *([self.begins] if self.begins else []),
            *(f"launch: {told(owner)}" for owner in strangers(new)),
            f"weights: from {old} by ssh or from the Hub, whichever a short probe shows faster",
            f"cut over: {way.words()}",
            f"settle: {there} serves {way.rules.settle_s:g} s before {old} ends",
        ]
        lines.append(f"stop: {old} is kept (--keep-source)" if record.keep_source else drain)
        if record.retire:
            lines += [f"retire: {text}" for text in migrate_retire.words(self.source)]
        return lines


__all__ = ["Outset"]
