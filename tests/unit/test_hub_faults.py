"""Every way in which the lab's hub misbehaves, and how it counts what it sent."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

# The client puts the hub's folder on the path.
from hubclient import SHARD, ask, cdn_url, connect, content, partial, resolve  # isort: skip
from faults import ACTIONS, PRESETS, Request, checked, read_presets
from hub import Hub, preset
from shared import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def hub(data: Path) -> Iterator[Hub]:
    with Hub(data, shards=3, mb=1) as hub:
        yield hub


# ---- names
def test_every_action_has_a_named_fault_and_every_name_a_line() -> None:
    parts = [part for one in PRESETS.values() for part in one.parts]
    assert {part["do"] for part in parts if "do" in part} == ACTIONS
    assert {key for part in parts for key in part.get("set", {})} <= set(DEFAULTS)
    for name, one in PRESETS.items():
        assert re.fullmatch(r"hub-[a-z0-9-]+", name) and one.text and one.parts, name


def test_lab_sh_reads_the_same_table() -> None:
    """`lab.sh faults` greps the names; one that it misses nobody can switch on."""
    table = (ROOT / "docker" / "hub" / "faults.txt").read_text()
    assert re.findall(r"^(hub-\S+)", table, re.M) == list(PRESETS)
    assert "grep '^hub-' \"$here/hub/faults.txt\"" in (ROOT / "docker" / "lab.sh").read_text()


@pytest.mark.parametrize(
    "fault", [{"do": "explode"}, {"do": "stall", "afer": 3}, {"do": "stall", "match": "("}]
)
def test_a_fault_that_means_nothing_is_refused(hub: Hub, fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        checked(fault)
    assert ask(f"{hub.url}/_faults", "POST", [fault])[0] == 400


def test_a_table_of_faults(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('# note\n\nhub-a  one two\n  {"do": "hang"}\n  {"set": {"bps": 1}}\n')
    one = read_presets(path)["hub-a"]
    assert (one.text, one.parts) == ("one two", ({"do": "hang"}, {"set": {"bps": 1}}))


def test_a_fault_of_one_client_strikes_no_other(hub: Hub) -> None:
    """The lab's two hosts use one hub; each has its own faults."""
    faults = hub.shared.faults

    def struck(client: str) -> object:
        return faults.pick(Request("cdn", "GET", "m-00002-of-3", True, True, None, client)).get(
            "do"
        )

    faults.replace(["hub-cdn-503"], "127.0.0.2")
    faults.replace(["hub-hang"], "localhost")
    assert struck("127.0.0.3") is None
    assert struck("127.0.0.2") == "status"
    faults.replace(["hub-xet"], "localhost")  # a name, and a setting, which holds for all
    assert [fault["client"] for fault in faults.now()] == ["127.0.0.2"]
    assert faults.settings == {"xet": True}
    faults.replace([], "127.0.0.2")
    assert (faults.now(), faults.settings) == ([], {"xet": True})
    faults.replace([], "localhost")
    assert faults.settings == {}


def test_settings_of_a_fault_end_with_it(hub: Hub) -> None:
    hub.faults(["hub-gated"])
    assert resolve(hub)[0] == 401
    assert resolve(hub, Authorization="Bearer hf_lab")[0] == 302
    hub.faults([])
    assert resolve(hub)[0] == 302


# ---- ends of a connection
@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("hub-stall-once", "TimeoutError"),
        ("hub-reset", "ConnectionResetError"),
        ("hub-short", "short"),
        ("hub-drip", "TimeoutError"),
    ],
)
def test_a_cut_in_the_middle_sends_exactly_up_to_the_cut_once(
    hub: Hub, name: str, end: str
) -> None:
    hub.faults(preset(name, match=SHARD))
    url, whole = cdn_url(hub), content(hub)
    half = int(0.5 * len(whole))
    got, how = partial(url, half if end == "TimeoutError" else len(whole))
    assert (got, how) == (whole[:half], end)
    assert hub.stats()["sent"][SHARD] == half
    assert ask(url, Range=f"bytes={half}-")[2] == whole[half:]
    assert hub.stats()["faults"][0]["hits"] == 1


def test_each_connection_gets_only_1_mib(data: Path) -> None:
    with Hub(data / "large", shards=3, mb=3) as hub:
        hub.faults(preset("hub-stall-each-mb", match=SHARD))
        url, whole, got = cdn_url(hub), content(hub), b""
        for _ in range(2):
            got += partial(url, 1 << 20, Range=f"bytes={len(got)}-")[0]
        assert got == whole[: 2 << 20]


def test_drip_goes_on_a_little(hub: Hub) -> None:
    hub.faults([{"where": "cdn", "do": "drip", "after": 0, "bps": 1000}])
    at = urlsplit(cdn_url(hub))
    conn = connect(hub.url)
    conn.port = at.port or 0
    conn.request("GET", f"{at.path}?{at.query}")
    assert conn.getresponse().read(100) == content(hub)[:100]
    conn.close()


