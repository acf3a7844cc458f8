"""What is installed at engine.venv, what could build it, and which GPUs it must run on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployer.deployment import Deployment
from deployer.model import Probe, ProbeOutput
from deployer.shell import assignments
from deployer.steps.harmless import HARMLESS

OWN_UV = "/opt/deployer/uv/bin/uv"

# Reversed: of two on the path, the first is imported.
_VERSIONS = (
    "import importlib.metadata as m, json, sys; "
    "print(json.dumps({'python': '%d.%d' % sys.version_info[:2], "
    "'versions': {d.metadata['Name']: d.version for d in reversed(list(m.distributions()))}}))"
)

_LOOK = r"""
if [ -L "$LINK" ]; then printf 'kind=link\n'
elif [ -d "$LINK" ]; then printf 'kind=folder\n'
elif [ -e "$LINK" ]; then printf 'kind=other\n'
else printf 'kind=none\n'; fi
printf 'target=%s\n' "$(readlink -f "$LINK" 2>/dev/null)"
if [ -r "$LINK/deployer.json" ]; then
  printf 'record=%s\n' "$(tr -d '\n\r' <"$LINK/deployer.json")"
fi
if [ -x "$LINK/bin/python" ]; then
  printf 'inside=%s\n' "$("$LINK/bin/python" -I -c "$VERSIONS" 2>&1 | tr '\n\r' '  ')"
fi
for uv in "$(command -v uv 2>/dev/null)" "$OWN_UV"; do
  [ -n "$uv" ] && [ -x "$uv" ] || continue
  printf 'uv=%s %s\n' "$uv" "$("$uv" --version 2>/dev/null | tr '\n' ' ')"
done
if command -v python3 >/dev/null 2>&1; then
  printf 'python3=%s\n' "$(python3 -V 2>&1)"
  python3 -I -c 'import ensurepip, venv' 2>/dev/null && printf 'ensurepip=yes\n'
fi
command -v apt-get >/dev/null 2>&1 && printf 'apt=yes\n'
exit 0
"""

_COMPUTE = (
    HARMLESS
    + r"""
command -v nvidia-smi >/dev/null || { echo 'it is not installed'; exit 127; }
cannot_harm nvidia-smi --query-gpu=pci.bus_id,compute_cap --format=csv,noheader
status=$?
[ "$status" -ne 125 ] || echo 'it cannot be asked without side effects'
exit "$status"
"""
)


@dataclass(frozen=True)
class Uv:
    """An installed uv and its version numbers."""

    path: str
    version: tuple[int, ...]


@dataclass(frozen=True)
class VenvFact:
    """engine.venv as it is. `kind`: none|link|folder|other; `target`: the build it points to.

    `record`: the proof written when it was switched to; `versions`: what is installed, by
    normalised name; `broken`: what its python says instead of running.
    """

    kind: str = "none"
    target: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    broken: str = ""
    uvs: tuple[Uv, ...] = ()
    python3: str = ""
    ensurepip: bool = False
    apt: bool = False
    problem: str = ""


@dataclass(frozen=True)
class ComputeFact:
    """GPUs as the guest's driver shows them: PCI address (lower case) -> capability, `8.6`.

    `problem`: why there are none.
    """

    capabilities: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def venv_probes(want: Deployment) -> list[Probe]:
    """Two: the driver's answer may hang, and must not take the rest with it."""
    values = {
        "LINK": want.playbook.engine.venv,
        "VERSIONS": _VERSIONS,
        "OWN_UV": OWN_UV,
    }
    return [
        Probe("venv", want.guest, assignments(values) + _LOOK, parse_venv, timeout_s=20.0),
        Probe(
            "venv-compute",
            want.guest,
            _COMPUTE,
            parse_compute,
            timeout_s=15.0,
        ),
    ]


def normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_venv(output: ProbeOutput) -> VenvFact:
    """Any output gives a fact; a cut-off look is a `problem`."""
    rows: dict[str, str] = {}
    uvs: list[Uv] = []
    for line in output.text.splitlines():
        key, found, value = line.partition("=")
        if key == "uv" and found:
            path, _, said = value.partition(" ")
            if match := re.search(r"uv (\d+(?:\.\d+)*)", said):
                uvs.append(Uv(path, tuple(int(n) for n in match[1].split("."))))
        elif found:
            rows.setdefault(key, value)
    problem = ""
    if output.timed_out:
        problem = "looking at the environment timed out (a hung mount?)"
    elif "kind" not in rows:
        problem = f"the environment could not be examined (exit {output.exit})"
    inside = _object(rows.get("inside", ""))
    listed = inside.get("versions")
    return VenvFact(
        kind=rows.get("kind", "none"),
        target=rows.get("target", ""),
        record=_object(rows.get("record", "")),
        python=str(inside.get("python", "")),
        versions={normal(str(k)): str(v) for k, v in listed.items()}
        if isinstance(listed, dict)
        else {},
        broken="" if inside else rows.get("inside", "").strip()[-200:],
        uvs=tuple(uvs),
        python3=rows.get("python3", "").removeprefix("Python ").strip(),
        ensurepip=rows.get("ensurepip") == "yes",
        apt=rows.get("apt") == "yes",
        problem=problem,
    )


def parse_compute(output: ProbeOutput) -> ComputeFact:
    """csv rows of bus id and capability; anything else is the driver's own complaint."""
    if output.timed_out:
        return ComputeFact(problem="nvidia-smi hangs in the guest")
    found = {}
    for line in output.text.splitlines():
        match = re.fullmatch(r"\s*([0-9A-Fa-f:.]+)\s*,\s*(\d+\.\d+)\s*", line)
        if match:
            found[match[1].lower()[-12:]] = match[2]
    if output.exit == 0 and found:
        return ComputeFact(found)
    lines = (output.text.strip() or output.error_text.strip()).splitlines()
    said = lines[0][:200] if lines else f"exit {output.exit}"
    return ComputeFact(problem=f"nvidia-smi in the guest: {said}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
