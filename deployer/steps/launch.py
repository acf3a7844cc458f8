"""The step `launch`: starts the wanted server as a job and follows it until it serves.

A dead process ends the wait at once. The next rung of the ladder is tried only where the class of
the failure allows it. When all fail, the last known-good launch is started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from deployer.deployment import Deployment
from deployer.errors import DeployError, RemoteCommandFailed, StepFailed
from deployer.model import Facts, Plan, Probe
from deployer.remote.jobs import JobIdentity
from deployer.sglang.argv import command, server_argv
from deployer.state import DeploymentState, Launch
from deployer.steps.base import StepContext
from deployer.steps.failed_want import remember_failure
from deployer.steps.known_good import LEFT_OUT
from deployer.steps.launch_again import LaunchAgain
from deployer.steps.launch_fit import difference, outlook
from deployer.steps.launch_ladder import Fall
from deployer.steps.launch_plan import launch_plan
from deployer.steps.launch_start import SeenBefore, identify, recorded, start_command
from deployer.steps.launch_told import as_step_failed, redacted
from deployer.steps.server_facts import ServerFact, problems_of
from deployer.steps.server_wanted import (
    LaunchNote,
    Rung,
    degraded,
    is_wanted,
    server_job_name,
)
from deployer.steps.stop_leftovers import clear, held
from deployer.steps.stop_told import still_there
from deployer.steps.venv_facts import VenvFact
from deployer.steps.weights_facts import WeightsFact, weights_probe

# What follows a launch (the rules of its failures among it) is loaded where one is followed: a look
# that finds nothing to do is over before it would be.
if TYPE_CHECKING:
    from deployer.steps.launch_wait import LaunchFailed


class LaunchStep(LaunchAgain):
    """Plans from the fact of the stop step's probe."""

    name: ClassVar[str] = "launch"

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now = now
        self.sleep = sleep
        self.seen = SeenBefore()
        """By the last plan."""

    def probes(self, want: Deployment) -> list[Probe]:
        """The weights' headers; ServerFact comes from the stop step."""
        return [weights_probe(want, self.seen.weights)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when the wanted server listens; else a start, or the wait for one that starts."""
        self.see(facts)
        return launch_plan(want, facts, state)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Starts or joins a launch and follows it; falls down the ladder where that may help."""
        fact = facts.need(ServerFact)
        key = api_key(context)
        fall = Fall.begin(context.want, context.state)
        if fall.why:
            context.note(fall.why, "warning")
        attach = self._joinable(context, fact)
        if attach is not None:
            fall.join(attach[1])
        elif fact.job is not None and not fact.leftovers:
            # It died by itself: no stop has ended what left its session, or cleared its files.
            self._end_rest(context, fact.job.identity)
        from deployer.steps.launch_wait import LaunchFailed

        last: tuple[Launch, LaunchFailed] | None = None
        failed: set[str] = set()
        while (rung := fall.next()) is not None:
            want = rung.deployment(context.want)
            if attach is not None:
                job, launch = attach[0], recorded(context, *attach)
                attach = None
                context.job_started(job.name, job.pid, True)
            else:
                problems = problems_of(want, fact, rung.variant)
                if problems:
                    context.note(
                        f"variant {rung.variant} is left out: {problems[0].reason}", "warning"
                    )
                    fall.failed(rung, LEFT_OUT)
                    continue
                try:
                    job, launch = self.start_rung(context, rung, fall.note(rung), key)
                except RemoteCommandFailed as error:
                    raise self._not_started(context, key, failed, error) from error
                view = outlook(want, facts, context.state.manifest, rung.variant)
                launch.figures.update(view.figures)
                context.note(f"variant {rung.variant}: {view.words}")
            try:
                self.follow(context, job, launch, key)
                if less := degraded(launch.variant, launch.instead_of):
                    context.note(less, "warning")
                return
            except LaunchFailed as error:
                self.give_up(context, job, launch, error)
                fall.failed(rung, error.failure.cls)
                failed.add(launch.fingerprint)
                last = launch, error
                if not error.failure.next_variant_allowed:
                    break
                self._fall(context, facts, fall, rung, error, key)
        if last is None:
            left_out = ", ".join(fall.reasons) or "all"
            known = self.restore(context, key, failed)
            raise StepFailed(
                f"no variant is left to launch; left out: {left_out}"
                f"{f'; {known}' if known else ''}",
                where=f"{context.want.id} launch",
                fix="change the variants of the playbook as the notes above say",
            )
        said = last[1].failure
        cause = redacted(f"{said.cls}: {said.cause_line}", key)
        remember_failure(context.state, context.want, cause, StepFailed.exit_code, said.action)
        context.save()
        known = self.restore(context, key, failed)
        raise as_step_failed(context.want, *last, known, key) from last[1]

    def refused(self, context: StepContext, changed: Sequence[str], error: DeployError) -> None:
        """What was stopped for a launch that cannot be tried now serves again."""
        if "stop" not in changed:
            return
        try:
            known = self.restore(context, api_key(context), ())
        except StepFailed as second:
            known = f"and what served before was not started again: {second.what}"
        if known:
            error.add(known)

    def see(self, facts: Facts) -> None:
        weights, venv = facts.get(WeightsFact), facts.get(VenvFact)
        self.seen = SeenBefore(
            weights.line if weights is not None else self.seen.weights,
            venv.target if venv is not None else self.seen.venv,
        )

    def _fall(
        self,
        context: StepContext,
        facts: Facts,
        fall: Fall,
        rung: Rung,
        error: LaunchFailed,
        key: str,
    ) -> None:
        """Adds the derived step where one helps, and says what is tried next."""
        told = f"variant {rung.variant} failed ({error.failure.cls}: "
        told += f"{redacted(error.failure.cause_line, key)})"
        found = fall.derive(facts, context.state.manifest, rung, error)
        if found is not None:
            context.note(f"{told}; trying it once more with {found.words}", "warning")
        elif fall.left:
            context.note(f"{told}; trying the next one", "warning")

    def _not_started(
        self,
        context: StepContext,
        key: str,
        failed: Collection[str],
        error: RemoteCommandFailed,
    ) -> StepFailed:
        """The job did not begin: nothing of the wish was tried, and the old server is gone."""
        if not (known := self.restore(context, key, failed)):
            return error
        return StepFailed(
            f"{error.what}; {known}", where=error.where, fix=error.fix, evidence=error.evidence
        )

    def _end_rest(self, context: StepContext, job: JobIdentity) -> None:
        """Processes that a dead launch has marked as its own hold GPU memory; so do its files."""
        rules = context.want.playbook.stop
        proof = context.jobs(context.want.guest).stop(job, grace_s=5.0, kill_s=rules.kill_s)
        if not proof.stopped:
            raise still_there(context.want, f"launch {job.id}", proof.survivors, proof.how)
        clear(context, job, [])

    def _joinable(
        self, context: StepContext, fact: ServerFact
    ) -> tuple[JobIdentity, LaunchNote] | None:
        job = fact.job
        if job is None or not job.alive:
            return None
        if not is_wanted(context.want, context.state.manifest, job.fingerprint, job.launch):
            return None
        return job.identity, job.launch

    def start_rung(
        self, context: StepContext, rung: Rung, note: LaunchNote, key: str
    ) -> tuple[JobIdentity, Launch]:
        want = rung.deployment(context.want)
        argv = command(want, server_argv(want))
        mark = rung.fingerprint(context.want, context.state.manifest)
        return start_command(context, argv, mark, note, key, self.seen)

    def follow(self, context: StepContext, job: JobIdentity, launch: Launch, key: str) -> None:
        from deployer.steps.launch_wait import LaunchWait

        wait = LaunchWait(context, job, key, self.now, self.sleep)
        answer = wait.until_ready()
        identify(launch, job)
        launch.verdict = "ready"
        launch.figures.update(wait.log.figures)
        context.save()
        want = context.want
        keep = want.playbook.serve.keep_launches
        gone = context.jobs(want.guest).prune(server_job_name(want), keep)
        if gone:
            context.note(f"removed {len(gone)} old launch folders (serve.keep_launches: {keep})")
        members = len(answer.get("members", []))
        context.note(f"launch {launch.id} is ready: pid {job.pid}, {members} processes")
        if told := difference(launch.figures, wait.log.figures):
            context.note(told)

    def give_up(
        self, context: StepContext, job: JobIdentity, launch: Launch, error: LaunchFailed
    ) -> None:
        """Nothing of a failed launch may stay behind: it would hold GPU memory."""
        rules = context.want.playbook.stop
        files = held(context, job) if error.exit_code is None else []
        proof = context.jobs(context.want.guest).stop(job, grace_s=5.0, kill_s=rules.kill_s)
        launch.verdict = f"failed: {error.failure.cls}"
        context.save()
        if not proof.stopped:
            raise StepFailed(
                f"launch {launch.id} failed ({error.failure.cls}) and could not be ended",
                where=f"{context.want.id} launch",
                fix=f"reboot {context.want.host_name} if these are in D state",
                evidence=proof.survivors,
            ) from error
        clear(context, job, files)


def api_key(context: StepContext) -> str:
    """The API key of the playbook's variable, '' when it names none.

    Raises StepFailed when the variable is unset.
    """
    name = context.want.playbook.serve.api_key_env
    if name is None:
        return ""
    key = context.environ.get(name, "")
    if not key:
        raise StepFailed(
            f"the environment variable {name} (serve.api_key_env) is not set",
            where=f"{context.want.id} {context.step}",
            fix=f"export {name}=...",
        )
    return key
