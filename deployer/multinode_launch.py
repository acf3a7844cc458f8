"""The launch of one server on several hosts: started, followed, ended and judged as one.

Rank 0 is the deployment that the step works on; the others are its `Follower`s. All share the
launch's id. As in SGLang 0.5.11 (entrypoints/engine.py, `_launch_subprocesses`), a follower runs
its schedulers and, once these are ready, a health server on the port; it names no model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.errors import REFUSALS, GateFailed, StepBlocked, StepFailed, Unreachable
from deployer.model import Facts, Plan, PlanState
from deployer.multinode_threads import raise_first, together
from deployer.remote.jobs import JobIdentity, JobStatus
from deployer.sglang.argv import command, server_argv
from deployer.sglang.derive import Seen
from deployer.sglang.failure import Failure
from deployer.state import DeploymentState, Launch, Manifest
from deployer.steps.base import StepContext
from deployer.steps.failed_want import forget_failure, remember_failure
from deployer.steps.launch import LaunchStep, api_key
from deployer.steps.launch_restore import as_launched, command_of, last_good, note_of
from deployer.steps.launch_start import SeenBefore, new_launch_id, start_command
from deployer.steps.launch_told import redacted
from deployer.steps.launch_wait import LOST_S, LaunchFailed, LaunchWait
from deployer.steps.server_facts import ServerFact, ServerJob
from deployer.steps.server_wanted import DERIVED, LaunchNote, Rung, is_wanted
from deployer.steps.stop import StopStep
from deployer.steps.verify import VerifyStep

BEAT_S = 3.0
"""How often each follower is asked while the launch starts."""
SETTLE_S = 6.0
"""After a death: so long the other nodes get to die of the same, and to say why. A scheduler whose
peer is gone raises at its next collective, and its parent ends within some 2 s."""
LISTEN_S = 60.0
"""A follower listens as soon as its schedulers are ready, which the first answer needs already."""
PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|remote process exited|Broken pipe"
    r"|ncclRemoteError|connectFullMesh failed|client socket has|failed to (?:connect|recv)"
    r"|wait timeout after|clients joined",
    re.IGNORECASE,
)
"""Of torch, gloo and NCCL: another rank is gone, which is no cause of its own."""


@dataclass
class Follower:
    """A node of rank 1 or more. `step` has planned with its own facts."""

    context: StepContext
    step: LaunchStep
    facts: Facts = dataclasses.field(default_factory=Facts)
    wait: FollowerWait | None = None
    launch: Launch | None = None
    active: StepContext | None = None
    """What the launch that runs was started with."""

    @property
    def want(self) -> Deployment:
        """Its deployment."""
        return self.context.want

    @property
    def label(self) -> str:
        """`rank 1 on kpro6`."""
        rank = self.want.node.rank if self.want.node is not None else 0
        return f"rank {rank} on {self.want.host_name}"

    def joins(self, job: JobIdentity, launch: Launch, key: str, step: LaunchStep) -> None:
        """Follows what was found running."""
        self._follows(self.context, job, launch, key, step)

    def start(self, rung: Rung, note: LaunchNote, key: str, shared: str, step: LaunchStep) -> None:
        """Starts its part of the launch `shared`. Raises StepFailed."""
        context = self.context
        want, manifest = rung.deployment(context.want), context.state.manifest
        seen = dataclasses.replace(self.step.seen, launch=shared)
        note = marked(context.want, manifest, note)
        argv, mark = command(want, server_argv(want)), rung.fingerprint(context.want, manifest)
        job, launch = start_command(context, argv, mark, note, key, seen)
        self._follows(context, job, launch, key, step)

    def start_again(self, good: Launch, key: str, shared: str, step: LaunchStep) -> None:
        """Starts what it had in an earlier launch. Raises StepFailed."""
        then = copy.copy(self.context)
        then.want = as_launched(self.context.want, good)
        seen = SeenBefore(self.step.seen.weights, good.venv, good.recipe, shared)
        job, launch = start_command(
            then, command_of(good), good.fingerprint, note_of(good), key, seen
        )
        self._follows(then, job, launch, key, step)

    def end(self, cls: str) -> None:
        """Nothing of its part stays behind. Raises StepFailed."""
        if self.active is None or self.wait is None or self.launch is None:
            return
        failed = Failure(cls, "", "", False)
        # Told as alive: then what it holds is cleared, whatever it died of.
        error = LaunchFailed(failed, None, self.wait.log.phase, (), self.wait.seen())
        self.step.give_up(self.active, self.wait.job, self.launch, error)
        self.active = self.wait = self.launch = None

    def earlier(self, launch_id: str) -> Launch | None:
        """Its part of an earlier launch."""
        return next((one for one in self.context.state.launches if one.id == launch_id), None)

    def _follows(
        self, context: StepContext, job: JobIdentity, launch: Launch, key: str, step: LaunchStep
    ) -> None:
        self.active, self.launch = context, launch
        self.wait = FollowerWait(context, job, key, step.now, step.sleep, label=self.label)


@dataclass
class FollowerWait(LaunchWait):
    """One follower, looked at between two looks at rank 0."""

    label: str = ""
    inode: int = 0
    offset: int = 0
    lost: float | None = None
    status: JobStatus | None = None

    def beat(self) -> bool:
        """Whether it lives, as far as it can be asked. Raises Unreachable after LOST_S."""
        if self.status is not None and not self.status.alive:
            return False
        try:
            status = self.context.jobs(self.context.want.guest).poll(
                self.job, inode=self.inode, offset=self.offset
            )
        except REFUSALS:
            raise
        except Unreachable:
            self.lost = self.now() if self.lost is None else self.lost
            if self.now() - self.lost > LOST_S:
                raise
            return True
        self.lost = None
        self.inode, self.offset, self.status = status.inode, status.offset, status
        self.log.feed(status.log)
        if not status.alive:
            self.status = self._rest(status)
        return status.alive

    def failure(self) -> LaunchFailed:
        """Why it is dead; told as of this node."""
        if self.status is None:
            raise ValueError(f"{self.label} was not asked")
        error = self._dead(self.status)
        told = dataclasses.replace(
            error.failure, cause_line=f"{self.label}: {error.failure.cause_line or 'no last word'}"
        )
        lines = tuple(f"{self.label}: {line}" for line in error.evidence)
        return LaunchFailed(told, error.exit_code, error.phase, lines, error.seen)

    def seen(self) -> Seen:
        """What its log told of memory."""
        free, use = self.log.free_before.values(), self.log.weight_use.values()
        return Seen(min(free, default=None), max(use, default=None))

    def listens(self) -> bool:
        """Has its health server come up, on a port of its own?"""
        answer = self._ask_if_there("ready") or {}
        return bool(answer.get("ok") and answer.get("owned") and answer.get("health") == 200)


class NodesLaunch(LaunchStep):
    """The launch step of rank 0, for all nodes."""

    def __init__(
        self,
        followers: Sequence[Follower],
        cancel: Cancel,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(now, self._sleep_and_look)
        self.followers = followers
        self.cancel = cancel
        self._sleep = sleep
        self._looked = now()
        self._watching = False

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when all nodes run one launch; a wait when all start one; else a start."""
        plans = {want.host_name: super().plan(want, facts, state)}
        for one in self.followers:
            theirs = one.step.plan(one.want, one.facts, one.context.state)
            plans[one.want.host_name] = theirs
        for kind in (PlanState.BLOCKED, PlanState.UNKNOWN):
            for host, plan in plans.items():
                if plan.state is kind:
                    reason = plan.reason if host == want.host_name else f"{host}: {plan.reason}"
                    return dataclasses.replace(plan, reason=reason)
        mine = plans[want.host_name]
        shared = self.shared(want, facts, state)
        if all(plan.state is PlanState.NOTHING for plan in plans.values()) and shared:
            return Plan.nothing(f"launch {shared} is alive on {', '.join(plans)}")
        jobs = {host: job_of(one) for host, one in self._all(want, facts).items()}
        if any(job is not None for job in jobs.values()) and not shared:
            there = ", ".join(host for host, job in jobs.items() if job is not None)
            return Plan.unknown("stop", f"unknown until stop has ended what runs on {there}")
        if mine.state is PlanState.NOTHING:
            # Rank 0 answers, and a follower does not listen yet.
            theirs = next(plan for plan in plans.values() if plan.state is not PlanState.NOTHING)
            return theirs
        return mine.noted(
            *(
                f"{one.label}: {change.title}"
                for one in self.followers
                for change in plans[one.want.host_name].changes
            )
        )

    def shared(self, want: Deployment, facts: Facts, state: DeploymentState) -> str:
        """The id of the wanted launch that all nodes have alive; '' when there is none."""
        ids = {wanted_id(want, facts, state)}
        ids |= {wanted_id(one.want, one.facts, one.context.state) for one in self.followers}
        return ids.pop() if len(ids) == 1 else ""

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """As of `launch`, on all nodes; what a dead part of one has left is ended first."""
        if not self.shared(context.want, facts, context.state):
            for one in self.followers:
                server = one.facts.get(ServerFact)
                if server is not None and server.job is not None and not server.leftovers:
                    self._end_rest(one.context, server.job.identity)
        super().apply(context, facts, plan)

    def start_rung(
        self, context: StepContext, rung: Rung, note: LaunchNote, key: str
    ) -> tuple[JobIdentity, Launch]:
        shared = new_launch_id()
        self.seen = dataclasses.replace(self.seen, launch=shared)
        try:
            for one in self.followers:
                one.start(rung, note, key, shared, self)
            return super().start_rung(context, rung, note, key)
        except StepFailed:
            # Of a launch that is not whole nothing may wait for the rest.
            self._end_followers("not-started")
            raise

    def follow(self, context: StepContext, job: JobIdentity, launch: Launch, key: str) -> None:
        for one in self.followers:
            if one.wait is None:
                self._join(one, job, key)
        self._watching, self._looked = True, self.now()
        try:
            super().follow(context, job, launch, key)
            self._until_all_listen(context)
        except LaunchFailed as error:
            self._watching = False
            raise self._cause(context, job, key, error) from error
        finally:
            self._watching = False
        for one in self.followers:
            if one.launch is not None and one.wait is not None:
                one.launch.verdict = "ready"
                one.launch.pid, one.launch.start = one.wait.job.pid, one.wait.job.start
                one.launch.boot = one.wait.job.boot
                one.context.save()

    def give_up(
        self, context: StepContext, job: JobIdentity, launch: Launch, error: LaunchFailed
    ) -> None:
        """On all nodes at once; each is tried, whatever another says."""
        # The cause may be another node's: whether rank 0 lives is not said by it.
        mine = LaunchFailed(error.failure, None, error.phase, error.evidence, error.seen)
        ends = self._ends(error.failure.cls)
        ends[context.want.host_name] = lambda: LaunchStep.give_up(self, context, job, launch, mine)
        raise_first(together(ends, self.cancel))

    def restore(self, context: StepContext, key: str, failed: Collection[str]) -> str:
        """The last known-good launch again, on all nodes or on none."""
        good = self.former(context.state, failed)
        if good is None:
            return ""
        parts = [(one, one.earlier(good.id)) for one in self.followers]
        lacking = [one.label for one, part in parts if part is None or not part.argv]
        if lacking:
            return (
                f"the last known-good launch {good.id} was not started again: "
                f"{', '.join(lacking)} has no record of its part"
            )
        shared = new_launch_id()
        try:
            for one, part in parts:
                if part is not None:
                    one.start_again(part, key, shared, self)
        except REFUSALS:
            raise
        except (StepFailed, Unreachable) as error:
            self._end_followers("not-started")
            return (
                f"the last known-good launch {good.id} did not start again either "
                f"({redacted(error.what, key)})"
            )
        self.seen = dataclasses.replace(self.seen, launch=shared)
        words = super().restore(context, key, failed)
        newest = context.state.launches[-1]
        if newest.id != shared or newest.verdict != "ready":
            self._end_followers("not-started")
        return words

    # ---- while it starts
    def _join(self, one: Follower, job: JobIdentity, key: str) -> None:
        server = one.facts.get(ServerFact)
        theirs = server.job if server is not None else None
        launch = one.earlier(job.id)
        if theirs is None or theirs.identity.id != job.id:
            raise StepFailed(
                f"{one.label} has no part of launch {job.id}",
                where=f"{one.want.id} launch",
                fix="run `deploy up` again",
            )
        if launch is None:
            want = theirs.launch.rung.deployment(one.want)
            launch = Launch(
                id=job.id,
                variant=theirs.launch.variant,
                started=time.time(),
                fingerprint=theirs.fingerprint,
                argv=command(want, server_argv(want)),
                changes=dict(theirs.launch.changes),
                instead_of=theirs.launch.instead_of,
            )
            one.context.state.launches.append(launch)
        one.joins(theirs.identity, launch, key, self)
        one.context.job_started(theirs.identity.name, theirs.identity.pid, True)

    def _sleep_and_look(self, seconds: float) -> None:
        """In place of the sleep of who waits for rank 0. Raises LaunchFailed for a dead node."""
        self._sleep(seconds)
        if not self._watching or self.now() - self._looked < BEAT_S:
            return
        self._looked = self.now()
        for one in self.followers:
            if one.wait is not None and not one.wait.beat():
                raise one.wait.failure()

    def _until_all_listen(self, context: StepContext) -> None:
        ends = self.now() + LISTEN_S
        for one in self.followers:
            while one.wait is not None and not one.wait.listens():
                if not one.wait.beat():
                    raise one.wait.failure()
                if self.now() >= ends:
                    failure = Failure(
                        "not-ready-in-time",
                        f"{one.label} does not listen on port {one.want.port}",
                        f"read `deploy logs {one.want.id}`",
                        False,
                    )
                    raise LaunchFailed(failure, None, one.wait.log.phase, (), one.wait.seen())
                context.progress(f"{one.label} listens", 0, 1, "", f"launch {one.wait.job.id}")
                self.sleep(1.0)

    def _cause(
        self, context: StepContext, job: JobIdentity, key: str, error: LaunchFailed
    ) -> LaunchFailed:
        """Which node's last words are the cause: those that do not only miss another node."""
        waits = [one.wait for one in self.followers if one.wait is not None]
        of_follower = any(error.failure.cause_line.startswith(f"{one.label}: ") for one in waits)
        dead_of_its_own = of_follower or error.exit_code is not None
        if dead_of_its_own and not only_misses_a_peer(error):
            return error
        if of_follower:
            leader = f"rank 0 on {context.want.host_name}"
            waits.append(FollowerWait(context, job, key, self.now, self._sleep, label=leader))
        ends = self.now() + SETTLE_S
        while True:
            dead = [one for one in waits if not one.beat()]
            causes = [one.failure() for one in dead]
            if own := [one for one in causes if not only_misses_a_peer(one)]:
                return own[0]
            if self.now() >= ends or len(dead) == len(waits):
                return error
            context.progress("the other nodes' last words", 0, SETTLE_S, "s")
            self._sleep(0.5)

    def _ends(self, cls: str) -> dict[str, Callable[[], None]]:
        """How each follower's part of the launch is ended, by host."""
        return {one.want.host_name: functools.partial(one.end, cls) for one in self.followers}

    def _end_followers(self, cls: str) -> None:
        for host, error in together(self._ends(cls), self.cancel).items():
            one = next(one for one in self.followers if one.want.host_name == host)
            one.context.note(f"its part of the launch could not be ended: {error}", "warning")

    def _all(self, want: Deployment, facts: Facts) -> dict[str, Facts]:
        return {want.host_name: facts, **{one.want.host_name: one.facts for one in self.followers}}


