"""`deploy migrate` as words: what goes where."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import deployer.catalog
import deployer.migrate
from deployer import inventory
from deployer.catalog import Catalog
from deployer.cli.help import MIGRATE
from deployer.cli.help import command as help_command
from deployer.cli.main import group
from deployer.cli.migrate import command, pair
from deployer.deployment import Deployment
from deployer.errors import DeployError, StepBlocked, UsageError
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


def named(tmp_path: Path, kpro6: str, kpro5: str) -> Catalog:
    """Two hosts with deployments of these names (spaces between)."""
    folder = tmp_path / "inventory"
    folder.mkdir()
    shutil.copytree(Path(INVENTORY).parent / "playbooks", tmp_path / "playbooks")
    for number, (host, names) in enumerate({"kpro6": kpro6, "kpro5": kpro5}.items()):
        entries = {
            name: {"container": 130 + at, "playbook": "qwen3.6-27b", "port": 30000 + at}
            for at, name in enumerate(names.split())
        }
        entry = {
            "ssh": {"address": f"192.0.2.{number + 1}"},
            "gpus": [{"address": "0000:21:00.0"}, {"address": "0000:41:00.0"}],
            "containers": {one["container"]: {} for one in entries.values()},
            "deployments": entries,
        }
        (folder / f"{host}.yaml").write_text(yaml.safe_dump({"hosts": {host: entry}}))
    return Catalog.load(folder)


@pytest.mark.parametrize(
    ("names", "words", "ends"),
    [
        (("a", "a"), ("kpro6", "kpro5"), ("kpro6/a", "kpro5/a")),
        (("a", "b"), ("kpro6", "kpro5"), ("kpro6/a", "kpro5/b")),
        (("a b", "b a"), ("kpro6/b", "kpro5"), ("kpro6/b", "kpro5/b")),
        (("a", "a b"), ("kpro6", "kpro5"), ("kpro6/a", "kpro5/a")),
        (("a b", "a b"), ("kpro6/a", "kpro5/b"), ("kpro6/a", "kpro5/b")),
        (("a b", "a b"), ("kpro6/a", "kpro6/b"), ("kpro6/a", "kpro6/b")),
    ],
)
def test_which_two_deployments_are_meant(
    tmp_path: Path, names: tuple[str, str], words: tuple[str, str], ends: tuple[str, str]
) -> None:
    old, new = pair(named(tmp_path, *names), *words)
    assert (old.id, new.id) == ends


@pytest.mark.parametrize(
    ("names", "words", "said"),
    [
        (("a b", "a b"), ("kpro6", "kpro5"), "kpro6 has 2 deployments"),
        (("a", "b c"), ("kpro6", "kpro5"), "name one of them: kpro5/b, kpro5/c"),
        (("a", "a"), ("kpro6/x", "kpro5"), "x"),
        (("a", "a"), ("kpro6", "kpro7"), "kpro7"),
    ],
)
def test_what_is_not_clear_is_asked_for(
    tmp_path: Path, names: tuple[str, str], words: tuple[str, str], said: str
) -> None:
    with pytest.raises(DeployError) as caught:
        pair(named(tmp_path, *names), *words)
    assert caught.value.exit_code == 2 and said in f"{caught.value} {caught.value.fix}"


def test_one_host_is_no_pair() -> None:
    for words in (["kpro5", "kpro5"], ["kpro5/qwen", "kpro5", "--abort"]):
        ended = CliRunner().invoke(group, ["-i", INVENTORY, "migrate", *words, "--dry-run"])
        assert isinstance(ended.exception, UsageError), ended.output
        assert "on one host" in str(ended.exception) and "deploy up" in ended.exception.fix
