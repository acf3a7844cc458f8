"""Step `container`: the LXC guest exists, runs, and sees the GPUs through the right device nodes.

A node is judged inside the guest by type and numbers, never by its name: a bind mount of a missing
host node leaves a regular file that opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from deployer import pct_errors, proxmox
from deployer.deployment import Deployment
from deployer.errors import (
    AuthenticationRefused,
    DeployError,
    HostKeyUnknown,
    StepFailed,
    Unreachable,
)
from deployer.inventory import Create
from deployer.model import Change, Facts, Plan, PlanState, Probe, Where
from deployer.state import DeploymentState
from deployer.steps import container_create as creation
from deployer.steps import container_power as power
from deployer.steps import container_undo as undoing
from deployer.steps.base import Step, StepContext
from deployer.steps.container_devices import (
    Lacks,
    aside,
    edits,
    lacks,
    pending_of_others,
    unstartable,
)
from deployer.steps.container_facts import ContainerFacts, GuestNodes, probes
from deployer.steps.container_hostkey import record_host_key
from deployer.steps.container_inside import plan_inside, plan_plain, wrong_nodes, wrong_reason
from deployer.steps.container_refuse import refuse
from deployer.steps.container_snapshot import is_snapshot, snapshot
from deployer.steps.container_snapshot import take as take_snapshot
from deployer.steps.container_told import notes
from deployer.steps.gpus_facts import GpuFacts

ROUNDS = 6
"""Create; snapshot; add nodes; restart when hot-plug did not show them; install libraries."""
ANSWER_DEADLINE_S = 90.0


class ContainerStep(Step):
    """Creates, adds devN entries, starts or restarts the guest when it may, looks inside."""

    name: ClassVar[str] = "container"
    refuses_first: ClassVar[bool] = True

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._pause = pause

    def probes(self, want: Deployment) -> list[Probe]:
        """pct's view, the guest's nodes, and whether CUDA starts there."""
        create = want.container.create if want.container is not None else None
        return [] if want.vmid is None else probes(want.vmid, create=create)

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Configuration first, then what the guest sees. What was seen of both goes along."""
        if want.vmid is None:
            return plan_plain(want, facts)
        seen = facts.get(ContainerFacts)
        if seen is None or seen.timed_out:
            return Plan.blocked(
                f"pct on {want.host_name} gave no answer in time",
                f"look at `pvecm status` and `systemctl status pve-cluster` on {want.host_name}",
            )
        told = notes(want.vmid, seen, facts.get(GpuFacts), facts.get(GuestNodes))
        return self._decide(want, want.vmid, facts, seen).noted(*told)

    def _decide(self, want: Deployment, vmid: int, facts: Facts, seen: ContainerFacts) -> Plan:
        host = facts.get(GpuFacts)
        create = want.container.create if want.container is not None else None
        # A status without a readable file: pct knows the container.
        absent = not seen.exists and not seen.status
        if create is not None and (absent or creation.cut_off(seen)):
            refusal = creation.refuse(want, vmid, create, seen)
            return refusal or _plan_new(want, vmid, create, seen, host)
        if refusal := refuse(want, vmid, seen):
            return refusal
        if host is None or not host.ready:
            return Plan.unknown("gpus", "unknown until gpus has put the GPUs on nvidia")
        decided = _plan_there(want, vmid, facts, host, seen)
        if decided.state is PlanState.CHANGES and not seen.quorate:
            return creation.no_quorum(want.host_name)
        return decided

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the changes, looks again, and goes on while looking shows more to do.

        After a creation or a snapshot the file is another one, and what follows is planned again.
        A node that hot-plug did not bring needs a restart, and libraries can only be installed in
        a guest that runs; neither is knowable before.
        """
        try:
            self._rounds(context, facts, plan)
        except StepFailed as error:
            told = pct_errors.explain(error.evidence)
            if told is not None:
                error.add(told.cause)
                error.fix = error.fix or told.fix
            raise

    def _rounds(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        guarded = False
        for _ in range(ROUNDS):
            first = plan.changes[0]
            if guarded and is_snapshot(first):
                plan = replace(plan, changes=plan.changes[1:])
                first = plan.changes[0]
            if is_snapshot(first):
                guarded = True
                take_snapshot(context, first)
            elif _is_creation(first):
                super().apply(context, facts, replace(plan, changes=(first,)))
            else:
                super().apply(context, facts, plan)
                self._await_guest(context)
            facts = context.reprobe()
            plan = self.plan(context.want, facts, context.state)
            if plan.state is not PlanState.CHANGES:
                return

    def undo(self, context: StepContext, facts: Facts, plan: Plan, error: DeployError) -> None:
        """Takes out what this step put into the configuration, and gives the run state back."""
        if context.want.vmid is not None:
            undoing.undo(context, facts, plan, error)

    def _await_guest(self, context: StepContext) -> None:
        """Waits until the guest's own door answers; after a start its sshd comes last."""
        deadline = self._clock() + ANSWER_DEADLINE_S
        recorded = False
        while True:
            try:
                context.on(Where.GUEST).run("exit 0", timeout_s=15.0)
                return
            except HostKeyUnknown:
                # Only once, and only of a container that we made: its host shows its key.
                if recorded or not record_host_key(context):
                    raise
                recorded = True
                continue
            except AuthenticationRefused:
                # Final, and not asked again: each try counts there.
                raise
            except Unreachable:
                if self._clock() >= deadline:
                    raise
            context.progress(
                f"container {context.want.vmid} answers",
                ANSWER_DEADLINE_S - max(0.0, deadline - self._clock()),
                ANSWER_DEADLINE_S,
                "s",
            )
            self._pause(1.0)


