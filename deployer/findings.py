"""What `doctor` finds: the plans of all steps and the warnings inside facts, worst first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from deployer.agents.fetch.claims import plain
from deployer.deployment import Deployment
from deployer.errors import DeployError, Unreachable
from deployer.model import Facts, Plan, PlanState, Where
from deployer.observe import LockSeen
from deployer.rehash import Verdict
from deployer.remote.lock_record import Controller, is_stale
from deployer.state import DeploymentState
from deployer.steps import container_told, driver, gpus_persist
from deployer.steps.base import Step
from deployer.steps.boot_facts import BootFacts
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import HostSmi
from deployer.steps.gpus_facts import GpuFacts
from deployer.steps.server_facts import ServerFact, problems_of
from deployer.steps.serving_fact import ServingFact
from deployer.steps.shards import pinned
from deployer.steps.shards_facts import ShardsFact
from deployer.steps.shards_preflight import leftovers
from deployer.steps.venv_facts import ComputeFact, VenvFact


class Level(IntEnum):
    """Worst first."""

    UNREACHABLE = 0
    BLOCKED = 1
    WARNING = 2
    PENDING = 3
    UNKNOWN = 4
    FINE = 5


LEVELS = {
    PlanState.BLOCKED: Level.BLOCKED,
    PlanState.CHANGES: Level.PENDING,
    PlanState.UNKNOWN: Level.UNKNOWN,
    PlanState.NOTHING: Level.FINE,
}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. `where` is HOST, or HOST/NAME with the step."""

    level: Level
    where: str
    what: str
    fix: str = ""
    notes: tuple[str, ...] = ()
    """Facts behind it, a line each."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "level": self.level.name.lower(),
            "where": self.where,
            "what": self.what,
            "fix": self.fix,
            "notes": list(self.notes),
        }


def of_error(error: DeployError, where: str) -> Finding:
    """A target that could not be looked at."""
    level = Level.UNREACHABLE if isinstance(error, Unreachable) else Level.BLOCKED
    return Finding(level, error.where or where, error.what, error.fix)


def examine(
    want: Deployment, facts: Facts, state: DeploymentState, steps: Sequence[Step]
) -> list[Finding]:
    """All findings of one deployment, worst first, each said once."""
    planned = [_planned(step, want, facts, state) for step in steps]
    said = " ".join(one.what for one in planned if one.level is not Level.FINE)
    # What a step is blocked by is not warned of once more under the same action.
    blocked = {(one.where, one.fix) for one in planned if one.level is Level.BLOCKED}
    warned = [
        one
        for one in _warnings(want, facts, state)
        if one.what not in said and (one.where, one.fix) not in blocked
    ]
    told = {one.what for one in warned}
    once = [
        replace(one, notes=tuple(note for note in one.notes if note not in told)) for one in planned
    ]
    return in_order([*once, *warned])


def in_order(found: Iterable[Finding]) -> list[Finding]:
    """Worst first; what is equally bad stays in the order of the steps."""
    return sorted(dict.fromkeys(found), key=lambda one: one.level)


def of_rehash(want: Deployment, wrong: Iterable[Verdict]) -> list[Finding]:
    """Files whose bytes are not those of the list: wrong ones first, then missing ones."""
    where, found = f"{want.id} shards", []
    again = f"`deploy up {want.id} --only shards` fetches it again"
    for one in wrong:
        if one.missing:
            what = f"{plain(one.path)}: {one.got}"
            found.append(Finding(Level.PENDING, where, what, f"`deploy up {want.id}` fetches it"))
            continue
        what = f"{plain(one.path)}: expected {one.expected}, got {one.got} ({one.size} bytes)"
        fix = f"{again}; if it comes back: suspect the disk or the RAM of {want.host_name}"
        found.append(Finding(Level.BLOCKED, where, what, fix))
    return in_order(found)


def of_lock(host: str, facts: Facts, me: Controller) -> list[Finding]:
    """What the host lock tells."""
    seen = facts.get(LockSeen)
    if seen is None:
        return []
    if seen.problem:
        fix = f"check /var/lib/deployer on {host}"
        return [Finding(Level.WARNING, host, seen.problem, fix)]
    if seen.held is None:
        return []
    record = seen.held.record
    if record is None:
        what = f"the host lock is held by run {seen.held.run_id or '?'}, its record is unreadable"
        return [Finding(Level.WARNING, host, what, f"if that run is dead: `deploy unlock {host}`")]
    if stale := is_stale(record, me):
        what = f"a host lock was left behind by {record.describe()}: {stale}"
        return [Finding(Level.WARNING, host, what, "the next `deploy up` takes it over")]
    what = f"another run is at work: {record.describe()}"
    fix = f"wait for it; if it is surely dead: `deploy unlock {host}`"
    return [Finding(Level.WARNING, host, what, fix)]


def _planned(step: Step, want: Deployment, facts: Facts, state: DeploymentState) -> Finding:
    where = f"{want.id} {step.name}"
    try:
        plan = step.plan(want, facts, state)
    except DeployError as error:
        return Finding(Level.BLOCKED, where, error.what, error.fix)
    return Finding(LEVELS[plan.state], where, _reason(plan), _fix(want, plan), plan.notes)


def _reason(plan: Plan) -> str:
    count = len(plan.changes)
    if plan.state is not PlanState.CHANGES:
        return plan.reason
    return f"{count} change{'s' if count != 1 else ''}: {plan.reason}"


def _fix(want: Deployment, plan: Plan) -> str:
    if plan.fix:
        return plan.fix
    return f"`deploy up {want.id}` does it" if plan.state is PlanState.CHANGES else ""


def _warnings(want: Deployment, facts: Facts, state: DeploymentState) -> Iterable[Finding]:
    def warn(step: str, what: str, fix: str = "") -> Finding:
        return Finding(Level.WARNING, f"{want.id} {step}".rstrip(), what, fix)

    box = facts.get(ContainerFacts)
    stopped = box is not None and box.status == "stopped"  # the container step's plan tells of it
    if (silent := facts.silent.get(Where.GUEST)) and not stopped:
        fix = f"check that container {want.vmid} runs and that its sshd answers"
        yield warn("container", f"the guest cannot be asked: {silent}", fix)
    for kind, fact in facts.values.items():
        if getattr(fact, "timed_out", False) and kind not in (HostSmi, CudaProof):
            yield warn("", f"a look ran over its deadline ({kind.__name__})", "is the host sick?")
    yield from (warn("driver", *one) for one in driver.warnings(want, facts))
    gpus = gpus_persist.warnings(want, facts.get(GpuFacts), facts.get(BootFacts))
    yield from (warn("gpus", *one) for one in gpus)
    yield from (warn("container", *one) for one in container_told.warnings(want, facts))
    yield from (warn(*one) for one in _venv(want, facts))
    shards = facts.get(ShardsFact)
    if shards is not None and (problem := shards.problem or shards.record_error):
        yield warn("shards", problem, f"check {want.playbook.model.path} on the target")
    manifest = pinned(want, state)
    if shards is not None and manifest is not None:
        whole = all(shards.verified(file) for file in manifest.files)
        text = leftovers(shards, manifest.files, own=whole).useless_text(want.id)
        if text:
            what, _, fix = text.partition(": ")
            yield warn("shards", what, fix)
    yield from (warn(*one) for one in _server(want, facts))


def _venv(want: Deployment, facts: Facts) -> Iterable[tuple[str, str, str]]:
    venv, compute = facts.get(VenvFact), facts.get(ComputeFact)
    if venv is not None and (problem := venv.problem or venv.broken):
        yield "venv", problem, f"look at {want.playbook.engine.venv} on the target"
    if compute is not None and compute.problem:
        yield "venv", compute.problem, "the steps driver, gpus and container come first"


def _server(want: Deployment, facts: Facts) -> Iterable[tuple[str, str, str]]:
    server, serving = facts.get(ServerFact), facts.get(ServingFact)
    if server is None:
        return
    if server.problem:
        yield "launch", server.problem, ""
    adopts = want.playbook.stop.old_server == "adopt"
    for owner in server.strangers:
        if adopts and owner.is_server:
            continue  # the stop step's plan tells of it
        what = f"port {want.port} is held by pid {owner.pid}, not ours: {owner.command[:120]}"
        fix = "end it yourself, or choose another port; `stop.old_server: adopt` stops a server"
        yield "stop", what, fix
    for problem in problems_of(want, server, want.variant_name):
        yield "launch", problem.reason, problem.change
    good = serving is not None and serving.verdict == "good"
    if serving is not None and good and serving.problem and server.job and server.job.alive:
        fix = f"`deploy logs {want.id}`, then `deploy verify {want.id}`"
        yield "verify", f"launch {serving.launch} passed its gates, but now: {serving.problem}", fix
