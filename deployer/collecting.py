"""The step of `deploy gc`: shows what may go, and removes it, each after a second look."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.gc import Known, decide, freeable
from deployer.gc_found import GcFact, HostUsed, Row
from deployer.gc_look import host_probe, look_probe
from deployer.gc_scripts import removal
from deployer.model import Change, Facts, Plan, Probe, Shell
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext
from deployer.steps.shards_figures import size_text
from deployer.steps.venv_build import UV_CACHE

REMOVE_S = 600.0
"""For one folder: a checkpoint of many files on a slow disk."""

Knowing = Callable[[Deployment, DeploymentState | None], Known]
"""What is known of a deployment; with None by the state file as it was when the run began."""


class Collect(Step):
    """Folders of builds, weights, launches and jobs of one deployment."""

    name: ClassVar[str] = "gc"

    def __init__(
        self,
        knowing: Knowing,
        shown: dict[str, list[Row]],
        became: dict[tuple[str, str], str] | None = None,
    ) -> None:
        self.knowing = knowing
        self.shown = shown
        """Deployment's id -> rows of the first look, for the table."""
        self.became = {} if became is None else became
        """(deployment's id, path) -> `freed`, or why it is still there."""
        self.paths: dict[str, str] = {}
        """Title of a change -> path."""
        self.done = False

    def probes(self, want: Deployment) -> list[Probe]:
        """One look; and one of the host at who uses the same, where the model runs in a guest."""
        known = self.knowing(want, None)
        builds, models = known.builds(), known.models()
        links = [root.removesuffix(".builds") for root in builds]
        look = look_probe(
            builds,
            links,
            models,
            known.jobs(),
            want.guest,
            cache=UV_CACHE,
            names=known.names(),
        )
        return [look] if want.vmid is None else [look, host_probe([*builds, *models, UV_CACHE])]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """One change a folder."""
        fact = facts.get(GcFact)
        if fact is None:
            return Plan.unknown("container", facts.silent.get(want.guest, ""))
        if fact.problem:
            return Plan.blocked(fact.problem, f"look at {want.id} by hand", exit_code=1)
        host = facts.get(HostUsed) or HostUsed()
        if host.problem:
            return Plan.blocked(host.problem, f"look at {want.host_name} by hand", exit_code=1)
        fact = dataclasses.replace(fact, used=(*fact.used, *host.used))
        rows = decide(self.knowing(want, state), fact)
        self.shown.setdefault(want.id, rows)
        gone = [row for row in rows if row.goes]
        if self.done or not gone:
            kept = size_text(sum(row.found.size for row in rows if not row.goes))
            left = f"; left {len(gone)} that were held" if gone else ""
            return Plan.nothing(f"nothing to free; {kept} are kept{left}")
        links = sorted(fact.links)
        changes = [
            Change(
                f"free {row.found.kind} {row.found.path} ({size_text(row.found.freed)})",
                row.why,
                Shell(want.guest, removal(row.found, links), REMOVE_S),
                "none: `up` and `rollback` bring builds and weights again",
            )
            for row in gone
        ]
        self.paths |= {
            change.title: row.found.path for change, row in zip(changes, gone, strict=True)
        }
        return Plan.change(f"{len(gone)} folders, {size_text(freeable(rows))}", *changes)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Removes what was shown; what is held by now is left, and told. Raises StepFailed."""
        problems: list[str] = []
        for number, change in enumerate(plan.changes):
            context.progress("freeing", number, len(plan.changes), "folders", change.title)
            if not isinstance(change.action, Shell):
                continue
            answer = context.on(change.action.where).run(change.action.script, timeout_s=REMOVE_S)
            said = answer.text.strip().split("\n")[-1]
            name, told = change.title.removeprefix("free "), "freed"
            if answer.exit == 0 and said.startswith("held "):
                told = said.removeprefix("held ")
                context.note(f"left {name}: {told}", "warning")
            elif answer.exit == 0 and said in {"removed", "gone"}:
                context.note(f"{said}: {name}")
            else:
                told = answer.error_text.strip().split("\n")[-1] or f"exit {answer.exit}"
                problems.append(f"{name}: {told}")
            self.became[context.want.id, self.paths.get(change.title, "")] = told
        self.done = True
        if problems:
            raise StepFailed(
                f"{len(problems)} of {len(plan.changes)} folders were not removed",
                where=f"{context.want.id} gc",
                fix="see why, then run `deploy gc` again: it goes on with what is left",
                evidence=tuple(problems),
            )


def gc_steps(
    knowing: Knowing, shown: dict[str, list[Row]], became: dict[tuple[str, str], str]
) -> list[Step]:
    """The steps of `deploy gc`."""
    return [Collect(knowing, shown, became)]
