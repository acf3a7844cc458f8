"""One side of a migration: its connections, its state, its looks; and the record on its host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.events import Bus, Note, Progress
from deployer.kept import Kept
from deployer.migrate_journal import FOLDER
from deployer.migrate_mark import Mark, mark_path
from deployer.model import Facts, Where
from deployer.observe import Sight
from deployer.recipe import recipe_of
from deployer.remote.files import write_atomic
from deployer.remote.transport import Transport
from deployer.session import HostSession
from deployer.state import DeploymentState, HostState, Migration
from deployer.state_file import StateFile
from deployer.steps.base import Step, StepContext
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.order import all_steps
from deployer.steps.server_facts import ServerFact
from deployer.steps.serving_fact import ServingFact


@dataclass
class Side:
    """The source or the destination."""

    want: Deployment
    session: HostSession
    file: StateFile
    state: HostState
    bus: Bus
    run_id: str
    environ: Mapping[str, str]
    on_step: Callable[[str], None]
    steps: list[Step] = field(default_factory=all_steps)

    @property
    def own(self) -> DeploymentState:
        """The recorded state of the deployment."""
        return self.state.deployments.setdefault(self.want.name, DeploymentState())

    @property
    def transports(self) -> Mapping[Where, Transport]:
        """Of the host and of where the model runs."""
        return self.session.transports(self.want)

    @property
    def guest(self) -> Transport:
        """Where the model runs."""
        return self.transports[self.want.guest]

    @property
    def host(self) -> Transport:
        """The host."""
        return self.transports[Where.HOST]

    def save(self) -> None:
        """Writes the state file."""
        self.file.save(self.state)

    def gather(self, want: Deployment | None = None) -> Facts:
        """All probes of `up`, and those of a migration."""
        return self.session.look(want or self.want, [*self.steps, Sight(), Mark()])

    def engine(self, steps: Sequence[Step], want: Deployment | None = None) -> Engine:
        """An engine for these steps that looks at everything."""
        asked = want or self.want
        kept = Kept(self.file.path.parent.parent / "kept")
        return Engine(
            asked,
            steps,
            lambda: self.gather(asked),
            self.transports,
            state=self.own,
            save=self.save,
            bus=self.bus,
            run_id=self.run_id,
            environ=self.environ,
            on_step=self.on_step,
            keep=lambda want, manifest: kept.add(recipe_of(want, manifest), want.lock_text),
        )

    def only(self, *names: str) -> list[Step]:
        """Steps of `up` by name, in their order."""
        return [step for step in self.steps if step.name in names]

    def bring(
        self, steps: Sequence[Step], facts: Facts | None = None, want: Deployment | None = None
    ) -> Facts:
        """Applies the steps. Raises as Engine.apply."""
        engine = self.engine(steps, want)
        facts = engine.look("before it acts") if facts is None else facts
        return engine.apply(Outcome(), facts, Selection())

    def context(self, step: str, want: Deployment | None = None) -> StepContext:
        """A context for work that is no step of `up`."""
        asked = want or self.want
        return StepContext(
            want=asked,
            run_id=self.run_id,
            bus=self.bus,
            transports=self.transports,
            reprobe=lambda: self.gather(asked),
            state=self.own,
            save=self.save,
            step=step,
            environ=self.environ,
        )

    def note(self, phase: str, text: str, level: str = "info") -> None:
        """One line for the user."""
        self.bus.emit(Note(self.want.host_name, self.want.id, phase, level, text))

    def progress(self, phase: str, what: str, done: float, total: float) -> None:
        """How far a wait is, in seconds."""
        where = (self.want.host_name, self.want.id, phase)
        self.bus.emit(Progress(*where, what, round(done, 1), round(total, 1), "s"))

    def write_mark(self, record: Migration) -> None:
        """The record on the host, as it is now. Raises Unreachable, RemoteCommandFailed."""
        text = record.model_dump_json(indent=1) + "\n"
        write_atomic(self.host, mark_path(self.want), text.encode(), 0o600)

    def remove_mark(self) -> None:
        """No record there any more. Raises Unreachable."""
        self.host.run(
            'rm -f "$1"; rmdir "$2" 2>/dev/null; exit 0', args=(mark_path(self.want), FOLDER)
        )


def trouble(want: Deployment, facts: Facts) -> str:
    """Why the deployment does not serve as proven, as seen now; '' when it does."""
    server, serving = facts.get(ServerFact), facts.get(ServingFact)
    if server is None or serving is None:
        return facts.silent.get(want.guest, "it could not be asked")
    if not server.asked:
        return server.problem
    if server.job is None:
        return "no launch of it runs"
    if not server.job.alive:
        return f"launch {server.job.identity.id} has ended"
    if not server.serving:
        return f"launch {server.job.identity.id} does not have port {want.port}"
    if serving.verdict != "good" or serving.launch != server.job.identity.id:
        return f"launch {server.job.identity.id} has not passed its gates"
    return serving.problem


def is_stopped(want: Deployment, facts: Facts) -> bool:
    """Is there provably nobody to ask: a container that is stopped, or that does not exist?"""
    seen = facts.get(ContainerFacts)
    if want.vmid is None or seen is None:
        return False
    return seen.status == "stopped" or (not seen.exists and "does not exist" in seen.status_text)


def with_drain(want: Deployment, drain_s: float) -> Deployment:
    """The deployment whose stop waits at least so long for running requests."""
    stop = want.playbook.stop
    if stop.drain_s >= drain_s:
        return want
    playbook = want.playbook.model_copy(
        update={"stop": stop.model_copy(update={"drain_s": drain_s})}
    )
    return dataclasses.replace(want, playbook=playbook)