class NodesVerify(VerifyStep):
    """The gates of rank 0; their verdict is that of all nodes."""

    replaces = False
    """By the fallback of one host; that of all nodes is here."""

    def __init__(
        self,
        launch: NodesLaunch,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(now, sleep)
        self.launch = launch
        self.followers = launch.followers

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """As of `verify`; after a failed gate, what the playbook says becomes of the launch."""
        try:
            super().apply(context, facts, plan)
        except GateFailed as error:
            remember_failure(context.state, context.want, error.what, error.exit_code, error.fix)
            context.save()
            told = self._after(context, facts)
            what = f"{error.what}; {told}" if told else error.what
            raise GateFailed(
                what, where=error.where, fix=error.fix, evidence=error.evidence
            ) from error

    def _after(self, context: StepContext, facts: Facts) -> str:
        """Restores what served before, on all nodes, or ends the launch; says what came of it."""
        rule = context.want.playbook.gates.on_failure
        job = facts.need(ServerFact).job
        if rule == "leave" or job is None:
            return ""
        failed = {job.fingerprint}
        good = last_good(context.state, failed)
        if good is None and rule != "stop":
            return f"launch {job.identity.id} is left as it is; `deploy down` stops it"
        try:
            self._end_all(context)
            if good is None:
                return f"launch {job.identity.id} was stopped (gates.on_failure: stop)"
            return self.launch.restore(context, api_key(context), failed)
        except (StepFailed, Unreachable) as error:
            # The gate's failure is the one to tell; this one is told with it.
            return f"what was to follow could not be done: {error.what}"

    def _end_all(self, context: StepContext) -> None:
        """Rank 0 first: the others then end by themselves, or are ended."""
        self._end(context, context.reprobe())
        ends: dict[str, Callable[[], None]] = {
            one.want.host_name: functools.partial(self._end, one.context, one.facts)
            for one in self.followers
        }
        raise_first(together(ends, self.launch.cancel))

    def _end(self, context: StepContext, facts: Facts) -> None:
        step = StopStep(self.now, self.sleep)
        plan = step.down_plan(context.want, facts)
        if plan.state is PlanState.CHANGES:
            step.apply(context, facts, plan)
        elif plan.state is not PlanState.NOTHING:
            raise StepBlocked(plan.reason, where=f"{context.want.id} verify", fix=plan.fix)

    def _record(
        self,
        context: StepContext,
        launch_id: str,
        verdict: str,
        figures: dict[str, float],
        *,
        required: bool,
    ) -> None:
        for one in self.followers:
            # Theirs first: while rank 0 has no verdict, the gates run again.
            super()._record(one.context, launch_id, verdict, figures, required=required)
            if verdict == "good":
                forget_failure(one.context.state, one.want)
                one.context.save()
        super()._record(context, launch_id, verdict, figures, required=required)
        if verdict == "good":
            forget_failure(context.state, context.want)
            context.save()


def job_of(facts: Facts) -> ServerJob | None:
    """The node's job, when it is alive."""
    server = facts.get(ServerFact)
    job = server.job if server is not None else None
    return job if job is not None and job.alive else None


def wanted_id(want: Deployment, facts: Facts, state: DeploymentState) -> str:
    """The id of the wanted launch that is alive on this node; '' when there is none."""
    job = job_of(facts)
    if job is None or state.manifest is None:
        return ""
    return job.identity.id if is_wanted(want, state.manifest, job.fingerprint, job.launch) else ""


def marked(want: Deployment, manifest: Manifest | None, note: LaunchNote) -> LaunchNote:
    """The note of rank 0 with the fingerprints of this node; of derived rungs they are not kept."""
    marks = tuple(
        Rung(name).fingerprint(want, manifest) if mark and DERIVED not in name else ""
        for name, mark in zip(note.fell_from, note.marks, strict=False)
    )
    return dataclasses.replace(note, marks=marks)


def only_misses_a_peer(error: LaunchFailed) -> bool:
    """Does it tell no more than that another rank is gone?"""
    return bool(PEER_LOST.search(error.failure.cause_line))
