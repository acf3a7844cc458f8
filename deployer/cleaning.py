"""`deploy doctor --clean-partials`: removes partial files that are of no use."""

from __future__ import annotations

import json
from typing import ClassVar

from deployer.agents.fetch.claims import plain
from deployer.deployment import Deployment
from deployer.model import Change, Facts, Plan, Probe, Procedure
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext
from deployer.steps.shards import pinned
from deployer.steps.shards_agent import failed, run_agent
from deployer.steps.shards_facts import ShardsFact, shards_probe
from deployer.steps.shards_figures import size_text
from deployer.steps.shards_preflight import leftovers, obstacle, stranger

TIMEOUT_S = 600.0


class CleanPartials(Step):
    """What the list of files makes useless: of other clients, of earlier lists, of ours."""

    name: ClassVar[str] = "partials"

    def probes(self, want: Deployment) -> list[Probe]:
        """The look of the shards step."""
        return [shards_probe(want.playbook.model.path, want.playbook.engine.venv, want.guest)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """One change a file; refused while anybody downloads into the folder."""
        fact = facts.get(ShardsFact)
        path = want.playbook.model.path
        if fact is None:
            return Plan.unknown("container", facts.silent.get(want.guest, ""))
        if not fact.python:
            return Plan.blocked(
                "there is no python3 (3.9 or newer) on the target, and the venv has none yet",
                f"install python3 there, or run `deploy up {want.id} --only venv`",
            )
        if fact.problem:
            return Plan.blocked(fact.problem, f"check {path} on the target")
        manifest = pinned(want, state)
        if manifest is None:
            return Plan.blocked(
                "the list of the model's files is not known yet, so nothing can be judged",
                f"`deploy up {want.id} --only shards` fetches it",
            )
        if fact.running:
            return Plan.blocked(
                f"our own download is at work: pid {fact.running} ({fact.running_command})",
                f"wait for it: `deploy up {want.id}` shows how far it is",
            )
        if busy := stranger(want, fact, manifest.files):
            return busy
        useless = leftovers(fact, manifest.files).useless
        if not useless:
            return Plan.nothing(f"no useless partial files in {path}")
        if blocked := obstacle(want, fact):
            return blocked
        action = Procedure(want.guest, "the agent, mode clean: unlink, after a look of its own")
        changes = [
            Change(f"remove {plain(name)} ({size_text(used)})", why, action)
            for name, used, why in useless
        ]
        total = size_text(sum(used for _, used, _ in useless))
        return Plan.change(f"useless partial files: {len(useless)}, {total}", *changes)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Removes exactly what was shown, as far as it is useless still. Raises StepFailed."""
        want = context.want
        manifest = pinned(want, context.state)
        if manifest is None:
            return
        shown = [path for path, _, _ in leftovers(facts.need(ShardsFact), manifest.files).useless]
        said = run_agent(
            context.on(want.guest),
            want,
            manifest,
            ["clean"],
            more=json.dumps(shown).encode(),
            timeout_s=TIMEOUT_S,
        )
        if said.exit != 0:
            raise failed(want, "the partial files were not all removed", said)
        freed = sum(int(row["bytes"]) for row in said.rows)
        context.note(f"removed {len(said.rows)} files, {size_text(freed)}")


def clean_steps() -> list[Step]:
    """The steps of `deploy doctor --clean-partials`."""
    return [CleanPartials()]
