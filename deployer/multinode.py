"""`deploy up` of one server on several hosts (`nodes` of the playbook), with one verdict.

Take the local locks, look at all nodes at once, decide. With one wanted launch alive on all of them
and passed, that was all. Else take the host locks, prepare every node (driver to shards, at once),
stop what is not part of a launch of all, start all, judge rank 0. Killed at any moment, the same
command joins a launch that is alive on all nodes, and stops a part of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

from deployer.deployment import Deployment
from deployer.engine import Outcome, Selection
from deployer.errors import DeployError, StepBlocked
from deployer.events import Bus, RunFinished, RunStarted
from deployer.locallock import LocalLock
from deployer.model import Facts, Plan, PlanState
from deployer.multinode_follower import job_of
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_node import NodeRun, open_node
from deployer.multinode_threads import raise_first, together
from deployer.multinode_told import Failed, recorded, summary, tell
from deployer.multinode_verify import NodesVerify
from deployer.repin import repin
from deployer.restart import RestartStop
from deployer.run_record import new_run_id
from deployer.steps.base import Step
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult, proven


def up_nodes(wants: Sequence[Deployment], options: UpOptions, bus: Bus) -> list[DeploymentResult]:
    """Brings one server up on all its nodes; `wants` are they, in rank order.

    Every error is in the results: the cause with its node, and NotStarted with the others.
    """
    run_id = new_run_id()
    results = [DeploymentResult(want.id) for want in wants]
    with contextlib.ExitStack() as records:
        try:
            if not options.dry_run:
                bus = recorded(records, wants, options, run_id, bus)
            _up(wants, results, options, bus, run_id)
        except KeyboardInterrupt:
            for want in wants:
                bus.emit(RunFinished(want.host_name, want.id, 130, "interrupted"))
            raise
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - told with its nodes
            tell(wants, results, error, options, bus)
    return results


def _up(
    wants: Sequence[Deployment],
    results: Sequence[DeploymentResult],
    options: UpOptions,
    bus: Bus,
    run_id: str,
) -> None:
    for want in wants:
        bus.emit(RunStarted(want.host_name, want.id, run_id, options.command))
    with contextlib.ExitStack() as stack:
        _Run(stack, wants, results, options, bus, run_id).story()
        for want, result in zip(wants, results, strict=True):
            words = summary(want, result)
            bus.emit(RunFinished(want.host_name, want.id, 0, words, "", result.result))


class _Run:
    """One run on all nodes."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        wants: Sequence[Deployment],
        results: Sequence[DeploymentResult],
        options: UpOptions,
        bus: Bus,
        run_id: str,
    ) -> None:
        self.options = options
        self.run_id = run_id
        self.bus = bus
        locks: dict[str, LocalLock] = {}
        if not options.dry_run:
            # In name order: of two runs that meet, one gets all of them.
            for host in sorted(want.host_name for want in wants):
                locks[host] = LocalLock(
                    options.deploy_dir, host, run_id=run_id, command=options.command
                )
                stack.enter_context(locks[host])
        self.nodes = [
            open_node(stack, want, options, bus, run_id, result, locks.get(want.host_name))
            for want, result in zip(wants, results, strict=True)
        ]
        self.leader, self.others = self.nodes[0], self.nodes[1:]
        self.names = [step.name for step in self.leader.steps]
        self.restarts = any(isinstance(step, RestartStop) for step in options.steps())
        self.followers = [node.follower() for node in self.others]
        self.launch = NodesLaunch(self.followers, options.cancel)
        self.verify = NodesVerify(self.launch)

    def story(self) -> None:
        """From a look to one verdict."""
        options, leader = self.options, self.leader
        self._one_pin()
        self._all(lambda node: node.look("first look"))
        self._judge()
        self._plan()
        if options.dry_run:
            return
        if any(self._acting(node).pending for node in self.nodes):
            if options.confirm is not None and not self._agreed(options.confirm):
                return
            for node in sorted(self.nodes, key=lambda one: one.host):
                node.session.want_lock(self.run_id)
                self._of(node, lambda node: node.look("under the host lock"))
            self._judge()
        for node in self.nodes:
            self._of(node, lambda node: node.save())
        self._refuse_what_stands()
        self._prepare()
        self._stop()
        self._serve()
        result = leader.result
        result.left = [
            step.name
            for step in (*self._before_stop(leader), leader.stop, self.launch, self.verify)
            if not options.selection.acts(self.names, step.name)
            and step.plan(leader.want, leader.facts, leader.own).state is not PlanState.NOTHING
        ]
        result.result = proven(leader.want, [self.verify], leader.facts, leader.own)

    # ---- the parts of it
    def _one_pin(self) -> None:
        """All nodes load the same commit: that of rank 0."""
        leader = self.leader
        if self.options.repin:
            self._of(leader, lambda node: repin(node.want, node.own, self.options, self.bus))
        self._share_pin()

    def _share_pin(self) -> None:
        pin = self.leader.own.manifest
        for node in self.others:
            if pin is not None and (
                node.own.manifest is None or node.own.manifest.commit != pin.commit
            ):
                node.own.manifest = pin.model_copy(deep=True)

    def _judge(self) -> None:
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

    def _plan(self) -> None:
        for node in self.nodes:
            steps: list[Step] = [*self._before_stop(node), node.stop]
            steps += [self.launch, self.verify] if node is self.leader else [node.launch]
            node.result.outcome, _ = node.engine(steps).plan(node.facts)

    def _acting(self, node: NodeRun) -> Outcome:
        plans = node.result.outcome.plans.items() if node.result.outcome is not None else ()
        acts = self.options.selection.acts
        return Outcome({name: plan for name, plan in plans if acts(self.names, name)})

    def _agreed(self, confirm: Callable[[Deployment, Outcome], bool]) -> bool:
        for node in self.nodes:
            acting = self._acting(node)
            if acting.pending and not confirm(node.want, acting):
                for one in self.nodes:
                    one.result.declined = True
                return False
        return True

    def _refuse_what_stands(self) -> None:
        """A refusal that nothing can lift comes before any change on any node."""
        for node in self.nodes:
            for name, plan in self._acting(node).plans.items():
                if plan.state is PlanState.BLOCKED and plan.stands:
                    self._refuse(node, name, plan)

    def _refuse(self, node: NodeRun, name: str, plan: Plan) -> None:
        error = StepBlocked(plan.reason, where=f"{node.want.id} {name}", fix=plan.fix)
        error.exit_code = plan.exit_code
        raise Failed({node.host: error})

    def _prepare(self) -> None:
        """driver to shards; rank 0 learns first which commit it is."""
        steps = [step for step in self._before_stop(self.leader) if self._acts(step)]
        leader = self.leader
        if any(step.name == "shards" for step in steps) and leader.own.manifest is None:
            shards = next(step for step in steps if step.name == "shards")
            self._of(leader, lambda node: self._learn(node, shards))
            self._share_pin()
        self._all(lambda node: node.apply([s for s in self._before_stop(node) if self._acts(s)]))

    @staticmethod
    def _learn(node: NodeRun, step: Step) -> None:
        step.prepare(dataclasses.replace(node.follower().context, step=step.name))

    def _stop(self) -> None:
        """Rank 0 first: its parser is asked whether it takes the new arguments, and nothing has
        ended when it does not."""
        self._judge()
        if not self._acts(self.leader.stop):
            return
        for node in self.nodes:
            plan = node.stop.plan(node.want, node.facts, node.own)
            if plan.state is PlanState.BLOCKED:
                self._refuse(node, "stop", plan)
        self._of(self.leader, lambda node: node.apply([node.stop]))
        self._all(lambda node: node.apply([node.stop]), self.others)
        for node in self.nodes:
            node.stop.reason = ""

    def _serve(self) -> None:
        leader = self.leader
        steps: list[Step] = [step for step in (self.launch, self.verify) if self._acts(step)]
        if not steps:
            return

        def entering(step: str) -> None:
            for node in self.nodes:
                node.entered(step)

        self._facts_to_followers()
        outcome = Outcome()
        engine = leader.engine(steps, self._gather, entering)
        try:
            leader.facts = engine.apply(outcome, leader.facts, Selection())
        except DeployError as error:
            raise Failed({leader.host: error}) from error
        finally:
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

    def _acts(self, step: Step) -> bool:
        return self.options.selection.acts(self.names, step.name)

    @staticmethod
    def _before_stop(node: NodeRun) -> list[Step]:
        return node.steps[: node.steps.index(node.stop)]

    def _of(self, node: NodeRun, work: Callable[[NodeRun], object]) -> None:
        try:
            work(node)
        except DeployError as error:
            raise Failed({node.host: error}) from error

    def _all(self, work: Callable[[NodeRun], None], nodes: Sequence[NodeRun] | None = None) -> None:
        """On all nodes at once. Raises Failed with the errors of all that failed."""
        works: dict[str, Callable[[], None]] = {
            node.host: functools.partial(work, node)
            for node in (self.nodes if nodes is None else nodes)
        }
        errors = together(works, self.options.cancel)
        if errors:
            raise Failed(errors)
