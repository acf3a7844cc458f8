"""The stop step's changes, refusals and failures, as they are told."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import Change, Plan, Procedure
from deployer.remote.jobs import JobIdentity
from deployer.state import DeploymentState, FailedWant
from deployer.steps.server_facts import PortOwner, ServerFact, ServerJob
from deployer.steps.server_wanted import server_job_name
from deployer.steps.stop_gpu import GpuMemory

RELEASE_S = 60.0
"""How long the port and the GPU memory may take to come back after the last process ended."""


@dataclass(frozen=True)
class StopOurs:
    """Stop this job of ours."""

    job: JobIdentity


@dataclass(frozen=True)
class StopAdopted:
    """Stop this process that we did not start, known by boot id, pid and start time."""

    owner: PortOwner
    boot: str


def others(want: Deployment, fact: ServerFact) -> Plan | None:
    """The refusal when the port belongs to somebody who may not be stopped."""
    if fact.listening and not fact.owners:
        return Plan.blocked(
            f"port {want.port} is listened on by a process that cannot be seen from there",
            "find it on the host (`ss -ltnp`), or give the deployment another port",
        )
    for owner in fact.strangers:
        shown = f"pid {owner.pid} ({owner.command[:200] or 'no command line'})"
        if owner.job and owner.job.split("/")[0] != server_job_name(want):
            return Plan.blocked(
                f"port {want.port} belongs to job {owner.job}: {shown}",
                "give one of the two deployments another port, or `deploy down` the other",
            )
        if not owner.is_server:
            return Plan.blocked(
                f"port {want.port} is held by {shown}, which is no server of this tool",
                f"stop it yourself (kill {owner.pid}), or set another serve.port",
            )
        if want.playbook.stop.old_server != "adopt" and not owner.job:
            return Plan.blocked(
                f"port {want.port} is held by {shown}, which this tool did not start",
                f"stop it yourself (kill {owner.pid}), or allow it with stop.old_server: adopt",
            )
    return None


def alone(want: Deployment, fact: ServerFact) -> str:
    """Who has the port though nothing of ours runs; '' when nobody has it."""
    if not fact.listening:
        return ""
    shown = "; ".join(f"pid {one.pid} ({one.command[:200]})" for one in fact.owners)
    return f"; port {want.port} is held by {shown or 'a process not seen'}, which is left alone"


def runs(want: Deployment, job: ServerJob, left: Mapping[str, tuple[int, ...]]) -> str:
    """That the wanted launch runs, what is less than asked for, and what earlier ones have left."""
    text = f"the wanted server runs; launch {job.identity.id}"
    if job.launch.variant != want.variant_name:
        text += (
            f"; {job.launch.degraded}; `deploy restart {want.id} --variant {want.variant_name}` "
            f"tries {want.variant_name} again"
        )
    for launch, pids in left.items():
        text += f"; launch {launch}, which is dead, left pid {', '.join(map(str, pids))}"
    if left:
        text += f" (`deploy restart {want.id}` ends them too)"
    return text


def failed_again(
    want: Deployment, job: ServerJob, serving: bool, failed: FailedWant, state: DeploymentState
) -> Plan:
    """The refusal to end a server for what has failed before, with the exit code of that time."""
    good = next((one for one in state.launches if one.id == state.known_good), None)
    known = good is not None and good.fingerprint == job.fingerprint
    return Plan.blocked(
        f"{_failed(failed)}; {'known-good ' if known else ''}launch {job.identity.id} (variant "
        f"{job.launch.variant}) {'serves' if serving else 'runs'} and was left alone",
        _retry(want, failed),
        exit_code=failed.exit_code,
    )


def stop_left(want: Deployment, launch: str, pids: tuple[int, ...], boot: str) -> Change:
    """The change that ends what is left of a launch which is not the newest."""
    # No number of its main process is known, and none is needed: they are found by their marks.
    job = JobIdentity(server_job_name(want), launch, -1, -1, boot, -1)
    shown = ", ".join(map(str, pids))
    return Change(
        f"stop what is left of launch {launch} (pid {shown})",
        f"launch {launch} died and left processes: {shown}",
        Procedure(
            want.guest,
            "TERM to each process that is marked as this launch's, then KILL; proof: none is left",
            StopOurs(job),
        ),
        "none: its launch is over",
    )


def stop_ours(want: Deployment, job: ServerJob, wanted: bool, left: tuple[int, ...] = ()) -> Change:
    """The change that ends our own launch; `wanted`: it is the wanted one, without its port.

    `left`: of a dead launch, all its processes.
    """
    ident = job.identity
    if not job.alive:
        reason = f"launch {ident.id} died and left processes: {', '.join(map(str, left))}"
    elif wanted:
        reason = f"launch {ident.id} lost its port to another process and will not get it back"
    else:
        reason = f"launch {ident.id} runs other arguments, weights or engine than wanted"
    return Change(
        f"stop launch {ident.id} (pid {ident.pid})",
        reason,
        Procedure(
            want.guest,
            f"TERM to session {ident.session}, then KILL; proof: no process, port free, "
            "GPU memory back on the host",
            StopOurs(ident),
        ),
        "the launch step starts a server again",
    )


def stop_adopted(want: Deployment, owner: PortOwner, boot: str) -> Change:
    """The change that ends a server which we did not start."""
    return Change(
        f"stop the server that holds the port (pid {owner.pid})",
        f"pid {owner.pid} holds the port and may be adopted: {owner.command[:200]}",
        Procedure(
            want.guest,
            f"TERM to pid {owner.pid} (start {owner.start}), then KILL to it and its descendants",
            StopAdopted(owner, boot),
        ),
        "if no launch comes up in its place it is started again; by hand: " + owner.command[:500],
    )


def adopt_again(want: Deployment, owner: PortOwner, failed: FailedWant) -> Plan:
    """The refusal to end what has the port for what has failed before."""
    return Plan.blocked(
        f"{_failed(failed)}; pid {owner.pid} ({owner.command[:200]}) has port {want.port}, and was "
        "left alone",
        _retry(want, failed),
        exit_code=failed.exit_code,
    )


def _failed(failed: FailedWant) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(failed.when))
    return f"exactly this (variant {failed.variant}) failed at {when}: {failed.cause}"


def _retry(want: Deployment, failed: FailedWant) -> str:
    helps = f" ({failed.fix})" if failed.fix else ""
    return f"change the playbook{helps}; `deploy up {want.id} --retry` tries it again as it is"


def at_the_router(want: Deployment, *, returns: bool) -> tuple[str, ...]:
    """What becomes of a replica's place behind its router around the stop."""
    replica = want.entry.replica
    if replica is None:
        return ()
    url, drain_s = replica.router.url, want.playbook.stop.drain_s
    while_ = ", while all other replicas get requests" if returns else ""
    lines = (f"before it: out of {url}{while_}; {drain_s:g} s for the requests that it has",)
    return (*lines, f"after the gates: in {url} again") if returns else lines


