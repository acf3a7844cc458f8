"""How a run of `up` ended for one deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployer.deployment import Deployment
from deployer.engine import Outcome
from deployer.errors import DeployError
from deployer.model import Facts, PlanState
from deployer.names import in_url
from deployer.state import DeploymentState
from deployer.steps.base import Step
from deployer.steps.server_facts import ServerFact
from deployer.steps.serving_fact import ServingFact
from deployer.steps.verify import VerifyStep


@dataclass
class DeploymentResult:
    """How one deployment ended."""

    id: str
    outcome: Outcome | None = None
    error: DeployError | None = None
    declined: bool = False
    acted: bool = False
    """One of its steps has begun to change something."""
    left: list[str] = field(default_factory=list)
    """Steps outside of `--from`/`--only` that still have something to do."""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, or the error's code."""
        return self.error.exit_code if self.error is not None else 0


def address(want: Deployment) -> str:
    """The URL at which the model answers when it is served."""
    ssh = want.host.ssh
    if want.container is not None and want.container.ssh is not None:
        ssh = want.container.ssh
    return f"{(want.entry.url or f'http://{in_url(ssh.address)}:{want.port}').rstrip('/')}/v1"


def proven(
    want: Deployment, steps: Sequence[Step], facts: Facts, own: DeploymentState
) -> dict[str, Any]:
    """Where the model answers, and what was proven of the launch that is alive now.

    Empty unless the verify step, asked with these facts, has nothing left to do.
    """
    verify = next((step for step in steps if isinstance(step, VerifyStep)), None)
    server, serving = facts.get(ServerFact), facts.get(ServingFact)
    if verify is None or server is None or server.job is None or serving is None:
        return {}
    if want.follows:
        # It answers no requests.
        return {}
    if verify.plan(want, facts, own).state is not PlanState.NOTHING:
        return {}
    return {
        "endpoint": address(want),
        "model": want.playbook.model.served_name,
        "launch": serving.launch,
        "variant": server.job.launch.variant,
        "degraded": server.job.launch.degraded,
        "verdict": serving.verdict,
        "figures": dict(serving.figures),
    }


def summary(want: Deployment, result: DeploymentResult) -> str:
    """One line: what serves now, or what was done."""
    if result.declined:
        return "declined; nothing was changed"
    if result.result:
        changed = result.outcome.changed if result.outcome else []
        did = f"changed: {', '.join(changed)}" if changed else "nothing to do"
        less = result.result.get("degraded")
        return (
            f"{want.id} serves {result.result['model']} at {result.result['endpoint']} "
            f"({f'{less}; {did}' if less else did})"
        )
    done = "nothing was changed"
    if result.outcome is not None and result.outcome.changed:
        done = f"changed: {', '.join(result.outcome.changed)}"
    return f"{done}; left to do: {', '.join(result.left)}" if result.left else done
