"""What one run of `deploy migrate` asks for, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer.errors import DeployError
from deployer.migrate_preflight import Obstacle
from deployer.state import Migration


@dataclass(frozen=True)
class MigrateOptions:
    """What the user asked for. `confirm` sees the plan's lines; False changes nothing."""

    base: Path
    environ: Mapping[str, str]
    dry_run: bool = False
    abort: bool = False
    retire: bool = False
    keep_source: bool = False
    confirm: Callable[[list[str]], bool] | None = None
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def deploy_dir(self) -> Path:
        """State, locks and run records."""
        return self.base.resolve().parent / ".deploy"


@dataclass
class MigrateResult:
    """How it ended. `done`: one line; `lines`: what a dry run shows."""

    error: DeployError | None = None
    done: str = ""
    lines: list[str] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    record: Migration | None = None
    declined: bool = False

    @property
    def exit_code(self) -> int:
        """0, or the error's code."""
        return self.error.exit_code if self.error is not None else 0

    def document(self) -> dict[str, Any]:
        """The JSON form, less the error."""
        return {
            "done": self.done,
            "plan": self.lines,
            "obstacles": [one.__dict__ for one in self.obstacles],
            "migration": self.record.model_dump() if self.record is not None else None,
        }
