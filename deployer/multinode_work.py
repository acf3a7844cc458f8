"""The work on all nodes of one server: looked at, prepared, stopped, started and judged as one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from deployer.cancel import Cancel
from deployer.engine import Outcome, Selection
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable
from deployer.model import Facts, Plan, PlanState
from deployer.multinode_follower import Follower, job_of
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_meet import meet
from deployer.multinode_node import NodeRun
from deployer.multinode_threads import raise_first, together
from deployer.multinode_told import Failed
from deployer.multinode_verify import NodesVerify
from deployer.steps.base import Step
from deployer.steps.launch import api_key
from deployer.steps.server_facts import ServerFact
from deployer.steps.stop import ENDED
from deployer.up_options import UpOptions

MakeLaunch = Callable[[Sequence[Follower], Cancel], NodesLaunch]


class Nodes:
    """All nodes of one server, in rank order. Every error is raised as Failed, with its hosts.

    `restarts`: the wanted launch ends too. `judged`: the gates follow the launch.
    """

    def __init__(
        self,
        nodes: Sequence[NodeRun],
        options: UpOptions,
        launch: MakeLaunch = NodesLaunch,
        *,
        restarts: bool = False,
        judged: bool = True,
    ) -> None:
        self.nodes = list(nodes)
        self.leader, self.others = self.nodes[0], self.nodes[1:]
        self.options = options
        self.restarts = restarts
        self.names = [step.name for step in self.leader.steps]
        self.followers = [node.follower() for node in self.others]
        self.launch = launch(self.followers, options.cancel)
        self.verify = NodesVerify(self.launch)
        self.own: list[Step] = [self.launch, self.verify] if judged else [self.launch]
        """The steps of rank 0 that are of all nodes."""

    def look(self, reason: str) -> None:
        """At all nodes at once."""
        self.all(lambda node: node.look(reason))

    def judge(self) -> None:
        """Is what runs one wanted launch of all nodes? Else all parts of it end."""
        self._facts_to_followers()
        leader = self.leader
        shared = self.launch.shared(leader.want, leader.facts, leader.own)
        alive = [node.host for node in self.nodes if job_of(node.facts) is not None]
        reason = ""
        if self.restarts:
            reason = "a restart is asked for"
        elif alive and not shared:
            lacking = [node.host for node in self.nodes if node.host not in alive]
            gone = f"none runs on {', '.join(lacking)}" if lacking else "they are not one launch"
            reason = f"its nodes start and end together, and {gone}"
        for node in self.nodes:
            node.stop.reason = reason

    def plan(self) -> None:
        """Each node's plans, into its result."""
        for node in self.nodes:
            steps: list[Step] = [*self.before_stop(node), node.stop]
            steps += self.own if node is self.leader else [node.launch]
            node.result.outcome, _ = node.engine(steps).plan(node.facts)

    def acting(self, node: NodeRun) -> Outcome:
        """The plans of the steps that may act."""
        plans = node.result.outcome.plans.items() if node.result.outcome is not None else ()
        acts = self.options.selection.acts
        return Outcome({name: plan for name, plan in plans if acts(self.names, name)})

    def refuse_what_stands(self) -> None:
        """A refusal that nothing can lift comes before any change on any node."""
        for node in self.nodes:
            for name, plan in self.acting(node).plans.items():
                if plan.state is PlanState.BLOCKED and plan.stands:
                    self._refuse(node, name, plan)

    def _refuse(self, node: NodeRun, name: str, plan: Plan) -> None:
        error = StepBlocked(plan.reason, where=f"{node.want.id} {name}", fix=plan.fix)
        error.exit_code = plan.exit_code
        raise Failed({node.host: error})

    def prepare(self) -> None:
        """driver to shards; rank 0 learns first which commit it is."""
        steps = [step for step in self.before_stop(self.leader) if self.acts(step)]
        leader = self.leader
        if any(step.name == "shards" for step in steps) and leader.own.manifest is None:
            shards = next(step for step in steps if step.name == "shards")
            self.of(leader, lambda node: self._learn(node, shards))
            self.share_pin()
        self.all(lambda node: node.apply([s for s in self.before_stop(node) if self.acts(s)]))

    @staticmethod
    def _learn(node: NodeRun, step: Step) -> None:
        step.prepare(dataclasses.replace(node.follower().context, step=step.name))

    def share_pin(self) -> None:
        """All nodes load the commit of rank 0."""
        pin = self.leader.own.manifest
        for node in self.others:
            if pin is not None and (
                node.own.manifest is None or node.own.manifest.commit != pin.commit
            ):
                node.own.manifest = pin.model_copy(deep=True)

    def meet(self) -> None:
        """Before anything ends: can the nodes of a launch that will be started meet?"""
        shared = self.launch.shared(self.leader.want, self.leader.facts, self.leader.own)
        if self.acts(self.launch) and (self.restarts or not shared):
            meet(self.nodes)

    def stop(self) -> None:
        """Rank 0 first: its parser is asked whether it takes the new arguments, and nothing has
        ended when it does not."""
        self.judge()
        if not self.acts(self.leader.stop):
            return
        for node in self.nodes:
            plan = node.stop.plan(node.want, node.facts, node.own)
            if plan.state is PlanState.BLOCKED:
                self._refuse(node, "stop", plan)
        served = self.shared_id()
        try:
            self.of(self.leader, lambda node: node.apply([node.stop]))
            self.all(lambda node: node.apply([node.stop]), self.others)
        except Failed as failed:
            if served:
                self._undo_stop(failed)
            raise
        for node in self.nodes:
            node.stop.reason = ""

    def shared_id(self) -> str:
        """The id of one launch that all nodes have alive, wanted or not; '' when there is none."""
        jobs = [job_of(node.facts) for node in self.nodes]
        ids = {job.identity.id if job is not None else "" for job in jobs}
        return ids.pop() if len(ids) == 1 else ""

    def _undo_stop(self, failed: Failed) -> None:
        """GPU memory that did not come back, say: what was ended on all serves again where it can.

        What came of it is told with the error.
        """
        errors = list(failed.errors.values())
        if self.options.cancel.asked or not all(isinstance(one, StepFailed) for one in errors):
            return
        try:
            self.look("what the stop has left")
            servers = [node.facts.get(ServerFact) for node in self.nodes]
            for one in servers:
                busy = one is None or not one.asked or one.listening or bool(one.leftovers)
                if busy or (one is not None and one.job is not None and one.job.alive):
                    return
            for node in self.nodes:
                for launch in node.own.launches:
                    launch.verdict = "stopped" if launch.verdict in ENDED else launch.verdict
                node.save()
            self._facts_to_followers()
            context = self.leader.follower().context
            told = self.launch.restore(context, api_key(context), ())
        except (Failed, StepFailed, Unreachable) as second:
            told = f"and what served before was not started again: {second}"
        if told:
            errors[0].add(told)

    def serve(self) -> None:
        """Starts all and judges rank 0, with what the selection leaves of it."""
        leader = self.leader
        steps = [step for step in self.own if self.acts(step)]
        if not steps:
            return

        def entering(step: str) -> None:
            for node in self.nodes:
                node.entered(step)

        self._facts_to_followers()
        # What was stopped for a launch that is then refused serves again.
        ended = any("stop" in node.changes for node in self.nodes)
        outcome = Outcome(changed=["stop"] if ended else [])
        engine = leader.engine(steps, self._gather, entering)
        try:
            leader.facts = engine.apply(outcome, leader.facts, Selection())
        except DeployError as error:
            raise Failed({leader.host: error}) from error
        finally:
            outcome.changed = [name for name in outcome.changed if name != "stop"]
            for node in self.nodes:
                node.changed(outcome)

    def _gather(self) -> Facts:
        """Of all nodes; rank 0's are returned, the others' lie with the followers."""
        errors = together(
            {node.host: node.see for node in self.nodes},
            self.options.cancel,
        )
        raise_first(errors)
        self._facts_to_followers()
        return self.leader.facts

    def _facts_to_followers(self) -> None:
        for node, follower in zip(self.others, self.followers, strict=True):
            follower.facts = node.facts

    def acts(self, step: Step) -> bool:
        """May it act under the selection?"""
        return self.options.selection.acts(self.names, step.name)

    @staticmethod
    def before_stop(node: NodeRun) -> list[Step]:
        """driver to shards."""
        return node.steps[: node.steps.index(node.stop)]

    def of(self, node: NodeRun, work: Callable[[NodeRun], object]) -> None:
        """On one node."""
        try:
            work(node)
        except DeployError as error:
            raise Failed({node.host: error}) from error

    def all(self, work: Callable[[NodeRun], None], nodes: Sequence[NodeRun] | None = None) -> None:
        """On all nodes at once. Raises Failed with the errors of all that failed."""
        works: dict[str, Callable[[], None]] = {
            node.host: functools.partial(work, node)
            for node in (self.nodes if nodes is None else nodes)
        }
        errors = together(works, self.options.cancel)
        if errors:
            raise Failed(errors)
