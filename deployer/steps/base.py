"""The step contract: probe -> plan -> apply -> verify (DESIGN section 3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from deployer.deployment import Deployment
from deployer.errors import DeployError
from deployer.events import Bus, JobStarted, Note, Part, Progress
from deployer.model import Facts, Plan, Probe, Where
from deployer.remote.jobs import Jobs
from deployer.remote.transport import Transport
from deployer.state import DeploymentState, Manifest


@dataclass
class StepContext:
    """What `apply` works with. `reprobe` runs all probes again and returns the facts as of now."""

    want: Deployment
    run_id: str
    bus: Bus
    transports: Mapping[Where, Transport]
    reprobe: Callable[[], Facts]
    state: DeploymentState
    save: Callable[[], None]
    """Writes the state file; call it after changing `state`."""
    step: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The controller's environment (for *_env references)."""
    keep: Callable[[Deployment, Manifest], str] | None = None
    """Keeps what a launch is made from, and returns the key; None: nothing is kept."""

    def on(self, where: Where) -> Transport:
        """The transport of the host or the guest."""
        return self.transports[where]

    def jobs(self, where: Where) -> Jobs:
        """The job mechanism there."""
        return Jobs(self.on(where))

    def note(self, text: str, level: str = "info") -> None:
        """One line for the user."""
        self.bus.emit(Note(self.want.host_name, self.want.id, self.step, level, text))

    def progress(
        self,
        what: str,
        done: float,
        total: float,
        unit: str = "",
        detail: str = "",
        *,
        parts: tuple[Part, ...] = (),
        figures: dict[str, float | str | None] | None = None,
    ) -> None:
        """How far a wait is, and what it waits for; see events.Progress."""
        where = (self.want.host_name, self.want.id, self.step)
        self.bus.emit(Progress(*where, what, done, total, unit, detail, parts, figures or {}))

    def job_started(self, job: str, pid: int, attached: bool) -> None:
        """A detached job runs."""
        self.bus.emit(JobStarted(self.want.host_name, self.want.id, self.step, job, pid, attached))


class Step(ABC):
    """One noun of the product. Says what it looks at, decides purely, acts, is looked at again."""

    name: ClassVar[str]
    refuses_first: ClassVar[bool] = False
    """No earlier step can lift this step's refusal: it is told before any step acts."""

    @abstractmethod
    def probes(self, want: Deployment) -> list[Probe]:
        """Read-only snippets and their parsers."""

    @abstractmethod
    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Pure: facts in, decision out."""

    def prepare(self, context: StepContext) -> bool:
        """Before any step acts: learns what is told elsewhere than on the target.

        True when the state has changed by it; the refusals that stand are then asked for again.
        """
        return False

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the plan's changes as shown. A step overrides it for `Procedure` actions."""
        from deployer.steps.apply import run_changes

        run_changes(context, plan)

    def refused(  # noqa: B027 - only what was stopped for this step is brought back
        self, context: StepContext, changed: Sequence[str], error: DeployError
    ) -> None:
        """Before `apply`: the step cannot act, and the steps `changed` of this run have acted.

        `error` is raised afterwards; what came of it is added to its `what`.
        """

    def undo(  # noqa: B027 - most steps leave what they did
        self, context: StepContext, facts: Facts, plan: Plan, error: DeployError
    ) -> None:
        """After `apply` or the look behind it failed: puts the machine back as `facts` saw it.

        `facts` and `plan` are those that were acted upon. `error` is raised again afterwards; what
        could not be put back, and why, is added to its `what`. Not called when the target is out of
        reach or the user interrupted: the next run decides by what it sees. By default a step
        leaves what it did, which the next run goes on from.
        """
