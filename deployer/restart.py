"""`deploy restart`: the steps of `up`, whose stop ends the launch that runs, wanted or not.

What earlier steps have to bring is brought, and what would refuse the new launch is asked, while
the old one still serves.
"""

from __future__ import annotations

import dataclasses

from deployer.deployment import Deployment
from deployer.model import Facts, Plan, PlanState
from deployer.state import DeploymentState, RolledBack
from deployer.steps.base import Step
from deployer.steps.launch import LaunchStep
from deployer.steps.order import all_steps
from deployer.steps.rolled_back import rolled_back
from deployer.steps.server_facts import ServerFact
from deployer.steps.stop import StopStep
from deployer.steps.stop_told import stop_ours

REASON = "a restart is asked for"


class RestartStop(StopStep):
    """Ends the launch that was seen first, once."""

    old: str | None = None
    """Id of that launch; '' when none ran at the first look."""

    def __init__(self) -> None:
        super().__init__(retry=True, restores=True)

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """As of `stop`, but the wanted launch is stopped too."""
        plan = super().plan(want, facts, state)
        fact = facts.get(ServerFact)
        if fact is None or not fact.asked:
            return plan
        job = fact.job
        if self.old is None:
            self.old = job.identity.id if job is not None and job.alive else ""
        if job is None or not job.alive or job.identity.id != self.old:
            return plan
        if plan.state is not PlanState.NOTHING:
            return plan
        refused = self.successor_refused(want, facts, state)
        change = dataclasses.replace(stop_ours(want, job, False), reason=REASON)
        return refused or Plan.change(REASON, change, *self.left_changes(want, fact))

    def rollback(self, want: Deployment, state: DeploymentState) -> RolledBack | None:
        """A restart is no word against a rollback."""
        return rolled_back(state, want)


class RestartLaunch(LaunchStep):
    """Launches once the old one has been stopped."""

    def __init__(self, stop: RestartStop) -> None:
        super().__init__()
        self.stop = stop

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """As of `launch`; the old launch does not count."""
        fact = facts.get(ServerFact)
        job = fact.job if fact is not None else None
        if job is not None and job.alive and job.identity.id == self.stop.old:
            return Plan.unknown("stop", "unknown until stop has ended the other launch")
        return super().plan(want, facts, state)


def restart_steps() -> list[Step]:
    """The steps of `deploy restart`, in order."""
    stop = RestartStop()
    own: dict[str, Step] = {stop.name: stop, LaunchStep.name: RestartLaunch(stop)}
    return [own.get(step.name, step) for step in all_steps()]
