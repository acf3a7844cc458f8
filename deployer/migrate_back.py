"""`deploy migrate --abort`: the source serves as before, nothing half-done is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deployer import migrate_adopted
from deployer.deployment import Deployment
from deployer.errors import DeployError, GateFailed, StepBlocked, StepFailed, Unreachable
from deployer.kept import Kept
from deployer.migrate_pair import Pair
from deployer.migrate_preflight import Obstacle
from deployer.migrate_side import is_stopped, trouble
from deployer.migrate_weights import Lending
from deployer.model import Facts, PlanState
from deployer.recipe import recipe_of
from deployer.rollback import made_of, then

JOBS = ("shards", "venv", "venv-python")
"""Detached work there that `--abort` ends; a driver is never cut off half installed."""


class Back:
    """The way back, from any phase. `dark`: why a side could not be looked at, by its id."""

    def __init__(self, pair: Pair, dark: Mapping[str, DeployError]) -> None:
        self.pair, self.dark = pair, dark
        self.source, self.destination = pair.source, pair.destination
        self.before = list(pair.record.released)

    def take(self) -> None:
        """The source serves as before, the destination is stopped. Traffic first.

        What can be done while one side is dark is done, and the error tells what is left. Raises
        UsageError before anything is touched when the way back is not known.
        """
        pair, source = self.pair, self.source
        pair.free = frozenset(self.before)
        pair.result.record = pair.record
        pair.result.lines = self.lines()
        if pair.record.cut:
            pair.way()
        if pair.options.dry_run or not pair.agreed():
            return
        facts = self.source_facts()
        if pair.record.cut and facts is not None:
            with pair.told("back"):
                self.source_serves(facts)
                self.begin()
                self.traffic()
        else:
            self.begin()
        if self.destination.want.id not in self.before:
            self.undo_destination()
        elif source.want.id not in self.before:
            self.end_lending(borrower=False)
        if source.want.id in pair.absent:
            raise self.left_at_source()
        self.lock_the_free()
        pair.finish("aborted")
        pair.result.done = f"taken back; {self.of_source()}"

    def source_facts(self) -> Facts | None:
        """The source, under its lock; None when it is done with, or dark and never lost anything.

        Raises Unreachable when it is dark and has to serve again.
        """
        pair, name = self.pair, self.source.want.id
        if name in self.before:
            return None
        error = self.dark.get(name)
        if error is None:
            return pair.lock(self.source)
        if len(self.dark) > 1:
            error.add("nothing was touched")
            error.evidence = tuple(str(one) for one in self.dark.values())
            raise error
        if pair.record.cut:
            error.add(f"nothing was touched; the traffic stays at {self.destination.want.id}")
            error.fix = _and(error.fix, "run --abort again when it can be reached")
        if pair.record.cut or not isinstance(error, Unreachable):
            raise error
        self.source.note("back", f"it cannot be reached, and was not touched: {error.what}")
        pair.absent.add(name)
        return None

    def begin(self) -> None:
        """From here on only --abort goes on."""
        pair = self.pair
        pair.record.back, pair.record.outcome = True, ""
        if self.destination.want.id not in self.before:
            # What the destination has to say can wait: it may be dark.
            pair.absent.add(self.destination.want.id)
        pair.save()

    def traffic(self) -> None:
        """Moves back; an address not from a host that cannot be asked whether it has it."""
        try:
            self.pair.moved("back")
        except Unreachable as error:
            error.add(f"{self.source.want.id} serves, and the traffic is not moved back yet")
            error.fix = _and(error.fix, "run --abort again when it can be reached")
            raise

    def undo_destination(self) -> None:
        """Raises Unreachable when it is dark: then the source is done with."""
        pair, side = self.pair, self.destination
        try:
            facts = pair.lock(side)
            pair.absent.discard(side.want.id)
            with pair.told("undo"):
                self.undo(facts)
        except Unreachable as error:
            if self.source.want.id not in pair.absent:
                self.release_source(error)
            raise
        try:
            self.end_lending(borrower=not is_stopped(side.want, facts))
        except DeployError as error:
            error.add(f"{side.want.id} is taken back; left is the key for the copy")
            error.fix = _and(error.fix, "run --abort again")
            raise

    def release_source(self, error: Unreachable) -> None:
        """The destination's key opens nothing any more, and the source may move elsewhere."""
        pair, here, there = self.pair, self.source, self.destination.want.id
        pair.absent.add(there)
        if here.want.id not in self.before:
            if pair.record.lending:
                Lending(here, self.destination, pair.record.id).close(borrower=False)
            pair.record.released.append(here.want.id)
            pair.save()
        left = "its partial files" if pair.record.served_before else "its server and jobs"
        error.add(f"{self.of_source()}; left on {there}: {left}, and the migration's record")
        again = f"`deploy migrate {here.want.id} {there} --abort` again when it can be reached"
        error.fix = _and(error.fix, f"run {again}; {here.want.id} may move elsewhere meanwhile")

    def left_at_source(self) -> DeployError:
        """The destination is done with; the source is dark."""
        pair, here, there = self.pair, self.source.want.id, self.destination.want.id
        if there not in pair.record.released:
            pair.record.released.append(there)
            pair.save()
        error = self.dark[here]
        left = "the key for the copy and " if pair.record.lending else ""
        error.add(f"{there} is taken back; left on {here}: {left}the migration's record")
        again = f"`deploy migrate {here} {there} --abort` again when it can be reached"
        error.fix = _and(error.fix, f"run {again}")
        return error

    def lock_the_free(self) -> None:
        """Where the record of a side that was done with before still lies: it goes now."""
        pair = self.pair
        for side in pair.sides:
            there = pair.marks.get(side.want.id)
            if side.want.id in self.before and there is not None and there.id == pair.record.id:
                pair.lock(side)

    def of_source(self) -> str:
        """What may be said of it, as seen now."""
        side = self.source
        if side.want.id in self.before:
            return f"{side.want.id} was done with before"
        try:
            why = trouble(side.want, side.gather())
        except DeployError as error:
            why = error.what
        serves = f"not as proven, though: {why}" if why else "as before"
        return f"{side.want.id} serves {serves}"

    def lines(self) -> list[str]:
        """What `--abort` does, in words."""
        record, lines = self.pair.record, []
        if record.cut and self.source.want.id not in self.before:
            lines.append(f"start {self.source.want.id} if it is stopped, and prove it")
            lines.append("move the traffic back to it")
        if self.destination.want.id in self.before:
            return [*lines, f"{self.destination.want.id} is taken back already"]
        if record.served_before:
            lines.append(f"leave {self.destination.want.id}: it served before the migration")
        else:
            lines.append(f"stop {self.destination.want.id} and its unfinished jobs")
        if record.adopted:
            lines.append(f"start what had its port before: {record.adopted}")
        return lines

    def source_serves(self, facts: Facts) -> None:
        """Brings it up again if it does not, as it served.

        The journal is as it was until then: when it cannot serve again, the same command may also
        go on forward. Raises StepBlocked with all that is in the way before anything is touched.
        """
        side = self.source
        if not trouble(side.want, facts):
            return
        want = self.as_before()
        self.refuse(want, facts)
        side.note("back", f"{side.want.id} is started again")
        side.bring(side.steps, want=want)
        if why := trouble(side.want, side.gather()):
            raise GateFailed(
                f"it does not serve as proven: {why}; the traffic stays where it is",
                where=side.want.id,
                fix="`deploy up` it, then --abort again",
            )

    def refuse(self, want: Deployment, facts: Facts) -> None:
        """What its steps refuse."""
        side = self.source
        plans = {step.name: step.plan(want, facts, side.own) for step in side.steps}
        found = [
            Obstacle(f"{want.id} {name}", plan.reason, plan.fix).line()
            for name, plan in plans.items()
            if plan.state is PlanState.BLOCKED
        ]
        if found:
            raise StepBlocked(
                f"it cannot serve again: {len(found)} obstacle{'s' if len(found) > 1 else ''}; "
                f"nothing was touched, the traffic stays at {self.destination.want.id}",
                where=want.id,
                fix="remove them, then --abort again",
                evidence=tuple(found),
            )

    def as_before(self) -> Deployment:
        """The source as it was launched, though its playbook was edited since.

        Where that launch is not known here: with the variant that it served, if there still is one.
        """
        side, record = self.source, self.pair.record
        want, variant = side.want, record.source_variant
        if variant in {rung.name for rung in want.playbook.variants}:
            want = dataclasses.replace(want, variant=variant)
        launch = next((one for one in side.own.launches if one.id == record.source_launch), None)
        if launch is None or not launch.recipe:
            return want
        pin = side.own.manifest
        if pin is not None and recipe_of(side.want, pin).key == launch.recipe:
            return want
        try:
            made = made_of(Kept(self.pair.options.deploy_dir / "kept"), launch, want.id)
            want = then(side.want, *made, launch)
        except DeployError as error:
            text = f"it is started as its playbook says now: {error.what}"
            side.note("back", text, "warning")
            return want
        side.own.manifest = made[0].manifest
        side.note("back", f"as launch {launch.id} was made; its playbook says something else now")
        return want

    def undo(self, facts: Facts) -> None:
        """The destination's server and jobs; then what had its port."""
        pair, side = self.pair, self.destination
        stopped = is_stopped(side.want, facts)
        if stopped:
            side.note("undo", f"container {side.want.vmid} is stopped: nothing of it runs")
        else:
            self.end_jobs()
            if not pair.record.served_before:
                # Of a source that was done with before nobody waits for requests any more.
                drains = pair.record.cut and self.source.want.id not in self.before
                pair.drain_and_stop(side, "back" if drains else None)
        if pair.record.adopted:
            if stopped:
                text = f"is started by hand when it runs: {pair.record.adopted}"
                side.note("undo", f"what had the port {text}", "warning")
            else:
                migrate_adopted.put_back(side)

    def end_lending(self, *, borrower: bool) -> None:
        """The key for the copy. Of a source that is dark only the private half goes."""
        pair = self.pair
        if not pair.record.lending:
            return
        lending = Lending(self.source, self.destination, pair.record.id)
        if self.source.want.id in {*pair.absent, *self.before}:
            if borrower:
                lending.drop()
        else:
            lending.close(borrower=borrower)
        pair.record.lending = self.source.want.id in pair.absent

    def end_jobs(self) -> None:
        """Detached work of ours there. Raises StepFailed when one cannot be ended."""
        side = self.destination
        jobs = side.context("undo").jobs(side.want.guest)
        for name in JOBS:
            job = f"{name}-{side.want.name}"
            status = jobs.find(job)
            if status is None or not status.alive:
                continue
            proof = jobs.stop(status.identity, grace_s=20.0)
            if not proof.stopped:
                raise StepFailed(
                    f"job {job} cannot be stopped: {', '.join(proof.survivors)}",
                    where=side.want.id,
                    fix="a process in D state needs a reboot of the host",
                )
            side.note("undo", f"job {job} is stopped; what it has brought is kept")


def _and(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second


__all__ = ["Back"]
