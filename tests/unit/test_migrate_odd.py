"""`deploy migrate` in the odd cases: things changed by hand in between, a side that is gone."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import migrateworld as mw
import pytest
from migrateworld import DST, SRC, Killed, World, url
from test_migrate import HOOK, ROUTER, Make, assert_back, assert_moved

from deployer.errors import StepFailed
from deployer.events import Note
from deployer.inventory import Host
from deployer.kept import Kept
from deployer.migrate import MigrateResult
from deployer.migrate_back import Back
from deployer.migrate_hook import HookWay
from deployer.model import Plan
from deployer.recipe import recipe_of
from deployer.state import HostState, Launch, Migration
from deployer.state_file import StateFile
from deployer.steps.server_wanted import fingerprint
from deployer.steps.serving_fact import ServingFact

PATH = "/var/lib/deployer/migrations/qwen.json"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="deployer-migrate-", dir=base) as inside:
        yield lambda cutover=ROUTER: mw.build(monkeypatch, Path(inside), cutover)


def killed(world: World, after: str, **words: Any) -> None:
    """Runs the command, and kills it right after the first effect of that name."""
    effects = len(world.effects)
    plain = world.check

    def check() -> None:
        plain()
        if after in world.effects[effects:]:
            raise Killed

    world.check = check  # type: ignore[method-assign]
    with pytest.raises(Killed):
        world.migrate(**words)
    world.check = plain  # type: ignore[method-assign]


def told(world: World) -> str:
    return "\n".join(one.text for one in world.events if isinstance(one, Note))


def state(world: World, host: str) -> tuple[StateFile, HostState]:
    file = StateFile(world.folder / ".deploy" / "state", host)
    return file, file.load()


def refused(result: MigrateResult, code: int, *words: str) -> None:
    assert result.error is not None and result.exit_code == code, result.error
    text = "\n".join([str(result.error), result.error.fix, *result.error.evidence])
    for word in words:
        assert word in text, text


# ---- a finished one, asked again


def test_a_source_that_serves_again_is_moved_anew_before_it_is_retired(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    source = world.machines[SRC]
    source.serving = source.good = True
    world.workers[url(SRC)] = True
    before = len(world.effects)
    assert world.migrate(retire=True).error is None
    assert "serves again since the migration" in told(world)
    assert_moved(world, retired=True)
    done = world.effects[before:]
    # It loses its traffic before it ends; what serves there is not started again.
    assert done.index(f"router:remove {url(SRC)}") < done.index(f"{SRC}:down")
    assert f"{DST}:launch" not in done
    assert done.index(f"{SRC}:down") < done.index(f"{SRC}:retire")


def test_a_source_that_somebody_starts_is_not_stopped_by_retire(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.machines[SRC].serving = True
    before = len(world.effects)
    result = world.migrate(retire=True)
    refused(result, 1, "1 obstacle", "somebody has started it since", "the traffic is at kpro5")
    assert len(world.effects) == before and world.machines[SRC].serving
    record = world.migration(SRC)
    assert record is not None and record.outcome == "done"


def test_a_source_that_serves_again_without_traffic_is_told_how_it_ends(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.machines[SRC].serving = world.machines[SRC].good = True
    result = world.migrate(retire=True)
    refused(result, 1, f"has no worker {url(SRC)}", "stop it: `deploy down kpro6/qwen`")
    assert world.machines[SRC].serving
    world.machines[SRC].serving = False
    assert world.migrate(retire=True).error is None
    assert_moved(world, retired=True)


def test_kept_first_and_retired_later(make: Make) -> None:
    world = make()
    assert world.migrate(keep_source=True).error is None
    # Somebody has put it back at the router.
    world.workers[url(SRC)] = True
    assert world.migrate(retire=True).error is None
    assert_moved(world, retired=True)
    assert world.effects.index(f"router:remove {url(SRC)}") < world.effects.index(f"{SRC}:down")


def test_the_later_word_counts(make: Make) -> None:
    world = make()
    killed(world, f"router:remove {url(SRC)}", retire=True)
    result = world.migrate(keep_source=True)
    assert result.error is None and "kpro6/qwen still runs" in result.done
    assert world.machines[SRC].serving and world.machines[SRC].container
    assert world.migrate(abort=True).error is None
    killed(world, f"{SRC}:down", retire=True)
    result = world.migrate(keep_source=True)
    assert result.error is None and "kpro6/qwen does not run" in result.done
    assert world.machines[SRC].container


def test_retire_later_does_not_take_another_deployment_along(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    assert world.migrate().error is None
    plain = mw.deployment

    def two(host: str, rules: Any, **edits: Any) -> Any:
        want = plain(host, rules, **edits)
        entries = {"qwen": want.entry, "other": want.entry}
        document = {**want.host.model_dump(), "deployments": entries}
        return dataclasses.replace(want, host=Host.model_validate(document))

    monkeypatch.setattr(mw, "deployment", two)
    before = len(world.effects)
    result = world.migrate(retire=True)
    refused(result, 1, "--retire would stop container 129, in which kpro6/other is too")
    assert len(world.effects) == before


def test_done_is_not_said_of_a_destination_that_is_down(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.machines[DST].serving = False
    refused(world.migrate(), 1, "was finished at", "does not serve as proven now", "deploy up")
    world.dark.add(DST)
    refused(world.migrate(), 3, "no route to host")


def test_an_older_finished_one_does_not_write_over_a_later_one(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    # By the other controller's clock, which is slow.
    later = Migration(
        **{"id": "m2", "source": f"{DST}/qwen", "destination": "kpro7/qwen", "phase": "retire"},
        outcome="done",
        started=1.0,
    )
    world.machines[DST].files[PATH] = later.model_dump_json().encode()
    assert world.migrate().error is None
    assert world.machines[DST].files[PATH] == later.model_dump_json().encode()


# ---- a side that is gone


def test_a_source_that_died_after_the_cutover_does_not_keep_the_migration_open(make: Make) -> None:
    world = make()
    killed(world, f"router:remove {url(SRC)}", retire=True)
    world.dark.add(SRC)
    world.machines[SRC].serving = False
    refused(
        *(world.migrate(retire=True), 3),
        *("no route to host", "--keep-source ends the migration without it"),
        "the traffic is at kpro5/qwen; --abort moves it back",
    )
    result = world.migrate(keep_source=True)
    assert result.error is None and "left as it is: it cannot be reached" in result.done
    for host in (SRC, DST):
        record = world.migration(host)
        assert record is not None and record.outcome == "done"
    world.dark.clear()
    assert world.migrate().error is None
    assert b'"outcome": "done"' in world.machines[SRC].files[PATH]


def test_a_dark_source_is_no_trifle_before_the_cutover(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:verify")
    world.dark.add(SRC)
    refused(world.migrate(keep_source=True), 3, "no route to host")


def test_an_abort_before_the_cutover_while_the_destination_is_dark(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:shards")
    assert world.keys == {SRC, DST}
    world.dark.add(DST)
    result = world.migrate(abort=True)
    refused(
        *(result, 3, "no route to host", "kpro6/qwen serves as before"),
        *("left on kpro5/qwen: its server and jobs", "kpro6/qwen may move elsewhere meanwhile"),
        "`deploy migrate kpro6/qwen kpro5/qwen --abort` again",
    )
    assert world.keys == {DST}, "what the key opens is closed"
    refused(world.migrate(abort=True), 3, "left on kpro5/qwen")
    world.dark.clear()
    refused(world.migrate(), 2, "is being taken back")
    assert world.migrate(abort=True).error is None
    assert_back(world)


def test_what_moved_elsewhere_meanwhile_is_left_alone(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:launch")
    world.dark.add(DST)
    assert world.migrate(abort=True).exit_code == 3
    other = Migration(
        **{"id": "m2", "source": f"{SRC}/qwen", "destination": "kpro7/qwen", "phase": "launch"},
        started=9e9,
    )
    raw = world.machines[SRC].files[PATH] = other.model_dump_json().encode()
    file, known = state(world, SRC)
    known.deployments["qwen"].migration = other
    file.save(known)
    world.dark.clear()
    world.locked.add(SRC)
    before = len(world.effects)
    assert world.migrate(abort=True).error is None
    assert not world.machines[DST].serving and PATH not in world.machines[DST].files
    assert world.machines[SRC].files[PATH] == raw and world.migration(SRC) == other
    assert not [one for one in world.effects[before:] if one.startswith(SRC)]


def test_an_abort_before_the_cutover_while_the_source_is_dark(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:shards")
    world.dark.add(SRC)
    result = world.migrate(abort=True)
    refused(
        *(result, 3, "no route to host", "kpro5/qwen is taken back"),
        *("left on kpro6/qwen: the key for the copy", "--abort` again when it can be reached"),
    )
    assert world.keys == {SRC}, "what opens it is gone"
    world.dark.clear()
    world.machines[DST].serving = world.machines[DST].good = True
    assert world.migrate(abort=True).error is None
    assert not world.keys and world.machines[DST].serving, "it may serve something else by now"
    for host in (SRC, DST):
        assert PATH not in world.machines[host].files
        record = world.migration(host)
        assert record is not None and record.outcome == "aborted"


def test_an_abort_after_the_cutover_while_the_source_is_dark_touches_nothing(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.dark.add(SRC)
    before = len(world.effects)
    refused(
        *(world.migrate(abort=True), 3),
        *("nothing was touched; the traffic stays at kpro5/qwen", "run --abort again"),
    )
    assert len(world.effects) == before and world.machines[DST].serving
    world.dark.clear()
    assert "was finished" in world.migrate().done


def test_an_abort_while_both_are_dark_touches_nothing(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:launch")
    world.dark |= {SRC, DST}
    refused(world.migrate(abort=True), 3, "nothing was touched", SRC, DST)
    world.dark.clear()
    assert world.migrate().error is None
    assert_moved(world)


def test_an_abort_while_another_run_holds_the_destination(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.locked.add(DST)
    assert world.migrate(abort=True).exit_code == 4
    assert world.workers == {url(SRC): True}
    world.locked.clear()
    assert world.migrate(abort=True).error is None
    assert_back(world)


# ---- --abort


def test_abort_twice_and_without_any(make: Make) -> None:
    world = make()
    refused(world.migrate(abort=True), 2, "there is no migration to abort")
    world.dark |= {SRC, DST}
    refused(world.migrate(abort=True), 3, "kpro6: no route to host", "kpro5: no route to host")
    world.dark.clear()
    assert world.migrate().error is None
    assert world.migrate(abort=True).error is None
    before = len(world.effects)
    again = world.migrate(abort=True)
    assert again.error is None and "is taken back: nothing is left to do" in again.done
    world.machines[SRC].serving = False
    refused(world.migrate(abort=True), 1, "kpro6/qwen does not serve as proven now")
    assert len(world.effects) == before


def test_an_abort_whose_source_cannot_serve_leaves_the_way_forward(make: Make) -> None:
    world = make()
    assert world.migrate().error is None
    world.blocked[SRC, "gpus"] = Plan.blocked("a VM has the GPUs", "shut it down")
    before = len(world.effects)
    result = world.migrate(abort=True)
    refused(result, 1, "it cannot serve again: 1 obstacle", "kpro6/qwen gpus: a VM has the GPUs")
    assert len(world.effects) == before
    world.blocked.clear()
    world.bad.add(SRC)
    refused(world.migrate(abort=True), 5, "it repeats itself")
    assert world.workers == {url(DST): True} and world.machines[DST].serving
    record = world.migration(SRC)
    assert record is not None and record.outcome == "done" and not record.back
    assert "was finished at" in world.migrate().done
    world.bad.clear()
    assert world.migrate(abort=True).error is None
    assert_back(world)


def launched(world: World) -> None:
    """The records of what serves at the source."""
    old = world.wanted(SRC)
    key = Kept(world.folder / ".deploy" / "kept").add(recipe_of(old, mw.MANIFEST), old.lock_text)
    file, known = state(world, SRC)
    launch = Launch(
        id="l-kpro6-0",
        variant="mtp",
        started=2.0,
        verdict="good",
        recipe=key,
        argv=["python", "-m", "sglang.launch_server"],
        fingerprint=fingerprint(old, mw.MANIFEST, "mtp"),
    )
    known.deployments["qwen"].launches.append(launch)
    file.save(known)


def test_the_source_is_looked_at_as_it_runs(make: Make) -> None:
    world = make()
    launched(world)
    for host in (SRC, DST):
        world.edits[host] = {"model": {"served_name": "other"}}
    refused(world.migrate(), 2, "they serve different names, tiny and other")
    for host in (SRC, DST):
        world.edits[host] = {"serve": {"args": {"context-length": 1024}}}
    assert world.migrate().error is None
    assert "serve.args: context-length 32768 there, 1024 here" in told(world)


def test_the_source_serves_as_before_though_its_playbook_was_edited(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    launched(world)
    assert world.migrate().error is None
    file, known = state(world, SRC)
    known.deployments["qwen"].launches[-1].verdict = "stopped"
    file.save(known)
    was = Back.as_before
    seen: list[Any] = []
    monkeypatch.setattr(Back, "as_before", lambda back: seen.append(was(back)) or seen[-1])
    world.edits[SRC] = {"serve": {"args": {"context-length": 1024}}}
    assert world.migrate(abort=True).error is None
    assert seen[0].serve_args()["context-length"] == 32768 and seen[0].variant == "mtp"
    assert "its playbook says something else now" in told(world)
    assert_back(world)


# ---- changed by hand in between


def test_a_source_whose_container_was_stopped_by_hand(make: Make) -> None:
    world = make()
    killed(world, f"router:remove {url(SRC)}")
    world.machines[SRC].serving = False
    world.stopped.add(SRC)
    assert world.migrate().error is None
    assert "container 129 is stopped: nothing of it runs" in told(world)
    assert_moved(world)


def test_what_has_the_traffic_is_not_started_anew_for_an_edited_playbook(make: Make) -> None:
    world = make()
    killed(world, f"router:add {url(DST)}")
    world.edits[DST] = {"serve": {"args": {"context-length": 1024}}}
    assert world.migrate().error is None
    assert_moved(world)


def test_what_up_would_refuse_after_the_cutover_does_not_keep_it_open(make: Make) -> None:
    world = make()
    killed(world, f"router:remove {url(SRC)}")
    world.blocked[DST, "venv"] = Plan.blocked("the lock is for another driver", "edit it")
    world.edits[DST] = {"model": {"served_name": "other"}}
    assert world.migrate().error is None
    assert_moved(world)


def test_an_edited_playbook_counts_before_the_cutover(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:verify")
    world.edits[DST] = {"serve": {"args": {"context-length": 1024}}}
    assert world.migrate().error is None
    assert world.machines[DST].launches == 2


def test_a_destination_that_died_after_the_cutover_loses_the_traffic(make: Make) -> None:
    world = make()
    killed(world, f"router:add {url(DST)}")
    world.machines[DST].serving = False
    refused(world.migrate(), 5, "the traffic is back at kpro6/qwen")
    assert world.workers == {url(SRC): True}
    assert world.migrate().error is None
    assert world.workers == {url(DST): True} and world.machines[DST].launches == 2


def test_another_router_in_the_inventory_is_not_taken_for_the_one_that_has_the_traffic(
    make: Make,
) -> None:
    world = make()
    killed(world, f"router:remove {url(SRC)}")
    world.rules = {**world.rules, "router": {"url": "http://elsewhere"}}
    before = len(world.effects)
    for words in ({}, {"abort": True}):
        result = world.migrate(**words)
        refused(result, 2, "cutover.router http://router", "cutover.router http://elsewhere now")
    assert len(world.effects) == before


def test_a_hook_may_be_corrected_on_the_way(make: Make) -> None:
    world = make(HOOK)
    killed(world, "hook:forward")
    world.rules = {**world.rules, "hook": {"command": ["/bin/sh", "-e"]}}
    assert world.migrate(abort=True).error is None
    assert world.hook_at == SRC


def test_a_router_that_came_into_the_inventory_later_is_remembered_as_it_was(make: Make) -> None:
    world = make({})
    killed(world, f"{DST}:launch")
    world.workers[url(DST)] = True
    world.machines[DST].good = True
    world.rules = {"settle_s": 1, "drain_s": 0, **ROUTER}
    assert world.migrate().error is None
    record = world.migration(DST)
    assert record is not None and record.routed_before


def test_a_worker_that_was_taken_out_until_it_has_passed_is_remembered(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:launch")
    file, known = state(world, DST)
    record = known.deployments["qwen"].migration
    assert record is not None
    record.routed_before = True
    record.seq += 1
    file.save(known)
    assert world.migrate().error is None
    done = world.migration(DST)
    assert done is not None and done.routed_before


# ---- the copies of the journal


def test_a_damaged_copy_does_not_count_when_there_is_another(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:verify")
    world.machines[DST].files[PATH] = world.machines[DST].files[PATH][:100]
    assert world.migrate().error is None
    assert "the other copies count" in told(world)
    assert_moved(world)


def test_damaged_copies_alone_are_an_obstacle_that_says_what_to_remove(make: Make) -> None:
    world = make()
    for machine in world.machines.values():
        machine.files[PATH] = b"\0" * 900
    refused(world.migrate(), 1, "it is not JSON", f"remove {PATH} there", "1 obstacle")
    refused(world.migrate(abort=True), 1, "it is not JSON")
    assert not world.effects


def test_a_copy_of_a_newer_version_is_left_to_that(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:verify")
    raw = world.machines[SRC].files[PATH].replace(b'"launch"', b'"teleport"')
    world.machines[SRC].files[PATH] = raw
    for words in ({}, {"abort": True}):
        refused(world.migrate(**words), 1, "teleport", "written by a newer deploy? use that one")


def test_what_another_controller_has_taken_back_is_not_gone_on_with(make: Make) -> None:
    world = make()
    killed(world, f"router:add {url(DST)}")
    ours = {host: state(world, host)[1] for host in (SRC, DST)}
    assert world.migrate(abort=True).error is None
    for host, known in ours.items():  # as this controller had it
        state(world, host)[0].save(known)
    before = len(world.effects)
    again = world.migrate(abort=True)
    assert again.error is None and "is taken back: nothing is left to do" in again.done
    assert len(world.effects) == before
    for host, known in ours.items():
        state(world, host)[0].save(known)
    assert world.migrate().error is None
    record = world.migration(DST)
    assert record is not None and record.id != ours[DST].deployments["qwen"].migration.id  # type: ignore[union-attr]


def test_one_that_was_taken_back_between_the_look_and_the_lock(make: Make) -> None:
    world = make()
    killed(world, f"{DST}:verify")

    def confirm(lines: list[str]) -> bool:
        for machine in world.machines.values():
            machine.files.pop(PATH)
        return True

    before = len(world.effects)
    refused(world.migrate(confirm=confirm), 1, "in the meantime")
    assert len(world.effects) == before


@pytest.mark.parametrize("host", [SRC, DST])
@pytest.mark.parametrize("begun", ["done", "shards"])
def test_an_abort_that_is_cut_off_after_every_effect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str, begun: str
) -> None:
    def start(name: str) -> World:
        folder = tmp_path / name
        folder.mkdir()
        world = mw.build(monkeypatch, folder, ROUTER)
        if begun == "done":
            assert world.migrate().error is None
        else:
            killed(world, f"{DST}:{begun}")
        return world

    whole = start("whole")
    first = len(whole.effects)
    assert whole.migrate(abort=True).error is None
    for number in range(first, len(whole.effects)):
        world = start(str(number))
        world.cut_at = (number, host)
        result = world.migrate(abort=True)
        assert result.error is None or result.exit_code == 3, (number, world.effects[first:])
        # While it stays dark, again: nothing is lost by it.
        assert world.migrate(abort=True).exit_code in (0, 3)
        world.cut_at = None
        world.dark.clear()
        result = world.migrate(abort=True)
        assert result.error is None, (number, world.effects[first:], result.error)
        assert_back(world)


def test_both_state_files_that_cannot_be_read_are_told_at_once(make: Make) -> None:
    world = make()
    for host in (SRC, DST):
        path = state(world, host)[0].path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{")
    for words in ({}, {"abort": True}, {"dry_run": True}):
        refused(world.migrate(**words), 2, "kpro6.json", "kpro5.json", "doctor kpro5")
    assert not world.effects


# ---- the destination fails after the cut-over


def fails(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Once the hook has moved the traffic the destination answers badly, while `on` is set."""
    bad = {"on": True}
    plain = mw.World.facts

    def facts(self: World, want: Any) -> Any:
        seen = plain(self, want)
        if want.host_name == DST and self.hook_at == DST and bad["on"]:
            now = seen.need(ServingFact)
            seen.values[ServingFact] = dataclasses.replace(now, problem="a request failed: 500")
        return seen

    monkeypatch.setattr(mw.World, "facts", facts)
    return bad


