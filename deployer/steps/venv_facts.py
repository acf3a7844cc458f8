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

# As importlib.metadata finds them, of two on the path the one that is imported; but of each file
# only the head is read: its parser takes a millisecond a package.
_VERSIONS = r"""
import json, os, sys

def head(place):
    for name in ("METADATA", "PKG-INFO", ""):
        said = {}
        try:
            with open(os.path.join(place, name) if name else place, errors="replace") as file:
                for line in file:
                    if not line.strip():
                        break
                    key, found, value = line.partition(":")
                    if found and key.lower() in ("name", "version"):
                        said.setdefault(key.lower(), value.strip())
        except OSError:
            continue
        if said:
            return said
    return {}

versions = {}
for root in sys.path:
    try:
        names = os.listdir(root or ".")
    except OSError:
        continue
    for name in names:
        if name.lower().endswith((".dist-info", ".egg-info")):
            said = head(os.path.join(root, name))
            if said.get("name"):
                versions.setdefault(said["name"], said.get("version", ""))
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "versions": versions}))
"""

# Looked for as files: importing them takes longer than starting Python.
_SYSTEM = (
    "import os, sys; print('python3=Python', sys.version.split()[0]); "
    "lib = os.path.dirname(os.__file__); "
    "all(os.path.exists(os.path.join(lib, one, '__init__.py')) for one in ('ensurepip', 'venv')) "
    "and print('ensurepip=yes')"
)

_LOOK = r"""
flat() {
  # The words of $1 as one line.
  set -f
  set -- $1
  set +f
  echo "$*"
}
if [ -L "$LINK" ]; then printf 'kind=link\n'
elif [ -d "$LINK" ]; then printf 'kind=folder\n'
elif [ -e "$LINK" ]; then printf 'kind=other\n'
else printf 'kind=none\n'; fi
if cd -P "$LINK" 2>/dev/null; then target=$PWD; else target=$(readlink -f "$LINK" 2>/dev/null); fi
printf 'target=%s\n' "$target"
cd /
if [ -r "$LINK/deployer.json" ]; then
  printf 'record='
  while IFS= read -r line || [ -n "$line" ]; do
    printf '%s' "${line%[[:cntrl:]]}"
  done <"$LINK/deployer.json"
  echo
fi
if [ -x "$LINK/bin/python" ]; then
  inside=$("$LINK/bin/python" -I -c "$VERSIONS" 2>&1)
  printf 'inside='
  flat "$inside"
fi
for uv in "$(command -v uv 2>/dev/null)" "$OWN_UV"; do
  [ -n "$uv" ] && [ -x "$uv" ] || continue
  said=$("$uv" --version 2>/dev/null)
  printf 'uv=%s ' "$uv"
  flat "$said"
done
if command -v python3 >/dev/null 2>&1; then
  python3 -I -S -c "$SYSTEM" 2>/dev/null || printf 'python3=%s\n' "$(python3 -V 2>&1)"
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
        "SYSTEM": _SYSTEM,
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
