"""`deploy migrate --abort`: the source serves as before, nothing half-done is left."""

from __future__ import annotations

import dataclasses

from deployer import migrate_adopted
from deployer.deployment import Deployment
from deployer.errors import GateFailed, StepFailed
from deployer.migrate_pair import Pair
from deployer.migrate_side import is_stopped, trouble
from deployer.migrate_weights import Lending
from deployer.model import Facts

JOBS = ("shards", "venv", "venv-python")
"""Detached work there that `--abort` ends; a driver is never cut off half installed."""


class Back:
    """The way back, from any phase."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.source, self.destination = pair.source, pair.destination

    def take(self) -> None:
        """The source serves as before, the destination is stopped. Traffic first.

        Raises UsageError before anything is touched when the way back is not known.
        """
        pair, source, destination = self.pair, self.source, self.destination
        pair.result.record = pair.record
        pair.result.lines = self.lines()
        if pair.record.cut:
            pair.way()
        if pair.options.dry_run or not pair.agreed():
            return
        # What the destination has to say can wait: it may be dark.
        facts = pair.lock(source)
        pair.record.back, pair.record.outcome = True, ""
        pair.record.seq += 1
        for side in reversed(pair.sides):
            side.own.migration = pair.record.model_copy()
            side.save()
        source.write_mark(pair.record)
        if pair.record.cut:
            with pair.told("back"):
                self.source_serves(facts)
                pair.moved("back")
        seen = pair.lock(destination)
        with pair.told("undo"):
            self.undo(seen)
        pair.finish("aborted")
        why = trouble(source.want, source.gather())
        pair.result.done = f"taken back; {source.want.id} serves" + (
            f" not as proven, though: {why}" if why else " as before"
        )

    def lines(self) -> list[str]:
        """What `--abort` does, in words."""
        record, lines = self.pair.record, []
        if record.cut:
            lines.append(f"start {self.source.want.id} if it is stopped, and prove it")
            lines.append("move the traffic back to it")
        if record.served_before:
            lines.append(f"leave {self.destination.want.id}: it served before the migration")
        else:
            lines.append(f"stop {self.destination.want.id} and its unfinished jobs")
        if record.adopted:
            lines.append(f"start what had its port before: {record.adopted}")
        return lines

    def source_serves(self, facts: Facts) -> None:
        """Brings it up again if it does not, with the variant that it served."""
        side = self.source
        if not trouble(side.want, facts):
            return
        side.note("back", f"{side.want.id} is started again")
        want = self.as_before()
        side.bring(side.steps, want=want)
        if why := trouble(side.want, side.gather()):
            raise GateFailed(
                f"it does not serve as proven: {why}; the traffic stays where it is",
                where=side.want.id,
                fix="`deploy up` it, then --abort again",
            )

    def as_before(self) -> Deployment:
        """The source with the variant that it served, where the playbook still has it."""
        want, variant = self.source.want, self.pair.record.source_variant
        if variant in {rung.name for rung in want.playbook.variants}:
            return dataclasses.replace(want, variant=variant)
        return want

    def undo(self, facts: Facts) -> None:
        """The destination's server, jobs and the key for the copy; then what had its port."""
        pair, side = self.pair, self.destination
        stopped = is_stopped(side.want, facts)
        if stopped:
            side.note("undo", f"container {side.want.vmid} is stopped: nothing of it runs")
        else:
            self.end_jobs()
            if not pair.record.served_before:
                pair.drain_and_stop(side, "back" if pair.record.cut else None)
        if pair.record.lending:
            Lending(self.source, side, pair.record.id).close(borrower=not stopped)
            pair.record.lending = False
        if pair.record.adopted:
            if stopped:
                text = f"is started by hand when it runs: {pair.record.adopted}"
                side.note("undo", f"what had the port {text}", "warning")
            else:
                migrate_adopted.put_back(side)

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


__all__ = ["Back"]
