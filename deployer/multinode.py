"""`deploy up` of one server on several hosts (`nodes` of the playbook), with one verdict.

Take the local locks, look at all nodes at once, decide. With one wanted launch alive on all of them
and passed, that was all. Else take the host locks, prepare every node (driver to shards, at once),
stop what is not part of a launch of all, start all, judge rank 0. Killed at any moment, the same
command joins a launch that is alive on all nodes, and stops a part of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from deployer.deployment import Deployment
from deployer.engine import Outcome
from deployer.events import Bus, RunFinished, RunStarted
from deployer.locallock import LocalLock
from deployer.model import PlanState
from deployer.multinode_node import open_node
from deployer.multinode_told import recorded, summary, tell
from deployer.multinode_work import Nodes
from deployer.repin import repin
from deployer.restart import RestartStop
from deployer.run_record import new_run_id
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
        nodes = [
            open_node(stack, want, options, bus, run_id, result, locks.get(want.host_name))
            for want, result in zip(wants, results, strict=True)
        ]
        restarts = any(isinstance(step, RestartStop) for step in options.steps())
        self.work = Nodes(nodes, options, restarts=restarts)

    def story(self) -> None:
        """From a look to one verdict."""
        options, work = self.options, self.work
        leader = work.leader
        self._one_pin()
        work.look("first look")
        work.judge()
        work.plan()
        if options.dry_run:
            return
        if any(work.acting(node).pending for node in work.nodes):
            if options.confirm is not None and not self._agreed(options.confirm):
                return
            for node in sorted(work.nodes, key=lambda one: one.host):
                node.session.want_lock(self.run_id)
                work.of(node, lambda node: node.look("under the host lock"))
            work.judge()
        for node in work.nodes:
            work.of(node, lambda node: node.save())
        work.refuse_what_stands()
        work.prepare()
        work.stop()
        work.serve()
        result = leader.result
        result.left = [
            step.name
            for step in (*work.before_stop(leader), leader.stop, *work.own)
            if not options.selection.acts(work.names, step.name)
            and step.plan(leader.want, leader.facts, leader.own).state is not PlanState.NOTHING
        ]
        result.result = proven(leader.want, [work.verify], leader.facts, leader.own)

    def _one_pin(self) -> None:
        """All nodes load the same commit: that of rank 0."""
        leader = self.work.leader
        if self.options.repin:
            self.work.of(leader, lambda node: repin(node.want, node.own, self.options, self.bus))
        self.work.share_pin()

    def _agreed(self, confirm: Callable[[Deployment, Outcome], bool]) -> bool:
        for node in self.work.nodes:
            acting = self.work.acting(node)
            if acting.pending and not confirm(node.want, acting):
                for one in self.work.nodes:
                    one.result.declined = True
                return False
        return True
