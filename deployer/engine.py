"""Runs steps on one deployment: probe all -> plan -> apply in order -> verify.

A step looks, decides, acts, and looks again. The engine never asks the state file whether something
was done; it asks the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable
from deployer.events import Bus, Probed, StepDone, StepPlanned, StepStarted
from deployer.model import Facts, Plan, PlanState, Where
from deployer.remote.transport import Transport
from deployer.state import DeploymentState, Manifest
from deployer.steps.base import Step, StepContext

Gather = Callable[[], Facts]
"""Asks all targets of the deployment, one exec a target."""


@dataclass(frozen=True)
class Selection:
    """Which steps may act: from one on (`--from`), or only one (`--only`). All are planned."""

    first: str | None = None
    only: str | None = None

    def acts(self, names: Sequence[str], name: str) -> bool:
        """Whether step `name` may act under this selection."""
        if self.only is not None:
            return name == self.only
        return self.first is None or names.index(name) >= names.index(self.first)


@dataclass
class Outcome:
    """What the engine did: the plans as first shown, and the steps that changed something."""

    plans: dict[str, Plan] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Whether any step had something to do."""
        return any(plan.state is not PlanState.NOTHING for plan in self.plans.values())

    @property
    def refusal(self) -> Plan | None:
        """The blocked plan that ends a run before anything is changed."""
        left = [plan for plan in self.plans.values() if plan.state is not PlanState.NOTHING]
        blocked = (plan for plan in left if plan.state is PlanState.BLOCKED)
        return next((plan for plan in blocked if plan.stands or plan is left[0]), None)


class Engine:
    """One deployment, its steps, and the way to look at it."""

    def __init__(
        self,
        want: Deployment,
        steps: Sequence[Step],
        gather: Gather,
        transports: Mapping[Where, Transport],
        *,
        state: DeploymentState,
        save: Callable[[], None],
        bus: Bus,
        run_id: str,
        environ: Mapping[str, str],
        on_step: Callable[[str], None] | None = None,
        keep: Callable[[Deployment, Manifest], str] | None = None,
    ) -> None:
        self.want = want
        self.steps = list(steps)
        self.names = [step.name for step in steps]
        self.gather = gather
        self.transports = transports
        self.state = state
        self.save = save
        self.bus = bus
        self.run_id = run_id
        self.environ = environ
        self.on_step = on_step
        self.keep = keep

    def plan(self, facts: Facts | None = None) -> tuple[Outcome, Facts]:
        """Looks once and decides for every step; changes nothing."""
        facts = self.look("first look") if facts is None else facts
        outcome = Outcome()
        for step in self.steps:
            plan = step.plan(self.want, facts, self.state)
            outcome.plans[step.name] = plan
            self._planned(step, plan)
        return outcome, facts

    def look(self, reason: str) -> Facts:
        """Runs every probe again."""
        began = time.monotonic()
        facts = self.gather()
        seconds = round(time.monotonic() - began, 3)
        self.bus.emit(Probed(self.want.host_name, self.want.id, seconds, reason))
        return facts

    def apply(self, outcome: Outcome, facts: Facts, selection: Selection) -> Facts:
        """Each step in order: plan with fresh facts, act, look again; the plan must then be empty.

        Raises StepBlocked, StepFailed, GateFailed or Unreachable; nothing after the failing step
        is touched.
        """
        fresh = True
        acting = [step for step in self.steps if selection.acts(self.names, step.name)]
        self._refuse_first(acting, facts)
        if self._prepare(acting):
            self._refuse_first(acting, facts)
        for step in acting:
            plan = step.plan(self.want, facts, self.state)
            if plan.state is PlanState.UNKNOWN and not fresh:
                facts, fresh = self.look(f"before {step.name}"), True
                plan = step.plan(self.want, facts, self.state)
            if plan.state is PlanState.NOTHING:
                self._done(step, "nothing", plan.reason, 0.0)
                continue
            try:
                self._refuse(step, plan, facts)
            except StepFailed as error:
                step.refused(self.context(step.name), outcome.changed, error)
                raise
            began = time.monotonic()
            self.bus.emit(StepStarted(self.want.host_name, self.want.id, step.name))
            if self.on_step is not None:
                self.on_step(step.name)
            acted_upon, context = facts, self.context(step.name)
            try:
                step.apply(context, facts, plan)
                facts, fresh = self.look(f"after {step.name}"), True
                after = step.plan(self.want, facts, self.state)
                self._proven(step, after)
            except Exception as error:
                if isinstance(error, StepFailed):
                    step.undo(context, acted_upon, plan, error)
                self._done(step, "failed", str(error), time.monotonic() - began)
                raise
            outcome.changed.append(step.name)
            self._done(step, "done", after.reason, time.monotonic() - began)
        return facts

    def _prepare(self, acting: Sequence[Step]) -> bool:
        """Whether any step has learnt something."""
        learnt = False
        for step in acting:
            try:
                learnt |= step.prepare(self.context(step.name))
            except DeployError as error:
                self._done(step, "failed", str(error), 0.0)
                raise
        return learnt

    def _refuse_first(self, acting: Sequence[Step], facts: Facts) -> None:
        """A refusal that stands whatever the steps before it do comes before any change."""
        first = True
        for step in acting:
            plan = step.plan(self.want, facts, self.state)
            if plan.state is not PlanState.BLOCKED:
                continue
            if plan.stands or (first and step.refuses_first):
                self._refuse(step, plan, facts)
            first = False

    def _refuse(self, step: Step, plan: Plan, facts: Facts) -> None:
        where = f"{self.want.id} {step.name}"
        if plan.state is PlanState.BLOCKED:
            self._done(step, "failed", plan.reason, 0.0)
            error = StepBlocked(plan.reason, where=where, fix=plan.fix)
            error.exit_code = plan.exit_code
            raise error
        if plan.state is PlanState.UNKNOWN:
            self._done(step, "failed", plan.reason, 0.0)
            silent = facts.silent.get(Where.GUEST)
            if silent is not None:
                raise Unreachable(
                    f"the guest cannot be asked: {silent}",
                    where=where,
                    fix=f"check that container {self.want.vmid} runs and that its sshd answers",
                )
            raise StepFailed(
                plan.reason, where=where, fix="run the earlier step too: leave out --from/--only"
            )

    def _proven(self, step: Step, after: Plan) -> None:
        if after.state is PlanState.NOTHING:
            return
        left = "; ".join(change.title for change in after.changes) or after.reason
        raise StepFailed(
            f"still not as wanted after it ran: {after.reason}",
            where=f"{self.want.id} {step.name}",
            fix=after.fix or f"look at `deploy plan {self.want.id}` for what is left: {left}",
        )

    def context(self, step: str) -> StepContext:
        """What a step acts with."""
        return StepContext(
            want=self.want,
            run_id=self.run_id,
            bus=self.bus,
            transports=self.transports,
            reprobe=lambda: self.look(f"during {step}"),
            state=self.state,
            save=self.save,
            step=step,
            environ=self.environ,
            keep=self.keep,
        )

    def _planned(self, step: Step, plan: Plan) -> None:
        self.bus.emit(
            StepPlanned(
                self.want.host_name,
                self.want.id,
                step.name,
                plan.state.value,
                plan.reason,
                plan.fix,
                tuple(change.to_dict() for change in plan.changes),
                plan.notes,
            )
        )

    def _done(self, step: Step, outcome: str, reason: str, seconds: float) -> None:
        self.bus.emit(
            StepDone(
                self.want.host_name,
                self.want.id,
                step.name,
                outcome,
                reason,
                round(seconds, 3),
            )
        )
