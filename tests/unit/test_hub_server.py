"""The lab's hub: protocol, valid weights, faults."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

# The client puts the hub's folder on the path.
from hubclient import SHARD, ask, cdn_url, partial  # isort: skip
import tiny_model
from hub import Hub, byte_range, preset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def hub(data: Path) -> Iterator[Hub]:
    with Hub(data, shards=3, mb=1) as hub:
        yield hub


def test_shards_are_valid_and_match_the_index(hub: Hub) -> None:
    index = json.loads(hub.repo.blobs["model.safetensors.index.json"].path.read_bytes())
    seen, total = {}, 0
    for name, blob in hub.repo.blobs.items():
        if not name.endswith(".safetensors"):
            continue
        raw = blob.path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        header.pop("__metadata__")
        ends = sorted(tuple(t["data_offsets"]) for t in header.values())
        assert ends[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
        assert 8 + size + ends[-1][1] == len(raw)
        total += ends[-1][1]
        seen.update({tensor: name for tensor in header})
    assert seen == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_size_flags_are_met(tmp_path: Path) -> None:
    names = tiny_model.build(tmp_path, 6, 4)
    shards = [(tmp_path / n).stat().st_size for n in names if n.endswith(".safetensors")]
    assert len(shards) == 6
    assert abs(sum(shards) - (24 << 20)) < 1 << 20
    assert min(shards) > 1 << 20


def test_model_info_tree_and_resolve_agree(hub: Hub) -> None:
    status, _, raw = ask(f"{hub.url}/api/models/acme/tiny-hybrid/revision/main?blobs=true")
    info = json.loads(raw)
    assert (status, info["sha"]) == (200, hub.repo.commit)
    rows = {s["rfilename"]: s for s in info["siblings"]}
    _, _, raw = ask(f"{hub.url}/api/models/acme/tiny-hybrid/tree/{info['sha']}?recursive=true")
    assert {r["path"] for r in json.loads(raw)} == set(rows)
    status, head, _ = ask(f"{hub.url}/acme/tiny-hybrid/resolve/{info['sha']}/{SHARD}", "HEAD")
    assert status == 302
    assert head["x-linked-etag"].strip('"') == rows[SHARD]["lfs"]["sha256"]
    assert int(head["x-linked-size"]) == rows[SHARD]["size"]
    assert head["x-repo-commit"] == info["sha"]
    status, head, _ = ask(f"{hub.url}/acme/tiny-hybrid/resolve/main/config.json")
    assert (status, head["x-linked-etag"]) == (307, f'"{rows["config.json"]["blobId"]}"')
    status, _, raw = ask(hub.url + head["location"])
    oid = hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    assert (status, oid) == (200, rows["config.json"]["blobId"])


def test_the_cdn_has_the_name_the_client_used_and_the_next_port(hub: Hub) -> None:
    url = f"{hub.url}/acme/tiny-hybrid/resolve/main/{SHARD}"
    _, head, _ = ask(url, "HEAD", Host="hub.example:8900")
    at = urlsplit(head["location"])
    assert (at.hostname, at.port) == ("hub.example", urlsplit(hub.url).port + 1)  # type: ignore[operator]


def test_ranges(hub: Hub) -> None:
    url, blob = cdn_url(hub), hub.repo.blobs[SHARD]
    whole = blob.path.read_bytes()
    assert ask(url)[2] == whole
    status, head, body = ask(url, Range="bytes=1000-")
    assert (status, body) == (206, whole[1000:])
    assert head["content-range"] == f"bytes 1000-{blob.size - 1}/{blob.size}"
    assert ask(url, Range="bytes=5-9")[2] == whole[5:10]
    status, head, _ = ask(url, Range=f"bytes={blob.size}-")
    assert (status, head["content-range"]) == (416, f"bytes */{blob.size}")


@pytest.mark.parametrize(
    ("value", "want"),
    [(None, (0, 9)), ("bytes=3-", (3, 9)), ("bytes=-4", (6, 9)), ("bytes=10-", None)],
)
def test_byte_range(value: str | None, want: tuple[int, int] | None) -> None:
    assert byte_range(value, 10) == want


def test_expired_and_forged_urls_are_refused(hub: Hub) -> None:
    assert ask(cdn_url(hub)[:-1] + "!")[0] == 403
    hub.shared.set["url_ttl"] = -1.0
    status, _, body = ask(cdn_url(hub))
    assert (status, b"expired" in body) == (403, True)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("api/models/acme/other", "RepoNotFound"),
        ("api/models/acme/tiny-hybrid/revision/v9", "RevisionNotFound"),
        ("acme/tiny-hybrid/resolve/main/none.txt", "EntryNotFound"),
    ],
)
def test_what_is_not_there(hub: Hub, path: str, code: str) -> None:
    status, head, _ = ask(f"{hub.url}/{path}")
    assert (status, head["x-error-code"]) == (404, code)


def test_a_gated_repository(hub: Hub) -> None:
    ask(f"{hub.url}/_set", "POST", {"token": "hf_good"})
    url = f"{hub.url}/acme/tiny-hybrid/resolve/main/{SHARD}"
    status, head, _ = ask(url, "HEAD")
    assert (status, head["x-error-code"]) == (401, "GatedRepo")
    hub.shared.set["denied"] = "hf_other"
    status, head, _ = ask(url, "HEAD", Authorization="Bearer hf_other")
    assert (status, head["x-error-code"]) == (403, "GatedRepo")
    status, head, _ = ask(url, "HEAD", Authorization="Bearer hf_unknown")
    assert (status, head["x-error-message"]) == (401, "Invalid credentials in Authorization header")
    assert ask(url, "HEAD", Authorization="Bearer hf_good")[0] == 302
    check = f"{hub.url}/api/models/acme/tiny-hybrid/auth-check"
    assert ask(check)[0] == 401
    assert ask(f"{hub.url}/api/models/acme/tiny-hybrid")[0] == 200  # the listing stays public


def test_tokens_that_reach_the_cdn_are_counted(hub: Hub) -> None:
    ask(cdn_url(hub), Authorization="Bearer hf_x")
    assert hub.stats()["auth_leaks"] == 1


def test_hub_stall_is_silent_at_60_percent_twice_then_well(hub: Hub) -> None:
    hub.faults(preset("hub-stall", match=SHARD))
    url, blob = cdn_url(hub), hub.repo.blobs[SHARD]
    cut = int(0.6 * blob.size)
    for _ in range(2):
        assert partial(url, cut) == (blob.path.read_bytes()[:cut], "TimeoutError")
    assert ask(url, Range="bytes=0-9")[0] == 206  # does not reach the cut: neither hit nor counted
    assert ask(url)[2] == blob.path.read_bytes()
    assert hub.stats()["gets"][SHARD] == 4


def test_control_refuses_what_it_does_not_know(hub: Hub) -> None:
    assert ask(f"{hub.url}/_set", "POST", {"colour": "red"})[0] == 400
    assert ask(f"{hub.url}/_faults", "POST", ["no-such-preset"])[0] == 400
    assert ask(f"{hub.url}/_faults", "POST", ["hub-stall"])[0] == 200
    assert ask(f"{hub.url}/_reset", "POST")[0] == 200
    assert hub.stats()["faults"] == []


def test_many_at_once(hub: Hub) -> None:
    url, whole, bad = cdn_url(hub), hub.repo.blobs[SHARD].path.read_bytes(), []

    def fetch() -> None:
        if ask(url)[2] != whole:
            bad.append(1)

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad
