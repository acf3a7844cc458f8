"""An earlier launch of one server on several hosts, launched again: by its recipes, or as recorded.

The recipes say what each node's part was made from; a launch of an older version has none, and is
started by its recorded commands alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import Change, Facts, Plan, Procedure
from deployer.multinode_follower import Follower, job_of
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_node import NodeStop
from deployer.remote.jobs import JobIdentity
from deployer.rollback_steps import note_again, runs
from deployer.state import DeploymentState, Launch
from deployer.steps.base import StepContext
from deployer.steps.launch import api_key
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import LaunchNote, Rung


class NodesAgain(NodesLaunch):
    """Launches what `launch` was, the record of rank 0, on all nodes; falls back to nothing.

    `asked`: by `deploy rollback`, not after its failure.
    """

    def __init__(
        self,
        launch: Launch,
        followers: Sequence[Follower],
        cancel: Cancel,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        asked: bool = True,
    ) -> None:
        super().__init__(followers, cancel, now, sleep)
        self.again = launch
        self.asked = asked

    def see(self, facts: Facts) -> None:
        """The recipe is kept already."""
        super().see(facts)
        self.seen = dataclasses.replace(self.seen, recipe=self.again.recipe)

    def start_rung(
        self, context: StepContext, rung: Rung, note: LaunchNote, key: str
    ) -> tuple[JobIdentity, Launch]:
        """What had failed before it then is told of it again."""
        note = note_again(context.state, self.again, asked=self.asked)
        return super().start_rung(context, rung, note, key)

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """Nothing by this step: the rollback brings back what served before."""
        return None

    def restore(self, context: StepContext, key: str, failed: Collection[str]) -> str:
        """Nothing, for the same reason."""
        return ""


class NodesRecorded(NodesLaunch):
    """Starts `launch` by the recorded command of each node's part, unless all of it runs."""

    def __init__(self, launch: Launch, followers: Sequence[Follower], cancel: Cancel) -> None:
        super().__init__(followers, cancel)
        self.again = launch

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when it runs on all nodes."""
        if self.shared(want, facts, state):
            return Plan.nothing(f"what launch {self.again.id} was runs on all nodes")
        words = "each node's recorded command, environment and build"
        change = Change(
            f"start what launch {self.again.id} was", "it served", Procedure(want.guest, words)
        )
        return Plan.change("it served before", change)

    def shared(self, want: Deployment, facts: Facts, state: DeploymentState) -> str:
        """The id of what runs on all nodes when it is what the launch was."""
        ids = {self._id(facts, self.again)}
        ids |= {self._id(one.facts, one.earlier(self.again.id)) for one in self.followers}
        return ids.pop() if len(ids) == 1 else ""

    @staticmethod
    def _id(facts: Facts, part: Launch | None) -> str:
        job = job_of(facts)
        same = job is not None and part is not None and runs(facts, part)
        return job.identity.id if job is not None and same else ""

    def former(self, state: DeploymentState, failed: Collection[str]) -> Launch | None:
        """The launch."""
        return self.again

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Starts and follows it on all nodes. Raises StepFailed."""
        words = self.restore(context, api_key(context), ())
        if context.state.launches[-1].verdict != "ready":
            raise StepFailed(words, where=f"{context.want.id} rollback", fix="read `deploy logs`")


class StopAnyOther(NodeStop):
    """Ends whatever launch of ours runs but `launch`; with a `reason` that one too."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(retry=True)
        self.again = launch

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """As of `down`."""
        server = facts.get(ServerFact)
        if server is not None and runs(facts, self.again) and not self.reason:
            return Plan.nothing(f"launch {self.again.id} runs")
        return self.down_plan(want, facts)
