"""`deploy down`: stops the deployment's own server and proves that it is gone."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.model import Facts, Plan
from deployer.state import DeploymentState
from deployer.steps.base import Step
from deployer.steps.stop import StopStep


class Down(StopStep):
    """The stop step with the wish that nothing of ours runs."""

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Stops our launch whatever it serves; a stranger is left alone."""
        return self.down_plan(want, facts)


def down_steps() -> list[Step]:
    """The steps of `deploy down`."""
    return [Down()]
