"""The step `verify`: a verdict belongs to one launch; a quick proof says that it still holds."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from deployer.agents.text import agent_text
from deployer.deployment import Deployment
from deployer.errors import GateFailed, StepFailed
from deployer.model import Change, Facts, Plan, Probe, ProbeOutput, Procedure
from deployer.remote.jobs import ROOT
from deployer.shell import assignments
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext
from deployer.steps.launch import api_key
from deployer.steps.server_agent import PYTHON, parse_answers
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import is_wanted, server_job_name
from deployer.steps.verify_gates import Gates

LIGHT_S = 9.0
END = "DEPLOYER_AGENT_END"

LIGHT = r"""
id=$(readlink "$root/$name/current" 2>/dev/null)
id=${id##*/}
job=$root/$name/$id
verdict=
[ -z "$id" ] || [ ! -f "$job/verdict" ] || IFS= read -r verdict <"$job/verdict"
printf 'job=%s\nverdict=%s\n' "$id" "$verdict"
case $verdict in *'"good"'*) ;; *) exit 0 ;; esac
field() { value=; IFS= read -r value <"$job/$1"; }
field pid; pid=$value
field start; start=$value
field session; session=$value
field boot; boot=$value
case $pid$start$session in '' | *[!0-9]*) exit 0 ;; esac
case $boot in '' | *[!0-9a-f-]*) exit 0 ;; esac
set -- "$venv"
who=$(printf '"pid":%s,"start":%s,"session":%s,"boot":"%s"' "$pid" "$start" "$session" "$boot")
"""

WRITE_VERDICT = """\
d=$1/$2
[ "$(readlink "$1/current")" = "$2" ] || [ "$(readlink "$1/current")" = "$d" ] || exit 3
cat >"$d/verdict.new" && mv "$d/verdict.new" "$d/verdict"
"""


@dataclass(frozen=True)
class ServingFact:
    """The verdict file of the newest launch, and the quick proof when the verdict is good.

    `problem` is '' when the server is alive, owns its port, names the model and answers.
    """

    launch: str = ""
    verdict: str = ""
    verified: float = 0.0
    """Unix seconds, controller clock."""
    figures: dict[str, float] = field(default_factory=dict)
    problem: str = "not asked"


class VerifyStep(Step):
    """Runs the gates unless this very launch has passed them and still answers."""

    name: ClassVar[str] = "verify"

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.now = now
        self.sleep = sleep

    def probes(self, want: Deployment) -> list[Probe]:
        """One look: the verdict file and, when it is good, the agent's light mode."""
        served = want.playbook.model.served_name
        return [
            Probe(
                "serving",
                want.guest,
                light_script(want),
                lambda output: parse_serving(output, served),
                timeout_s=2 * LIGHT_S + 5,
            )
        ]

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
        return Plan.change("asked for", _gates(want, server.job.identity.id, "asked for"))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the gates and writes the verdict into the launch's folder and into the state."""
        want = context.want
        server = facts.need(ServerFact)
        if server.job is None:
            raise StepFailed(
                "no launch runs", where=f"{want.id} verify", fix="`deploy up` launches one"
            )
        job = server.job.identity
        gates = Gates(context, job, api_key(context), self.now, self.sleep)
        try:
            figures = gates.run()
        except GateFailed as error:
            self._record(
                context, job.id, f"failed: {error.what}"[:500], gates.figures, required=False
            )
            raise
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
        context.save()
        line = json.dumps(
            {"verdict": verdict, "launch": launch_id, "verified": verified, "figures": figures}
        )
        answer = context.on(want.guest).run(
            WRITE_VERDICT,
            args=[f"{ROOT}/{server_job_name(want)}", launch_id],
            stdin=f"{line}\n".encode(),
            timeout_s=30,
        )
        if answer.exit != 0 and not required:
            context.note(
                f"the verdict could not be written on the target, which may still hold an older "
                f"one: {answer.error_text.strip()}; `deploy verify` judges again",
                "warning",
            )
        elif answer.exit != 0:
            raise StepFailed(
                f"the verdict of launch {launch_id} could not be written on the target",
                where=f"{want.id} verify",
                fix="see that /var/lib/deployer has space, then run `deploy verify`",
                evidence=(answer.error_text.strip(),),
            )


def light_script(want: Deployment) -> str:
    """The probe's script: the agent's text is a here-document, the command its argument."""
    command = json.dumps(
        {
            "do": "light",
            "port": want.port,
            "model": want.playbook.model.served_name,
            "timeout_s": LIGHT_S,
        }
    )
    values = {
        "root": ROOT,
        "name": server_job_name(want),
        "venv": want.playbook.engine.venv,
        "rest": command[1:-1],
    }
    return (
        assignments(values)
        + LIGHT
        + PYTHON
        + f'"$python" -I - "[{{$who,$rest}}]" <<\'{END}\'\n{agent_text(light=True)}{END}\n'
    )


def parse_serving(output: ProbeOutput, served_name: str) -> ServingFact:
    """The fact of the probe's output."""
    if output.timed_out:
        return ServingFact(problem="the server did not answer in time")
    values = dict(
        line.split("=", 1) for line in output.text.split("\n")[:2] if line.count("=") >= 1
    )
    answers = parse_answers(output.stdout)
    problem = _problem(answers[0], served_name) if answers else _unasked(output)
    return dataclasses.replace(_verdict(values.get("verdict", "")), problem=problem)


def _verdict(line: str) -> ServingFact:
    """What the verdict file says; nothing when it is not whole."""
    try:
        record = json.loads(line)
        return ServingFact(
            launch=str(record["launch"]),
            verdict=str(record["verdict"]),
            verified=float(record["verified"]),
            figures={str(name): float(value) for name, value in record["figures"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServingFact()


def _unasked(output: ProbeOutput) -> str:
    told = output.error_text.strip().split("\n")[-1]
    return told or "not asked"


def _problem(answer: dict[str, Any], served_name: str) -> str:
    if not answer.get("ok"):
        return str(answer.get("error", "the agent failed"))
    if not answer.get("alive"):
        return "its process is gone"
    if not answer.get("owned"):
        return "it does not own its port"
    models = answer.get("models") or {}
    if served_name not in models.get("ids", []):
        shown = models.get("error") or models.get("ids") or f"status {models.get('status')}"
        return f"/v1/models: {shown}"
    reply = answer.get("completion") or {}
    if reply.get("status") != 200:
        return f"a short request failed: {reply.get('error') or reply.get('status')}"
    if not (reply.get("content") or reply.get("reasoning")):
        return "a short request got an empty answer"
    return ""


def _gates(want: Deployment, launch_id: str, reason: str) -> Change:
    gates = want.playbook.gates
    return Change(
        f"run the gates on launch {launch_id}",
        reason,
        Procedure(
            want.guest,
            f"known answers, a text of up to {gates.max_tokens} tokens, counting, "
            f"{gates.burst} requests {gates.parallel} at a time, a long prompt, speculation, "
            f"and alive {gates.alive_after_s:g} s later",
        ),
        "none needed: gates only ask",
    )