def _is_creation(change: Change) -> bool:
    return change.title.startswith("create container ")


def _plan_new(
    want: Deployment, vmid: int, create: Create, seen: ContainerFacts, host: GpuFacts | None
) -> Plan:
    """Creation, and what is known to follow it."""
    reason = f"container {vmid} does not exist on {want.host_name}"
    if seen.exists:
        reason = f"the creation of container {vmid} on {want.host_name} was cut off"
    made = [creation.change(want, vmid, create, reason)]
    if host is not None and host.ready:
        fresh = replace(seen, conf=None, devices=())
        made += edits(vmid, fresh, lacks(fresh, host))
    made.append(power.start(vmid, "it is new"))
    return Plan.change(reason, *made)


def _plan_there(
    want: Deployment, vmid: int, facts: Facts, host: GpuFacts, seen: ContainerFacts
) -> Plan:
    try:
        lack = lacks(seen, host)
        added = edits(vmid, seen, lack)
    except ValueError as error:
        return Plan.blocked(
            f"container {vmid}: {error}", "delete devN entries that it no longer needs"
        )
    if added and want.container is not None and want.container.snapshot != "never":
        taken = snapshot(vmid, seen)
        added = [taken, *added] if taken is not None else added
    if seen.status != "running":
        if bad := unstartable(seen):
            return _does_not_start(want, vmid, bad)
        reason = f"container {vmid} is {seen.status or 'not running'}"
        if refusal := _no_power(want, vmid, seen, reason):
            return refusal
        reason += aside(vmid, seen, host)
        return Plan.change(reason, *added, power.start(vmid, reason, seen.ha))
    return _plan_running(want, vmid, facts, added, lack)


def _no_power(want: Deployment, vmid: int, seen: ContainerFacts, reason: str) -> Plan | None:
    """Why the HA manager would start it neither now nor after a stop; None when it would."""
    if seen.ha and "error" in (seen.ha, seen.ha_state):
        return Plan.blocked(
            f"{reason}, and the HA manager has it in error: it does nothing for it",
            f"on {want.host_name}: ha-manager set ct:{vmid} --state disabled, mend what failed "
            f"(`journalctl -u pve-ha-lrm`), then ha-manager set ct:{vmid} --state started",
        )
    if seen.ha == "disabled":
        return Plan.blocked(
            f"{reason}, and the HA manager has it as disabled",
            f"on {want.host_name}: ha-manager set ct:{vmid} --state started",
        )
    return None


def _does_not_start(want: Deployment, vmid: int, bad: list[str]) -> Plan:
    keys = ",".join(one.split(" ")[0] for one in bad)
    return Plan.blocked(
        f"container {vmid} cannot start: {', '.join(bad)}",
        f"bring the device back, or take the entry out: pct set {vmid} --delete {keys}",
    )


def _plan_running(
    want: Deployment, vmid: int, facts: Facts, added: list[Change], lack: Lacks
) -> Plan:
    host, seen = facts.need(GpuFacts), facts.need(ContainerFacts)
    guest = facts.get(GuestNodes)
    if guest is None:
        silent = facts.silent.get(Where.GUEST, "it was not asked")
        return Plan.unknown("container", f"container {vmid} runs but cannot be asked: {silent}")
    wrong, missing = wrong_nodes(host, guest), list(lack.missing)
    if not wrong and not lack:
        inside = plan_inside(want, vmid, facts)
        return inside if isinstance(inside, Plan) else _restart(want, vmid, seen, inside.reason, [])
    # Only a new devN on a recent Proxmox shows up without a restart; raw lines act at a start.
    occupied = [path for path in missing if guest.node(path).kind not in ("missing", "char")]
    hotplug = (
        seen.version >= proxmox.HOTPLUG_SINCE
        and set(wrong) <= set(missing)
        and not occupied
        and bool(lack.entries)
    )
    reason = (
        wrong_reason(vmid, host, guest, wrong or missing)
        if wrong or missing
        else f"the rules of container {vmid} shut out what it mounts"
    )
    if not lack.edit and (hotplug or not wrong):
        return Plan.change(reason, *added)
    return _restart(want, vmid, seen, reason, added)


def _restart(
    want: Deployment, vmid: int, seen: ContainerFacts, reason: str, added: list[Change]
) -> Plan:
    if want.container is None or want.container.restart == "never":
        return Plan.blocked(
            f"{reason}; that needs a restart of container {vmid}, and its restart is never",
            f"restart it at a good time (`pct reboot {vmid}`), or set restart: allowed",
        )
    if refusal := _no_power(want, vmid, seen, f"{reason}; that needs a restart"):
        return refusal
    if bad := unstartable(seen):
        return _does_not_start(want, vmid, bad)
    if waits := pending_of_others(seen.config()):
        reason += f"; with the restart also comes what is pending: {', '.join(waits)}"
    return Plan.change(reason, *added, power.restart(vmid, reason, seen.ha))
