"""The verdict of the newest launch, and the quick proof that it still holds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from deployer.agents.text import agent_text
from deployer.deployment import Deployment
from deployer.model import Probe, ProbeOutput
from deployer.remote.jobs import ROOT
from deployer.shell import assignments
from deployer.steps.server_agent import PYTHON, parse_answers
from deployer.steps.server_wanted import server_job_name

LIGHT_S = 9.0
END = "DEPLOYER_AGENT_END"

LIGHT = r"""
id=
if cd -P "$root/$name/current" 2>/dev/null; then id=${PWD##*/}; fi
cd /
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
who="\"pid\":$pid,\"start\":$start,\"session\":$session,\"boot\":\"$boot\""
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


def serving_probe(want: Deployment) -> Probe:
    """One look: the verdict file and, when it is good, the agent's light mode."""
    # A node that follows owns its port and answers /health there; it names no model.
    served = "" if want.follows else want.playbook.model.served_name
    return Probe(
        "serving",
        want.guest,
        light_script(want),
        lambda output: parse_serving(output, served),
        timeout_s=2 * LIGHT_S + 5,
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
        + f'"$python" -I -S - "[{{$who,$rest}}]" <<\'{END}\'\n{agent_text(light=True)}{END}\n'
    )


def parse_serving(output: ProbeOutput, served_name: str) -> ServingFact:
    """The fact of the probe's output."""
    if output.timed_out:
        return ServingFact(problem="the server did not answer in time")
    values = dict(
        line.split("=", 1) for line in output.text.split("\n")[:2] if line.count("=") >= 1
    )
    answers = parse_answers(output.stdout)
    problem = light_problem(answers[0], served_name) if answers else _unasked(output)
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


def light_problem(answer: dict[str, Any], served_name: str) -> str:
    """What the agent's answer to `light` speaks against; '' when the server serves.

    Without a `served_name` it need only own its port.
    """
    if not answer.get("ok"):
        return str(answer.get("error", "the agent failed"))
    if not answer.get("alive"):
        return "its process is gone"
    if not answer.get("owned"):
        return "it does not own its port"
    if not served_name:
        return ""
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
