"""What cannot be seen on the host: attempts, jobs in flight, launches (DESIGN section 5).

`.deploy/state/<host>.json` beside the inventory folder. Never a source of "was it done?".
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 1


class StateModel(BaseModel):
    """Unknown keys are errors: a newer file is not guessed at."""

    # A figure that is no number (0 tokens in 0 s) must not make the file unreadable.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Launch(StateModel):
    """One start of the server. `verdict`: starting|ready|good|failed:<why>|stopped."""

    id: str
    variant: str
    started: float
    """Unix seconds, controller clock."""
    boot: str = ""
    pid: int = 0
    start: int = 0
    """Kernel start time, clock ticks."""
    fingerprint: str = ""
    """sha256 over arguments, manifest and lock: what the verdict belongs to."""
    argv: list[str] = Field(default_factory=list)
    verdict: str = "starting"
    verified: float = 0.0
    figures: dict[str, float] = Field(default_factory=dict)


class ManifestFile(StateModel):
    """One file of the model: size in bytes; sha256 (LFS) or git blob id."""

    path: str
    size: int
    sha256: str = ""
    blob_id: str = ""


class Manifest(StateModel):
    """The pinned list of the model's files."""

    repo: str
    asked: str
    """The revision as written in the playbook."""
    commit: str
    files: list[ManifestFile]


class DeploymentState(StateModel):
    """Of one deployment."""

    manifest: Manifest | None = None
    launches: list[Launch] = Field(default_factory=list)
    known_good: str = ""
    """Id of the last launch that passed the gates."""
    attempts: dict[str, int] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)


class HostState(StateModel):
    """One state file."""

    schema_version: int = SCHEMA
    host: str
    deployments: dict[str, DeploymentState] = Field(default_factory=dict)
