"""A replica and its router: out before the server stops, in when it has passed, never two out."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import serverworld as world
import yaml
from test_router import Clock, Fake
from test_up import Fake as FakeStep
from test_up import Session, finished
from test_up import session as session

from deployer import replicas, up
from deployer.catalog import Catalog
from deployer.deployment import Deployment, Peer
from deployer.errors import StepBlocked, StepFailed, Unreachable
from deployer.events import Bus, Event, Note, Progress
from deployer.inventory import Replica
from deployer.model import Facts
from deployer.remote.transport import Transport
from deployer.replicas import Membership, known_good_serves
from deployer.state import Back
from deployer.steps.server_wanted import LaunchNote
from deployer.up_options import UpOptions

MINE = "http://192.0.2.5:30000"
OTHERS = ("http://192.0.2.6:30000", "http://192.0.2.7:30000")
RULES = Replica.model_validate({"router": {"url": "http://router", "ready_s": 5}})


def want() -> Deployment:
    made = world.deployment()
    peers = tuple(Peer(f"kpro{n}/qwen", url) for n, url in zip((6, 7), OTHERS, strict=True))
    entry = made.entry.model_copy(update={"replica": RULES})
    return dataclasses.replace(made, entry=entry, peers=peers)


@pytest.fixture(params=["smg", "sglang-router"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A router with three workers."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    known = {url: f"id-{number}" for number, url in enumerate((MINE, *OTHERS))}
    fake = Fake(request.param)
    fake.rows = {url: fake.row(id_, url) for url, id_ in known.items()}
    return fake


def member(door: Any, *, down: bool = False) -> tuple[Membership, list[Event]]:
    events: list[Event] = []
    host = cast(Transport, None)
    bus = Bus(events.append)
    mine = Membership(want(), RULES, host, {}, bus, leaves_for_good=down, door=door)
    clock = Clock()
    mine.router.now, mine.router.sleep = clock.now, clock.sleep
    return mine, events


def no_wait() -> str:
    raise AssertionError("the step waits itself")


def served(door: Fake) -> list[str]:
    return [url for url, row in door.rows.items() if row["is_healthy"]]


def gone(door: Fake) -> None:
    """What smg lists as draining is gone once its requests have ended."""
    door.rows = {url: row for url, row in door.rows.items() if row["is_healthy"]}


def test_out_once_before_the_first_step_that_may_end_the_server(
    door: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, events = member(door)
    for step in ("venv", "shards"):
        mine.before(step, no_wait)
    assert served(door) == [MINE, *OTHERS] and not mine.out
    for step in ("stop", "launch", "verify"):
        mine.before(step, no_wait)
    assert served(door) == list(OTHERS)
    assert sum(asked.startswith("DELETE") for asked in door.asked) == 1
    gone(door)
    mine.join()
    assert sorted(served(door)) == [MINE, *OTHERS] and not mine.out
    said = [event.text for event in events if isinstance(event, Note)]
    assert said[0].startswith("taken out of http://router") and said[1].startswith("in http://")
    mine.join()
    assert sum(asked.startswith("POST") for asked in door.asked) == 1, "it is there already"


def test_not_while_another_one_is_missing(door: Fake) -> None:
    del door.rows[OTHERS[1]]
    mine, _ = member(door)
    with pytest.raises(StepBlocked, match="kpro7/qwen gets no requests") as caught:
        mine.before("stop", no_wait)
    assert "fewer than 2 of 3 replicas would serve" in caught.value.what
    assert caught.value.fix.startswith("`deploy up kpro7/qwen` first")
    assert caught.value.evidence == (f"the router lists {MINE}, {OTHERS[0]}",)
    assert MINE in served(door)


def test_when_two_go_in_the_same_moment_this_one_comes_back(
    door: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = member(door)
    remove = mine.router.remove

    def both(url: str, worker_id: str = "") -> bool:
        done = remove(url, worker_id)
        del door.rows[OTHERS[0]]
        gone(door)
        return done

    monkeypatch.setattr(mine.router, "remove", both)
    with pytest.raises(StepBlocked, match="kpro6/qwen"):
        mine.before("stop", no_wait)
    assert MINE in served(door) and not mine.out


def test_one_comes_back_when_the_answer_to_its_removal_is_lost(
    door: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = member(door)
    ask = door.ask

    def lost(method: str, *more: Any, **words: Any) -> Any:
        answer = ask(method, *more, **words)
        if method == "DELETE":
            raise Unreachable("timed out", where="http://router")
        return answer

    monkeypatch.setattr(door, "ask", lost)
    with pytest.raises(Unreachable):
        mine.before("stop", no_wait)
    monkeypatch.setattr(door, "ask", ask)
    gone(door)
    assert MINE not in served(door)
    monkeypatch.setattr(replicas, "known_good_serves", lambda *seen: True)
    mine.settle(lambda: Facts({}), "")
    assert MINE in served(door)


def test_one_that_is_not_in_the_router_may_always_be_changed(door: Fake) -> None:
    del door.rows[MINE]
    del door.rows[OTHERS[0]]
    mine, _ = member(door)
    mine.before("stop", no_wait)
    assert mine.out, "a failure must put it in again"
    assert not any(asked.startswith("DELETE") for asked in door.asked)


def test_down_leaves_whatever_the_others_do(door: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    del door.rows[OTHERS[0]]
    mine, _ = member(door, down=True)
    mine.before("stop", no_wait)
    assert MINE not in served(door)


def test_a_router_that_does_not_let_go_is_told(door: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, _ = member(door)
    monkeypatch.setattr(door, "leave", lambda url, row: None)
    with pytest.raises(StepFailed, match="still lists"):
        mine.before("stop", no_wait)


def test_a_router_that_is_gone_stops_nothing_and_the_way_out_is_told() -> None:
    class Dark(Fake):
        def ask(self, method: str, path: str, body: Any = None) -> Any:
            raise Unreachable("the router does not answer", fix="is it running")

    for down in (False, True):
        mine, _ = member(Dark("smg"), down=down)
        with pytest.raises(Unreachable) as caught:
            mine.before("stop", no_wait)
        assert "take `replica` out of the inventory" in caught.value.fix and not mine.out


def test_a_step_that_ends_the_server_suddenly_waits_for_its_requests(door: Fake) -> None:
    """A router does not know whether a server is empty; the stop step asks it itself."""
    mine, events = member(door)
    waits: list[str] = []

    def empty() -> str:
        assert MINE not in served(door), "no new ones come"
        waits.append("asked")
        return "drained: no request runs or waits"

    mine.before("container", empty)
    mine.before("stop", no_wait)
    assert waits == ["asked"]
    assert [one.text for one in events if isinstance(one, Note)][-1].startswith("drained")


def test_a_part_of_a_disaggregated_server_is_not_rolled(door: Fake) -> None:
    door.rows[MINE]["worker_type"] = "decode"
    mine, _ = member(door)
    with pytest.raises(StepBlocked, match="is a decode worker"):
        mine.before("stop", no_wait)
    assert MINE in served(door) and not mine.out


def test_a_static_list_does_not_send_it_requests_before_its_gates(door: Fake) -> None:
    """The router has tried the dead one since it began, and takes it in once it listens."""
    del door.rows[MINE]
    mine, _ = member(door)
    mine.before("launch", no_wait)
    assert mine.out
    door.rows[MINE] = door.row("id-static", MINE)
    mine.before("verify", no_wait)
    assert sorted(served(door)) == sorted(OTHERS)
    gone(door)
    mine.join()
    assert MINE in served(door)
    asked = len(door.asked)
    mine.before("verify", no_wait)
    assert len(door.asked) == asked, "one that serves is only asked again"


def test_one_that_the_router_could_not_ask_gets_no_requests(door: Fake) -> None:
    """Its key is another: all that is sent there would be refused."""
    del door.rows[MINE]
    for url in OTHERS:
        door.rows[url]["model_id"] = "tiny"
    mine, _ = member(door)
    with pytest.raises(StepFailed, match="could not ask"):
        mine.join()
    assert sorted(served(door)) == sorted(OTHERS) and mine.out
    named = door.row

    def known(id_: str, url: str) -> dict[str, Any]:
        return {**named(id_, url), "model_id": "tiny"}

    gone(door)
    door.row = known  # type: ignore[method-assign]
    mine.join()
    assert MINE in served(door) and not mine.out


def test_keys_that_are_not_set_are_told_before_anything(door: Fake) -> None:
    rules = RULES.model_copy(
        update={"router": RULES.router.model_copy(update={"api_key_env": "ROUTER_KEY"})}
    )
    with pytest.raises(StepBlocked, match="ROUTER_KEY"):
        Membership(want(), rules, cast(Transport, None), {}, Bus(lambda event: None))
    mine, _ = member(door)
    serve = mine.want.playbook.serve.model_copy(update={"api_key_env": "MODEL_KEY"})
    book = mine.want.playbook.model_copy(update={"serve": serve})
    mine.want = dataclasses.replace(mine.want, playbook=book)
    del door.rows[MINE]
    with pytest.raises(StepBlocked, match="MODEL_KEY"):
        mine.join()
    assert door.posted == []


@pytest.mark.parametrize(("verdict", "back"), [("good", True), ("failed: quality", False)])
def test_after_a_failure_only_a_proven_server_gets_requests(
    door: Fake, verdict: str, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, events = member(door)
    mine.before("stop", no_wait)
    gone(door)
    told = json.dumps({"launch": world.IDENTITY.id, "verdict": verdict})
    job = world.server_job(want(), verdict=told)
    seen = world.facts(world.fact(job=job, owners=(world.owner(),), listening=True))
    mine.settle(lambda: seen, "")
    assert (MINE in served(door)) is back
    assert any("stays out" in one.text for one in events if isinstance(one, Note)) is not back


def test_a_failure_of_the_settling_is_said_not_raised(
    door: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, events = member(door)
    mine.before("stop", no_wait)

    def dark() -> Facts:
        raise Unreachable("dark")

    mine.settle(dark, "")
    assert isinstance(events[-1], Note) and "not known" in events[-1].text


@pytest.mark.parametrize("verdict", ["", "{", "[]", '{"launch": "other", "verdict": "good"}'])
def test_no_verdict_on_this_launch_is_no_proof(verdict: str) -> None:
    job = world.server_job(want(), verdict=verdict)
    assert not known_good_serves(world.fact(job=job, owners=(world.owner(),)), "")
    assert not known_good_serves(None, "")


@pytest.mark.parametrize(("known_good", "back"), [("old", True), ("other", False), ("", False)])
def test_a_launch_that_repeats_the_known_good_one_is_proof(known_good: str, back: bool) -> None:
    note = LaunchNote("no-mtp", back=Back(to="old", left="new", by="me"))
    job = dataclasses.replace(world.server_job(want()), launch=note)
    seen = world.fact(job=job, owners=(world.owner(),), listening=True)
    assert known_good_serves(seen, known_good) is back


def test_one_that_a_killed_run_took_out_comes_back_after_a_failure(door: Fake) -> None:
    del door.rows[MINE]
    mine, _ = member(door)
    mine.before("stop", no_wait)
    told = json.dumps({"launch": world.IDENTITY.id, "verdict": "good"})
    job = world.server_job(want(), verdict=told)
    mine.settle(
        lambda: world.facts(world.fact(job=job, owners=(world.owner(),), listening=True)), ""
    )
    assert MINE in served(door)


def test_another_ones_first_health_checks_are_waited_for(
    door: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just been put in: that is no reason to refuse."""
    row = door.rows[OTHERS[0]]
    row["is_healthy"] = False
    if door.kind == "smg":
        row["status"] = "pending"
    mine, events = member(door)
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            door.rows[OTHERS[0]] = door.row(row["id"], OTHERS[0])

    monkeypatch.setattr(mine.router, "sleep", sleep)
    mine.before("stop", no_wait)
    assert len(naps) == 3 and MINE not in served(door)
    told = [event.what for event in events if isinstance(event, Progress)]
    assert told[0] == "the router takes kpro6/qwen in"


