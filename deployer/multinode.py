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
from deployer.errors import DeployError, NotStarted
from deployer.events import Bus, Progress, RunFinished, RunStarted
from deployer.locallock import LocalLock
from deployer.model import PlanState
from deployer.multinode_back import NodesBack
from deployer.multinode_launch import NodesLaunch
from deployer.multinode_node import open_node
from deployer.multinode_told import Failed, recorded, summary, tell
from deployer.multinode_work import Nodes
from deployer.repin import repin
from deployer.run_record import new_run_id
from deployer.steps.rolled_back import unfinished_pin
from deployer.up import keep_seen
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult, proven


def up_nodes(
    wants: Sequence[Deployment], options: UpOptions, bus: Bus, back: NodesBack | None = None
) -> list[DeploymentResult]:
    """Brings one server up on all its nodes; `wants` are they, in rank order.

    `back`: where it goes in place of what the playbook says (`rollback`).

    Every error is in the results: the cause with its node, and NotStarted with the others.
    """
    run_id = new_run_id()
    results = [DeploymentResult(want.id) for want in wants]
    with contextlib.ExitStack() as records:
        try:
            if not options.dry_run:
                bus = recorded(records, wants, options, run_id, bus)
            _up(wants, results, options, bus, run_id, back)
        except KeyboardInterrupt:
            for want in wants:
                bus.emit(RunFinished(want.host_name, want.id, 130, "interrupted"))
            raise
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - told with its nodes
            tell(wants, results, error, options, bus)
    _over(results, options)
    return results


def _over(results: Sequence[DeploymentResult], options: UpOptions) -> None:
    """Tells the other hosts of the run how it ended."""
    if options.rollout is None:
        return
    own = [one.error for one in results if one.error and not isinstance(one.error, NotStarted)]
    error = own[0] if own else results[0].error
    options.rollout.ended(
        results[0].id,
        error,
        acted=any(one.acted for one in results),
        passed=error is None and not results[0].declined,
    )


def _up(
    wants: Sequence[Deployment],
    results: Sequence[DeploymentResult],
    options: UpOptions,
    bus: Bus,
    run_id: str,
    back: NodesBack | None,
) -> None:
    for want in wants:
        bus.emit(RunStarted(want.host_name, want.id, run_id, options.command))
    with contextlib.ExitStack() as stack:
        _Run(stack, wants, results, options, bus, run_id, back).story()
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
        back: NodesBack | None,
    ) -> None:
        self.options = options
        self.back = back
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
            open_node(
                stack,
                want,
                options,
                bus,
                run_id,
                result,
                locks.get(want.host_name),
                options.steps() if back is None else back.steps(want),
            )
            for want, result in zip(wants, results, strict=True)
        ]
        make = NodesLaunch if back is None else back.make
        self.work = Nodes(nodes, options, make, restarts=nodes[0].stop.restarts)

    def story(self) -> None:
        """From a look to one verdict."""
        options, work, back = self.options, self.work, self.back
        leader = work.leader
        if back is None:
            self._one_pin()
        else:
            back.begin(work.nodes)
        work.look("first look")
        work.judge()
        work.plan()
        if options.dry_run:
            return
        if any(work.acting(node).pending for node in work.nodes):
            if options.confirm is not None and not self._agreed(options.confirm):
                return
            if options.rollout is not None:
                options.rollout.admit(leader.want, self._waits)
            for node in sorted(work.nodes, key=lambda one: one.host):
                node.session.want_lock(self.run_id)
                work.of(node, lambda node: node.look("under the host lock"))
            work.judge()
        if back is not None:
            back.seen(work.nodes)
        for node in work.nodes:
            work.of(node, lambda node: node.save())
        try:
            work.refuse_what_stands()
            work.prepare()
            work.meet()
            work.stop()
            work.serve()
        except (Failed, DeployError) as error:
            if back is not None:
                back.failed(work.nodes, options, error)
            raise
        if back is not None:
            back.done(work.nodes)
        else:
            self._settled()
        result = leader.result
        result.left = [
            step.name
            for step in (*work.before_stop(leader), leader.stop, *work.own)
            if not options.selection.acts(work.names, step.name)
            and step.plan(leader.want, leader.facts, leader.own).state is not PlanState.NOTHING
        ]
        result.result = proven(leader.want, [work.verify], leader.facts, leader.own)

    def _settled(self) -> None:
        """What was launched ends an earlier rollback, and what it was made from is kept."""
        outcome = self.work.leader.result.outcome
        launched = outcome is not None and "launch" in outcome.changed
        for node in self.work.nodes:
            over = launched and node.own.rollback is not None
            if over:
                node.own.rollback = None
            if keep_seen(node.want, node.own, node.facts, node.keep) or over:
                node.save()

    def _waits(self, text: str) -> None:
        want = self.work.leader.want
        self.bus.emit(Progress(want.host_name, want.id, "canary", text))

    def _one_pin(self) -> None:
        """All nodes load the same commit: that of rank 0."""
        leader = self.work.leader
        for node in self.work.nodes:
            # A rollback that was cut off has pinned the commit that it went to.
            node.own.manifest = unfinished_pin(node.own)
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
