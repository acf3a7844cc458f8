"""The cut-over at a router: what it takes along, what it refuses, what it does when it forgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import migrateworld as mw
import pytest
import serverworld as world
from migrateworld import DST, SRC, World, url
from test_router import Clock, Fake

from deployer import migrate_router
from deployer.deployment import Peer
from deployer.errors import StepFailed, Unreachable
from deployer.events import Note
from deployer.inventory import Cutover
from deployer.migrate_router import RouterWay
from deployer.model import Facts
from deployer.router import Router
from deployer.state import Migration

RULES = {"router": {"url": "http://router:1", "ready_s": 10}, "settle_s": 4, "drain_s": 0}
OLD, NEW = "http://192.0.2.6:30000", "http://192.0.2.5:30000"
RECORD = Migration(id="m1", source="kpro6/qwen", destination="kpro5/qwen", phase="prepare")
Made = tuple[RouterWay, Any, Fake]


def side(name: str, worker: str, key: str | None) -> Any:
    """A side that serves as proven, unless told."""
    want = world.deployment()
    serve = want.playbook.serve.model_copy(update={"api_key_env": key})
    book = want.playbook.model_copy(update={"serve": serve})
    entry = want.entry.model_copy(update={"worker_url": worker})
    want = dataclasses.replace(want, host_name=name, entry=entry, playbook=book)
    made = SimpleNamespace(want=want, told=[], environ={}, host=None)
    made.note = lambda phase, text, level="info": made.told.append(text)
    made.progress = lambda *words: None
    made.gather = lambda: Facts({})
    return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    def made(kind: str = "router", key: str | None = None, **record: Any) -> Made:
        fake, clock = Fake(kind, old=OLD), Clock()
        monkeypatch.setattr(migrate_router, "doors", lambda rules, key, hosts: fake)
        monkeypatch.setattr(
            migrate_router,
            "Router",
            lambda door, where: Router(door, where, now=clock.now, sleep=clock.sleep),
        )
        rules = Cutover.model_validate(RULES)
        copy = RECORD.model_copy(update=record)
        ends = side("kpro6", OLD, key), side("kpro5", NEW, key)
        return RouterWay(*ends, rules, copy, lambda: None), ends, fake

    return made


def rows(way: RouterWay, destination: Facts | None = None) -> list[tuple[str, str]]:
    return way.obstacles(None, destination)


def test_there_and_back_and_back_while_it_drains(make: Callable[..., Made]) -> None:
    for kind in ("smg", "router"):
        way, (source, destination), fake = make(kind)
        assert rows(way) == []
        way.move("forward")
        assert way.problem("forward") == "" and not way.lost("forward")
        assert destination.told[-1].endswith(f"name {NEW} from now on, and no longer {OLD}")
        # Its long requests run for a while: it drains, and cannot be added before that is over.
        fake.drains_for = 30
        way.move("back")
        assert way.problem("back") == ""
        assert [url for url, row in fake.rows.items() if row["is_healthy"]] == [OLD]
        assert source.told[-1] == f"the router has let {NEW} go; its requests end by themselves"


def test_who_has_other_replicas_is_told_that_it_is_none_any_more(
    make: Callable[..., Made],
) -> None:
    way, (source, destination), _ = make()
    source.want = dataclasses.replace(source.want, peers=(Peer("kpro7/qwen", "http://x"),))
    way.move("forward")
    assert destination.told[-1].startswith("take `replica` out of the entry of kpro6/qwen")


def test_another_spelling_at_the_router_is_the_same_worker(make: Callable[..., Made]) -> None:
    way, _, fake = make()
    fake.rows = {f"{OLD}/": Fake.row("a", f"{OLD}/"), f"{NEW}/": Fake.row("b", f"{NEW}/")}
    assert rows(way) == []
    assert way.problem("forward") == f"the router still sends requests to {OLD}"
    way.move("forward")
    assert way.problem("forward") == "" and list(fake.rows) == [f"{NEW}/"]


def test_names_that_only_the_router_gives_go_along(make: Callable[..., Made]) -> None:
    way, _, fake = make()
    fake.rows[OLD]["models"] = [{"id": "alias"}]
    fake.rows[OLD]["priority"] = 70

    def named(id_: str, url: str) -> dict[str, Any]:
        return {**Fake.row(id_, url), "models": fake.posted[-1]["models"]}

    fake.row = named  # type: ignore[method-assign]
    way.move("forward")
    body = fake.posted[0]
    assert (body["model_id"], body["models"], body["priority"]) == ("alias", [{"id": "alias"}], 70)
    assert list(fake.rows) == [NEW]


def test_one_that_lacks_the_name_never_takes_the_place(make: Callable[..., Made]) -> None:
    """A router that has another key than the server lists it as healthy, and all it sends fails."""
    way, (source, _), fake = make()
    fake.rows[OLD]["models"] = [{"id": source.want.playbook.model.served_name}]
    with pytest.raises(StepFailed, match="is the server's API key another") as caught:
        way.move("forward")
    assert source.want.playbook.model.served_name in caught.value.what
    assert list(fake.rows) == [OLD], "the old one serves on, the new one is out again"
    assert "model_id" not in fake.posted[0], "the name is the server's own"


def test_a_key_that_is_not_set_is_an_obstacle_not_a_worker_without_key(
    make: Callable[..., Made],
) -> None:
    way, ends, fake = make(key="MODEL_KEY")
    assert rows(way) == [("MODEL_KEY (serve.api_key_env) is not set", "export it")]
    with pytest.raises(StepFailed, match="MODEL_KEY"):
        way.move("forward")
    assert fake.posted == [] and list(fake.rows) == [OLD]
    for one in ends:
        one.environ["MODEL_KEY"] = "k"
    assert rows(way) == []
    way.move("forward")
    assert fake.posted[0]["api_key"] == "k"


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_part_of_a_disaggregated_server_is_not_moved(
    make: Callable[..., Made], kind: str
) -> None:
    way, _, fake = make()
    fake.rows[OLD]["worker_type"] = kind
    [(what, fix)] = rows(way)
    assert f"is a {kind} worker" in what and "cutover.hook" in fix


def test_one_that_gets_requests_unproven_is_an_obstacle(make: Callable[..., Made]) -> None:
    way, _, fake = make()
    fake.rows[NEW] = Fake.row("new", NEW)
    [(what, fix)] = rows(way, Facts({}))
    assert "sends requests to" in what and "take it out of the router" in fix
    way.record.started = 1.0
    assert rows(way, Facts({})) == [], "our own run has begun: it is held back"


def test_a_static_list_is_held_back_until_the_gates(make: Callable[..., Made]) -> None:
    way, (_, destination), fake = make()
    way.hold_back()
    assert not any(asked.startswith("DELETE") for asked in fake.asked)
    fake.rows[NEW] = Fake.row("new", NEW)
    way.hold_back()
    assert list(fake.rows) == [OLD]
    assert destination.told == [f"{NEW} is taken out of http://router:1 until it has passed"]
    fake.rows[NEW] = Fake.row("new", NEW)
    for word in ("cut", "served_before"):
        other, _, other_fake = make(**{word: True})
        other_fake.rows[NEW] = Fake.row("new", NEW)
        other.hold_back()
        assert NEW in other_fake.rows


def test_the_source_must_be_known_and_the_ends_must_differ(make: Callable[..., Made]) -> None:
    way, ends, fake = make()
    del fake.rows[OLD]
    [(what, fix)] = rows(way)
    assert f"has no worker {OLD}; it has none" in what and "worker_url of kpro6/qwen" in fix
    way.record.cut = True
    assert rows(way) == []
    ends[1].want = dataclasses.replace(ends[1].want, entry=ends[0].want.entry)
    assert "are both" in rows(way)[0][0]


# ---- in the whole procedure: a router that is started again forgets


def restarted(world_: World, monkeypatch: pytest.MonkeyPatch, *, workers: list[str]) -> list[float]:
    """At the first moment of the settle time the router has only its command line's workers."""
    slept: list[float] = []
    sleep = world_.sleep

    def once(seconds: float) -> None:
        sleep(seconds)
        slept.append(seconds)
        if len(slept) == 1:
            world_.workers = dict.fromkeys(workers, True)

    monkeypatch.setattr(world_, "sleep", once)
    return slept


