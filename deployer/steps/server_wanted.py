"""What server is wanted, and whether one that runs is that. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.sglang.argv import command, server_argv
from deployer.shell import quote, words
from deployer.state import Manifest

FINGERPRINT_FILE = "fingerprint"
LAUNCH_FILE = "launch"
VERDICT_FILE = "verdict"
"""Files of the job's folder: one line each; `launch` and `verdict` are JSON."""


def server_job_name(want: Deployment) -> str:
    """The name of the job that is this deployment's server."""
    return f"server-{want.name}"


def fingerprint(want: Deployment, manifest: Manifest | None, variant: str) -> str:
    """sha256 over the command, its environment, the weights' commit, the lock and the variant.

    No secret is in it; a changed API key does not make another server.
    """
    parts = {
        "command": command(want, server_argv(want, variant)),
        "env": dict(sorted(want.playbook.serve.env.items())),
        "weights": f"{manifest.repo}@{manifest.commit}" if manifest else "",
        "lock": hashlib.sha256(want.lock_text.encode()).hexdigest(),
        "variant": variant,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def ladder(want: Deployment) -> list[str]:
    """The variants that may be launched, in order, from the chosen one on."""
    names = [variant.name for variant in want.playbook.variants]
    chosen = want.variant_name
    return names[names.index(chosen) :] if chosen in names else [chosen]


def server_script(want: Deployment, whole_command: list[str]) -> str:
    """The job's script: environment, then the server in place of the shell."""
    venv_bin = quote(f"{want.playbook.engine.venv}/bin")
    # SGLang compiles kernels at the first start: ninja lies in the venv, nvcc in /usr/local/cuda.
    lines = [f"PATH={venv_bin}:/usr/local/cuda/bin:$PATH", "export PATH"]
    env = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **want.playbook.serve.env}
    for name, value in env.items():
        lines.append(f"{name}={quote(value)}")
        lines.append(f"export {name}")
    lines.append(f"exec {words(whole_command)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class LaunchNote:
    """What the job's folder tells of a launch: its variant, and the rungs that failed before it."""

    variant: str = ""
    fell_from: tuple[str, ...] = ()

    def line(self) -> str:
        """The content of the job's `launch` file."""
        return json.dumps({"variant": self.variant, "fell_from": list(self.fell_from)}) + "\n"

    @classmethod
    def parse(cls, line: str) -> LaunchNote:
        """The note of a `launch` file; an unreadable one says nothing."""
        try:
            data = json.loads(line)
            return cls(str(data["variant"]), tuple(str(name) for name in data["fell_from"]))
        except (ValueError, KeyError, TypeError):
            return cls()


def is_wanted(
    want: Deployment, manifest: Manifest | None, recorded: str, launch: LaunchNote
) -> bool:
    """Is a launch with this fingerprint what is wanted now?

    A lower rung counts when the chosen one failed before it in the same run of the ladder.
    """
    chosen = want.variant_name
    if launch.variant != chosen and chosen not in launch.fell_from:
        return False
    return bool(recorded) and recorded == fingerprint(want, manifest, launch.variant)