def test_killed_when_the_traffic_was_back_the_hook_runs_forward_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(HOOK)
    bad = fails(world, monkeypatch)
    killed(world, "hook:back")
    assert world.hook_at == SRC and world.machines[SRC].serving
    bad["on"] = False
    assert world.migrate().error is None
    assert world.hook_at == DST and world.machines[DST].serving


def test_clients_without_an_answer_after_the_way_back_do_not_lose_the_source(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(HOOK)
    bad = fails(world, monkeypatch)
    plain = HookWay.move

    def move(self: HookWay, direction: Any) -> Any:
        gap = plain(self, direction)
        if direction == "back":
            raise StepFailed("clients still get no answer", fix="look")
        return gap

    monkeypatch.setattr(HookWay, "move", move)
    assert world.migrate().error is not None
    monkeypatch.setattr(HookWay, "move", plain)
    bad["on"] = False
    assert world.migrate().error is None
    assert world.machines[world.hook_at].serving


def test_a_dark_source_does_not_hide_why_the_destination_failed(make: Make) -> None:
    world = make()
    plain = world.sleep

    def sleep(seconds: float) -> None:
        world.settle_fails = True
        world.dark.add(SRC)
        plain(seconds)

    world.sleep = sleep  # type: ignore[method-assign]
    refused(world.migrate(), 5, "500", "the source cannot take over")


def test_a_router_that_forgot_all_and_does_not_take_the_destination_gets_the_source(
    make: Make,
) -> None:
    world = make({"router": {"url": "http://router", "ready_s": 1}})
    world.check = lambda: None  # type: ignore[method-assign]
    ask, plain, restarted = world.ask, world.sleep, []

    def asks(method: str, path: str, body: Any = None) -> Any:
        answer = ask(method, path, body)
        if restarted and method == "POST" and body["url"] == url(DST):
            world.workers[url(DST)] = False
        return answer

    def sleep(seconds: float) -> None:
        if not restarted:
            restarted.append(True)
            world.workers.clear()
        plain(seconds)

    world.ask, world.sleep = asks, sleep  # type: ignore[method-assign]
    assert world.migrate().error is not None
    assert world.workers.get(url(SRC)) and world.machines[SRC].serving
