"""`deploy verify` of one server on several hosts: rank 0 is judged, and all get the verdict."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence

from deployer.deployment import Deployment
from deployer.errors import NotStarted
from deployer.events import Bus
from deployer.model import Change, Facts, Plan, Probe, Procedure
from deployer.state import DeploymentState, Launch
from deployer.state_file import StateFile
from deployer.steps.base import Step, StepContext
from deployer.steps.server_facts import ServerFact, server_probe
from deployer.steps.serving_fact import ServingFact
from deployer.steps.verify import VerifyStep
from deployer.up import up_host
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult


class VerdictOfRank0(VerifyStep):
    """Writes down what the gates said of `launch`, the record of rank 0."""

    replaces = False

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch
        self.written = False

    def probes(self, want: Deployment) -> list[Probe]:
        """The look at the server, and at its verdict."""
        return [server_probe(want), *super().probes(want)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when it says so already; a refusal when this node has no part in the launch."""
        server, serving = facts.get(ServerFact), facts.get(ServingFact)
        if server is None or serving is None:
            return Plan.unknown("container", "unknown until the guest can be asked")
        if server.job is None or server.job.identity.id != self.launch.id:
            return Plan.blocked(
                f"its newest launch is not {self.launch.id}, which rank 0 serves",
                f"`deploy up {want.id}` starts all nodes again",
            )
        if not server.job.alive:
            return Plan.blocked(
                f"launch {self.launch.id}, which rank 0 serves, has ended here",
                f"`deploy logs {want.id}` tells why; `deploy up {want.id}` starts all nodes again",
            )
        told = f"launch {self.launch.id}: {self.launch.verdict}"
        if self.written or (serving.launch, serving.verdict) == (
            self.launch.id,
            self.launch.verdict,
        ):
            return Plan.nothing(told)
        write = Procedure(want.guest, "into the launch's folder and the state")
        return Plan.change(told, Change("write down the verdict of rank 0", told, write))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Writes it."""
        launch = self.launch
        self._record(context, launch.id, launch.verdict, launch.figures, required=True)
        self.written = True


def verify_nodes(
    wants: Sequence[Deployment], options: UpOptions, bus: Bus
) -> list[DeploymentResult]:
    """`wants` in rank order. Every error is in the results."""
    leader, began = wants[0], time.time()
    results = up_host(leader.host_name, [leader], options, bus)
    # What a run before the state could be read wrote is no verdict of this one.
    launch = None
    if results[0].error is None or results[0].error.exit_code == 5:
        state = StateFile(options.deploy_dir / "state", leader.host_name).load()
        launches = state.deployments.get(leader.name, DeploymentState()).launches
        launch = next((one for one in reversed(launches) if one.verified >= began), None)
    for want in wants[1:]:
        if launch is None:
            error = NotStarted(
                f"rank 0, {leader.id}, was not judged", where=want.id, fix=f"see {leader.id}"
            )
            results.append(DeploymentResult(want.id, error=error))
            continue
        steps: list[Step] = [VerdictOfRank0(launch)]
        own = dataclasses.replace(options, steps=functools.partial(list, steps), rollout=None)
        [result] = up_host(want.host_name, [want], own, bus)
        if result.error is None and launch.verdict != "good":
            result.error = NotStarted(
                f"rank 0, {leader.id}, has failed its gates, which is written down here too",
                where=want.id,
                fix=f"see {leader.id}",
            )
        results.append(result)
    return results
