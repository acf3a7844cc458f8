"""What the launch step would do: nothing, a start, or the wait for one that starts. Pure."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.model import Change, Facts, Plan, Procedure
from deployer.remote.jobs import JobIdentity
from deployer.sglang.argv import command, server_argv
from deployer.state import DeploymentState
from deployer.steps.launch_fit import outlook
from deployer.steps.launch_ladder import first_rung
from deployer.steps.server_compat import refusal, settled_problems
from deployer.steps.server_facts import ServerFact, problems_of
from deployer.steps.server_wanted import is_wanted, server_job_name, server_script


def launch_plan(want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
    """Nothing when the wanted server listens; else a start, or the wait for one that starts."""
    fact = facts.get(ServerFact)
    rung, why = first_rung(want, state)
    chosen = rung.deployment(want)
    try:
        argv = server_argv(chosen)
    except ValueError as error:
        return Plan.blocked(str(error), "remove it from serve.args", exit_code=2)
    settled = settled_problems(chosen, facts, state.manifest, rung.variant)
    if fact is None and settled:
        return refusal(settled, stands=True)
    if fact is None or not fact.asked:
        return Plan.unknown("container", "unknown until the guest can be asked")
    problems = problems_of(chosen, fact, rung.variant)
    job = fact.job
    wanted = (
        job is not None
        and job.alive
        and state.manifest is not None
        and is_wanted(want, state.manifest, job.fingerprint, job.launch)
    )
    if job is not None and wanted and fact.serving:
        return Plan.nothing(f"launch {job.identity.id} is alive and listens on port {want.port}")
    if job is not None and wanted:
        return Plan.change(
            f"launch {job.identity.id} is still starting",
            _attach(want, job.identity, job.launch.variant),
        )
    if settled:
        return refusal(settled, stands=True)
    if problems:
        return refusal(problems, stands=False)
    if not fact.venv:
        return Plan.unknown("venv", "unknown until venv has built the engine")
    if not fact.weights or state.manifest is None:
        return Plan.unknown("shards", "unknown until shards has brought the weights")
    if (job is not None and job.alive) or fact.leftovers:
        return Plan.unknown("stop", "unknown until stop has ended the other launch")
    if fact.listening:
        return Plan.unknown("stop", f"unknown until port {want.port} is free")
    view = outlook(chosen, facts, state.manifest, rung.variant)
    words = f"{why}; {view.words}" if why else view.words
    return Plan.change(
        f"no server runs; {words}",
        _start(want, [*command(want, argv)], rung.variant, words),
    )


def _attach(want: Deployment, job: JobIdentity, variant: str) -> Change:
    return Change(
        f"wait for launch {job.id} (variant {variant}, pid {job.pid})",
        "it was started earlier and is not listening yet",
        Procedure(want.guest, f"follow the log of job {job.name}/{job.id} until it serves"),
        "`deploy down` stops it",
    )


def _start(want: Deployment, argv: list[str], variant: str, words: str) -> Change:
    return Change(
        f"launch {want.playbook.model.served_name} (variant {variant}) on port {want.port}",
        f"no server runs; {words}",
        Procedure(want.guest, f"job {server_job_name(want)}:\n{server_script(want, argv).strip()}"),
        "`deploy down` stops it",
    )
