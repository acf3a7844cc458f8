"""The gates of rank 0, whose verdict is that of all nodes, and what follows when one fails."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from deployer.errors import GateFailed, StepBlocked, StepFailed, Unreachable
from deployer.model import Facts, Plan, PlanState
from deployer.multinode_follower import Follower, job_of
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_threads import raise_first, together
from deployer.steps.base import StepContext
from deployer.steps.failed_want import forget_failure, remember_failure
from deployer.steps.launch import api_key
from deployer.steps.launch_restore import last_good
from deployer.steps.server_facts import ServerFact
from deployer.steps.stop import StopStep
from deployer.steps.verify import VerifyStep


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
            ended = [one.label for one in self.followers if self._ended(one)]
            gone = f"{', '.join(ended)} had ended by then" if ended else ""
            what = "; ".join(text for text in (error.what, gone) if text)
            remember_failure(context.state, context.want, what, error.exit_code, error.fix)
            context.save()
            told = self._after(context, facts)
            what = f"{what}; {told}" if told else what
            raise GateFailed(
                what, where=error.where, fix=error.fix, evidence=error.evidence
            ) from error

    @staticmethod
    def _ended(one: Follower) -> bool:
        """Without it rank 0 answers nothing, and does not know why."""
        job = job_of(one.facts)
        try:
            return job is None or not one.context.jobs(one.want.guest).poll(job.identity).alive
        except Unreachable:
            # The gate's failure is the one to tell.
            return False

    def _after(self, context: StepContext, facts: Facts) -> str:
        """Restores what served before, on all nodes, or ends the launch; says what came of it."""
        rule = context.want.playbook.gates.on_failure
        job = facts.need(ServerFact).job
        if rule == "leave" or job is None:
            return ""
        failed = {job.fingerprint}
        states = [context.state, *(one.context.state for one in self.followers)]
        good = next((one for own in states if (one := last_good(own, failed)) is not None), None)
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