@pytest.mark.parametrize("name", ["hub-hang", "hub-slow-headers"])
def test_no_answer_of_the_cdn(hub: Hub, name: str) -> None:
    hub.faults(preset(name, match=SHARD))
    assert partial(cdn_url(hub)) == (b"", "TimeoutError")


def test_slow_headers_never_pause(hub: Hub) -> None:
    hub.faults(preset("hub-slow-headers", match=SHARD, bps=50))
    at = urlsplit(cdn_url(hub))
    with socket.create_connection((at.hostname, at.port), timeout=5) as conn:
        conn.sendall(f"GET {at.path}?{at.query} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        data = b""
        while len(data) < 60:
            data += conn.recv(1)
    assert data.startswith(b"HTTP/1.1 200 OK\r\nX-Slow: xxxx")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("hub-head-hang", "acme/tiny-hybrid/resolve/main/model-00003-of-00003.safetensors"),
        ("hub-info-hang", "api/models/acme/tiny-hybrid/revision/main"),
        ("hub-info-hang", "api/models/acme/tiny-hybrid/tree/main"),
        ("hub-xet-token-hang", "api/models/acme/tiny-hybrid/xet-read-token/main"),
    ],
)
def test_no_answer_of_the_hub(hub: Hub, name: str, path: str) -> None:
    hub.faults([name])
    assert partial(f"{hub.url}/{path}") == (b"", "TimeoutError")
    hub.faults([])
    assert ask(f"{hub.url}/{path}", "HEAD")[0] in (200, 302, 404)


# ---- statuses
@pytest.mark.parametrize(
    ("name", "codes"),
    [("hub-busy", [429, 429, 429, 200]), ("hub-cdn-503", [503, 200])],
)
def test_status_of_the_cdn(hub: Hub, name: str, codes: list[int]) -> None:
    hub.faults([name])
    url = cdn_url(hub)
    answers = [ask(url) for _ in codes]
    assert [one[0] for one in answers] == codes
    assert answers[0][1].get("retry-after") == ("1" if codes[0] == 429 else None)


@pytest.mark.parametrize(
    ("name", "path", "codes"),
    [
        ("hub-head-503", f"acme/tiny-hybrid/resolve/main/{SHARD}", [503, 302]),
        ("hub-tree-429", "api/models/acme/tiny-hybrid/tree/main", [429, 429, 200]),
        ("hub-info-429", "api/models/acme/tiny-hybrid/revision/main", [429, 429, 200]),
        ("hub-info-503", "api/models/acme/tiny-hybrid/revision/main", [503, 200]),
    ],
)
def test_status_of_the_hub(hub: Hub, name: str, path: str, codes: list[int]) -> None:
    hub.faults([name])
    assert [ask(f"{hub.url}/{path}", "HEAD")[0] for _ in codes] == codes


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("hub-resume-500", [500, 206]),
        ("hub-resume-416", [416, 416]),
        ("hub-no-range", [200, 200]),
    ],
)
def test_a_resumption_goes_wrong_only_after_the_cut(hub: Hub, name: str, codes: list[int]) -> None:
    hub.faults([name])
    url, size = cdn_url(hub), len(content(hub))
    assert ask(url, Range="bytes=0-9")[0] == 206
    assert partial(url, size)[1] == "short"
    answers = [ask(url, Range=f"bytes={size // 2}-") for _ in codes]
    assert [one[0] for one in answers] == codes
    if name == "hub-no-range":
        assert answers[0][2] == content(hub)


# ---- lies
def test_a_byte_is_wrong_once_and_always(hub: Hub) -> None:
    url, whole = cdn_url(hub), content(hub)
    half = int(0.5 * len(whole))
    hub.faults(preset("hub-corrupt", match=SHARD))
    bodies = [ask(url)[2] for _ in range(2)]
    assert [i for i in range(len(whole)) if bodies[0][i] != whole[i]] == [half]
    assert bodies[1] == whole
    hub.faults(preset("hub-corrupt-always", match=SHARD))
    for _ in range(2):
        assert ask(url, Range=f"bytes={half - 1}-{half + 1}")[2] != whole[half - 1 : half + 2]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hub-wrong-start", "bytes 4196-{last}/{size}"),
        ("hub-wrong-total", "bytes 100-{last}/{more}"),
        ("hub-no-content-range", None),
    ],
)
def test_a_206_for_something_else(hub: Hub, name: str, says: str | None) -> None:
    hub.faults([name])
    url, whole = cdn_url(hub), content(hub)
    size = len(whole)
    assert partial(url, size)[1] == "short"
    status, fields, body = ask(url, Range="bytes=100-")
    wanted = says and says.format(last=size - 1, size=size, more=size + 1)
    assert (status, fields.get("content-range")) == (206, wanted)
    assert body == whole[4196 if name == "hub-wrong-start" else 100 :]


def test_a_compressed_answer(hub: Hub) -> None:
    hub.faults(["hub-gzip"])
    status, fields, body = ask(cdn_url(hub))
    assert (status, fields["content-encoding"]) == (200, "gzip")
    assert gzip.decompress(body) == content(hub)


