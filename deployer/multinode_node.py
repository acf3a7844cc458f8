"""One node of a run on several hosts: its connections, its state, its steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.events import Bus, Note
from deployer.kept import Kept
from deployer.locallock import LocalLock
from deployer.model import Facts, Plan, PlanState, Where
from deployer.multinode_follower import Follower, job_of
from deployer.recipe import recipe_of
from deployer.remote.transport import Transport
from deployer.restart import RestartStop
from deployer.rollback_steps import LaunchAgain
from deployer.session import HostSession
from deployer.state import DeploymentState, HostState, Manifest, RolledBack
from deployer.state_file import StateFile
from deployer.steps.base import Step, StepContext
from deployer.steps.launch import LaunchStep
from deployer.steps.rolled_back import rolled_back
from deployer.steps.server_facts import ServerFact
from deployer.steps.stop import StopStep
from deployer.steps.stop_told import stop_ours
from deployer.steps.verify import VerifyStep
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult


class NodeStop(StopStep):
    """As `stop`; with a `reason`, the wanted launch of this node ends too.

    `restarts`: for `deploy restart`, which is no word against a rollback.
    """

    reason: str = ""

    def __init__(self, *, retry: bool = False, restarts: bool = False) -> None:
        super().__init__(retry=retry)
        self.restarts = restarts

    def rollback(self, want: Deployment, state: DeploymentState) -> RolledBack | None:
        """As of `stop`."""
        return rolled_back(state, want) if self.restarts else super().rollback(want, state)

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """A part of a launch is of no use to a launch of all."""
        plan = super().plan(want, facts, state)
        job = job_of(facts)
        if not self.reason or job is None or plan.state is not PlanState.NOTHING:
            return plan
        change = dataclasses.replace(stop_ours(want, job, False), reason=self.reason)
        refused = self.successor_refused(want, facts, state)
        return refused or Plan.change(
            self.reason, change, *self.left_changes(want, facts.need(ServerFact))
        )


@dataclass
class NodeRun:
    """What a run knows of one node. Its locks are taken by who makes it."""

    want: Deployment
    session: HostSession
    state_file: StateFile
    state: HostState
    own: DeploymentState
    steps: list[Step]
    transports: Mapping[Where, Transport]
    options: UpOptions
    bus: Bus
    run_id: str
    local: LocalLock | None
    result: DeploymentResult
    stop: NodeStop
    launch: LaunchStep
    facts: Facts = field(default_factory=Facts)

    @property
    def host(self) -> str:
        return self.want.host_name

    def to(self, want: Deployment, steps: Sequence[Step]) -> NodeRun:
        """The same node on its way to another wish, by these steps."""
        own, stop, launch = node_steps(steps)
        return dataclasses.replace(self, want=want, steps=own, stop=stop, launch=launch)

    def save(self) -> None:
        self.state_file.save(self.state)

    def look(self, reason: str) -> None:
        self.facts = self.engine(self.steps).look(reason)

    def see(self) -> None:
        self.facts = self.session.look(self.want, self.steps)

    def keep(self, want: Deployment, manifest: Manifest) -> str:
        kept = Kept(self.options.deploy_dir / "kept")
        return kept.add(recipe_of(want, manifest), want.lock_text)

    def entered(self, step: str) -> None:
        self.result.acted = True
        if self.local is not None:
            self.local.enter(step)
        self.session.entered(step)

    def engine(
        self,
        steps: Sequence[Step],
        gather: Callable[[], Facts] | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> Engine:
        """`steps` act; those of the whole run look."""
        return Engine(
            self.want,
            steps,
            gather or (lambda: self.session.look(self.want, self.steps)),
            self.transports,
            state=self.own,
            save=self.save,
            bus=self.bus,
            run_id=self.run_id,
            environ=self.options.environ,
            on_step=on_step or self.entered,
            keep=self.keep,
        )

    def apply(self, steps: Sequence[Step]) -> None:
        """Runs these steps on this node alone."""
        outcome = Outcome()
        try:
            self.facts = self.engine(steps).apply(outcome, self.facts, Selection())
        finally:
            self.changed(outcome)

    @property
    def changes(self) -> list[str]:
        """The steps of this run that have changed something here."""
        return self.result.outcome.changed if self.result.outcome is not None else []

    def changed(self, outcome: Outcome) -> None:
        if self.result.outcome is not None:
            self.result.outcome.changed += outcome.changed

    def follower(self) -> Follower:
        """What the launch of all knows of it. Its save, bus and facts are this node's."""
        context = StepContext(
            want=self.want,
            run_id=self.run_id,
            bus=self.bus,
            transports=self.transports,
            reprobe=lambda: self.session.look(self.want, self.steps),
            state=self.own,
            save=self.save,
            step="launch",
            environ=self.options.environ,
            keep=self.keep,
        )
        return Follower(context, self.launch)


def open_node(
    stack: contextlib.ExitStack,
    want: Deployment,
    options: UpOptions,
    bus: Bus,
    run_id: str,
    result: DeploymentResult,
    local: LocalLock | None,
    given: Sequence[Step],
) -> NodeRun:
    """The node with a session that ends with `stack`; its steps are as `given`, but as of a node.

    Raises StateUnreadable.
    """
    session = stack.enter_context(_session(want, options, bus))
    state_file = StateFile(options.deploy_dir / "state", want.host_name)
    state = state_file.load()
    steps, stop, launch = node_steps(given)
    return NodeRun(
        want,
        session,
        state_file,
        state,
        state.deployments.setdefault(want.name, DeploymentState()),
        steps,
        session.transports(want),
        options,
        bus,
        run_id,
        local,
        result,
        stop,
        launch,
    )


def node_steps(given: Sequence[Step]) -> tuple[list[Step], NodeStop, LaunchStep]:
    """A node's steps. The whole list looks; `stop` and `launch` are its own."""
    retry = any(isinstance(step, StopStep) and step.retry for step in given)
    restarts = any(isinstance(step, RestartStop) for step in given)
    given_stop = next((step for step in given if isinstance(step, NodeStop)), None)
    stop = given_stop or NodeStop(retry=retry, restarts=restarts)
    launch = next((step for step in given if isinstance(step, LaunchAgain)), LaunchStep())
    own: dict[str, Step] = {"stop": stop, "launch": launch, "verify": VerifyStep()}
    return [own.get(step.name, step) for step in given], stop, launch


@contextlib.contextmanager
def _session(want: Deployment, options: UpOptions, bus: Bus) -> Iterator[HostSession]:
    host = want.host_name
    session = HostSession(
        host, want.host, options.base, lambda text: bus.emit(Note(host, "", "lock", "info", text))
    )
    try:
        with options.cancel.waking(session.wake):
            yield session
    finally:
        session.close(lambda text: bus.emit(Note(host, "", "", "warning", text)))
