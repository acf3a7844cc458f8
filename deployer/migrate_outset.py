"""What a migration sees and decides before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deployer import migrate_retire
from deployer.errors import DeployError, StepBlocked, UsageError
from deployer.migrate_adopted import strangers, told
from deployer.migrate_journal import (
    Begin,
    Decision,
    OtherMigration,
    Resume,
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
    one_machine,
    pair_obstacles,
    refused,
    source_obstacles,
)
from deployer.migrate_side import trouble
from deployer.model import Facts, Plan
from deployer.remote.lock_record import this_controller
from deployer.steps.shards import pinned


class Outset:
    """The looks at both sides, the decision by the journal, and the preflight."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.source, self.destination = pair.source, pair.destination
        self.looks: dict[str, Facts] = {}
        self.problems: list[Obstacle] = []
        self.unseen: list[DeployError] = []

    def look(self) -> None:
        """At each side; one that cannot be looked at is an obstacle, not the end."""
        for side in self.pair.sides:
            try:
                self.looks[side.want.id] = side.gather()
            except DeployError as error:
                self._problem(error, side.want.host_name)
                self.unseen.append(error)

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
        return self.unseen[0] if self.unseen and self.pair.options.abort else error

    def _decide(self) -> Decision:
        records = self.pair.records(self.looks)
        facts = self.looks.get(self.source.want.id)
        decision = decide(
            records,
            self.source.want.id,
            self.destination.want.id,
            abort=self.pair.options.abort,
            retire=self.pair.options.retire,
            source_serves=None if facts is None else not trouble(self.source.want, facts),
        )
        seen = self.pair.read = newest(records)
        if isinstance(decision, Resume | TakeBack) and seen is not None:
            by = f", begun by {seen.controller}" if seen.controller != self.pair.controller else ""
            self.destination.note("journal", f"migration {seen.id}, in phase {seen.phase}{by}")
        return decision

    def preflight(self, *, resumed: bool) -> None:
        """Raises StepBlocked with every obstacle; shows the plan in a dry run."""
        pair, source, destination = self.pair, self.source, self.destination
        found = [*pair_obstacles(source.want, destination.want), *self.problems]
        self.take_pin()
        me = this_controller()
        old, new = self.looks.get(source.want.id), self.looks.get(destination.want.id)
        if old is not None:
            found += lock_obstacle(source.want.host_name, old, me)
            if not pair.record.cut:
                found += source_obstacles(source.want, old, retire=pair.record.retire)
        if new is not None:
            found += lock_obstacle(destination.want.host_name, new, me)
            record = pair.record if resumed else None
            found += self.learnt()
            plans = self.plans(new)
            found += destination_obstacles(destination.want, new, destination.own, plans, record)
        found += one_machine(source.want, old, destination.want, new)
        if old is not None and new is not None:
            for line in differences(source.want, old, destination.want, new):
                destination.note("preflight", line)
        found += self.way_obstacles(old, new)
        pair.result.obstacles = found
        if found:
            raise refused(found, source.want.id, destination.want.id)
        pair.result.lines = self.lines(new)

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
