"""The steps of `up`, as a rollback takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import Change, Facts, Plan, PlanState, Probe, Procedure
from deployer.remote.jobs import JobIdentity
from deployer.remote.lock_record import owner_here
from deployer.shell import words
from deployer.state import Back, DeploymentState, Launch
from deployer.steps.adopted import KEPT, back_again, command_line, folder, for_abort_only
from deployer.steps.base import Step, StepContext
from deployer.steps.container import ContainerStep
from deployer.steps.driver import DriverStep
from deployer.steps.driver_cuda import cuda_need
from deployer.steps.driver_facts import HostDriver
from deployer.steps.gpus import GpusStep
from deployer.steps.launch import LaunchStep, api_key
from deployer.steps.launch_restore import by_itself, note_of
from deployer.steps.server_facts import ServerFact, ServerJob
from deployer.steps.server_wanted import LaunchNote, Rung
from deployer.steps.shards import ShardsStep
from deployer.steps.stop import StopStep
from deployer.steps.venv import VenvStep
from deployer.steps.verify import VerifyStep


class DriverAsItIs(DriverStep):
    """A rollback changes no driver; it refuses one that is too old for `launch`."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing, or the refusal before anything is touched."""
        host, need = facts.get(HostDriver), cuda_need(want)
        if host is not None and need is not None and not runs(facts, self.launch):
            version = host.loaded or host.on_disk
            if why := need.refuses(version):
                return Plan.blocked(
                    f"{why}; a rollback changes no driver",
                    f"name another launch (`deploy rollback {want.id}` lists them), or bring "
                    f"driver {need.driver} or newer to {want.host_name} first",
                    stands=True,
                )
        return Plan.nothing("left as it is; `deploy up` sees to it")


def note_again(state: DeploymentState, launch: Launch, *, asked: bool) -> LaunchNote:
    """What the job's folder is told of `launch` when it is launched again."""
    record, back = state.rollback, by_itself(state, launch)
    if asked and record is not None:
        back = Back(to=record.to, left=record.left, asked=True, by=record.by or owner_here())
    return note_of(launch, back)


class LaunchAgain(LaunchStep):
    """Launches what `launch` was; the note and the recipe are those of that time.

    `asked`: by `deploy rollback`, not after its failure.
    """

    def __init__(self, launch: Launch, *, asked: bool = True) -> None:
        super().__init__()
        self.launch = launch
        self.asked = asked

    def see(self, facts: Facts) -> None:
        """The recipe is kept already."""
        super().see(facts)
        self.seen = dataclasses.replace(self.seen, recipe=self.launch.recipe)

    def start_rung(
        self, context: StepContext, rung: Rung, note: LaunchNote, key: str
    ) -> tuple[JobIdentity, Launch]:
        """What had failed before it then is told of it again."""
        note = note_again(context.state, self.launch, asked=self.asked)
        return super().start_rung(context, rung, note, key)

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """Nothing by this step: the rollback brings back what served before."""
        return None

    def adopted_again(self, context: StepContext) -> str:
        """Nor what it ended of somebody else's: that is the rollback's to bring back."""
        return ""


def rollback_steps(launch: Launch, *, asked: bool = True) -> list[Step]:
    """The steps of `up` that bring `launch` back; no gates after a failure (not `asked`)."""
    steps: list[Step] = [
        DriverAsItIs(launch),
        GpusStep(),
        ContainerStep(),
        VenvStep(),
        ShardsStep(),
        StopStep(retry=True),
        LaunchAgain(launch, asked=asked),
    ]
    return [*steps, VerifyStep()] if asked else steps


class StopOther(StopStep):
    """Ends whatever launch of ours runs but `launch`."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(retry=True)
        self.launch = launch

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """As of `down`."""
        if runs(facts, self.launch):
            return Plan.nothing(f"launch {self.launch.id} runs")
        return self.down_plan(want, facts)


class AsRecorded(LaunchAgain):
    """Starts a launch by its recorded command: what it was made from is not known."""

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when it runs."""
        if runs(facts, self.launch):
            return Plan.nothing(f"what launch {self.launch.id} was runs")
        words = "its recorded command, environment and build"
        change = Change(
            f"start what launch {self.launch.id} was", "it served", Procedure(want.guest, words)
        )
        return Plan.change("it served before", change)

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """The launch."""
        return self.launch

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Starts and follows it. Raises StepFailed."""
        words = self.restore(context, api_key(context), ())
        if context.state.launches[-1].verdict != "ready":
            raise StepFailed(words, where=f"{context.want.id} rollback", fix="read `deploy logs`")


@dataclasses.dataclass(frozen=True)
class WrittenDown:
    """The command line of a server of somebody else that was ended for a launch; '' for none."""

    command: str


class AdoptedAgain(StopStep):
    """Ends what runs of ours, and starts again the server of somebody else that it replaced."""

    def __init__(self) -> None:
        super().__init__(retry=True)
        self.words = ""
        """What came of it."""
        self.holder = ""
        """Who has the port, when it was left alone."""

    def probes(self, want: Deployment) -> list[Probe]:
        """The look at the server, and what is written down."""
        return [*super().probes(want), written_probe(want)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when none is written down, or another has the port."""
        written, fact = facts.get(WrittenDown), facts.get(ServerFact)
        if written is None or fact is None or not fact.asked:
            return Plan.unknown("container", "unknown until the guest can be asked")
        if self.words or not written.command or for_abort_only(state):
            return Plan.nothing(self.words or "nothing had served before")
        ends = self.down_plan(want, facts)
        if ends.state in (PlanState.BLOCKED, PlanState.UNKNOWN):
            return ends
        if fact.strangers:
            self.holder = f"port {want.port} is held by pid {fact.strangers[0].pid}"
            return Plan.nothing(self.holder)
        words = f"its own command, environment and user: {written.command}"
        start = Change("start what had the port", "it had it", Procedure(want.guest, words))
        return Plan.change(ends.reason, *ends.changes, start)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Raises StepFailed when it does not come up."""
        ends = self.down_plan(context.want, facts)
        if ends.state is PlanState.CHANGES:
            super().apply(context, facts, ends)
        text, serves = back_again(
            context.on(context.want.guest),
            context.want,
            lambda what, done, total: context.progress(what, done, total, "s"),
            self.now,
            self.sleep,
        )
        if not serves:
            raise StepFailed(text, where=f"{context.want.id} rollback", fix="start it by hand")
        self.words = text


def written_probe(want: Deployment) -> Probe:
    """Its fact is WrittenDown."""
    script = f"set -- {words([folder(want)])}\n{KEPT}"
    return Probe(
        "adopted", want.guest, script, lambda output: WrittenDown(command_line(output.stdout))
    )


def job_of(facts: Facts) -> ServerJob | None:
    """Our server job, when it is alive."""
    server = facts.get(ServerFact)
    return server.job if server is not None and server.job and server.job.alive else None


def runs(facts: Facts, launch: Launch) -> bool:
    """Does what `launch` was run?"""
    job = job_of(facts)
    return job is not None and job.fingerprint == launch.fingerprint
