"""`deploy migrate` as words: what goes where."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import deployer.migrate
from deployer.cli.main import group
from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.events import Bus, StepPlanned
from deployer.migrate import MigrateOptions, MigrateResult

INVENTORY = str(Path(__file__).parents[2] / "inventory")


def test_the_plan_is_the_result_of_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    error = None

    def migrate(old: Deployment, new: Deployment, how: MigrateOptions, bus: Bus) -> MigrateResult:
        bus.emit(StepPlanned("kpro6", new.id, "gpus", "nothing", "all are bound"))
        return MigrateResult(lines=["settle: 60 s"] if error is None else [], error=error)

    monkeypatch.setattr(deployer.migrate, "migrate", migrate)
    words = ["-i", INVENTORY, "migrate", "kpro5", "kpro6", "--dry-run"]
    done = CliRunner().invoke(group, words)
    assert done.stdout.splitlines() == [
        "kpro6/qwen     = gpus       nothing to do: all are bound",
        "  then settle: 60 s",
    ]
    assert done.stderr == ""
    error = StepBlocked("no room", where="kpro6/qwen shards", fix="free 5 GB")
    done = CliRunner().invoke(group, words)
    assert done.stdout.splitlines() == ["kpro6/qwen     = gpus       nothing to do: all are bound"]
    assert done.stderr.splitlines() == ["deploy: kpro6/qwen shards: no room", "  -> free 5 GB"]
