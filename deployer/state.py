"""What cannot be seen on the host: attempts, jobs in flight, launches (DESIGN section 5).

`.deploy/state/<host>.json` beside the inventory folder. Never a source of "was it done?".
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SCHEMA = 2
"""Raised with every release that adds a key or changes what one means: an older deployer refuses
unknown keys, and by this number it can say why. Keys that came with it have defaults.

1: launches, known_good, manifest, attempts.
2: launches tell what was changed in them and why; validated sets; failed wishes; the model's
config; migrations; recipes of launches; rollbacks.
"""


class StateModel(BaseModel):
    """Unknown keys are errors: a newer file is not guessed at."""

    # A figure that is no number (0 tokens in 0 s) must not make the file unreadable.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


Value = bool | int | float | str
"""Of one server argument."""


class Back(StateModel):
    """Why a launch repeats an earlier one."""

    to: str
    """Id of the launch that it repeats."""
    left: str = ""
    """Id of the launch that served before, or failed; '' when there was none."""
    asked: bool = False
    """By `deploy rollback`; else by itself, after what was wanted had failed."""
    by: str = ""
    """user@controller."""


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
    env: dict[str, str] | None = None
    """serve.env of that time; None in a record of an older version."""
    venv: str = ""
    """The build that engine.venv pointed to; '' when that was not seen."""
    recipe: str = ""
    """Key of what it was made from (deployer.recipe); '' in a record of an older version."""
    verdict: str = "starting"
    verified: float = 0.0
    figures: dict[str, float] = Field(default_factory=dict)
    changes: dict[str, Value] = Field(default_factory=dict)
    """Arguments that this tool changed by itself after a failure, flag -> value."""
    instead_of: dict[str, str] = Field(default_factory=dict)
    """Rungs of the ladder that failed before it -> class of the failure: it is degraded."""
    back: Back | None = None


class ValidatedSet(StateModel):
    """What passed the gates for one model x engine x GPUs x asked arguments. Newest last.

    It is looked up by `model`, `engine`, `lock`, `gpus` and `asked`: with any of them changed it
    says nothing.
    """

    model: str
    """`repo@commit`."""
    engine: str
    lock: str
    """sha256 of the engine's lock."""
    gpus: list[str]
    """PCI addresses."""
    asked: str
    """sha256 over serve.args, serve.env and the variants of the playbook."""
    variant: str
    argv: list[str]
    changes: dict[str, Value] = Field(default_factory=dict)
    instead_of: dict[str, str] = Field(default_factory=dict)
    figures: dict[str, float] = Field(default_factory=dict)
    launch: str
    proven: float
    """Unix seconds, controller clock."""


class FailedWant(StateModel):
    """A wish that was tried and failed; `key` is steps.failed_want.want_key of it."""

    key: str
    variant: str
    when: float
    """Unix seconds, controller clock."""
    cause: str
    exit_code: int
    """What `up` ended with: 1 the launch failed, 5 a gate."""
    fix: str = ""
    """What was said to help."""


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
    config: str = ""
    """The model's config.json, shortened (hub_manifest.short_config); '' when it has none."""


class Migration(StateModel):
    """The journal of a migration: the same record in the state of both deployments, and a copy on
    both hosts. `deployer.migrate_journal` says what the phases are; the higher `seq` is the newer.
    """

    id: str
    source: str
    """HOST/NAME."""
    destination: str
    phase: str
    seq: int = 0
    back: bool = False
    """It is being taken back (`--abort`)."""
    released: list[str] = Field(default_factory=list)
    """Of one that is being taken back: the sides (HOST/NAME) where that is done, while the other
    could not be reached. They may be part of another migration.
    """
    outcome: str = ""
    """'' while it is under way; done|aborted."""
    started: float = 0.0
    """Unix seconds, controller clock; so is `entered`, of the phase."""
    entered: float = 0.0
    controller: str = ""
    """user@machine that wrote it."""
    source_variant: str = ""
    """What the source served; `--abort` starts it again."""
    source_launch: str = ""
    """Id of that launch."""
    served_before: bool = False
    """The destination had the wanted launch already; `--abort` leaves it."""
    cut: bool = False
    """The cut-over was begun: traffic may go to the destination."""
    way: str = ""
    """How: router|hook|address|none. The inventory may say something else by now."""
    route: str = ""
    """Where, in the inventory's words of that time: the router's URL, the address."""
    lending: bool = False
    """A key for the copy may be on the source."""
    weights_from: str = ""
    """peer|hub|relay, '' before it was measured."""
    worker: str = ""
    """Id of the destination at the router."""
    routed_before: bool = False
    """The router had the destination already; `--abort` leaves it there."""
    net: str = ""
    """The network entry that moves, as the source's container had it."""
    adopted: str = ""
    """The command of what had the destination's port; `--abort` starts it again."""
    retire: bool = False
    keep_source: bool = False
    figures: dict[str, float] = Field(default_factory=dict)
    """gap_s, peer_bytes_per_s, hub_bytes_per_s, seconds of phases."""


class RolledBack(StateModel):
    """The last rollback: what `up` must not undo by itself."""

    to: str
    """Id of the launch that was gone back to; a new launch with its recipe serves."""
    mark: str
    """Fingerprint of what it launches."""
    left: str
    """Id of the launch that served before, '' when none did; it serves again when this fails."""
    wish: str
    """steps.rolled_back.wish_key of the playbook at that time."""
    commits: list[str]
    """Of the weights, gone back to and left."""
    when: float
    """Unix seconds, controller clock."""
    by: str = ""
    """user@controller; '' in a record of an older version."""
    outcome: str = ""
    """'' while it is under way; done|failed."""
    manifest: Manifest | None = None
    """The pinned list of before."""


class DeploymentState(StateModel):
    """Of one deployment."""

    manifest: Manifest | None = None
    launches: list[Launch] = Field(default_factory=list)
    known_good: str = ""
    """Id of the last launch that passed the gates."""
    validated: list[ValidatedSet] = Field(default_factory=list)
    failed: list[FailedWant] = Field(default_factory=list)
    """Newest last."""
    attempts: dict[str, int] = Field(default_factory=dict)
    migration: Migration | None = None
    """The last one that this deployment was part of."""
    rollback: RolledBack | None = None
    """None once `up` has launched something else."""
    extra: dict[str, Any] = Field(default_factory=dict)

    def needed(self) -> set[str]:
        """Ids of the launches that must not be forgotten: the last good one, which a failed launch
        falls back to, and those of the last rollback.
        """
        record = self.rollback
        return {self.known_good, *((record.to, record.left) if record is not None else ())} - {""}


class HostState(StateModel):
    """One state file."""

    schema_version: int = SCHEMA
    host: str
    deployments: dict[str, DeploymentState] = Field(default_factory=dict)
