"""Everything that speaks against a migration, at once: facts of both sides in, obstacles out. Pure.

The steps' own plans are the checks: what `up` would refuse on the destination is an obstacle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.migrate_side import is_stopped, trouble
from deployer.model import Facts, Plan, PlanState
from deployer.observe import LockSeen
from deployer.pct_config import Section
from deployer.remote.lock_record import Controller, is_stale
from deployer.state import DeploymentState, Manifest, Migration
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.driver_facts import HostDriver
from deployer.steps.launch_fit import outlook
from deployer.steps.launch_ladder import Fall
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import is_wanted

ROOT_ONLY = ("features", "hookscript", "unprivileged")
"""Keys of a container that only root@pam may set (pct; besides bind mounts, devN and lxc.*)."""


@dataclass(frozen=True)
class Obstacle:
    """One thing that is in the way: where, what, and what to do."""

    where: str
    what: str
    fix: str = ""
    exit_code: int = 1

    def line(self) -> str:
        """For people."""
        return f"{self.where}: {self.what}" + (f" -> {self.fix}" if self.fix else "")


def refused(obstacles: Sequence[Obstacle], source: str, destination: str) -> StepBlocked:
    """The error for all of them; their exit code when they share one."""
    count = len(obstacles)
    error = StepBlocked(
        f"{count} obstacle{'s' if count > 1 else ''}; nothing was touched",
        where=f"{source} -> {destination}",
        fix="remove them, then run the same command again",
        evidence=tuple(one.line() for one in obstacles),
    )
    codes = {one.exit_code for one in obstacles}
    error.exit_code = codes.pop() if len(codes) == 1 else 1
    return error


def pair_obstacles(source: Deployment, destination: Deployment) -> list[Obstacle]:
    """Of the inventory alone."""
    found, where = [], f"{source.id} -> {destination.id}"
    old, new = source.playbook.model, destination.playbook.model
    if old.served_name != new.served_name:
        what = f"they serve different names, {old.served_name} and {new.served_name}"
        found.append(Obstacle(where, what, "use one model.served_name: clients ask for it", 2))
    if (old.repo, old.revision) != (new.repo, new.revision):
        what = (
            f"they serve different models, {old.repo} {old.revision} and {new.repo} {new.revision}"
        )
        found.append(Obstacle(where, what, "migrate first, then change the model with `up`", 2))
    return found


def one_machine(
    source: Deployment, old: Facts | None, destination: Deployment, new: Facts | None
) -> list[Obstacle]:
    """One machine under two names: what stops the source would stop the destination."""
    where, fix = f"{source.id} -> {destination.id}", "correct the inventory: hosts are machines"
    ends = [(want.host.ssh.address, want.host.ssh.port) for want in (source, destination)]
    if ends[0] == ends[1] and source.host.ssh.gateway == destination.host.ssh.gateway:
        what = f"{source.host_name} and {destination.host_name} are both {ends[0][0]}"
        return [Obstacle(where, what, fix, 2)]
    seen = [facts.get(ServerFact) if facts is not None else None for facts in (old, new)]
    jobs = [one.job if one is not None else None for one in seen]
    if jobs[0] is None or jobs[1] is None or jobs[0].identity != jobs[1].identity:
        return []
    ident = jobs[0].identity
    what = f"both have the same launch {ident.id} (pid {ident.pid}): one machine under two names"
    return [Obstacle(where, what, fix, 2)]


def source_obstacles(want: Deployment, facts: Facts) -> list[Obstacle]:
    """The source must serve what has passed its gates."""
    why = trouble(want, facts)
    if not why:
        return []
    fix = f"`deploy verify {want.id}` where it serves, else `deploy up {want.id}`"
    return [Obstacle(want.id, f"it does not serve as proven: {why}", fix)]


def lock_obstacle(where: str, facts: Facts, me: Controller) -> list[Obstacle]:
    """Another run works on the host; one that is proven dead does not count."""
    seen = facts.get(LockSeen)
    if seen is None or seen.held is None:
        return []
    record = seen.held.record
    if record is not None and is_stale(record, me):
        return []
    who = record.describe() if record is not None else f"run {seen.held.run_id}"
    fix = f"wait for it; `deploy unlock {where}` when it is surely dead"
    return [Obstacle(where, f"its lock is held by {who}", fix, 4)]


def destination_obstacles(
    want: Deployment,
    facts: Facts,
    state: DeploymentState,
    plans: Mapping[str, Plan],
    record: Migration | None,
) -> list[Obstacle]:
    """What `up` would refuse there, another server of ours, and a model that does not fit."""
    found = [
        Obstacle(f"{want.id} {name}", plan.reason, plan.fix, plan.exit_code)
        for name, plan in plans.items()
        if plan.state is PlanState.BLOCKED
    ]
    silent = facts.silent.get(want.guest)
    if silent is not None and not is_stopped(want, facts) and not blocks(plans, "container"):
        fix = f"check that container {want.vmid} runs and that its sshd answers"
        found.append(Obstacle(want.id, f"the guest cannot be asked: {silent}", fix, 3))
    server = facts.get(ServerFact)
    job = server.job if server is not None else None
    theirs = record is None or (record.served_before and not record.cut)
    if theirs and job is not None and job.alive:
        manifest = state.manifest
        if manifest is None or not is_wanted(want, manifest, job.fingerprint, job.launch):
            what = f"another launch of it runs there ({job.identity.id})"
            fix = f"`deploy down {want.id}` stops it, `deploy up {want.id}` replaces it"
            found.append(Obstacle(want.id, what, fix))
    if not any(one.where.endswith(" launch") for one in found):
        found += fit_obstacle(want, facts, state)
    seen = facts.get(ContainerFacts)
    container = plans.get("container")
    if (
        seen is not None
        and container is not None
        and container.state is PlanState.CHANGES
        and want.host.ssh.user != "root"
    ):
        what = f"only root@pam may change devices of container {want.vmid}"
        found.append(
            Obstacle(want.id, f"{what}; we are {want.host.ssh.user}", "set ssh.user to root")
        )
    return found


def blocks(plans: Mapping[str, Plan], name: str) -> bool:
    """Does this step refuse already?"""
    return name in plans and plans[name].state is PlanState.BLOCKED


def fit_obstacle(want: Deployment, facts: Facts, state: DeploymentState) -> list[Obstacle]:
    """By SGLang's own arithmetic no variant starts on the destination's GPUs."""
    refusals = []
    for rung in Fall.begin(want, state).left:
        fit = outlook(rung.deployment(want), facts, state.manifest, rung.variant).fit
        if fit is None or fit.refusal is None:
            return []
        refusals.append(f"{rung.variant}: {fit.refusal.error}")
    if not refusals:
        return []
    what = "the model does not fit its GPUs: " + "; ".join(refusals)
    return [Obstacle(want.id, what, f"change serve.args (`deploy fit {want.id}`)")]


def older_wish(want: Deployment, facts: Facts, manifest: Manifest | None) -> str:
    """That the source serves something else than its playbook and the list of files say now.

    `manifest`: of the destination; '' when the two cannot be compared, too.
    """
    server = facts.get(ServerFact)
    job = server.job if server is not None else None
    if job is None or not job.alive or manifest is None:
        return ""
    if is_wanted(want, manifest, job.fingerprint, job.launch):
        return ""
    return (
        f"launch {job.identity.id} has other arguments, weights or lock than the playbook says "
        "now; what it says now moves"
    )


def differences(source: Deployment, old: Facts, destination: Deployment, new: Facts) -> list[str]:
    """What is not the same on both sides and may matter; no obstacle."""
    told = []
    engines = source.playbook.engine.version, destination.playbook.engine.version
    if engines[0] != engines[1]:
        told.append(f"engine {engines[0]} there, {engines[1]} here")
    told += serve_differences(source, destination)
    drivers = [facts.get(HostDriver) for facts in (old, new)]
    loaded = [driver.loaded if driver is not None else "" for driver in drivers]
    if all(loaded) and loaded[0] != loaded[1]:
        told.append(f"driver {loaded[0]} there, {loaded[1]} here")
    left, right = old.get(ContainerFacts), new.get(ContainerFacts)
    if left is not None and right is not None and left.exists and right.exists:
        told += container_differences(
            left.config().after_restart(), right.config().after_restart(), destination.vmid or 0
        )
    return told


def serve_differences(source: Deployment, destination: Deployment) -> list[str]:
    """What clients may notice: other arguments, another API key."""
    old, new = source.serve_args(), destination.serve_args()
    told = [
        f"serve.args: {flag} {old.get(flag, 'unset')} there, {new.get(flag, 'unset')} here"
        for flag in sorted({*old, *new})
        if old.get(flag) != new.get(flag)
    ]
    keys = source.playbook.serve.api_key_env, destination.playbook.serve.api_key_env
    if keys[0] != keys[1]:
        names = [f"${name}" if name else "no variable" for name in keys]
        told.append(
            f"the API key of {names[0]} there, of {names[1]} here: clients need the new one"
        )
    return told


def container_differences(old: Section, new: Section, vmid: int) -> list[str]:
    """Settings of the source's container that the destination's lacks and only root@pam may set."""
    told = []
    for key in ROOT_ONLY:
        if old.keys.get(key, "") != new.keys.get(key, ""):
            wanted = old.keys.get(key)
            how = f"`pct set {vmid} --{key} {wanted}` as root" if wanted else f"it has {key} itself"
            told.append(f"the source's container has {key} {wanted or 'unset'}; {how}")
    mounts = {value for key, value in new.keys.items() if key.startswith("mp")}
    for key, value in sorted(old.keys.items()):
        if key.startswith("mp") and value.startswith("/") and value not in mounts:
            told.append(
                f"the source's container has the bind mount {key}: {value}; this one has not"
            )
    raw = {(key, value) for key, value in old.raw if "devices" not in key and "/dev/" not in value}
    for key, value in sorted(raw - set(new.raw)):
        told.append(f"the source's container has the line {key}: {value}; this one has not")
    return told
