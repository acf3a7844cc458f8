"""`deploy rollback` of one server on several hosts: all nodes go back, as one launch.

Each node's part is a RollBack (deployer.rollback): its launch of that id, its recipe, its record.
What served before is what all nodes had alive as one launch; when the rollback fails, that serves
again on all of them, or on none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.engine import Outcome, Selection
from deployer.errors import DeployError, Unreachable
from deployer.multinode_again import NodesAgain, NodesRecorded, StopAnyOther
from deployer.multinode_follower import Follower, job_of
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_node import NodeRun
from deployer.multinode_told import Failed
from deployer.multinode_work import Nodes
from deployer.rollback import NOT_NOW, RollBack, then
from deployer.rollback_steps import AdoptedAgain, AsRecorded, rollback_steps, runs
from deployer.state import Launch
from deployer.steps.base import Step
from deployer.steps.server_wanted import fingerprint
from deployer.up_options import UpOptions


class NodesBack:
    """The aim of one rollback; `parts` in rank order."""

    def __init__(self, parts: Sequence[RollBack]) -> None:
        self.parts = {part.now.host_name: part for part in parts}
        self.launch = parts[0].launch

    def steps(self, want: Deployment) -> list[Step]:
        """A node's."""
        return rollback_steps(self.parts[want.host_name].launch)

    def make(self, followers: Sequence[Follower], cancel: Cancel) -> NodesLaunch:
        """The launch of all nodes."""
        return NodesAgain(self.launch, followers, cancel)

    def begin(self, nodes: Sequence[NodeRun]) -> None:
        """Pins the weights of that time on all nodes, in memory."""
        for node in nodes:
            self.parts[node.host].begin(node.want, node.own)

    def seen(self, nodes: Sequence[NodeRun]) -> None:
        """Records where each goes and what served on all."""
        left = self._left(nodes)
        for node in nodes:
            self.parts[node.host].goes(node.want, node.own, left)

    def done(self, nodes: Sequence[NodeRun]) -> None:
        """It has passed. Rank 0 last: killed before it, the same command ends the rest."""
        for node in reversed(nodes):
            self.parts[node.host].done(node.want, node.own)
            node.save()

    def failed(
        self, nodes: Sequence[NodeRun], options: UpOptions, error: Failed | DeployError
    ) -> None:
        """What served before serves again; what came of it is told with the error."""
        errors = list(error.errors.values()) if isinstance(error, Failed) else [error]
        again = f"`deploy rollback {nodes[0].want.id} {self.launch.id}` goes on"
        if options.cancel.asked or any(isinstance(one, NOT_NOW) for one in errors):
            # Nothing is brought back: the same command goes on, by what it then sees.
            for one in errors:
                one.fix = f"{one.fix}; {again}" if one.fix else again
            return
        record = nodes[0].own.rollback
        left = record.left if record is not None else ""
        try:
            words = self._back(nodes, options, left)
        except (Failed, DeployError) as second:
            causes = second.errors.values() if isinstance(second, Failed) else [second]
            told = "; ".join(str(one) for one in causes)
            for one in errors:
                one.add(f"and what served before (launch {left}) could not be brought back: {told}")
                one.fix = f"{one.fix}; {again}; `deploy up {nodes[0].want.id}` launches the "
                one.fix += "playbook"
            return
        for one in errors:
            one.add(words)

    def _left(self, nodes: Sequence[NodeRun]) -> str:
        """The launch that all nodes had alive when it began; '' when there was none."""
        records = [node.own.rollback for node in nodes]
        going = [one for one in records if one is not None and not one.outcome]
        ours = {one.mark for one in going}
        ours |= {fingerprint(n.want, n.own.manifest, n.want.variant_name) for n in nodes}
        jobs = [job_of(node.facts) for node in nodes]
        alive = {one.identity.id if one and one.fingerprint not in ours else "" for one in jobs}
        left = alive.pop() if len(alive) == 1 else ""
        return left or next((one.left for one in going), "")

    def _back(self, nodes: Sequence[NodeRun], options: UpOptions, left: str) -> str:
        """Raises Failed, DeployError."""
        for node in nodes:
            if node.own.rollback is not None:
                node.own.manifest = node.own.rollback.manifest
        if not left:
            words = self._others_again(nodes)
        else:
            former = {node.host: _part(node, left) for node in nodes}
            new = self._serves_again(self._former(nodes, former, options), former)
            words = (
                f"launch {left}, which served before, serves on"
                if new == left
                else f"what served before (launch {left}) serves again as launch {new} on all "
                "nodes; its gates were not run again"
            )
        for node in nodes:
            record = node.own.rollback
            if record is not None:
                record.outcome = "failed"
                node.own.manifest = record.manifest
            node.save()
        return words

    def _others_again(self, nodes: Sequence[NodeRun]) -> str:
        """A server of somebody else that had a node's port. Raises DeployError."""
        told = []
        for node in nodes:
            step, now = AdoptedAgain(), self.parts[node.host].now
            look = functools.partial(node.session.look, now, [step])
            node.to(now, rollback_steps(self.parts[node.host].launch)).engine([step], look).apply(
                Outcome(), look(), Selection()
            )
            told += [f"{node.host}: {step.words}"] if step.words else []
        return "; ".join(told) or "nothing had served before"

    def _former(
        self, nodes: Sequence[NodeRun], former: Mapping[str, Launch], options: UpOptions
    ) -> Nodes:
        """The nodes as of what served before. Raises DeployError."""
        leader = former[nodes[0].host]
        kept = {host: part.kept for host, part in self.parts.items()}
        if not all(kept[node.host].has(former[node.host].recipe) for node in nodes):
            recorded = [
                node.to(
                    self.parts[node.host].now,
                    [StopAnyOther(former[node.host]), AsRecorded(former[node.host])],
                )
                for node in nodes
            ]
            make = functools.partial(NodesRecorded, leader)
            return Nodes(recorded, options, make, judged=False)
        made = []
        for node in nodes:
            part = former[node.host]
            recipe, lock_text = kept[node.host].load(part.recipe)
            node.own.manifest = recipe.manifest
            want = then(self.parts[node.host].now, recipe, lock_text, part)
            made.append(node.to(want, rollback_steps(part, asked=False)))
        return Nodes(
            made, options, functools.partial(NodesAgain, leader, asked=False), judged=False
        )

    @staticmethod
    def _serves_again(work: Nodes, former: Mapping[str, Launch]) -> str:
        """The id of what serves then. Raises Failed, DeployError."""
        work.look("to bring back what served before")
        work.judge()
        try:
            work.prepare()
            work.stop()
            work.serve()
        except (Failed, DeployError) as error:
            errors = list(error.errors.values()) if isinstance(error, Failed) else [error]
            if any(isinstance(one, Unreachable) for one in errors):
                raise
            work.look("what serves after the failure")
            if all(runs(node.facts, former[node.host]) for node in work.nodes):
                errors[0].add("it was not ended, and serves on")
            raise
        job = job_of(work.leader.facts)
        return job.identity.id if job is not None else ""


def _part(node: NodeRun, launch_id: str) -> Launch:
    """The node's record of a launch. Raises DeployError."""
    found = next((one for one in node.own.launches if one.id == launch_id), None)
    if found is None:
        raise DeployError(f"launch {launch_id} is not in the state file of {node.host}")
    return found