def test_one_that_never_gets_healthy_is_not_waited_for_longer(
    door: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = door.rows[OTHERS[0]]
    row["is_healthy"] = False
    if door.kind == "smg":
        row["status"] = "failed"
    mine, _ = member(door)
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(mine.router, "now", lambda: next(clock))
    with pytest.raises(StepBlocked, match="kpro6/qwen gets no requests"):
        mine.before("stop", no_wait)
    assert MINE in served(door) and next(clock) < 12


class Recorder:
    """Stands for Membership: what was asked of it, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, *words: Any, **more: Any) -> Recorder:
        self.said.append(f"for good {more['leaves_for_good']}")
        return self

    def before(self, step: str, empty: Callable[[], str]) -> None:
        self.said.append(f"before {step}")

    def join(self) -> None:
        self.said.append("join")

    def settle(self, look: Callable[[], Facts], known_good: str) -> None:
        self.said.append("settle")


def rolled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, **more: Any
) -> tuple[list[str], list[Event]]:
    """What `up` asks of the membership, with two steps of which the second may fail."""
    recorder, events = Recorder(), cast("list[Event]", [])
    monkeypatch.setattr(replicas, "Membership", recorder)
    monkeypatch.setattr(up, "proven", lambda *words: {"model": "tiny", "endpoint": "x"})
    monkeypatch.setattr(Session, "transports", lambda self, want: dict.fromkeys(up.Where))
    options = UpOptions(
        base=tmp_path / "inventory",
        steps=lambda: [FakeStep("venv"), FakeStep("stop", error)],
        environ={},
        **more,
    )
    up.up_host("kpro5", [want()], options, Bus(events.append))
    return recorder.said, events


def test_up_asks_before_each_step_and_joins_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: type[Session]
) -> None:
    monkeypatch.setattr(up, "HostSession", Session)
    said, events = rolled(tmp_path, monkeypatch, None)
    assert said == ["for good False", "before venv", "before stop", "join"]
    assert finished(events)[0].exit_code == 0
    said, events = rolled(tmp_path, monkeypatch, StepFailed("no"))
    assert said == ["for good False", "before venv", "before stop", "settle"]
    assert rolled(tmp_path, monkeypatch, None, dry_run=True)[0] == []
    said, _ = rolled(tmp_path, monkeypatch, None, serves=False)
    assert said == ["for good True", "before venv", "before stop"]


def test_replicas_find_each_other_and_are_drained(tmp_path: Path) -> None:
    """Same router and playbook; another router or none is somebody else."""
    root = Path(__file__).parents[2]
    (tmp_path / "playbooks").symlink_to(root / "playbooks")
    (tmp_path / "inventory").mkdir()
    hosts = {}
    for number, router in enumerate(("http://r", "http://R:80/", "http://other", ""), 1):
        entry: dict[str, Any] = {"playbook": "qwen3.6-27b", "port": 30000 + number}
        if router:
            entry["replica"] = {"router": {"url": router}, "drain_s": 77}
        if number == 2:
            entry["worker_url"] = "http://worker:1/"
        hosts[f"h{number}"] = {
            "kind": "plain",
            "ssh": {"address": f"192.0.2.{number}"},
            "gpus": [{"address": "0000:21:00.0"}],
            "deployments": {"m": entry},
        }
    (tmp_path / "inventory/x.yaml").write_text(yaml.safe_dump({"hosts": hosts}))
    one, two, three, four = Catalog.load(tmp_path / "inventory").select([], True)
    assert one.peers == (Peer("h2/m", "http://worker:1"),)
    assert two.peers == (Peer("h1/m", "http://192.0.2.1:30001"),)
    assert three.peers == four.peers == ()
    assert [w.playbook.stop.drain_s for w in (one, two, three, four)] == [77, 77, 77, 0]
    assert two.worker_url == "http://worker:1"


def test_the_names_of_the_steps_are_right() -> None:
    from deployer.steps.order import NAMES

    assert set(replicas.INTERRUPTS) < set(NAMES)
