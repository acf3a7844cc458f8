"""`deploy verify`: the gates of the launch that runs, passed before or not."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.model import Facts, Plan, Probe
from deployer.state import DeploymentState, Launch
from deployer.steps.base import Step, StepContext
from deployer.steps.launch import api_key
from deployer.steps.launch_told import as_step_failed
from deployer.steps.launch_wait import LaunchFailed, LaunchWait
from deployer.steps.server_facts import ServerFact, server_probe
from deployer.steps.serving_fact import ServingFact
from deployer.steps.verify import VerifyStep


class Reverify(VerifyStep):
    """The verify step that does not take an earlier verdict for an answer."""

    replaces = False
    ran = False

    def probes(self, want: Deployment) -> list[Probe]:
        """The look at the server, which `stop` brings in a whole run, and the quick proof."""
        return [server_probe(want), *super().probes(want)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """The gates; after they ran, what their verdict is and whether the server still answers."""
        if not self.ran:
            return self.gates_plan(want, facts)
        serving = facts.get(ServingFact)
        if serving is None:
            return Plan.blocked("the guest went silent after the gates", "`deploy status`", 3)
        if serving.verdict != "good" or serving.problem:
            return Plan.blocked(
                f"launch {serving.launch}: {serving.problem or serving.verdict}", "`deploy logs`", 5
            )
        return Plan.nothing(f"launch {serving.launch} passed its gates")

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the gates, on a launch that has no verdict yet once it has loaded."""
        self._wait_until_loaded(context, facts)
        super().apply(context, facts, plan)
        self.ran = True

    def _wait_until_loaded(self, context: StepContext, facts: Facts) -> None:
        """A launch that still loads is followed as `up` does; nothing of it is ended or judged.

        Raises StepFailed with the class of the failure when it does not come up.
        """
        server = facts.need(ServerFact)
        if server.job is None or server.job.verdict:
            return
        job, key = server.job.identity, api_key(context)
        try:
            LaunchWait(context, job, key, self.now, self.sleep).until_ready()
        except LaunchFailed as error:
            # Only its name is told; it is not written down.
            launch = Launch(id=job.id, variant=server.job.launch.variant, started=0.0)
            told = as_step_failed(
                context.want, launch, error, "", key, step="verify", stopped=False
            )
            raise told from error


def verify_steps() -> list[Step]:
    """The steps of `deploy verify`."""
    return [Reverify()]
