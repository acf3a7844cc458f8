"""The router's API: what its answers mean, and what is asked in which order."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from deployer import router_door
from deployer.errors import StepBlocked, StepFailed, Unreachable
from deployer.inventory import RouterCutover
from deployer.names import same_url
from deployer.router import Router, posted
from deployer.router_door import (
    HereDoor,
    Reply,
    ThereDoor,
    doors,
    key_for,
    reply,
)
from deployer.router_worker import Worker, at, parse_worker

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
    """A router of either kind as a door; `pending` additions come up after so many looks.

    smg lists what is taken out as draining for so many looks, and refuses it until then.
    """

    def __init__(self, kind: str, **workers: str) -> None:
        self.kind = kind
        self.rows: dict[str, dict[str, Any]] = {
            url: self.row(id_, url) for id_, url in workers.items()
        }
        self.pending: dict[str, int] = {}
        self.draining: dict[str, int] = {}
        self.asked: list[str] = []
        self.posted: list[Any] = []
        self.comes_after = 2
        self.drains_for = 3

    @staticmethod
    def row(id_: str, url: str) -> dict[str, Any]:
        return {"id": id_, "url": url, "is_healthy": True, "load": 1}

    def look(self) -> list[dict[str, Any]]:
        for url in list(self.pending):
            self.pending[url] -= 1
            if self.pending[url] <= 0:
                del self.pending[url]
                self.rows[url] = self.row(f"id-{url[-7]}", url)
        for url in list(self.draining):
            self.draining[url] -= 1
            if self.draining[url] <= 0:
                del self.draining[url]
                self.rows.pop(url, None)
        rows = list(self.rows.values())
        return [{"status": "ready", **row} for row in rows] if self.kind == "smg" else rows

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        self.asked.append(f"{method} {path}")
        if (method, path) == ("GET", "/workers"):
            return Reply(200, {"workers": self.look()})
        if method == "POST":
            url = body["url"]
            self.posted.append(body)
            if url in self.rows and self.kind == "smg":
                return reply(409, SMG_EXISTS.replace(ID, self.rows[url]["id"]).encode())
            self.pending.setdefault(url, self.comes_after)
            return Reply(202, {"worker_id": f"id-{url[-7]}"})
        if method == "DELETE":
            for url, row in list(self.rows.items()):
                if path.endswith(f"/{row['id']}"):
                    self.leave(url, row)
                    return Reply(202, {})
            return Reply(404, None)
        return Reply(404, None)

    def leave(self, url: str, row: dict[str, Any]) -> None:
        if self.kind == "smg":
            row |= {"status": "draining", "is_healthy": False}
            self.draining[url] = self.drains_for
        else:
            del self.rows[url]


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
    assert pending == Worker(ID, A, (), False, "pending", 0, "processing") and not pending.ready
    draining = parse_worker(json.loads(SMG_DRAINING))
    assert draining is not None and draining.draining and draining.load == 1 and not draining.ready
    ready = parse_worker(json.loads(ROUTER_READY))
    assert ready is not None and ready.ready and ready.models == ("tiny",)
    assert parse_worker({"url": 5}) is None and parse_worker([]) is None
    failed = parse_worker({"url": A, "job_status": {"status": "failed", "message": "no /health"}})
    assert failed is not None and failed.failed and failed.why == "no /health"
    # smg 1.1 has no model_id; what could not be asked is called unknown.
    row = {"url": A, "models": [{"id": "tiny"}, {"id": "unknown"}], "worker_type": "decode"}
    older = parse_worker({**row, "priority": 7, "cost": 2})
    assert older is not None and older.models == ("tiny",) and older.kind == "decode"
    assert (older.priority, older.cost) == (7, 2.0)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (A + "/", True),
        ("192.0.2.5:30000", True),
        ("HTTP://192.0.2.5:30000", True),
        ("http://192.0.2.5:30001", False),
        ("https://192.0.2.5:30000", False),
        (B, False),
    ],
)
def test_same_url(other: str, same: bool) -> None:
    assert same_url(A, other) is same


def test_an_address_has_one_form() -> None:
    assert same_url("http://[2001:DB8::5]:1", "http://[2001:db8:0::5]:1")
    assert same_url("http://Kpro5.:80/", "http://kpro5")
    assert posted("HTTP://Kpro5:1/") == "http://Kpro5:1" and posted("kpro5:1") == "http://kpro5:1"


def test_ranks_and_a_second_spelling_are_one_server() -> None:
    """--dp-aware lists URL@RANK; a slash more is another worker."""
    ranks = [Worker("0", f"{A}@0", (), True), Worker("1", f"{A}@1", (), False)]
    whole = at(ranks, A)
    assert whole is not None and whole.id == "1" and not whole.ready
    assert at([ranks[0]], A) == ranks[0] and ranks[0].ranked
    both = [Worker("0", f"{A}/", (), False), Worker("1", A, (), True)]
    found = at(both, A)
    assert found is not None and found.ready
    left = [Worker("0", A, (), False, "draining"), Worker("1", A, (), False, "pending")]
    found = at(left, A)
    assert found is not None and found.id == "1"
    assert at(left, B) is None


@pytest.mark.parametrize("kind", ["smg", "router"])
def test_in_then_out_then_in_again_at_once(kind: str) -> None:
    """What drains cannot be added: it is asked for again until it can."""
    fake = Fake(kind, old=A)
    one, clock = router(fake)
    waits: list[str] = []
    ready = one.take_in(B + "/", 10, lambda what, spent, limit: waits.append(what))
    assert ready.url == B and waits
    assert one.take_out(A, 5, quiet)
    if kind == "smg":
        fake.asked.clear()
        assert one.remove(A)
        assert fake.asked == ["GET /workers"]  # a second DELETE is not sent
        fake.draining[A] = 20
    ids: list[str] = []
    assert one.take_in(A, 30, quiet, noted=ids.append).ready
    if kind == "smg":
        posts = sum(asked.startswith("POST") for asked in fake.asked)
        assert 3 <= posts <= 5 and ids[0] == "old" and ids[-1] == "id-5:30000"[:4]
        assert 3 <= clock.at < 9
    assert one.take_out(B, 5, quiet) and not one.take_out("http://192.0.2.9:1", 5, quiet)


def test_both_spellings_go() -> None:
    fake = Fake("router", one=A)
    fake.rows[f"{A}/"] = Fake.row("two", f"{A}/")
    one, _ = router(fake)
    assert one.take_out(A, 5, quiet) and fake.rows == {}


def test_ranks_of_an_older_router_go_by_the_id_of_their_url() -> None:
    """sglang-router 0.3.2 accepts DELETE of a rank and does nothing."""

    class Ranks(Fake):
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            if method == "DELETE" and path == f"/workers/{ID}":
                self.rows.clear()
            elif method == "DELETE":
                self.asked.append(f"{method} {path}")
                return Reply(202, {})
            elif method == "POST":
                return Reply(202, {"worker_id": ID})
            return super().ask(method, path, body)

    fake = Ranks("router", r0=f"{A}@0", r1=f"{A}@1")
    one, clock = router(fake)
    assert one.take_out(A, 10, quiet) and fake.rows == {} and clock.at < 5
    deleted = [asked for asked in fake.asked if "DELETE" in asked]
    assert deleted[:2] == ["DELETE /workers/r0", "DELETE /workers/r1"]
    assert deleted[-1] == f"DELETE /workers/{ID}"


def test_ranks_that_drain_are_not_added_before_they_are_gone() -> None:
    """smg 1.8 would take the addition, and drop it with the old ranks."""
    fake = Fake("smg", r0=f"{A}@0")
    one, clock = router(fake)
    assert one.take_out(A, 5, quiet)
    fake.draining[f"{A}@0"] = 12
    assert one.take_in(A, 30, quiet).ready
    assert fake.asked.index("POST /workers") > 12 and clock.at >= 2.75


@pytest.mark.parametrize("kind", ["smg", "router"])
def test_one_that_is_there_is_no_error(kind: str) -> None:
    one, _ = router(Fake(kind, **{ID: A}))
    assert one.add(A) == (ID if kind == "smg" else "id-5:30000"[:4])
    assert one.take_in(A, 5, quiet).ready


def test_what_takes_a_place_gets_its_names_priority_and_cost() -> None:
    fake = Fake("smg")
    one, _ = router(fake)
    one.add(A, api_key="k", like=Worker("", B, ("alias", "b"), priority=7))
    one.add(B, like=Worker("", A))
    assert fake.posted == [
        {
            **{"url": A, "api_key": "k", "model_id": "alias", "priority": 7, "cost": 1.0},
            "models": [{"id": "alias"}, {"id": "b"}],
        },
        {"url": B},
    ]


class Slow(Fake):
    """An addition that never comes about; what the router says of it."""

    tells = SMG_PENDING

    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        if path.startswith("/workers/") and method == "GET":
            self.asked.append(f"{method} {path}")
            return reply(200 if self.tells else 404, self.tells.encode())
        return super().ask(method, path, body)


def test_one_that_never_gets_healthy_is_told_with_its_reason() -> None:
    fake = Slow("smg")
    fake.comes_after = 10**9
    one, clock = router(fake)
    with pytest.raises(StepFailed, match="did not become healthy in 3 s: processing"):
        one.take_in(A, 3, quiet)
    assert 3 <= clock.at < 4
    assert len(fake.posted) == 1, "the router is at it"


@pytest.mark.parametrize(
    "tells", ["", '{"url": "x", "job_status": {"status": "failed", "message": "no /health"}}']
)
def test_what_the_router_gave_up_is_asked_for_again(tells: str) -> None:
    """It was started again, or has tried for four seconds only."""
    fake = Slow("router")
    fake.tells, fake.comes_after = tells, 10**9
    one, _ = router(fake)
    with pytest.raises(StepFailed, match="no /health" if tells else "not listed"):
        one.take_in(A, 9, quiet)
    assert len(fake.posted) == 5


def test_a_router_that_is_started_again_meanwhile_is_waited_for() -> None:
    class Restarted(Fake):
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            if 2 <= clock.at < 8:
                self.rows.clear()
                self.pending.clear()
                raise Unreachable("connection refused")
            return super().ask(method, path, body)

    fake = Restarted("smg")
    fake.comes_after = 20
    one, clock = router(fake)
    assert one.take_in(A, 60, quiet).ready and len(fake.posted) > 1 and clock.at > 8

    dark = Restarted("smg")
    one, clock = router(dark)
    clock.at = 3
    with pytest.raises(Unreachable):
        one.take_in(A, 60, quiet)
    assert clock.at == 3, "one that never answered is not waited for"


def test_a_proxy_whose_router_is_down_is_no_other_thing() -> None:
    class Proxy:
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            return reply(502, b"<html>Bad Gateway</html>")

    one, _ = router(Proxy())
    with pytest.raises(Unreachable, match="status 502"):
        one.workers()


def test_a_router_of_before_the_worker_api_is_told() -> None:
    class Old:
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            return reply(404, b"")

    one, _ = router(Old())
    with pytest.raises(StepFailed, match="GET /workers: status 404") as caught:
        one.workers()
    assert "Before 0.2" in caught.value.fix


def test_a_router_that_puts_it_back_is_told() -> None:
    class Discovery(Fake):
        def leave(self, url: str, row: dict[str, Any]) -> None:
            pass

    one, clock = router(Discovery("router", old=A))
    with pytest.raises(StepFailed, match="still lists") as caught:
        one.take_out(A, 5, quiet)
    assert "service discovery" in caught.value.fix and 5 <= clock.at < 6


def test_an_addition_that_is_not_listed_is_taken_back_by_its_id() -> None:
    fake = Fake("router")
    fake.rows["hidden"] = Fake.row(ID, "hidden")
    one, _ = router(fake)
    assert one.remove(A, ID)
    assert fake.asked[-1] == f"DELETE /workers/{ID}"
    assert not one.remove(A)


def test_an_id_of_another_kind_of_router_is_not_there() -> None:
    """sglang-router 0.2 has URLs as ids; smg refuses them as no UUID."""

    class Uuids(Fake):
        def ask(self, method: str, path: str, body: Any = None) -> Reply:
            if method == "DELETE":
                return reply(400, b'{"error":"Invalid worker_id","code":"BAD_REQUEST"}')
            return super().ask(method, path, body)

    one, _ = router(Uuids("smg"))
    assert not one.take_out(A, 5, quiet, A)


def test_a_wait_ends_early_when_its_tick_says_so() -> None:
    def dead(what: str, spent: float, limit: float) -> None:
        raise StepFailed("the server is gone")

    fake = Fake("router")
    fake.comes_after = 10**9
    one, _ = router(fake)
    with pytest.raises(StepFailed, match="gone"):
        one.take_in(A, 3, dead)


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


class Odd(BaseHTTPRequestHandler):
    """What may listen where a router is looked for; the path chooses."""

    seen: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        kind = self.path.split("/")[1]
        if kind == "ssh":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
            return
        self.send_response(302 if kind == "moved" else 200)
        if kind == "moved":
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        if kind == "cut":
            self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * (200 if kind == "large" else 1))

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def odd() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("there", [False, True])
def test_what_is_no_router_is_told_from_here_and_from_a_target(
    odd: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.local_transport import LocalTransport

    monkeypatch.setattr(router_door, "MOST", 100)
    Odd.seen.clear()

    def door(path: str) -> Any:
        url, key = odd + path, "s3cret"
        return (
            ThereDoor(LocalTransport(os.environ["PATH"]), url, key) if there else HereDoor(url, key)
        )

    for path, said in (("/ssh", "SSH-2.0"), ("/large", "more than")):
        with pytest.raises(Unreachable, match=said):
            door(path).ask("GET", "/workers")
    assert door("/cut").ask("GET", "/workers") == Reply(200, None, "x")
    moved = door("/moved").ask("GET", "/workers")
    assert moved.status == 302, "the key is not carried to another address"
    assert Odd.seen == ["Bearer s3cret"] * 4


def test_a_key_is_never_shown() -> None:
    rules = RouterCutover(url="http://r:1", api_key_env="KEY")
    for value, said in (("", "is not set"), ("s3cret\n", "line breaks"), ("schlüssel", "letters")):
        with pytest.raises(StepBlocked, match=said) as caught:
            key_for(rules, {"KEY": value})
        assert not value or value.strip() not in str(caught.value)
    assert key_for(rules, {"KEY": "k"}) == "k"
    assert key_for(RouterCutover(url="http://r:1"), {}) == ""


def test_another_host_is_asked_when_one_is_dark() -> None:
    from tests.local_transport import ScriptedTransport

    class Dark(ScriptedTransport):
        def run(self, script: str, **words: Any) -> Any:
            raise Unreachable("no route to host", where="kpro5")

    dark, well = Dark(""), ScriptedTransport(json.dumps({"status": 200, "text": "{}"}))
    rules = RouterCutover(url="http://10.0.0.1:3000", via="host")
    assert doors(rules, "", [dark, well]).ask("GET", "/workers").status == 200
    with pytest.raises(Unreachable, match="no route"):
        doors(rules, "", [dark, dark]).ask("GET", "/workers")
    # 127.0.0.1 of another host is another router.
    own = RouterCutover(url="http://localhost:3000", via="host")
    with pytest.raises(Unreachable):
        doors(own, "", [dark, well]).ask("GET", "/workers")
    assert isinstance(doors(RouterCutover(url="http://r"), "", []), HereDoor)


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://192.0.2.5:30000", True),
        ("https://router.example/api/", True),
        ("http://[2001:db8::5]:1", True),
        ("192.0.2.5:30000", False),
        ("http://user:secret@router", False),
        ("http://router?key=1", False),
        ("http://router:99999", False),
        ("http://rou ter", False),
        ("ftp://router", False),
        ("http://", False),
    ],
)
def test_a_url_is_checked_when_the_inventory_is_loaded(url: str, good: bool) -> None:
    if good:
        assert RouterCutover(url=url).url == url
    else:
        with pytest.raises(ValidationError):
            RouterCutover(url=url)


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