@pytest.mark.parametrize("workers", [[], [SRC], [SRC, DST]])
def test_what_a_router_forgot_is_moved_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: list[str]
) -> None:
    made = mw.build(monkeypatch, tmp_path, RULES)
    slept = restarted(made, monkeypatch, workers=[url(host) for host in workers])
    result = made.migrate()
    assert result.exit_code == 0, result.error
    assert made.workers == {url(DST): True} and not made.machines[SRC].serving
    told = [one.text for one in made.events if isinstance(one, Note)]
    assert any("the traffic is moved again" in text for text in told)
    assert sum(slept) >= 2 + 4, "the settle time begins anew"


def test_a_router_whose_discovery_puts_the_old_one_back_gets_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not for ever: after some times the source has the traffic, and is not stopped."""
    made = mw.build(monkeypatch, tmp_path, RULES)
    sleep = made.sleep

    def put_back(seconds: float) -> None:
        sleep(seconds)
        if url(DST) in made.workers:
            made.workers[url(SRC)] = True

    monkeypatch.setattr(made, "sleep", put_back)
    result = made.migrate()
    assert result.exit_code == 5 and "still sends requests to" in str(result.error)
    assert made.machines[SRC].serving and made.workers[url(SRC)]


def test_the_source_is_not_stopped_while_the_router_sends_requests_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Killed after the settle time; the router is started again before the same command is."""
    made = mw.build(monkeypatch, tmp_path, RULES)
    at = next_effect(made, monkeypatch, tmp_path)
    made = mw.build(monkeypatch, tmp_path / "again", RULES)
    made.stop_at = (at, "before")
    with pytest.raises(mw.Killed):
        made.migrate()
    assert made.migration(DST) is not None and made.machines[SRC].serving
    made.stop_at, made.workers = None, {url(SRC): True}
    result = made.migrate()
    assert result.exit_code == 0, result.error
    assert made.workers == {url(DST): True} and not made.machines[SRC].serving


