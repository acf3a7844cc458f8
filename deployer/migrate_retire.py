"""The end of the source: its container stops, its GPUs go back to vfio-pci; nothing is deleted."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.errors import StepBlocked
from deployer.migrate_side import Side
from deployer.model import Change, Facts, Plan, PlanState, Shell, Where
from deployer.shell import assignments
from deployer.steps.apply import run_changes
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_retire import apply_retire, retire_plan

SHUTDOWN_S = 60
_STOP = r"""
stopped() { [ "$(pct status "$VMID" 2>/dev/null)" = "status: stopped" ]; }
stopped && exit 0
pct shutdown "$VMID" --timeout "$SHUTDOWN" --forceStop 1 || stopped || exit 1
left=$SHUTDOWN
until stopped; do
  [ "$left" -gt 0 ] || { echo "it still runs: $(pct status "$VMID" 2>&1)" >&2; exit 1; }
  left=$((left - 1))
  sleep 1
done
"""


def stop_container(vmid: int) -> Change:
    """Shuts the container down, by force after a minute."""
    script = assignments({"VMID": str(vmid), "SHUTDOWN": str(SHUTDOWN_S)}) + _STOP
    reason = "the migration retires it (--retire)"
    return Change(
        f"stop container {vmid}",
        reason,
        Shell(Where.HOST, script, timeout_s=3.0 * SHUTDOWN_S),
        f"pct start {vmid}",
    )


def words(side: Side) -> Sequence[str]:
    """What it will do, for a dry run."""
    told = []
    if side.want.vmid is not None:
        told.append(stop_container(side.want.vmid).title)
    return [*told, f"bind {', '.join(side.want.gpus)} to vfio-pci, and no longer to nvidia at boot"]


def is_retired(side: Side, facts: Facts) -> bool | None:
    """Is the container stopped and are the GPUs on vfio-pci? None: it cannot be told."""
    seen = facts.get(ContainerFacts)
    if side.want.vmid is not None and (seen is None or not seen.status):
        return None
    if side.want.vmid is not None and seen is not None and seen.status != "stopped":
        return False
    plan = retire_plan(side.want, facts, side.own)
    return None if plan.state is PlanState.BLOCKED else plan.state is PlanState.NOTHING


def retire(side: Side) -> Plan:
    """Stops the container, then gives the GPUs back; the last plan, which is empty.

    Raises StepBlocked when a GPU is in use by somebody else, StepFailed.
    """
    want = side.want
    context = side.context("retire")
    facts = side.gather()
    seen = facts.get(ContainerFacts)
    if want.vmid is not None and seen is not None and seen.status != "stopped":
        change = stop_container(want.vmid)
        run_changes(context, Plan.change(change.reason, change))
        facts = side.gather()
    plan = retire_plan(want, facts, context.state)
    if plan.state is PlanState.BLOCKED:
        raise StepBlocked(plan.reason, where=f"{want.id} retire", fix=plan.fix)
    if plan.state is PlanState.CHANGES:
        apply_retire(context, facts, plan)
        plan = retire_plan(want, side.gather(), context.state)
    for line in (plan.reason, *plan.notes):
        side.note("retire", line)
    return plan
