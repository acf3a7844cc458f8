"""What `up` does after a failed gate: which side is broken, and what serves now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from deployer.errors import GateFailed, StepBlocked, StepFailed, Unreachable
from deployer.model import PlanState
from deployer.remote.jobs import JobIdentity
from deployer.sglang.mtphead import ALGORITHM_FLAGS
from deployer.state import Launch
from deployer.steps.adopted import for_abort_only, kept
from deployer.steps.base import StepContext
from deployer.steps.gates_bench import Bench, GateFault
from deployer.steps.gates_identity import identity
from deployer.steps.gates_judge import Fault
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_ladder import Fall
from deployer.steps.launch_restore import as_launched, last_good
from deployer.steps.launch_start import SeenBefore
from deployer.steps.launch_told import redacted
from deployer.steps.launch_wait import LaunchFailed
from deployer.steps.server_agent import ask
from deployer.steps.server_facts import ServerFact, problems_of
from deployer.steps.server_wanted import DERIVED, LaunchNote, Rung
from deployer.steps.serving_fact import LIGHT_S, light_problem
from deployer.steps.stop import StopStep
from deployer.steps.verify_gates import Failure, Gates

Record = Callable[[str, str, dict[str, float]], None]
"""Writes (launch id, verdict, figures) into state and target."""


@dataclass(frozen=True)
class Compared:
    """What came of the same questions without speculation. `serves`: that launch is proven now."""

    words: str
    serves: bool
    fix: str


@dataclass
class Fallback:
    """After the gates of `bench` failed with `failure`; its verdict is recorded already."""

    context: StepContext
    fact: ServerFact
    bench: Bench
    failure: Failure
    record: Record
    note: LaunchNote
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def error(self) -> GateFailed:
        """Compares, restores or ends the launch; the failure with what came of it."""
        rules, first, want = self.bench.rules, self.failure.error, self.context.want
        told: list[str] = []
        fix = first.fix
        found: Compared | None = None
        try:
            rung = self.without_speculation() if rules.ab_on_failure else None
            if self.failure.comparable and rung is not None:
                found = self.compared(*rung)
                told.append(found.words)
                fix = found.fix
        except StepFailed as error:
            # It may have ended the launch before: what was good is started again all the same.
            told.append(f"it could not be compared: {error.what}")
        except Unreachable as error:
            told.append(f"what was to follow could not be done: {error.what}")
            return self._told(told, fix)
        try:
            if (found is None or not found.serves) and rules.on_failure != "leave":
                if again := self.restored():
                    fix = f"correct the playbook, then `deploy up {want.id}`; {fix}"
                told.append(again or self.ended())
        except (StepFailed, Unreachable) as error:
            # The gate's failure is the one to tell; this one is told with it.
            told.append(f"what was to follow could not be done: {error.what}")
        return self._told(told, fix)

    def _told(self, told: list[str], fix: str) -> GateFailed:
        first = self.failure.error
        what = "; ".join([first.what, *(words for words in told if words)])
        return GateFailed(what, where=first.where, fix=fix, evidence=first.evidence)

    def without_speculation(self) -> tuple[Rung, LaunchNote] | None:
        """The next variant that does not speculate; without one, this variant less its drafts."""
        want = self.context.want
        fall = Fall(want, self.context.state.manifest, [])
        fall.join(self.note)
        failed = fall.next()
        if failed is not None:
            fall.failed(failed, f"gate-{self.failure.gate.replace(' ', '-')}")
        while (rung := fall.next()) is not None:
            there = rung.deployment(want)
            if not any(there.serve_args().get(flag) for flag in ALGORITHM_FLAGS):
                break
        else:
            rung = self._without_drafts()
        known = problems_of(rung.deployment(want), self.fact, rung.variant)
        return None if known else (rung, fall.note(rung))

    def _without_drafts(self) -> Rung:
        ran = self.note.rung if self.note.variant else Rung(self.bench.variant)
        drafts = [flag for flag in self.bench.args if flag.startswith("speculative-")]
        changes = {**dict(ran.changes), **dict.fromkeys(drafts, False)}
        return Rung(f"{ran.variant}{DERIVED}no-spec", tuple(changes.items()))

    def compared(self, rung: Rung, note: LaunchNote) -> Compared:
        """The same questions to `rung`: which side is broken, and does that launch serve now?"""
        context, key = self.context, self.bench.api_key
        context.note(
            f"gate {self.failure.gate!r} failed with speculation on; the same is asked of variant "
            f"{rung.variant}, without it",
            "warning",
        )
        self.end_launch()
        step = self._launcher()
        job, launch = step.start_rung(context, rung, note, key)
        try:
            step.follow(context, job, launch, key)
        except LaunchFailed as error:
            step.give_up(context, job, launch, error)
            cls = error.failure.cls
            words = f"without speculation (variant {rung.variant}) it did not start: {cls}"
            return Compared(words, False, error.failure.action)
        return self._judged(rung, job, launch)

    def _judged(self, rung: Rung, job: JobIdentity, launch: Launch) -> Compared:
        bench = Bench(
            self.context,
            job,
            rung.variant,
            rung.deployment(self.context.want).serve_args(),
            self.bench.model_type,
            self.bench.api_key,
            self.now,
            self.sleep,
        )
        which = f"variant {rung.variant}, launch {launch.id}"
        if fault := self._same_questions(bench):
            worse = redacted(fault.why, self.bench.api_key)
            if fault.kind != "output":
                # No answer, or another server: that says nothing about the drafts.
                self.record(launch.id, f"failed: {worse}", {})
                return Compared(
                    f"without speculation ({which}) it fails in another way ({worse}): which side "
                    "is broken is not known",
                    False,
                    fault.fix or f"read `deploy logs {self.context.want.id}`",
                )
            self.record(launch.id, f"failed: as with speculation: {worse}", {})
            return Compared(
                f"without speculation ({which}) the same prompts fail too ({worse}): speculation "
                "is not the broken side",
                False,
                f"look at the weights (`deploy doctor {self.context.want.id} --rehash`), then at "
                "the engine's version, quantisation and attention backend",
            )
        side = (
            f"without speculation ({which}) the same prompts are answered well: speculation is "
            "the broken side"
        )
        gates = Gates(bench)
        try:
            figures = gates.run()
        except GateFailed as error:
            self.record(launch.id, f"failed: {error.what}", bench.figures)
            return Compared(f"{side}; but that launch failed too: {error.what}", False, error.fix)
        self.record(launch.id, "good", figures)
        return Compared(
            f"{side}; launch {launch.id} has passed all gates and serves now",
            True,
            f"mend variant {self.bench.variant}, or take it out of the playbook's variants",
        )

    def _same_questions(self, bench: Bench) -> Fault | None:
        """What is wrong with the answers of the other server."""
        try:
            identity(bench)
            for one in self.failure.asked:
                answer = bench.answer(one.request)
                fault = one.judged(answer)
                if fault is not None and fault.kind == "thinking":
                    # Cut before its answer: no fault yet, as in the gates.
                    bench.settle(one, answer)
                elif fault is not None:
                    return fault
        except GateFault as found:
            return found.fault
        return None

    def restored(self) -> str:
        """What was stopped for this launch runs again: the last known-good one, else a server that
        this tool did not start; '' when there was none.
        """
        state, key, want = self.context.state, self.bench.api_key, self.context.want
        failed = {*self.note.marks, *self._since()}
        if last_good(state, failed) is None and (
            for_abort_only(state) or not kept(self.context.on(want.guest), want)
        ):
            return ""
        self.end_launch()
        words = self._launcher().restore(self.context, key, failed)
        if not words or state.launches[-1].verdict != "ready":
            return words
        problem = self._light(state.launches[-1])
        return f"{words}; {f'but: {problem}' if problem else 'it answers'}"

    def _launcher(self) -> LaunchStep:
        """A launch step that knows in which build the launch under test runs."""
        step = LaunchStep(self.now, self.sleep)
        launches = {one.id: one for one in self.context.state.launches}
        if tested := launches.get(self.bench.job.id):
            step.seen = SeenBefore(venv=tested.venv)
        return step

    def _since(self) -> set[str]:
        """Fingerprints of the launch that failed its gates, and of what was launched after it."""
        found = {self.fact.job.fingerprint} if self.fact.job is not None else set()
        ids = [one.id for one in self.context.state.launches]
        first = ids.index(self.bench.job.id) if self.bench.job.id in ids else len(ids) - 1
        return found | {one.fingerprint for one in self.context.state.launches[max(first, 0) :]}

    def _light(self, launch: Launch) -> str:
        want = as_launched(self.context.want, launch)
        fact = self.context.reprobe().get(ServerFact)
        job = fact.job if fact is not None else None
        # Without its session only the main process would count as the port's rightful owner.
        session = job.identity.session if job is not None and job.identity.id == launch.id else 0
        command = {
            "do": "light",
            "pid": launch.pid,
            "start": launch.start,
            "boot": launch.boot,
            "session": session,
            "model": want.playbook.model.served_name,
            "timeout_s": LIGHT_S,
        }
        answer = ask(
            self.context.on(want.guest),
            want,
            [command],
            timeout_s=3 * LIGHT_S + 30,
            api_key=self.bench.api_key,
        )[0]
        return light_problem(answer, want.playbook.model.served_name)

    def ended(self) -> str:
        """Nothing known to be good can take its place: what becomes of the failed launch."""
        last = (
            self.context.state.launches[-1].id if self.context.state.launches else self.bench.job.id
        )
        if self.bench.rules.on_failure == "stop":
            self.end_launch()
            return f"launch {last} was stopped (gates.on_failure: stop)"
        if self.failure.died:
            return ""
        fact = self.context.reprobe().get(ServerFact)
        if fact is not None and fact.asked and not (fact.job is not None and fact.job.alive):
            return "no server runs now"
        return f"launch {last} still runs, marked as failed; `deploy down` stops it"

    def end_launch(self) -> None:
        """Stops the newest launch and proves it: no process, port free, GPU memory back."""
        want, step = self.context.want, StopStep(self.now, self.sleep)
        facts = self.context.reprobe()
        plan = step.down_plan(want, facts)
        if plan.state is PlanState.NOTHING:
            return
        if plan.state is not PlanState.CHANGES:
            raise StepBlocked(plan.reason, where=f"{want.id} verify", fix=plan.fix)
        step.apply(self.context, facts, plan)
