"""The router's API: what its answers mean, and what is asked in which order."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deployer.errors import StepFailed, Unreachable
from deployer.router import (
    HereDoor,
    Reply,
    Router,
    ThereDoor,
    Worker,
    parse_worker,
    reply,
    same_url,
)

A, B = "http://192.0.2.5:30000", "http://192.0.2.6:30000"
ID = "01a22c50-25b4-7156-b8d2-e14eef530f9e"
# smg 1.13.0, shortened.
SMG_PENDING = (
    f'{{"id":"{ID}","url":"{A}","worker_type":"regular","is_healthy":false,"status":"pending",'
    f'"load":0,"job_status":{{"job_type":"AddWorker","status":"processing","message":null}}}}'
)
SMG_DRAINING = f'{{"id":"{ID}","url":"{A}","is_healthy":false,"status":"draining","load":1}}'
SMG_EXISTS = (
    f'{{"error":"Worker already exists at URL \'{A}\' with ID {ID}. Use PUT /workers/{ID} to '
    'replace","code":"WORKER_ALREADY_EXISTS"}'
)
# sglang-router 0.3.2, shortened.
ROUTER_READY = f'{{"id":"{ID}","url":"{A}","model_id":"tiny","is_healthy":true,"load":0}}'


class Fake:
    """A router of either kind as a door; `pending` additions come up after so many looks."""

    def __init__(self, kind: str, **workers: str) -> None:
        self.kind = kind
        self.rows: dict[str, dict[str, Any]] = {
            url: self.row(id_, url) for id_, url in workers.items()
        }
        self.pending: dict[str, int] = {}
        self.asked: list[str] = []
        self.comes_after = 2

    @staticmethod
    def row(id_: str, url: str) -> dict[str, Any]:
        return {"id": id_, "url": url, "is_healthy": True, "load": 1}

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        self.asked.append(f"{method} {path}")
        if (method, path) == ("GET", "/workers"):
            for url in list(self.pending):
                self.pending[url] -= 1
                if self.pending[url] <= 0:
                    del self.pending[url]
                    self.rows[url] = self.row(f"id-{url[-7]}", url)
            rows = list(self.rows.values())
            if self.kind == "smg":
                rows = [{"status": "ready", **row} for row in rows]
            return Reply(200, {"workers": rows})
        if method == "POST":
            url = body["url"]
            if url in self.rows and self.kind == "smg":
                return reply(409, SMG_EXISTS.encode())
            self.pending.setdefault(url, self.comes_after)
            return Reply(202, {"worker_id": f"id-{url[-7]}"})
        if method == "DELETE":
            for url, row in self.rows.items():
                if path.endswith(f"/{row['id']}"):
                    if self.kind == "smg":
                        row |= {"status": "draining", "is_healthy": False}
                    else:
                        del self.rows[url]
                    return Reply(202, {})
            return Reply(404, None)
        return Reply(404, None)


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def router(fake: Any) -> tuple[Router, Clock]:
    clock = Clock()
    return Router(fake, "http://router", now=clock.now, sleep=clock.sleep), clock


def quiet(what: str, spent: float, limit: float) -> None:
    pass


def test_what_a_row_means() -> None:
    pending = parse_worker(json.loads(SMG_PENDING))
    assert pending == Worker(ID, A, "", False, "pending", 0, "processing") and not pending.ready
    draining = parse_worker(json.loads(SMG_DRAINING))
    assert draining is not None and draining.draining and draining.load == 1 and not draining.ready
    ready = parse_worker(json.loads(ROUTER_READY))
    assert ready is not None and ready.ready and ready.model == "tiny"
    assert parse_worker({"url": 5}) is None and parse_worker([]) is None


@pytest.mark.parametrize(
    ("other", "same"),
    [(A + "/", True), ("192.0.2.5:30000", True), ("http://192.0.2.5:30001", False), (B, False)],
)
def test_same_url(other: str, same: bool) -> None:
    assert same_url(A, other) is same


@pytest.mark.parametrize("kind", ["smg", "router"])
def test_in_then_out(kind: str) -> None:
    fake = Fake(kind, old=A)
    one, clock = router(fake)
    waits: list[str] = []
    worker_id = one.add(B + "/")
    ready = one.await_ready(B, worker_id, 10, lambda what, spent, limit: waits.append(what))
    assert ready.url == B and waits
    assert one.remove(A)
    assert one.await_out(A, 5, quiet, drained=False)
    if kind == "smg":
        assert not one.await_out(A, 5, quiet, drained=True)
        assert clock.at >= 5
        fake.asked.clear()
        assert one.remove(A)
        assert fake.asked == ["GET /workers"]  # a second DELETE is not sent
    else:
        assert one.await_out(A, 5, quiet, drained=True)
        assert not one.remove(A)


@pytest.mark.parametrize("kind", ["smg", "router"])
def test_one_that_is_there_is_no_error(kind: str) -> None:
    one, _ = router(Fake(kind, **{ID: A}))
    assert one.add(A) == (ID if kind == "smg" else "id-5:30000"[:4])


def test_one_that_never_gets_healthy_is_told_with_its_reason() -> None:
    class Dead(Fake):
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            if path.startswith("/workers/"):
                return reply(200, SMG_PENDING.encode())
            return super().ask(method, path, body)

    fake = Dead("smg")
    fake.comes_after = 10**9
    one, clock = router(fake)
    with pytest.raises(StepFailed, match="did not become healthy in 3 s: processing"):
        one.await_ready(A, ID, 3, quiet)
    assert 3 <= clock.at < 4


def test_an_addition_that_is_not_listed_is_taken_back_by_its_id() -> None:
    fake = Fake("router")
    fake.rows["hidden"] = Fake.row(ID, "hidden")
    one, _ = router(fake)
    assert one.remove(A, ID)
    assert fake.asked[-1] == f"DELETE /workers/{ID}"
    assert not one.remove(A)


def test_a_wait_ends_early_when_its_tick_says_so() -> None:
    def dead(what: str, spent: float, limit: float) -> None:
        raise StepFailed("the server is gone")

    fake = Fake("router")
    fake.comes_after = 10**9
    one, _ = router(fake)
    with pytest.raises(StepFailed, match="gone"):
        one.await_ready(A, "", 3, dead)


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.workers(),
        lambda one: one.add(A),
    ],
)
def test_something_else_is_not_taken_for_a_router(call: Callable[[Router], object]) -> None:
    class Web:
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            return reply(200 if method == "GET" else 401, b"<html>hello</html>")

    one, _ = router(Web())
    with pytest.raises(StepFailed) as caught:
        call(one)
    assert caught.value.evidence == ("<html>hello</html>",)


def test_a_router_that_is_not_there() -> None:
    with pytest.raises(Unreachable, match="does not answer"):
        HereDoor("http://127.0.0.1:9").ask("GET", "/workers")


def test_from_a_target_the_key_goes_by_stdin() -> None:
    from tests.local_transport import ScriptedTransport

    there = ScriptedTransport(json.dumps({"status": 202, "text": '{"worker_id":"x"}'}))
    door = ThereDoor(there, "http://10.0.0.1:3000/", "s3cret")
    assert door.ask("POST", "/workers", {"url": A}) == Reply(
        202, {"worker_id": "x"}, '{"worker_id":"x"}'
    )
    [call] = there.calls
    assert "s3cret" not in call.script + "".join(call.args)
    asked = json.loads(call.stdin)
    assert asked["url"] == "http://10.0.0.1:3000/workers" and asked["key"] == "s3cret"
    dark = ScriptedTransport(json.dumps({"status": 0, "text": "refused"}), name="kpro5")
    with pytest.raises(Unreachable, match="refused"):
        ThereDoor(dark, "http://10.0.0.1:3000").ask("GET", "/workers")
    broken = ScriptedTransport("", name="kpro5")
    with pytest.raises(StepFailed, match="could not be asked"):
        ThereDoor(broken, "http://10.0.0.1:3000").ask("GET", "/workers")