def reboot(want: Deployment, job: ServerJob) -> Plan:
    """The refusal for processes that no signal ends."""
    pids = ", ".join(map(str, job.stuck))
    return Plan.blocked(
        f"launch {job.identity.id} left processes in D state: {pids}",
        "look again in a minute: giving back GPU memory takes a while; what stays so ends only "
        f"with a reboot of {want.host_name}, and no GPU may be used before",
    )


def still_there(want: Deployment, what: str, survivors: tuple[str, ...], how: str) -> StepFailed:
    """The failure of a stop that left somebody."""
    stuck = "D state" in how or any("state D" in line for line in survivors)
    return StepFailed(
        f"{what} could not be stopped ({how})",
        where=f"{want.id} stop",
        fix=f"reboot {want.host_name}" if stuck else "look at the processes named above",
        evidence=survivors,
    )


def memory_lost(
    want: Deployment, memory: GpuMemory, over: tuple[str, ...], floor: int
) -> StepFailed:
    """The failure when memory stays used and nobody is seen to hold it."""
    return StepFailed(
        f"GPU memory did not come back below {floor} MiB within {RELEASE_S:g} s",
        where=f"{want.id} stop",
        fix=f"no process holds it: raise stop.gpu_floor_mib, or reboot {want.host_name}",
        evidence=(memory.told(over),),
    )
