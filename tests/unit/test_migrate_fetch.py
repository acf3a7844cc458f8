"""Which way the weights of a migration take, and that the key for the copy never outlives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import migrateworld as mw
import pytest
from migrateworld import DST, World

from deployer import migrate_fetch
from deployer.errors import StepFailed
from deployer.migrate_weights import Rate

NOTHING = Rate(0.0, "no route")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return mw.build(monkeypatch, tmp_path, {"router": {"url": "http://router"}})


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each relay; the first one is cut off."""
    calls: list[int] = []

    def relay(source: Any, destination: Any, files: list[Any], progress: Any) -> int:
        calls.append(len(files))
        if len(calls) == 1:
            raise StepFailed("cut off", where=DST)
        return 0

    monkeypatch.setattr(migrate_fetch, "relay", relay)
    return calls


def way(world: World) -> str:
    record = world.migration(DST)
    assert record is not None
    return record.weights_from


@pytest.mark.parametrize("back", [None, "peer", "hub"])
def test_the_relay_is_the_last_way_and_others_are_asked_again(
    world: World, relayed: list[int], back: str | None
) -> None:
    world.rates = {"peer": NOTHING, "hub": NOTHING}
    result = world.migrate()
    assert result.error is not None and "cut off" in str(result.error)
    assert way(world) == "relay" and not world.keys
    if back is not None:
        world.rates[back] = Rate(1e6)
    assert world.migrate().error is None
    assert way(world) == (back or "relay")
    assert len(relayed) == (1 if back else 2) and not world.keys


@pytest.mark.parametrize(("rate", "chosen"), [(Rate(1e6), "hub"), (NOTHING, "relay")])
def test_no_key_for_the_copy(
    world: World, relayed: list[int], monkeypatch: pytest.MonkeyPatch, rate: Rate, chosen: str
) -> None:
    def refuse(self: Any, manifest: object) -> Any:
        raise StepFailed("authorized_keys cannot be written: Read-only file system")

    monkeypatch.setattr(mw.Key, "open", refuse)
    relayed.append(0)
    world.rates = {"peer": Rate(9e9), "hub": rate}
    assert world.migrate().error is None
    assert way(world) == chosen
    assert len(relayed) == (2 if chosen == "relay" else 1)


def test_a_choice_holds_for_the_run_that_goes_on_and_the_other_stays_the_way_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.rates["hub"] = Rate(9e9)
    asked: list[list[str]] = []
    bring = migrate_fetch.Fetch.fetch

    def fetch(self: migrate_fetch.Fetch) -> None:
        real = self.bring

        def spied(want: Any) -> object:
            asked.append(list(want.playbook.download.methods))
            if len(asked) == 1:
                raise StepFailed("the disk is full", where=DST)
            return real(want)

        self.bring = spied
        bring(self)

    monkeypatch.setattr(migrate_fetch.Fetch, "fetch", fetch)
    assert world.migrate().error is not None
    world.rates["hub"] = NOTHING  # not asked again: it was chosen
    assert world.migrate().error is None
    assert asked[0] == asked[1] and asked[0][-1] == "peer" and way(world) == "hub"
