"""The launch of one server on several hosts: started, followed, ended and judged as one.

Rank 0 is the deployment that the step works on; the others are its `Follower`s. All share the
launch's id.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.errors import REFUSALS, StepFailed, Unreachable
from deployer.model import Facts, Plan, PlanState
from deployer.multinode_follower import Follower, FollowerWait, job_of, only_misses_a_peer
from deployer.multinode_threads import raise_first, together
from deployer.place import place_of
from deployer.remote.jobs import JobIdentity
from deployer.rollback_choice import unfit
from deployer.sglang.argv import command, server_argv
from deployer.state import DeploymentState, Launch
from deployer.steps.base import StepContext
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_restore import last_good
from deployer.steps.launch_start import new_launch_id
from deployer.steps.launch_told import redacted
from deployer.steps.launch_wait import LaunchFailed
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import LaunchNote, Rung, is_wanted

BEAT_S = 3.0
"""How often each follower is asked while the launch starts."""
SETTLE_S = 6.0
"""After a death: so long the other nodes get to die of the same, and to say why. A scheduler whose
peer is gone raises at its next collective, and its parent ends within some 2 s."""
LISTEN_S = 60.0
"""A follower listens as soon as its schedulers are ready, which the first answer needs already."""


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
        except (StepFailed, Unreachable):
            # Of a launch that cannot become whole nothing may wait for the rest.
            self._end_followers("not-started")
            raise
        try:
            return super().start_rung(context, rung, note, key)
        except StepFailed:
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
            one.prune()

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
        """The last known-good launch again, on all nodes or on none.

        Where a node had a server of its own before, ours or not, that one serves again.
        """
        good = self.former(context.state, failed)
        if good is None or place_of(good)[0] == 1:
            contexts = [context, *(one.context for one in self.followers)]
            told = [self._alone_again(one, key, failed) for one in contexts]
            return "; ".join(text for text in told if text)
        places = [(one.want, one.context.state) for one in self.followers]
        if why := unfit([(context.want, context.state), *places], good.id):
            return f"the last known-good launch {good.id} was not started again: {why}"
        parts = [(one, one.earlier(good.id)) for one in self.followers]
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

    def _alone_again(self, context: StepContext, key: str, failed: Collection[str]) -> str:
        alone, step = copy.copy(context), LaunchStep(self.now, self._sleep)
        alone.want = dataclasses.replace(context.want, node=None)
        step.seen = dataclasses.replace(self.seen, launch="")
        good = last_good(context.state, failed)
        if good is not None and place_of(good)[0] > 1:
            return step.adopted_again(alone)
        return step.restore(alone, key, failed)

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
                    raise one.wait.late()
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


def wanted_id(want: Deployment, facts: Facts, state: DeploymentState) -> str:
    """The id of the wanted launch that is alive on this node; '' when there is none."""
    job = job_of(facts)
    if job is None or state.manifest is None:
        return ""
    return job.identity.id if is_wanted(want, state.manifest, job.fingerprint, job.launch) else ""
