"""A container step that fails at any call of pct: all is as before, or the difference is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer.errors import DeployError
from deployer.model import PlanState
from tests.scripts.test_container_host import WHOLE, Creating, World
from tests.unit.hoststeps import tool

# The verbs that change something; the one that ROOT/fault names fails, before its effect or after.
COUNTED = """case $1 in
set | start | shutdown | stop | snapshot | delsnapshot | create | destroy | unlock)
  n=$(($(cat {root}/count) + 1))
  echo "$n" >{root}/count
  read -r at when <{root}/fault
  if [ "$n $when" = "$at before" ]; then echo "pct: Input/output error" >&2; exit 5; fi
  {pct} "$@"
  code=$?
  if [ "$n $when" = "$at after" ]; then echo "pct: Input/output error" >&2; exit 5; fi
  exit "$code" ;;
esac
exec {pct} "$@"
"""


def break_at(world: World, effect: int, when: str) -> None:
    """The so-many-th changing call fails."""
    (world.root / "bin/pct").rename(world.root / "plain-pct")
    tool(world.root / "bin", "pct", COUNTED.format(root=world.root, pct=world.root / "plain-pct"))
    (world.root / "count").write_text("0\n")
    (world.root / "fault").write_text(f"{effect} {when}\n")


def listing(world: World) -> dict[str, str]:
    """The configuration, and whether the container runs."""
    found = {path.name: path.read_text() for path in world.conf.parent.iterdir()}
    return {**found, "running": str(world.running)}


AFTER = pytest.param("after", marks=pytest.mark.long)


@pytest.mark.parametrize("when", ["before", AFTER])
@pytest.mark.parametrize(
    ("status", "version", "effects"),
    [
        # Snapshot, set, start.
        ("stopped", "6.1.10", 3),
        # Snapshot, set: hot-plug does the rest.
        ("running", "6.1.10", 2),
        # Snapshot, shutdown, start; raw lines are written without pct.
        ("running", "4.4.0", 3),
    ],
)
def test_at_every_call_the_container_is_as_before_or_it_is_right(
    tmp_path: Path, status: str, version: str, effects: int, when: str
) -> None:
    told = []
    for effect in range(1, effects + 2):
        text = "#note\n" + WHOLE.replace("arch", "cores: 2\narch")
        world = World(tmp_path / str(effect), text, status, version)
        before = listing(world)
        break_at(world, effect, when)
        try:
            after = world.apply()
        except DeployError as error:
            told.append(error.what)
            kept = "is right and stays" in error.what
            as_before = listing(world) == before
            assert as_before or kept or "is not as before: " in error.what, error.what
            if not as_before:
                _explained(world, error.what)
            assert (world.root / "count").read_text() != "0\n"
            (world.root / "fault").write_text("0 never\n")
            left = world.plan(world.look())
            # The same command finishes what is left to do.
            after = world.apply() if left.state is PlanState.CHANGES else left
        assert after.state is PlanState.NOTHING, (effect, after)
    print(*told, sep="\n")


def _explained(world: World, what: str) -> None:
    """Each line that is there and was not is told."""
    now = world.conf.read_text().partition("\n[")[0]
    for line in now.splitlines():
        key, _, value = line.partition(": ")
        if key.startswith("dev"):
            assert f"{key} is new ({value})" in what or f"{key} goes at" in what, what


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_creation_that_fails_at_any_call_says_what_is_there(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for effect in range(1, 5):
        with monkeypatch.context() as patch:
            world = Creating(tmp_path / str(effect), patch)
            break_at(world, effect, when)
            try:
                after = world.apply()
            except DeployError as error:
                if world.conf.exists():
                    assert "container 129 was created and stays" in error.what, error.what
                else:
                    assert "was created" not in error.what
                after = world.apply()
            assert after.state is PlanState.NOTHING, (effect, after)
