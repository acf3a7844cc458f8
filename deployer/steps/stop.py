"""The step `stop`: ends a server that is not the wanted one, and proves that it is gone."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import ClassVar

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable
from deployer.model import Change, Facts, Plan, Probe, Procedure
from deployer.remote.jobs import JobIdentity
from deployer.state import DeploymentState, RolledBack
from deployer.steps import adopted
from deployer.steps.base import Step, StepContext
from deployer.steps.failed_want import failed_before
from deployer.steps.launch import LaunchStep, api_key
from deployer.steps.launch_fit import outlook
from deployer.steps.launch_ladder import Fall, first_rung
from deployer.steps.rolled_back import rolled_back, stands
from deployer.steps.server_agent import ask
from deployer.steps.server_facts import (
    ServerFact,
    problems_of,
    server_probe,
)
from deployer.steps.server_wanted import is_wanted
from deployer.steps.stop_argv import ask_parser
from deployer.steps.stop_drain import drain
from deployer.steps.stop_leftovers import clear, held
from deployer.steps.stop_proof import StopProven
from deployer.steps.stop_told import (
    StopAdopted,
    StopOurs,
    adopt_again,
    alone,
    at_the_router,
    failed_again,
    others,
    reboot,
    runs,
    still_there,
    stop_adopted,
    stop_left,
    stop_ours,
)

ASKED_FOR = "asked for"


ENDED = frozenset({"starting", "ready", "good"})
"""Verdicts of launches that a stop has ended."""


def job_alive(fact: ServerFact) -> bool:
    """Does our job run?"""
    return fact.job is not None and fact.job.alive


class StopStep(Step):
    """Looks at our job and at the owners of the port."""

    name: ClassVar[str] = "stop"

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        retry: bool = False,
        restores: bool = False,
    ) -> None:
        self.now = now
        self.sleep = sleep
        self.retry = retry
        """May a server end for a wish that has failed, or was rolled back from?"""
        self.restores = restores
        """Does what it ended serve again when the stop itself fails?"""

    def probes(self, want: Deployment) -> list[Probe]:
        """The one look at the server; launch and verify plan from its fact too."""
        return [server_probe(want)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing, a stop of ours or of an adopted server, or a refusal that names the owner."""
        fact = facts.get(ServerFact)
        if fact is None:
            return Plan.unknown("container", "unknown until the guest can be asked")
        if not fact.asked:
            return Plan.unknown("container", fact.problem)
        job = fact.job
        changes: list[Change] = []
        fix = others(want, fact)
        if fix is not None:
            return fix
        if job is not None and job.stuck and not job.alive:
            return reboot(want, job)
        left = fact.leftovers
        if job is not None and job.alive:
            if state.manifest is None:
                return Plan.unknown("shards", "unknown until shards has pinned the weights")
            wanted = is_wanted(want, state.manifest, job.fingerprint, job.launch)
            if wanted and not fact.strangers:
                return Plan.nothing(runs(want, job, left))
            if not wanted and not self.retry and (failed := failed_before(state, want)):
                return failed_again(want, job, fact.serving, failed, state)
            if not wanted and (record := self.rollback(want, state)):
                return stands(want, job, record)
            changes.append(stop_ours(want, job, wanted))
        elif record := self.rollback(want, state):
            return stands(want, None, record)
        elif not self.retry and (failed := failed_before(state, want)):
            for owner in fact.strangers:
                if not owner.job:
                    return adopt_again(want, owner, failed)
        changes += self.left_changes(want, fact)
        changes += [stop_adopted(want, owner, fact.boot) for owner in fact.strangers]
        if not changes:
            return Plan.nothing(f"no server runs and port {want.port} is free")
        return self.successor_refused(want, facts, state) or Plan.change(
            "; ".join(change.reason for change in changes), *changes
        ).noted(*at_the_router(want, returns=True))

    def rollback(self, want: Deployment, state: DeploymentState) -> RolledBack | None:
        """What forbids to launch this wish by itself."""
        return None if self.retry else rolled_back(state, want)

    def successor_refused(
        self, want: Deployment, facts: Facts, state: DeploymentState
    ) -> Plan | None:
        """The refusal when what would be launched next is known not to start.

        A server that runs is not stopped for one that will not.
        """
        fact = facts.need(ServerFact)
        chosen, _ = first_rung(want, state)
        problems = problems_of(chosen.deployment(want), fact, chosen.variant)
        if problems:
            return Plan.blocked(
                "; ".join(problem.reason for problem in problems),
                "; ".join(dict.fromkeys(problem.change for problem in problems)),
            )
        if not fact.serving:
            return None
        refusals = []
        for rung in Fall.begin(want, state).left:
            fit = outlook(rung.deployment(want), facts, state.manifest, rung.variant).fit
            if fit is None or fit.refusal is None:
                return None
            refusals.append(f"{rung.variant}: {fit.refusal.error}")
        return Plan.blocked(
            "by SGLang's own arithmetic no variant will start, and a server runs: "
            + "; ".join(refusals),
            "change serve.args (`deploy fit` shows what fits); or `deploy down`, then `deploy up`, "
            "to try it all the same",
        )

    def down_plan(self, want: Deployment, facts: Facts) -> Plan:
        """For `down`: stops our own launch whatever it runs; a stranger is left alone."""
        fact = facts.get(ServerFact)
        if fact is None or not fact.asked:
            return Plan.unknown("container", "unknown until the guest can be asked")
        job = fact.job
        if job is not None and job.stuck and not job.alive:
            return reboot(want, job)
        changes = self.left_changes(want, fact)
        if job is not None and job.alive:
            change = stop_ours(want, job, False)
            undo = "`deploy up` starts it again"
            changes.insert(0, dataclasses.replace(change, reason=ASKED_FOR, undo=undo))
        if not changes:
            return Plan.nothing(f"no launch of {want.id} runs{alone(want, fact)}")
        return Plan.change(ASKED_FOR, *changes).noted(*at_the_router(want, returns=False))

    @staticmethod
    def left_changes(want: Deployment, fact: ServerFact) -> list[Change]:
        """End what dead launches have left, wherever it went; only what is provably ours."""
        job = fact.job
        return [
            stop_ours(want, job, False, pids)
            if job is not None and job.identity.id == launch
            else stop_left(want, launch, pids, fact.boot)
            for launch, pids in fact.leftovers.items()
        ]

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Stops what the plan names, then proves: no process, port free, GPU memory given back."""
        self._arguments_are_accepted(context, facts, plan)
        for change in plan.changes:
            data = change.action.data if isinstance(change.action, Procedure) else None
            if isinstance(data, StopOurs):
                self._ours(context, data.job)
            elif isinstance(data, StopAdopted):
                self._adopted(context, data)
        proof = StopProven(context, self.now, self.sleep)
        port = proof.port_is_free(others_may_stay=plan.reason == ASKED_FOR)
        memory = proof.gpu_memory()
        for launch in context.state.launches:
            if launch.verdict in ENDED:
                launch.verdict = "stopped"
        context.save()
        context.note(f"stopped: no process left, {port}, {memory}")

    def undo(self, context: StepContext, facts: Facts, plan: Plan, error: DeployError) -> None:
        """GPU memory that did not come back, say: what was ended serves again where it can."""
        before = facts.get(ServerFact)
        served = before is not None and (bool(before.strangers) or job_alive(before))
        if not self.restores or not served:
            return
        try:
            now = context.reprobe().get(ServerFact)
            if now is None or not now.asked or now.listening or now.leftovers or job_alive(now):
                return
            for launch in context.state.launches:
                if launch.verdict in ENDED:
                    launch.verdict = "stopped"
            context.save()
            known = LaunchStep(self.now, self.sleep).restore(context, api_key(context), ())
        except (StepFailed, Unreachable) as second:
            known = f"and what served before was not started again: {second.what}"
        if known:
            error.add(known)

    def _arguments_are_accepted(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """A server that serves is not stopped for arguments that its successor refuses."""
        want, fact = context.want, facts.get(ServerFact)
        if fact is None or not fact.venv or plan.reason == ASKED_FOR or not fact.owners:
            return
        # Raises when the variable is unset: the successor could not be launched.
        api_key(context)
        chosen, _ = first_rung(want, context.state)
        verdict = ask_parser(context.on(want.guest), chosen.deployment(want))
        if verdict.refused:
            raise StepBlocked(
                "the installed engine refuses the new arguments; nothing was stopped",
                where=f"{want.id} stop",
                fix=verdict.fix or "correct serve.args in the playbook",
                evidence=(verdict.refused,),
            )
        if not verdict.asked:
            context.note(f"the engine's parser could not be asked: {verdict.problem}", "warning")

    def _ours(self, context: StepContext, job: JobIdentity) -> None:
        want, rules = context.want, context.want.playbook.stop
        jobs = context.jobs(want.guest)
        files = []
        if job.session > 0:
            self._drain(context, job, lambda: jobs.poll(job).alive)
            files = held(context, job)
        proof = jobs.stop(job, grace_s=rules.grace_s, kill_s=rules.kill_s, main_first=True)
        if not proof.stopped:
            raise still_there(want, f"launch {job.id}", proof.survivors, proof.how)
        context.note(f"launch {job.id}: {proof.how}")
        if job.session > 0:
            clear(context, job, files)

    def _drain(self, context: StepContext, job: JobIdentity, alive: Callable[[], bool]) -> None:
        limit_s = context.want.playbook.stop.drain_s
        if limit_s > 0 and alive():
            context.note(drain(context, job, limit_s, alive, self.now, self.sleep))

    def _adopted(self, context: StepContext, data: StopAdopted) -> None:
        want, rules = context.want, context.want.playbook.stop
        owner, guest = data.owner, context.on(context.want.guest)
        # What a dead launch of ours left is none of it.
        written = None if owner.job else adopted.keep(guest, want, owner, data.boot)
        if written is not None and (one := adopted.for_abort_only(context.state)):
            # It lies where that of the finished migration lay.
            one.adopted = ""
        there = JobIdentity("", "", owner.pid, owner.start, data.boot, owner.session)
        self._drain(context, there, lambda: True)
        if written is not None and written.unit:
            context.note(adopted.stop_unit(guest, written.unit), "warning")
        command = {
            "do": "stop",
            "pid": data.owner.pid,
            "start": data.owner.start,
            "boot": data.boot,
            "grace_s": rules.grace_s,
            "kill_s": rules.kill_s,
        }
        answer = ask(guest, want, [command], timeout_s=rules.grace_s + rules.kill_s + 30)[0]
        if not answer.get("stopped"):
            survivors = tuple(str(line) for line in answer.get("survivors", []))
            raise still_there(want, f"pid {data.owner.pid}", survivors, str(answer.get("error")))
        context.note(f"adopted server, pid {data.owner.pid}: {answer['how']}")
