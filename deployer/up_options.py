"""What a run of `up` is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.errors import DeployError
from deployer.model import Facts
from deployer.rollout import Rollout
from deployer.state import DeploymentState
from deployer.steps.base import Step
from deployer.steps.order import all_steps
from deployer.twins import Twins

MakeEngine = Callable[[Deployment, Sequence[Step]], Engine]

Confirm = Callable[[Deployment, Outcome], bool]
"""Shown the plans of the steps that may act; False changes nothing."""


class Aim(Protocol):
    """A run that goes somewhere else than the playbook says (`rollback`)."""

    def begin(self, want: Deployment, own: DeploymentState) -> None:
        """Before the first look: the state as this run needs it. In memory only."""

    def seen(self, want: Deployment, own: DeploymentState, facts: Facts) -> None:
        """It will act; `facts` are of under the lock. The state is saved afterwards."""

    def failed(
        self, want: Deployment, own: DeploymentState, error: DeployError, engine: MakeEngine
    ) -> DeployError:
        """Something was acted upon and failed: goes back, and returns the error to tell."""

    def done(self, want: Deployment, own: DeploymentState) -> None:
        """It has passed. The state is saved afterwards."""


@dataclass(frozen=True)
class UpOptions:
    """What the user asked for."""

    base: Path
    """The inventory folder; `.deploy/` lies beside it."""
    command: str = "up"
    dry_run: bool = False
    selection: Selection = field(default_factory=Selection)
    confirm: Confirm | None = None
    steps: Callable[[], list[Step]] = all_steps
    serves: bool = True
    """Whether the run ends with a server: `down` does not."""
    repin: bool = False
    """Ask the Hub what the model's revision is now; else a branch stays at its pinned commit."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    aim: Aim | None = None
    rollout: Rollout | None = None
    """Asked before anything is changed, when other hosts are in the same run."""
    twins: Twins | None = None
    """Told what machine each host is, when others are in the same run."""
    cancel: Cancel = field(default_factory=Cancel)

    @property
    def deploy_dir(self) -> Path:
        """State, locks and run records."""
        return self.base.resolve().parent / ".deploy"
