"""The CAS of the lab's hub: a file is put together from its xorbs as the protocol says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The client puts the hub's folder on the path.
from hubclient import SHARD, ask, content, partial, resolve  # isort: skip
from hub import Hub, preset
from repo import CHUNK, XORB


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def hub(data: Path) -> Iterator[Hub]:
    """The shards are of more than one xorb."""
    with Hub(data, shards=3, mb=20, xet=True) as hub:
        yield hub


def token(hub: Hub) -> tuple[str, str]:
    """The CAS's url and the header that opens it."""
    status, fields, raw = ask(f"{hub.url}/api/models/acme/tiny-hybrid/xet-read-token/main")
    assert status == 200
    assert json.loads(raw)["casUrl"] == fields["x-xet-cas-url"]
    return fields["x-xet-cas-url"], f"Bearer {fields['x-xet-access-token']}"


def plan(hub: Hub, name: str = SHARD, **fields: str) -> dict[str, Any]:
    cas, auth = token(hub)
    url = f"{cas}/v1/reconstructions/{hub.repo.blobs[name].xet}"
    status, _, raw = ask(url, Authorization=auth, headers=fields)
    assert status == 200, raw
    return json.loads(raw)  # type: ignore[no-any-return]


def chunks(xorb: bytes) -> list[bytes]:
    out = []
    while xorb:
        version, packed, scheme = xorb[0], int.from_bytes(xorb[1:4], "little"), xorb[4]
        assert (version, scheme) == (0, 0)
        assert int.from_bytes(xorb[5:8], "little") == packed
        out.append(xorb[8 : 8 + packed])
        xorb = xorb[8 + packed :]
    return out


def fetch(answer: dict[str, Any], n: int) -> list[bytes]:
    """The chunks of the n-th term."""
    term = answer["terms"][n]
    (info,) = answer["fetch_info"][term["hash"]]
    span = info["url_range"]
    status, _, raw = ask(info["url"], Range=f"bytes={span['start']}-{span['end']}")
    assert status == 206
    got = chunks(raw)
    assert len(got) == info["range"]["end"] - info["range"]["start"]
    assert sum(map(len, got)) == term["unpacked_length"]
    return got


def test_a_file_from_its_xorbs(hub: Hub) -> None:
    answer = plan(hub)
    assert len(answer["terms"]) == 2
    got = b"".join(part for n in range(2) for part in fetch(answer, n))
    assert got == content(hub)
    assert hub.stats()["auth_leaks"] == 0


def test_a_range_of_a_file_and_of_a_xorb(hub: Hub) -> None:
    at = XORB + 3 * CHUNK + 5
    answer = plan(hub, Range=f"bytes={at}-{at + 9}")
    assert (len(answer["terms"]), answer["offset_into_first_range"]) == (1, at - XORB)
    assert b"".join(fetch(answer, 0))[at - XORB :][:10] == content(hub)[at : at + 10]
    (info,) = answer["fetch_info"][answer["terms"][0]["hash"]]
    whole = ask(info["url"])[2]
    for first, last in ((0, 0), (7, 8), (CHUNK, CHUNK + 20), (3 * CHUNK + 11, 5 * CHUNK)):
        got = ask(info["url"], Range=f"bytes={first}-{last}")[2]
        assert got == whole[first : last + 1], (first, last)


def test_headers_lead_to_the_cas_and_go_when_xet_is_off(hub: Hub) -> None:
    fields = resolve(hub)[1]
    assert fields["x-xet-hash"] == hub.repo.blobs[SHARD].xet
    assert fields["x-xet-refresh-route"] in fields["link"]
    tree = f"{hub.url}/api/models/acme/tiny-hybrid/tree/main"
    rows = {row["path"]: row for row in json.loads(ask(tree)[2])}
    assert rows[SHARD]["xetHash"] == hub.repo.blobs[SHARD].xet
    assert "xetHash" not in rows["config.json"]
    hub.shared.set["xet"] = False
    assert "x-xet-hash" not in resolve(hub)[1]
    assert ask(f"{hub.url}/api/models/acme/tiny-hybrid/xet-read-token/main")[0] == 404


def test_who_may_ask(hub: Hub) -> None:
    cas, auth = token(hub)
    path = f"reconstructions/{hub.repo.blobs[SHARD].xet}"
    assert ask(f"{cas}/v1/{path}")[0] == 401
    assert ask(f"{cas}/v1/{path}", Authorization=auth + "0")[0] == 401
    assert ask(f"{cas}/v2/{path}", Authorization=auth)[0] == 404
    assert ask(f"{cas}/v1/reconstructions/{'0' * 64}", Authorization=auth)[0] == 404
    status, fields, _ = ask(f"{cas}/v1/{path}", Authorization=auth, Range="bytes=99999999-")
    assert (status, fields["content-range"][:8]) == (416, "bytes */")
    hub.shared.set["token"] = "hf_good"
    assert ask(f"{hub.url}/api/models/acme/tiny-hybrid/xet-read-token/main")[0] == 401


def test_a_token_of_the_hub_at_the_cas_is_a_leak(hub: Hub) -> None:
    cas, _ = token(hub)
    url = f"{cas}/v1/reconstructions/{hub.repo.blobs[SHARD].xet}"
    assert ask(url, Authorization="Bearer hf_secret")[0] == 401
    assert hub.stats()["auth_leaks"] == 1
    answer = plan(hub)
    (info,) = answer["fetch_info"][answer["terms"][0]["hash"]]
    ask(info["url"], Range="bytes=0-9", Authorization="Bearer x")
    assert hub.stats()["auth_leaks"] == 2


def test_xorb_urls_expire(hub: Hub) -> None:
    hub.shared.set["url_ttl"] = -1.0
    answer = plan(hub)
    (info,) = answer["fetch_info"][answer["terms"][0]["hash"]]
    assert ask(info["url"])[0] == 403


def test_a_stall_in_a_xorb(hub: Hub) -> None:
    hub.faults(preset("hub-xet-stall", match=SHARD, times=1))
    answer = plan(hub)
    (info,) = answer["fetch_info"][answer["terms"][0]["hash"]]
    size = info["url_range"]["end"] + 1
    data, how = partial(info["url"], size // 2)
    assert (len(data), how) == (size // 2, "TimeoutError")
    hub.faults([])
    assert len(ask(info["url"])[2]) == size


def test_corrupt_at_counts_over_all_xorbs(hub: Hub) -> None:
    hub.faults(preset("hub-xet-corrupt", match=SHARD, at=0.9))
    answer, whole = plan(hub), content(hub)
    got = [part for n in range(2) for part in fetch(answer, n)]
    wrong = [i for i, part in enumerate(got) if part != whole[i * CHUNK : (i + 1) * CHUNK]]
    assert wrong == [int(0.9 * len(whole)) // CHUNK]
    xorbs = [row for row in hub.stats()["log"] if "/xorbs/" in row["path"]]
    assert [row["fault"] for row in xorbs] == [None, "corrupt"]