def test_chunks_without_a_length(hub: Hub) -> None:
    hub.faults(["hub-chunked"])
    status, fields, body = ask(cdn_url(hub), Range="bytes=1000-")
    assert (status, body) == (206, content(hub)[1000:])
    assert "content-length" not in fields
    assert hub.stats()["sent"][SHARD] == len(body)


def test_half_a_file_that_is_called_whole(hub: Hub) -> None:
    hub.faults(["hub-shrunk"])
    half = len(content(hub)) // 2
    assert ask(cdn_url(hub))[2] == content(hub)[:half]
    status, fields, _ = ask(cdn_url(hub), Range="bytes=10-")
    assert (status, fields["content-range"]) == (206, f"bytes 10-{half - 1}/{half}")
    assert ask(cdn_url(hub))[2] == content(hub)


def test_no_answer_at_all_and_the_wrong_one(hub: Hub) -> None:
    hub.faults(["hub-drop"])
    assert partial(cdn_url(hub), 1) == (b"", "RemoteDisconnected")
    hub.faults(["hub-portal"])
    for path in ("api/models/acme/tiny-hybrid", f"acme/tiny-hybrid/resolve/main/{SHARD}"):
        status, fields, body = ask(f"{hub.url}/{path}")
        assert (status, fields["content-type"]) == (200, "text/html")
        assert b"Log in" in body
    hub.faults([])
    assert ask(f"{hub.url}/api/models/acme/tiny-hybrid")[1]["content-type"] == "application/json"


def test_another_version_and_an_expired_url(hub: Hub) -> None:
    before = resolve(hub)[1]["x-linked-etag"]
    hub.faults(["hub-other-version"])
    assert resolve(hub)[1]["x-linked-etag"] != before
    hub.faults([{"set": {"url_ttl": 0.1}}, *preset("hub-url-expires", match=SHARD, secs=0.2)[1:]])
    url = cdn_url(hub)
    assert partial(url, len(content(hub)))[1] == "short"
    assert ask(url, Range="bytes=9-")[0] == 403


def test_redirects(hub: Hub) -> None:
    hub.faults(["hub-redirect-loop"])
    assert resolve(hub)[1]["location"] == f"/acme/tiny-hybrid/resolve/main/{SHARD}"
    hub.faults(["hub-redirect-elsewhere"])
    for name in (SHARD, "config.json"):
        where = resolve(hub, name)[1]["location"]
        assert urlsplit(where).port == (urlsplit(hub.url).port or 0) + 1
        assert ask(where)[2] == content(hub, name)
    assert hub.stats()["auth_leaks"] == 0
    ask(where, Authorization="Bearer hf_x")
    assert hub.stats()["auth_leaks"] == 1


# ---- counting
def test_a_client_that_leaves_is_counted_for_what_the_kernel_took(data: Path) -> None:
    with Hub(data / "wide", shards=3, mb=24) as hub:
        at, size = urlsplit(cdn_url(hub)), len(content(hub))
        with socket.create_connection((at.hostname, at.port), timeout=5) as conn:
            conn.sendall(f"GET {at.path}?{at.query} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
            conn.recv(1000)
        deadline = time.monotonic() + 5
        while hub.shared.live and time.monotonic() < deadline:
            time.sleep(0.01)
        sent = hub.stats()["sent"][SHARD]
    assert 0 < sent < size


def test_clients_are_told_apart(data: Path) -> None:
    with Hub(data, shards=3, mb=1, host="0.0.0.0") as hub:
        for address in ("127.0.0.1", "127.0.0.2"):
            url = cdn_url(hub).replace("127.0.0.1", address)
            at = urlsplit(url)
            conn = http.client.HTTPConnection(address, at.port, 5, (address, 0))
            conn.request("GET", f"{at.path}?{at.query}", headers={"Range": "bytes=0-99"})
            assert len(conn.getresponse().read()) == 100
            conn.close()
        assert hub.stats()["clients"] == {"127.0.0.1": 100, "127.0.0.2": 100}
        raw = ask(f"{hub.url}/_stats?client=127.0.0.2&log=0")[2]
        one = json.loads(raw)
    assert (one["sent_total"], one["log"]) == (100, [])


def test_a_rate_is_kept(hub: Hub) -> None:
    hub.shared.set["bps"] = 1_000_000.0
    url, began = cdn_url(hub), time.monotonic()
    assert len(ask(url, Range="bytes=0-299999")[2]) == 300_000
    assert time.monotonic() - began > 0.25


def test_a_hub_that_stops_ends_its_connections(data: Path) -> None:
    with Hub(data, shards=3, mb=1) as hub:
        hub.faults([{"where": "cdn", "do": "stall", "after": 10}])
        at = urlsplit(cdn_url(hub))
        conn = connect(hub.url)
        conn.port = at.port or 0
        conn.request("GET", f"{at.path}?{at.query}")
        got = conn.getresponse()
        assert got.read(10) == content(hub)[:10]
    assert got.read1(10) == b""
    conn.close()
