"""`deploy migrate` as a procedure: its story, and its end at every effect, both ways."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import migrateworld as mw
import pytest
from migrateworld import DST, SRC, Killed, World, url

from deployer.errors import UsageError
from deployer.events import Note
from deployer.hub_errors import HubError
from deployer.migrate_gap import Gap
from deployer.migrate_hook import HookWay
from deployer.migrate_way import Direction
from deployer.migrate_weights import Rate
from deployer.state import Migration
from deployer.steps.base import StepContext

ROUTER: dict[str, Any] = {"router": {"url": "http://router"}}
HOOK: dict[str, Any] = {"hook": {"command": ["/bin/sh"]}}
Make = Callable[..., World]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    # State files are renamed by the thousand: in memory that takes half of the time.
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="deployer-migrate-", dir=base) as inside:
        count = [0]

        def made(cutover: dict[str, Any] = ROUTER) -> World:
            count[0] += 1
            folder = Path(inside) / str(count[0])
            folder.mkdir()
            return mw.build(monkeypatch, folder, cutover)

        yield made


def assert_moved(world: World, *, retired: bool = False) -> None:
    source, destination = world.machines[SRC], world.machines[DST]
    assert destination.serving and destination.good and not source.serving
    assert destination.launches == 1, "one launch, however often it was killed"
    assert not world.keys
    assert source.container is not retired
    if "router" in world.rules:
        assert world.workers == {url(DST): True}
    else:
        assert world.hook_at == DST
    for host in (SRC, DST):
        record = world.migration(host)
        assert record is not None and record.outcome == "done"
        assert b'"outcome": "done"' in next(iter(world.machines[host].files.values()))


def assert_back(world: World) -> None:
    source, destination = world.machines[SRC], world.machines[DST]
    assert source.serving and source.good and not destination.serving
    assert not world.keys
    assert world.workers == {url(SRC): True}
    assert world.hook_at == SRC
    for host in (SRC, DST):
        record = world.migration(host)
        assert record is None or record.outcome == "aborted"
        assert not world.machines[host].files


def test_the_story(make: Make) -> None:
    world = make()
    result = world.migrate()
    assert result.error is None, result.error
    assert "kpro5/qwen serves tiny at http://kpro5:30000/v1; kpro6/qwen is stopped" in result.done
    assert_moved(world)
    told = [one for one in world.effects if not one.endswith("mark")]
    assert told == [
        *(f"{DST}:{step}" for step in ("driver", "gpus", "container", "venv")),
        *(f"{DST}:key", f"{SRC}:key", f"{DST}:shards", f"{SRC}:no key", f"{DST}:no key"),
        *(f"{DST}:launch", f"{DST}:verify"),
        *(f"router:add {url(DST)}", f"router:remove {url(SRC)}", f"{SRC}:down"),
    ]
    before = len(world.effects)
    again = world.migrate()
    assert again.error is None and "was finished at" in again.done
    assert len(world.effects) == before


def count_effects(make: Make, cutover: dict[str, Any], **words: Any) -> int:
    world = make(cutover)
    assert world.migrate(**words).error is None
    return len(world.effects)


@pytest.mark.parametrize(
    ("cutover", "when"),
    [
        pytest.param(ROUTER, "before", id="router-before"),
        pytest.param(ROUTER, "after", id="router-after"),
        pytest.param(HOOK, "after", id="hook"),
    ],
)
def test_killed_at_every_effect_then_the_same_command(
    make: Make, cutover: dict[str, Any], when: str
) -> None:
    total = count_effects(make, cutover, retire=True)
    assert total > 20
    for number in range(total):
        world = make(cutover)
        world.stop_at = (number, when)
        with pytest.raises(Killed):
            world.migrate(retire=True)
        world.stop_at = None
        result = world.migrate(retire=True)
        assert result.error is None, (number, world.effects, result.error)
        assert_moved(world, retired=True)


@pytest.mark.parametrize(
    ("cutover", "when"),
    [
        pytest.param(ROUTER, "before", id="router-before"),
        pytest.param(ROUTER, "after", id="router-after"),
        pytest.param(HOOK, "after", id="hook"),
    ],
)
def test_killed_at_every_effect_then_aborted(
    make: Make, cutover: dict[str, Any], when: str
) -> None:
    total = count_effects(make, cutover, retire=True)
    for number in range(total):
        world = make(cutover)
        world.stop_at = (number, when)
        with pytest.raises(Killed):
            world.migrate(retire=True)
        world.stop_at = None
        try:
            result = world.migrate(abort=True)
        except UsageError:  # killed before the journal began: nothing of it is anywhere
            result = None
        else:
            assert result.error is None, (number, world.effects, result.error)
        assert_back(world) if result else None
        assert world.machines[SRC].serving, number
        assert not world.machines[DST].serving


def test_an_abort_killed_at_every_effect_is_finished_by_the_same(make: Make) -> None:
    def aborting(stop: int | None) -> World:
        world = make()
        assert world.migrate().error is None
        first = len(world.effects)
        if stop is not None:
            world.stop_at = (first + stop, "after")
            with pytest.raises(Killed):
                world.migrate(abort=True)
            world.stop_at = None
            if world.migration(SRC) and not world.migration(SRC).outcome:  # type: ignore[union-attr]
                forward = world.migrate()
                assert forward.error is not None and "being taken back" in forward.error.what
        else:
            assert world.migrate(abort=True).error is None
            world.stop_at = (len(world.effects) - first, "")
        return world

    whole = aborting(None)
    assert_back(whole)
    total = whole.stop_at[0] if whole.stop_at else 0
    assert total >= 6
    for number in range(total - 1):
        world = aborting(number)
        result = world.migrate(abort=True)
        assert result.error is None, (number, world.effects, result.error)
        assert_back(world)


@pytest.mark.parametrize("host", [SRC, DST])
@pytest.mark.parametrize("abort", [False, True], ids=["resume", "abort"])
def test_the_network_cut_after_every_effect(make: Make, host: str, abort: bool) -> None:
    total = count_effects(make, ROUTER)
    for number in range(total - 1):
        world = make()
        world.cut_at = (number, host)
        result = world.migrate()
        assert result.error is None or result.exit_code == 3, (number, world.effects, result.error)
        world.cut_at = None
        if abort:
            # While it is dark nothing is claimed; what can be done already is done.
            assert world.migrate(abort=True).exit_code in (0, 1, 3)
        world.dark.clear()
        result = world.migrate(abort=abort)
        assert result.error is None or (abort and "no migration to abort" in str(result.error)), (
            number,
            world.effects,
            result.error,
        )
        assert_back(world) if abort else assert_moved(world)


def test_traffic_goes_back_though_the_destination_is_dark(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.dark.add(DST)
    result = world.migrate(abort=True)
    assert result.exit_code == 3
    assert world.workers == {url(SRC): True} and world.machines[SRC].serving
    world.dark.clear()
    assert world.migrate(abort=True).error is None
    assert_back(world)


def test_gates_that_fail_leave_the_source_alone(make: Make) -> None:
    world = make()
    world.gates_fail = True
    result = world.migrate()
    assert result.exit_code == 5
    touched = [one for one in world.effects if one.startswith(f"{SRC}:")]
    assert set(touched) <= {f"{SRC}:mark", f"{SRC}:key", f"{SRC}:no key"}
    assert world.workers == {url(SRC): True} and not world.keys
    assert any(isinstance(one, Note) and "was not touched" in one.text for one in world.events)
    world.gates_fail = False
    assert world.migrate().error is None
    assert_moved(world)


def test_a_destination_that_fails_while_it_settles_loses_the_traffic_again(make: Make) -> None:
    world = make()
    world.settle_fails = True
    result = world.migrate()
    assert result.exit_code == 5 and "the traffic is back at kpro6/qwen" in str(result.error)
    assert world.workers == {url(SRC): True} and world.machines[SRC].serving
    world.settle_fails = False
    assert world.migrate().error is None
    assert_moved(world)


def settling(
    world: World, *, waits: int = 1000, dies: bool = False, only_guest: bool = False
) -> None:
    """The destination goes dark while it settles, for so many waits of the controller."""
    clock, slept = world.sleep, [0]
    out = world.mute if only_guest else world.dark

    def sleep(seconds: float) -> None:
        slept[0] += 1
        if slept[0] == 1:
            out.add(DST)
            world.machines[DST].serving = not dies
        elif slept[0] > waits:
            out.discard(DST)
        clock(seconds)

    world.sleep = sleep  # type: ignore[method-assign]


@pytest.mark.parametrize("only_guest", [False, True])
def test_a_destination_that_is_dark_for_a_moment_while_it_settles(
    make: Make, only_guest: bool
) -> None:
    world = make()
    settling(world, waits=3, only_guest=only_guest)
    result = world.migrate()
    assert result.error is None, result.error
    assert world.clock >= 3
    assert_moved(world)


def test_a_destination_that_stays_dark_keeps_the_traffic_while_the_router_finds_it_well(
    make: Make,
) -> None:
    world = make()
    settling(world)
    result = world.migrate()
    assert result.exit_code == 3 and "nobody finds it bad" in str(result.error)
    assert world.workers == {url(DST): True} and world.machines[SRC].serving
    world.dark.clear()
    assert world.migrate().error is None
    assert_moved(world)


def test_a_dark_destination_that_the_router_finds_dead_loses_the_traffic(make: Make) -> None:
    world = make()
    settling(world, dies=True)
    result = world.migrate()
    assert result.exit_code == 5 and "the traffic is back at kpro6/qwen" in str(result.error)
    assert world.workers == {url(SRC): True}


def test_clients_that_get_no_answer_after_the_cutover_get_the_source_back(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(HOOK)
    move = HookWay.move

    def blind(way: HookWay, direction: Direction) -> Gap:
        move(way, direction)
        return Gap(9, 5, 31.0, direction == "forward", "refused")

    monkeypatch.setattr(HookWay, "move", blind)
    result = world.migrate()
    assert result.exit_code == 5 and "clients get no answer: gap: at least 31" in str(result.error)
    assert world.hook_at == SRC and world.machines[SRC].serving
    assert not [one for one in world.effects if one == f"{SRC}:down"]
    monkeypatch.setattr(HookWay, "move", move)
    assert world.migrate().error is None
    assert_moved(world)


def test_a_probe_url_that_answers_nobody_is_an_obstacle(make: Make) -> None:
    world = make({"hook": {"command": ["/bin/sh"], "probe_url": "http://127.0.0.1:1"}})
    result = world.migrate()
    assert result.error is not None and not world.effects
    assert "clients get no answer at http://127.0.0.1:1" in result.error.evidence[0]


def test_a_cutover_that_was_changed_meanwhile_is_not_used_for_the_way_back(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.rules = {"settle_s": 1, "drain_s": 0, **HOOK}
    before = len(world.effects)
    result = world.migrate(abort=True)
    assert result.exit_code == 2
    said = "moved by cutover.router http://router; the inventory has cutover.hook now"
    assert said in str(result.error)
    assert len(world.effects) == before
    world.rules = {"settle_s": 1, "drain_s": 0, **ROUTER}
    assert world.migrate(abort=True).error is None
    assert_back(world)


def test_another_migration_is_one_obstacle_among_others(make: Make) -> None:
    world = make()
    world.machines[SRC].good = False
    other = Migration(id="m0", source=f"{SRC}/qwen", destination="kpro7/qwen", phase="launch")
    path = "/var/lib/deployer/migrations/qwen.json"
    world.machines[SRC].files[path] = other.model_dump_json().encode()
    result = world.migrate()
    assert result.error is not None and len(result.error.evidence) == 2
    assert "kpro6/qwen -> kpro7/qwen (m0) is under way" in result.error.evidence[0]
    world.machines[SRC].files[path] = b'{"id": "from the future", "colour": 1}'
    result = world.migrate()
    assert result.error is not None and len(result.error.evidence) == 2
    assert "cannot be read" in result.error.evidence[0]
    assert not world.effects


def test_another_run_between_the_look_and_the_lock(make: Make) -> None:
    world = make()
    other = Migration(id="m9", source="a/b", destination=f"{SRC}/qwen", phase="launch", started=9.0)

    def confirm(lines: list[str]) -> bool:
        path = "/var/lib/deployer/migrations/qwen.json"
        world.machines[SRC].files[path] = other.model_dump_json().encode()
        return True

    result = world.migrate(confirm=confirm)
    assert result.exit_code == 1 and "in the meantime" in str(result.error)
    assert not world.effects


def test_an_abort_while_a_host_is_dark_does_not_say_that_there_is_none(make: Make) -> None:
    world = make()
    world.dark.add(SRC)
    assert world.migrate(abort=True).exit_code == 3
    world.dark.clear()
    assert "no migration to abort" in str(world.migrate(abort=True).error)


def test_an_abort_with_a_stopped_container_has_nothing_to_stop_there(make: Make) -> None:
    world = make()
    world.stop_at = (4, "after")
    with pytest.raises(Killed):
        world.migrate()
    world.stop_at = None
    world.stopped.add(DST)
    result = world.migrate(abort=True)
    assert result.error is None, result.error
    assert any(isinstance(one, Note) and "is stopped: nothing" in one.text for one in world.events)
    assert_back(world)


def test_a_replica_that_was_at_the_router_before_stays_there(make: Make) -> None:
    world = make()
    there = world.machines[DST]
    there.done = set(world.machines[SRC].done)
    there.serving = there.good = True
    world.workers[url(DST)] = True
    assert world.migrate().error is None
    assert world.workers == {url(DST): True} and not world.machines[SRC].serving
    assert world.migrate(abort=True).error is None
    assert world.workers == {url(DST): True, url(SRC): True}
    assert there.serving and world.machines[SRC].serving


def test_a_hook_that_is_not_there_is_found_before_anything(make: Make) -> None:
    world = make({"hook": {"command": ["./no-such-hook"]}})
    result = world.migrate()
    assert result.error is not None and not world.effects
    assert "./no-such-hook cannot be run here (in " in result.error.evidence[0]


def test_keep_source(make: Make) -> None:
    world = make()
    assert world.migrate(keep_source=True).error is None
    assert world.machines[SRC].serving and world.machines[DST].serving
    assert world.workers == {url(DST): True}


def test_retire_later(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    assert world.machines[SRC].container
    assert world.migrate(retire=True).error is None
    assert_moved(world, retired=True)


def test_all_obstacles_at_once_and_nothing_is_touched(make: Make) -> None:
    world = make()
    world.machines[SRC].good = False
    world.workers = {"http://elsewhere:1": True}
    world.machine_of = lambda one: world.machines[SRC]  # type: ignore[method-assign]
    result = world.migrate()
    lines = result.error.evidence if result.error else ()
    assert len(lines) == 2 and "does not serve as proven" in lines[0]
    assert "has no worker http://kpro6:30000; it has http://elsewhere:1" in lines[1]
    assert not world.effects
    world.dark.add(DST)
    both = world.migrate()
    assert both.error is not None and len(both.error.evidence) == 3


def test_what_the_hub_refuses_is_an_obstacle(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make()

    def prepare(step: mw.Fake, context: StepContext) -> bool:
        if step.name == "shards":
            raise HubError("the model is gated", where="acme/tiny", fix="accept its licence")
        return False

    monkeypatch.setattr(mw.Fake, "prepare", prepare)
    result = world.migrate()
    assert result.error is not None
    assert result.error.evidence == ("kpro5/qwen shards: the model is gated -> accept its licence",)
    assert not world.effects


def test_a_dry_run_touches_nothing(make: Make) -> None:
    world = make()
    result = world.migrate(dry_run=True, retire=True)
    assert result.error is None and not world.effects
    text = "\n".join(result.lines)
    for word in (f"POST /workers {url(DST)}", "settle:", "drains kpro6/qwen", "retire: "):
        assert word in text
    assert world.migration(SRC) is None and not (world.folder / ".deploy" / "runs").exists()


def test_the_hub_is_taken_where_it_is_faster(make: Make) -> None:
    world = make()
    world.rates["hub"] = Rate(9e9)
    assert world.migrate().error is None
    record = world.migration(DST)
    assert record is not None and record.weights_from == "hub"
    assert_moved(world)


def test_another_controller_goes_on(make: Make) -> None:
    world = make()
    total = count_effects(make, ROUTER)
    for number in range(4, total - 4, 3):
        world = make()
        world.stop_at = (number, "after")
        with pytest.raises(Killed):
            world.migrate()
        world.stop_at = None
        for host in (SRC, DST):
            path = world.folder / ".deploy" / "state" / f"{host}.json"
            text = path.read_text()
            if host == DST:
                path.unlink()
            else:
                # What its own `up` would have recorded is there, the journal is not.
                import json

                data = json.loads(text)
                data["deployments"]["qwen"]["migration"] = None
                path.write_text(json.dumps(data))
        result = world.migrate()
        assert result.error is None, (number, world.effects, result.error)
        assert_moved(world)
