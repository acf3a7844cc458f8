"""The step `verify`: a verdict belongs to one launch; a quick proof says that it still holds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import ClassVar

from deployer.deployment import Deployment
from deployer.errors import GateFailed, StepFailed, Unreachable
from deployer.model import Change, Facts, Plan, Probe, Procedure
from deployer.playbook import ArgValue
from deployer.remote.jobs import ROOT
from deployer.state import DeploymentState
from deployer.steps import adopted
from deployer.steps.base import Step, StepContext
from deployer.steps.failed_want import forget_failure, remember_failure
from deployer.steps.known_good import remember
from deployer.steps.launch import api_key
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import LaunchNote, is_wanted, server_job_name
from deployer.steps.serving_fact import ServingFact, serving_probe

# $1 jobs, $2 launch, $3 what is written down of a server that it replaced, '' for nothing.
WRITE_VERDICT = """\
d=$1/$2
[ "$(readlink "$1/current")" = "$2" ] || [ "$(readlink "$1/current")" = "$d" ] || exit 3
cat >"$d/verdict.new" && mv "$d/verdict.new" "$d/verdict" || exit 1
[ -z "$3" ] || { rm -rf "$3"; rmdir "${3%/*}" 2>/dev/null; }
exit 0
"""


ASKED_FOR = "asked for"


class VerifyStep(Step):
    """Runs the gates unless this very launch has passed them and still answers."""

    name: ClassVar[str] = "verify"
    replaces: ClassVar[bool] = True
    """Whether a launch that failed may be replaced; `deploy verify` only asks."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now = now
        self.sleep = sleep

    def probes(self, want: Deployment) -> list[Probe]:
        """One look: the verdict file and, when it is good, the agent's light mode."""
        return [serving_probe(want)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing when the launch has passed and answers; unknown without a launch; else gates."""
        server, serving = facts.get(ServerFact), facts.get(ServingFact)
        if server is None or serving is None:
            return Plan.unknown("container", "unknown until the guest can be asked")
        job = server.job
        if (
            job is None
            or not job.alive
            or not server.serving
            or state.manifest is None
            or not is_wanted(want, state.manifest, job.fingerprint, job.launch)
        ):
            return Plan.unknown("launch")
        passed = serving.verdict == "good" and serving.launch == job.identity.id
        if passed and not serving.problem:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(serving.verified))
            return Plan.nothing(
                f"launch {serving.launch} passed its gates at {when}; alive, listening, answering"
            )
        if passed:
            reason = f"launch {serving.launch} passed its gates, but now: {serving.problem}"
        elif serving.verdict and serving.launch == job.identity.id:
            reason = f"the last verdict of launch {job.identity.id} was: {serving.verdict}"
        else:
            reason = f"launch {job.identity.id} has not passed its gates yet"
        return Plan.change(reason, _gates(want, job.identity.id, reason))

    def gates_plan(self, want: Deployment, facts: Facts) -> Plan:
        """For `deploy verify`: the gates of whatever launch runs, passed before or not."""
        server = facts.get(ServerFact)
        if server is None or server.job is None or not server.job.alive:
            return Plan.blocked(f"no launch of {want.id} runs", f"`deploy up {want.id}`")
        launch = server.job.identity.id
        loads = not server.serving and not server.job.verdict
        reason = f"asked for; launch {launch} still loads and is waited for" if loads else ASKED_FOR
        return Plan.change(reason, _gates(want, launch, reason))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the gates and writes the verdict into the launch's folder and into the state."""
        # The gates are loaded where they run: a quick proof has no need of them.
        from deployer.steps.gates_bench import Bench
        from deployer.steps.verify_fallback import Fallback
        from deployer.steps.verify_gates import Gates

        want = context.want
        server = facts.need(ServerFact)
        if server.job is None:
            raise StepFailed(
                "no launch runs", where=f"{want.id} verify", fix="`deploy up` launches one"
            )
        job, note = server.job.identity, server.job.launch
        bench = Bench(
            context,
            job,
            note.variant or want.variant_name,
            _arguments(want, note),
            server.model_type,
            api_key(context),
            self.now,
            self.sleep,
        )
        gates = Gates(bench)
        try:
            figures = gates.run()
        except GateFailed as error:
            self._record(
                context, job.id, f"failed: {error.what}"[:500], bench.figures, required=False
            )
            if gates.failure is None or not self.replaces:
                raise

            def record(launch_id: str, verdict: str, figures: dict[str, float]) -> None:
                self._record(context, launch_id, verdict[:500], figures, required=False)

            fallback = Fallback(
                context,
                server,
                bench,
                gates.failure,
                record,
                note,
                self.now,
                self.sleep,
            )
            remember_failure(context.state, want, error.what, error.exit_code, error.fix)
            context.save()
            raise fallback.error() from error
        self._record(context, job.id, "good", figures, required=True)

    def _record(
        self,
        context: StepContext,
        launch_id: str,
        verdict: str,
        figures: dict[str, float],
        *,
        required: bool,
    ) -> None:
        want, verified = context.want, time.time()
        launch = next((one for one in context.state.launches if one.id == launch_id), None)
        if launch is not None:
            launch.verdict, launch.verified = verdict, verified
            launch.figures.update(figures)
            figures = dict(launch.figures)
        if verdict == "good":
            context.state.known_good = launch_id
            if self.replaces:
                forget_failure(context.state, want)
            if launch is not None:
                remember(context.state, want, launch)
        context.save()
        line = json.dumps(
            {"verdict": verdict, "launch": launch_id, "verified": verified, "figures": figures}
        )
        try:
            answer = context.on(want.guest).run(
                WRITE_VERDICT,
                args=[f"{ROOT}/{server_job_name(want)}", launch_id, _needless(context, verdict)],
                stdin=f"{line}\n".encode(),
                timeout_s=30,
            )
            problem = answer.error_text.strip() or f"exit code {answer.exit}"
            written = answer.exit == 0
        except Unreachable as error:
            # A gate's failure is the one to tell; this one is told with it.
            if required:
                raise
            problem, written = error.what, False
        if not written and not required:
            context.note(
                f"the verdict could not be written on the target, which may still hold an older "
                f"one: {problem}; `deploy verify` judges again",
                "warning",
            )
        elif not written:
            raise StepFailed(
                f"the verdict of launch {launch_id} could not be written on the target",
                where=f"{want.id} verify",
                fix="see that /var/lib/deployer has space, then run `deploy verify`",
                evidence=(problem,),
            )


def _needless(context: StepContext, verdict: str) -> str:
    """The folder of what this launch replaced and may not be needed any more, '' while it may."""
    migration = context.state.migration
    may_go_back = migration is not None and not migration.outcome
    if verdict != "good" or may_go_back or adopted.for_abort_only(context.state):
        return ""
    return adopted.folder(context.want)


def _arguments(want: Deployment, note: LaunchNote) -> dict[str, ArgValue]:
    """Of the rung that the note names; of the chosen variant when it names none."""
    return (note.rung.deployment(want) if note.variant else want).serve_args()


def _gates(want: Deployment, launch_id: str, reason: str) -> Change:
    gates = want.playbook.gates
    return Change(
        f"run the gates on launch {launch_id}",
        reason,
        Procedure(
            want.guest,
            "identity, weights, known answers, long texts with and without thinking, counting, "
            f"a prompt of {gates.long_prompt_tokens} tokens, {gates.burst} requests "
            f"{gates.parallel} at a time, the context's edge, speed, speculation, and all alive "
            f"{gates.alive_after_s:g} s later",
        ),
        "none needed: gates ask; a launch that fails them may be replaced (gates.on_failure)",
    )