def test_one_that_dies_while_the_old_one_leaves_loses_the_traffic_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = mw.build(monkeypatch, tmp_path, RULES)
    take_out = Router.take_out

    def dies(self: Router, old: str, *words: Any) -> bool:
        if old == url(SRC):
            made.machines[DST].serving = False
            made.workers = {url(DST): True}
            raise StepFailed("it does not serve any more")
        return take_out(self, old, *words)

    monkeypatch.setattr(Router, "take_out", dies)
    result = made.migrate()
    assert result.exit_code == 5 and "the traffic is back at kpro6/qwen" in str(result.error)
    assert made.workers == {url(SRC): True}


def next_effect(made: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """The number of the effect that stops the source."""
    (tmp_path / "again").mkdir()
    assert made.migrate().exit_code == 0
    return made.effects.index(f"{SRC}:down")


@pytest.mark.parametrize("end", ["bad", "abort"])
def test_who_was_a_worker_before_stays_one_only_with_a_good_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str
) -> None:
    made = mw.build(monkeypatch, tmp_path, RULES)
    there = made.machines[DST]
    there.done = set(made.machines[SRC].done)
    there.serving = there.good = True
    made.workers[url(DST)] = True
    if end == "abort":
        assert made.migrate().exit_code == 0
        assert made.migrate(abort=True).exit_code == 0
        assert made.workers == {url(SRC): True, url(DST): True}
        return
    sleep = made.sleep

    def broken(seconds: float) -> None:
        sleep(seconds)
        made.settle_fails = True

    monkeypatch.setattr(made, "sleep", broken)
    assert made.migrate().exit_code == 5
    assert made.workers == {url(SRC): True}, "a bad server gets no requests"


def test_a_static_worker_does_not_stay_when_its_server_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was listed before the migration, and dead."""
    made = mw.build(monkeypatch, tmp_path, RULES)
    made.workers[url(DST)] = False
    assert made.migrate().exit_code == 0
    assert made.migrate(abort=True).exit_code == 0
    assert made.workers == {url(SRC): True} and not made.machines[DST].serving


def test_a_router_that_does_not_answer_keeps_the_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = mw.build(monkeypatch, tmp_path, RULES)
    ask, sleep = made.ask, made.sleep
    dark: list[bool] = []

    def asked(method: str, path: str, body: Any = None) -> Any:
        if dark:
            raise Unreachable("connection refused", where="http://router:1")
        return ask(method, path, body)

    monkeypatch.setattr(made, "ask", asked)
    monkeypatch.setattr(made, "sleep", lambda seconds: (sleep(seconds), dark.append(True)))
    result = made.migrate()
    assert result.exit_code == 3 and "nobody finds it bad" in str(result.error)
    assert made.machines[SRC].serving
    dark.clear()
    monkeypatch.setattr(made, "sleep", sleep)
    assert made.migrate().exit_code == 0 and not made.machines[SRC].serving
