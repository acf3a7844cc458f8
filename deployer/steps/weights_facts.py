"""What the weights on the target weigh, by their safetensors headers: one bounded read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from deployer.deployment import Deployment
from deployer.model import Probe, ProbeOutput
from deployer.remote.jobs import ROOT
from deployer.sglang.weights import Tensors
from deployer.shell import assignments
from deployer.steps.server_wanted import server_job_name

SCRIPT = """\
[ -f "$model/config.json" ] || exit 0
for python in "$venv/bin/python" "$(command -v python3 2>/dev/null)"; do
  [ -n "$python" ] && [ -x "$python" ] || continue
  exec "$python" -I -S -c "$agent" "$model" "$known" "$root/$name"/*/weights
done
"""


@dataclass(frozen=True)
class WeightsFact:
    """`tensors` is None when they are not there or could not be read: `problem`."""

    tensors: Tensors | None = None
    problem: str = ""
    line: str = ""
    """The answer as text: handed back, it saves reading the headers of unchanged files again."""
    read: int = 0
    """Headers that were read for it."""


def weights_probe(want: Deployment, known: str = "") -> Probe:
    """The probe; its fact is WeightsFact. A folder that hangs takes nothing else with it.

    `known` is the `line` of an earlier look. Each launch keeps one too, in WEIGHTS_FILE.
    """
    agent = resources.files("deployer.agents").joinpath("headers.py").read_text("utf-8")
    values = {
        "model": want.playbook.model.path,
        "venv": want.playbook.engine.venv,
        "agent": agent,
        "known": known,
        "root": ROOT,
        "name": server_job_name(want),
    }
    return Probe("weights", want.guest, assignments(values) + SCRIPT, parse_weights, 20.0)


def parse_weights(output: ProbeOutput) -> WeightsFact:
    """Any output gives a fact."""
    if output.timed_out:
        return WeightsFact(problem="reading the headers of the weights timed out")
    lines = output.text.strip().splitlines()
    if not lines:
        return WeightsFact()
    try:
        told = json.loads(lines[-1])
        if "problem" in told:
            return WeightsFact(problem=str(told["problem"])[:300])
        groups = {
            str(group): {str(kind): int(size) for kind, size in kinds.items()}
            for group, kinds in told["groups"].items()
        }
        read = int(told.get("read", 0))
    except (ValueError, TypeError, KeyError, AttributeError):
        return WeightsFact(problem="the headers of the weights were not understood")
    if not groups:
        return WeightsFact()
    return WeightsFact(Tensors(groups), line=lines[-1], read=read)
