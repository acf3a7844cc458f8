"""`deploy migrate` as words: what goes where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import deployer.catalog
import deployer.migrate
from deployer import inventory
from deployer.cli.help import MIGRATE
from deployer.cli.help import command as help_command
from deployer.cli.main import group
from deployer.cli.migrate import command
from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.events import Bus, StepPlanned
from deployer.migrate import MigrateOptions, MigrateResult
from deployer.migrate_gap import EVERY_S
from deployer.migrate_hook import HookWay
from deployer.migrate_journal import FOLDER, PHASES
from deployer.migrate_side import Side
from deployer.migrate_way import BACK_S
from deployer.state import Migration

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


def test_help_names_every_phase_option_key_and_variable() -> None:
    told = MIGRATE.split("A port forward is a rule")[0]
    firsts = {line.split()[0] for line in told.splitlines() if line and line[0] != " "}
    assert {"preflight", *PHASES} <= firsts
    options = {name for one in command.params for name in one.opts if name.startswith("--")}
    everywhere = {name for one in help_command.params for name in one.opts}
    assert options - everywhere <= firsts
    kinds = (inventory.RouterCutover, inventory.HookCutover, inventory.AddressCutover)
    for kind in (*kinds, inventory.Cutover):
        for key, field in kind.model_fields.items():
            assert key in told, key
            if isinstance(field.default, float | str):
                shown = f"{field.default:g}" if isinstance(field.default, float) else field.default
                assert f"{key} ({shown})" in told, key
    assert FOLDER in told
    assert f"every {EVERY_S * 1000:g} ms" in told
    assert f"{BACK_S:g} s after the move" in told


def test_help_names_every_variable_of_a_hook_and_no_other() -> None:
    catalog = deployer.catalog.Catalog.load(Path(INVENTORY))
    [old], [new] = catalog.select(["kpro5"]), catalog.select(["kpro6"])
    sides = [Side.__new__(Side), Side.__new__(Side)]
    sides[0].want, sides[1].want = old, new
    record = Migration(id="m1", source=old.id, destination=new.id, phase="cutover")
    way = HookWay(sides[0], sides[1], inventory.Cutover(), record)
    forward, back = way.variables("forward"), way.variables("back")
    assert set(re.findall(r"^DEPLOY_\w+", MIGRATE, re.MULTILINE)) == set(forward) == set(back)
    assert (forward["DEPLOY_FROM"], forward["DEPLOY_TO"]) == (old.id, new.id)
    assert (back["DEPLOY_FROM"], back["DEPLOY_TO_URL"]) == (new.id, forward["DEPLOY_FROM_URL"])
