"""What server is wanted, and whether one that runs is that. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from deployer.deployment import Deployment
from deployer.playbook import ArgValue, Variant
from deployer.sglang.argv import command, server_argv
from deployer.shell import quote, words
from deployer.state import Back, Manifest

DERIVED = "~"
"""Between a variant and what this tool changed in it; no variant of a playbook has it."""
FINGERPRINT_FILE = "fingerprint"
LAUNCH_FILE = "launch"
WEIGHTS_FILE = "weights"
"""Files of the job's folder: one line each; all but the first are JSON."""


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
class Rung:
    """One launch of the ladder: a variant of the playbook, or one with changes of our own.

    A derived one is named after what was changed: `mtp~mem-0.02`.
    """

    variant: str
    changes: tuple[tuple[str, ArgValue], ...] = ()

    @property
    def base(self) -> str:
        """The variant of the playbook that it comes from."""
        return self.variant.partition(DERIVED)[0]

    def deployment(self, want: Deployment) -> Deployment:
        """The deployment whose chosen variant is this rung."""
        if not self.changes:
            return dataclasses.replace(want, variant=self.variant)
        own = next((one.args for one in want.playbook.variants if one.name == self.base), {})
        derived = Variant.model_construct(name=self.variant, args={**own, **dict(self.changes)})
        variants = [*want.playbook.variants, derived]
        playbook = want.playbook.model_copy(update={"variants": variants})
        return dataclasses.replace(want, playbook=playbook, variant=self.variant)

    def fingerprint(self, want: Deployment, manifest: Manifest | None) -> str:
        """The fingerprint of a launch of it."""
        return fingerprint(self.deployment(want), manifest, self.variant)


@dataclass(frozen=True)
class LaunchNote:
    """What the job's folder tells of a launch: its rung, and the rungs that failed before it.

    `reasons` are the classes of their failures and `marks` their fingerprints, in the same order;
    a note of an older version of this tool lacks them. `changes`: arguments changed by this tool.
    `preferred`: they failed in an earlier run, and this one was started without trying them again.
    `back`: it repeats an earlier launch, and why.
    """

    variant: str = ""
    fell_from: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    changes: tuple[tuple[str, ArgValue], ...] = ()
    preferred: bool = False
    back: Back | None = None

    @property
    def rung(self) -> Rung:
        """The rung that runs."""
        return Rung(self.variant, self.changes)

    @property
    def instead_of(self) -> dict[str, str]:
        """The rungs that failed -> class of the failure, '' where it is not known."""
        reasons = (*self.reasons, *("" for _ in self.fell_from[len(self.reasons) :]))
        return dict(zip(self.fell_from, reasons, strict=False))

    @property
    def degraded(self) -> str:
        """What is less than asked for, in words; '' for the first choice."""
        return degraded(self.variant, self.instead_of)

    def line(self) -> str:
        """The content of the job's `launch` file."""
        return (
            json.dumps(
                {
                    "variant": self.variant,
                    "fell_from": list(self.fell_from),
                    "reasons": list(self.reasons),
                    "marks": list(self.marks),
                    "changes": dict(self.changes),
                    "preferred": self.preferred,
                    **({"back": self.back.model_dump()} if self.back is not None else {}),
                }
            )
            + "\n"
        )

    @classmethod
    def parse(cls, line: str) -> LaunchNote:
        """The note of a `launch` file; an unreadable one says nothing."""
        try:
            data = json.loads(line)
            return cls(
                str(data["variant"]),
                tuple(str(name) for name in data["fell_from"]),
                tuple(str(name) for name in data.get("reasons", [])),
                tuple(str(mark) for mark in data.get("marks", [])),
                tuple((str(k), v) for k, v in data.get("changes", {}).items()),
                data.get("preferred") is True,
                _back(data.get("back")),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()


def _back(data: object) -> Back | None:
    """One that this version cannot read says nothing; the rest of its note does."""
    try:
        return Back.model_validate(data) if data is not None else None
    except ValidationError:
        return None


def degraded(variant: str, instead_of: Mapping[str, str]) -> str:
    """`degraded: no-mtp runs in place of mtp (not-enough-memory)`; '' without a failure."""
    if not instead_of:
        return ""
    failed = ", ".join(f"{name} ({cls})" if cls else name for name, cls in instead_of.items())
    return f"degraded: {variant} runs in place of {failed}"


def is_wanted(
    want: Deployment, manifest: Manifest | None, recorded: str, launch: LaunchNote
) -> bool:
    """Is a launch with this fingerprint what is wanted now?

    A lower rung counts when the chosen one, as it is written now, failed before it in the same run
    of the ladder; or in an earlier run, unless the chosen one is asked for by name.
    """
    chosen = want.variant_name
    if launch.variant != chosen:
        if chosen not in launch.fell_from or (launch.preferred and want.variant is not None):
            return False
        tried = dict(zip(launch.fell_from, launch.marks, strict=False)).get(chosen)
        if tried and tried != fingerprint(want, manifest, chosen):
            return False
    return bool(recorded) and recorded == launch.rung.fingerprint(want, manifest)
