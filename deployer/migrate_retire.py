"""The end of the source: its container stops, its GPUs go back to vfio-pci; nothing is deleted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.migrate_preflight import Obstacle
from deployer.migrate_side import Side, trouble
from deployer.model import Change, Facts, Plan, PlanState, Shell, Where
from deployer.shell import assignments
from deployer.steps.apply import run_changes
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.gpus_facts import GpuFacts
from deployer.steps.gpus_holders import Holder
from deployer.steps.gpus_refuse import refuse_held
from deployer.steps.gpus_retire import apply_retire, retire_plan
from deployer.steps.server_facts import ServerFact

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


def restarted(want: Deployment, facts: Facts) -> list[Obstacle]:
    """What somebody has started since on a source that the migration had stopped."""
    server, gpus = facts.get(ServerFact), facts.get(GpuFacts)
    job = server.job if server is not None else None
    if job is not None and job.alive:
        what = f"somebody has started it since the migration, and {trouble(want, facts)}"
        fix = (
            f"`deploy up {want.id}` proves it (then it moves anew), `deploy down {want.id}` stops "
            "it; then run the same command again"
        )
        return [Obstacle(want.id, what, fix)]
    found = []
    if gpus is None:
        return []
    for one in gpus.functions:
        users = [user for user in gpus.held_by(one.address) if not user.is_persistenced]
        if refusal := refuse_held(one, users):
            found.append(Obstacle(want.id, f"since the migration {refusal.reason}", refusal.fix))
    return found


def retire_obstacles(want: Deployment) -> list[Obstacle]:
    """Other deployments of the host that `--retire` would take along."""
    found = []
    for name, entry in sorted(want.host.deployments.items()):
        if name == want.name:
            continue
        other = dataclasses.replace(want, name=name, entry=entry)
        shared = [address for address in other.gpus if address in want.gpus]
        if entry.container == want.vmid and want.vmid is not None:
            what = f"--retire would stop container {want.vmid}, in which {other.id} is too"
        elif shared:
            what = f"--retire would take GPU {', '.join(shared)}, which {other.id} has too"
        else:
            continue
        found.append(Obstacle(want.id, what, "leave --retire out"))
    return found


def retire_users(want: Deployment, facts: Facts) -> list[Obstacle]:
    """Who has the GPUs open and does not end with the container: `--retire` could not take them.

    Who is nobody's as far as can be seen may be the container's own: the step itself looks again.
    """
    gpus = facts.get(GpuFacts)
    if gpus is None or want.vmid is None:
        return []
    found, allowed = [], want.playbook.gpus.persistenced == "allowed"
    for one in gpus.functions:
        users = [
            user
            for user in gpus.held_by(one.address)
            if _is_anothers(user, want) and not (user.is_persistenced and allowed)
        ]
        if refusal := refuse_held(one, users):
            found.append(Obstacle(want.id, f"for --retire: {refusal.reason}", refusal.fix))
    return found


def _is_anothers(user: Holder, want: Deployment) -> bool:
    stays = user.vm is not None or bool(user.unit)
    return stays or user.container not in (None, want.vmid)


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
