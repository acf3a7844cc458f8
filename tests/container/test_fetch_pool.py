"""The range worker against a hub on loopback: connections, faults, deaths, limits."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from certs import Authority
from hub import Hub
from proxy import Proxy

from deployer.agents.bundle import fetch_agent

pytestmark = pytest.mark.container
MIB = 1 << 20
PYTHON = ["/usr/bin/python3", "-I", "-S", "fetch.pyz"]
SHARD = "00002-of"
KEYS = {
    *("tick", "bytes", "total", "received", "speed", "mean", "eta", "files_done", "files"),
    *("retries", "stalls", "pause", "moved", "method", "phase", "shards"),
}


class Worker:
    """A worker child in its own folder; its progress lines come through a pipe."""

    def __init__(self, hub: Hub, folder: Path, **manifest: Any) -> None:
        self.hub, self.root, self.job = hub, folder / "model", folder / "job"
        self.job.mkdir(parents=True)
        self.limits = {"backoff_s": 0.05, "recv_timeout_s": 2.0, "slow_window_s": 1.0}
        self.limits |= manifest.pop("limits", {})
        self.manifest = {
            "repo": hub.repo.name,
            "commit": hub.repo.commit,
            "path": str(self.root),
            "endpoint": hub.url,
            "limits": self.limits,
            "files": [
                {"path": name, "size": blob.size, "sha256": blob.sha256 if blob.lfs else ""}
                | {"blob_id": blob.oid}
                for name, blob in hub.repo.blobs.items()
            ],
            **manifest,
        }
        (self.job / "fetch.pyz").write_bytes(fetch_agent())
        self.lines: list[dict[str, Any]] = []
        self.log = ""

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Starts a mode; `end` waits for it."""
        (self.job / "manifest.json").write_text(json.dumps(self.manifest))
        self.reader, writer = os.pipe()
        process = subprocess.Popen(
            [*PYTHON, *words],
            cwd=self.job,
            env={"PATH": "/usr/bin:/bin", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The worker's pipe is descriptor 3, as the supervisor makes it.
            preexec_fn=lambda: os.dup2(writer, 3) and None,
            pass_fds=[3],
        )
        os.close(writer)
        return process

    def end(self, process: subprocess.Popen[str], timeout_s: float = 60) -> int:
        """Its exit code; `log` and `lines` are what it said."""
        data: list[bytes] = []

        def read() -> None:
            while block := os.read(self.reader, 65536):
                data.append(block)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self.log, _ = process.communicate(timeout=timeout_s)
        thread.join(5)
        os.close(self.reader)
        text = b"".join(data).decode()
        self.lines = [json.loads(line) for line in text.split("\n") if line.endswith("}")]
        return process.returncode

    def run(self, *words: str, **env: str) -> int:
        return self.end(self.start(*words, **env))

    def right(self) -> bool:
        """All files, their bytes, and nothing of ours left beside them."""
        names = {str(p.relative_to(self.root)) for p in self.root.rglob("*") if p.is_file()}
        own = {".deployer/verified.json", ".deployer/lock"}
        assert names - own == set(self.hub.repo.blobs), names
        return all(
            hashlib.sha256((self.root / name).read_bytes()).hexdigest() == blob.sha256
            for name, blob in self.hub.repo.blobs.items()
        )

    @property
    def total(self) -> int:
        """Bytes that come from the CDN."""
        return sum(blob.size for blob in self.hub.repo.blobs.values() if blob.lfs)

    @property
    def sent(self) -> int:
        """Bytes of files that the hub sent, small ones left out."""
        sent = self.hub.stats()["sent"]
        return sum(n for name, n in sent.items() if self.hub.repo.blobs[name].lfs)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model of one large shard, made once."""
    return tmp_path_factory.mktemp("big")


@pytest.fixture
def one(big: Path) -> Iterator[Hub]:
    with Hub(big, shards=1, mb=64) as hub:
        yield hub


@pytest.fixture
def hub(big: Path) -> Iterator[Hub]:
    with Hub(big / "small", shards=3, mb=2) as hub:
        yield hub


def shard_of(hub: Hub, match: str = SHARD) -> str:
    return next(name for name in hub.repo.blobs if match in name)


def test_one_file_is_fetched_by_four_connections(one: Hub, tmp_path: Path) -> None:
    one.shared.set["bps"] = 20e6
    worker = Worker(one, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right() and worker.sent == worker.total, "nothing twice"
    # One that ends and the next may overlap at the hub.
    assert 4 <= one.stats()["peak_connections"] <= 6
    last = worker.lines[-1]
    assert set(last) == KEYS and last["method"] == "range"
    assert last["bytes"] == last["total"] == last["received"] and last["files_done"] == 7
    assert any(line["shards"] and line["speed"] > 50e6 for line in worker.lines[1:-1])
    assert not (worker.job / "progress").exists(), "a child tells its supervisor only"


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_costs_a_block_a_connection(one: Hub, tmp_path: Path, seed: int) -> None:
    """The hub is slow, so that next to nothing lies in the kernel's buffers."""
    one.shared.set["bps"] = 8e6
    chance, worker = random.Random(seed), Worker(one, tmp_path)
    deaths = 0
    while True:
        process = worker.start("range")
        try:
            process.wait(chance.uniform(0.4, 1.2))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            deaths += 1
        if worker.end(process) == 0:
            break
        assert process.returncode == -signal.SIGKILL, worker.log
    assert worker.right()
    assert deaths >= 1 and worker.sent - worker.total <= deaths * 4 * MIB


def test_a_stalled_connection_is_named_and_helped(one: Hub, tmp_path: Path) -> None:
    one.faults([{"where": "cdn", "do": "stall", "after": 3 * MIB, "times": 1}])
    worker = Worker(one, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right()
    assert "no byte for 2 s at " in worker.log and "on one connection; reconnecting" in worker.log
    assert f"warning: {shard_of(one, '00001-of')}: no byte" in worker.log
    assert worker.sent <= 1.02 * worker.total


def test_a_server_that_ignores_ranges_gets_one_connection(one: Hub, tmp_path: Path) -> None:
    one.shared.set["bps"] = 30e6
    one.faults(
        [
            {"where": "cdn", "do": "truncate", "at": 0.1, "times": 1},
            {"where": "cdn", "do": "norange"},
        ]
    )
    worker = Worker(one, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right()
    assert "ignored the range" in worker.log
    assert worker.sent <= 1.25 * worker.total, "three connections gave up at once"


def test_a_server_that_refuses_ranges_is_asked_for_the_whole(one: Hub, tmp_path: Path) -> None:
    one.faults([{"where": "cdn", "do": "status", "code": 416, "ranged": True}])
    worker = Worker(one, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right() and worker.sent == worker.total


@pytest.mark.parametrize(
    "fault",
    [
        {"do": "wrongrange", "start": 1},
        {"do": "wrongrange", "total": 1},
        {"do": "wrongrange", "omit": True},
        {"do": "gzip"},
        {"do": "shrink", "at": 0.5},
        {"do": "portal"},
        {"do": "drop"},
        {"do": "chunked", "times": 9},
        {"do": "redirect", "to": "self"},
    ],
    ids=lambda fault: "-".join(str(value) for value in fault.values()),
)
def test_an_answer_that_is_not_ours_is_not_taken(
    one: Hub, tmp_path: Path, fault: dict[str, Any]
) -> None:
    one.faults([{"where": "cdn", "times": 2, **fault}])
    worker = Worker(one, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right()


def test_a_header_that_drips_is_not_waited_for(hub: Hub, tmp_path: Path) -> None:
    hub.faults([{"where": "cdn", "match": SHARD, "do": "slowhead", "bps": 2, "times": 1}])
    worker = Worker(hub, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right() and "was not whole after 2 s" in worker.log


def test_wrong_bytes_are_fetched_once_more_and_then_put_aside(hub: Hub, tmp_path: Path) -> None:
    hub.faults([{"where": "cdn", "match": SHARD, "do": "corrupt", "at": 0.5}])
    name, worker = shard_of(hub), Worker(hub, tmp_path)
    bad = worker.root / f"{name}.bad"
    worker.root.mkdir()
    bad.write_text("of an earlier run")
    assert worker.run("range") == 10
    blob = hub.repo.blobs[name]
    assert worker.lines[-1]["error"].startswith(f"{name}: expected {blob.sha256}, got ")
    assert bad.stat().st_size == blob.size
    assert not (worker.root / name).exists() and not (worker.root / f"{name}.part").exists()
    assert hub.stats()["sent"][name] == 2 * blob.size
    hub.faults([])
    assert worker.run("range") == 0, worker.log
    bad.unlink()
    assert worker.right()


def test_the_whole_pool_waits_when_the_hub_asks_for_it(hub: Hub, tmp_path: Path) -> None:
    busy = {"where": "cdn", "match": SHARD, "do": "status", "code": 429, "retry_after": 2}
    hub.faults([{**busy, "times": 1}])
    hub.shared.set["bps"] = 4e6
    worker = Worker(hub, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right()
    log = hub.stats()["log"]
    refused = next(row["t"] for row in log if row["status"] == 429)
    later = [row["t"] - refused for row in log if row["t"] > refused + 0.3]
    assert later and min(later) >= 1.9
    assert any(line["pause"] >= 1 for line in worker.lines)


def test_an_expired_url_is_asked_for_anew(hub: Hub, tmp_path: Path) -> None:
    hub.shared.set["url_ttl"] = 1.0
    hub.faults([{"where": "cdn", "match": SHARD, "do": "stall", "at": 0.5, "times": 1}])
    worker = Worker(hub, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.right() and worker.sent == worker.total


def test_a_limit_of_bytes_a_second_holds_for_all_connections(hub: Hub, tmp_path: Path) -> None:
    rate = hub.repo.blobs and 2_500_000
    worker = Worker(hub, tmp_path, limits={"bwlimit_bytes_per_s": rate})
    began = time.monotonic()
    assert worker.run("range") == 0, worker.log
    took = time.monotonic() - began
    assert worker.right()
    assert worker.total / rate * 0.9 <= took <= worker.total / rate + 3
    assert all(line["speed"] <= rate * 1.2 for line in worker.lines)


def test_a_mirror_gets_no_token_and_its_refusal_ends_only_the_mirror(
    hub: Hub, tmp_path: Path
) -> None:
    worker = Worker(hub, tmp_path, endpoint="http://127.0.0.1:9")
    assert worker.run("range", hub.url, HF_TOKEN="hf_secret") == 0, worker.log
    assert worker.right()
    assert not any(row["auth"] for row in hub.stats()["log"])
    hub.shared.set["token"] = "hf_secret"
    gated = Worker(hub, tmp_path / "gated", endpoint="http://127.0.0.1:9")
    assert gated.run("range", hub.url, HF_TOKEN="hf_secret") == 14
    mine = Worker(hub, tmp_path / "mine")
    assert mine.run("range", HF_TOKEN="hf_secret") == 0, mine.log
    assert mine.right() and hub.stats()["auth_leaks"] == 0
    assert mine.run("range", HF_TOKEN="hf_wrong") == 0, "complete: nobody is asked"
    other = Worker(hub, tmp_path / "other")
    assert other.run("range", HF_TOKEN="hf_wrong") == 11


def test_tls_through_a_proxy_with_a_password(big: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    bundle = str(authority.bundle)
    with (
        Hub(big / "small", shards=3, mb=2, tls=authority.server()) as hub,
        Proxy("me", "ge@heim") as proxy,
    ):
        worker = Worker(hub, tmp_path / "good", ca_bundle=bundle, proxy=proxy.url)
        assert worker.run("range", HF_TOKEN="hf_secret") == 0, worker.log
        assert worker.right() and proxy.passed > worker.total
        assert hub.stats()["auth_leaks"] == 0
        wrong = f"http://me:falsch@{proxy.address}"
        refused = Worker(hub, tmp_path / "refused", ca_bundle=bundle, proxy=wrong)
        assert refused.run("range") == 11
        untrusted = Worker(hub, tmp_path / "untrusted")
        assert untrusted.run("range") == 16
        said = worker.log + refused.log + untrusted.log
    assert "geheim" not in said and "heim" not in said and "falsch" not in said


def test_a_plain_hub_through_a_proxy(hub: Hub, tmp_path: Path) -> None:
    with Proxy("me", "ge@heim") as proxy:
        worker = Worker(hub, tmp_path, proxy=proxy.url)
        assert worker.run("range") == 0, worker.log
        assert worker.right() and proxy.passed > worker.total and not proxy.refused


def test_what_stands_in_the_way_is_named(hub: Hub, tmp_path: Path) -> None:
    name = shard_of(hub)
    for number, make in enumerate((Path.mkdir, os.mkfifo)):
        for suffix in ("", ".part", ".part.map"):
            worker = Worker(hub, tmp_path / f"{number}{suffix}")
            worker.root.mkdir()
            if suffix == ".part.map":
                (worker.root / f"{name}.part").write_text("begun")
            make(worker.root / (name + suffix))
            assert worker.run("range") == 18, suffix
    other = tmp_path / "precious"
    other.write_text("kept")
    worker = Worker(hub, tmp_path / "link")
    worker.root.mkdir()
    (worker.root / f"{name}.part").symlink_to(other)
    assert worker.run("range") == 18
    assert other.read_text() == "kept"
    worker = Worker(hub, tmp_path / "file")
    worker.root.write_text("a file")
    assert worker.run("range") == 18
    assert worker.root.read_text() == "a file"


def test_what_git_or_a_login_page_left_is_no_beginning(hub: Hub, tmp_path: Path) -> None:
    first, second, third = sorted(name for name, blob in hub.repo.blobs.items() if blob.lfs)
    worker = Worker(hub, tmp_path)
    worker.root.mkdir()
    oid = hub.repo.blobs[first].sha256
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 1\n"
    (worker.root / first).write_text(pointer)
    (worker.root / second).write_text("<!DOCTYPE html><html>log in</html>" * 9)
    assert worker.run("range") == 0, worker.log
    assert worker.sent == worker.total, "fetched twice"
    assert (worker.root / f"{first}.bad").read_text() == pointer
    for name in (first, second):
        (worker.root / f"{name}.bad").unlink()
    assert worker.right()
    begun = (worker.root / third).read_bytes()[: MIB // 2]
    (worker.root / third).write_bytes(begun)
    assert worker.run("range") == 0, worker.log
    assert "resuming" in worker.log and worker.right()


def test_a_connection_that_is_cut_ever_again_ends_when_the_file_does(
    one: Hub, tmp_path: Path
) -> None:
    worker = Worker(one, tmp_path, connections=1, limits={"tries": 2, "backoff_s": 0.01})
    one.faults([{"where": "cdn", "do": "truncate", "after": 4 * MIB}])
    assert worker.run("range") == 0, worker.log
    assert worker.right() and worker.lines[-1]["retries"] > 2


def test_a_complete_model_costs_stats_only(big: Path, tmp_path: Path) -> None:
    with Hub(big / "fifteen", shards=15, mb=1) as hub:
        worker = Worker(hub, tmp_path)
        assert worker.run("range") == 0, worker.log
        asked = len(hub.stats()["log"])
        began = time.monotonic()
        assert worker.run("range") == 0, worker.log
        assert time.monotonic() - began < 1.0
        assert len(hub.stats()["log"]) == asked
        assert worker.lines[-1]["moved"] == 0 and worker.lines[-1]["files_done"] == 21


def test_settle_names_what_is_complete_and_leaves_the_rest(hub: Hub, tmp_path: Path) -> None:
    worker = Worker(hub, tmp_path)
    assert worker.run("range") == 0, worker.log
    (worker.root / ".deployer/verified.json").unlink()
    first, second, third = sorted(name for name, blob in hub.repo.blobs.items() if blob.lfs)
    (worker.root / first).rename(worker.root / f"{first}.part")
    data = (worker.root / second).read_bytes()
    (worker.root / second).unlink()
    (worker.root / f"{second}.part").write_bytes(data[:-1] + b"x")
    data = (worker.root / third).read_bytes()
    (worker.root / third).unlink()
    (worker.root / f"{third}.part").write_bytes(data[:5])
    hub.faults([{"where": "hub", "do": "hang"}])
    assert worker.run("settle") == 0, worker.log
    names = {path.name for path in worker.root.iterdir()}
    assert first in names and f"{first}.part" not in names
    assert f"{second}.bad" in names and not {second, f"{second}.part"} & names
    assert f"{third}.part" in names and third not in names
    record = json.loads((worker.root / ".deployer/verified.json").read_text())["files"]
    assert set(record) == set(hub.repo.blobs) - {second, third}


def test_rehash_believes_nothing(hub: Hub, tmp_path: Path) -> None:
    worker = Worker(hub, tmp_path)
    assert worker.run("range") == 0, worker.log
    assert worker.run("rehash") == 0, worker.log
    assert worker.lines[-1]["moved"] == worker.lines[-1]["total"]
    name = shard_of(hub)
    shard = worker.root / name
    facts = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert worker.run("range") == 0, "the record believes in size and time"
    assert worker.run("rehash") == 10
    rows = {row["path"]: row for row in map(json.loads, worker.log.splitlines())}
    assert set(rows) == set(hub.repo.blobs)
    assert [path for path, row in rows.items() if not row["ok"]] == [name]
    assert rows[name]["expected"] == hub.repo.blobs[name].sha256
    assert rows[name]["got"] == hashlib.sha256(data).hexdigest()
    record = json.loads((worker.root / ".deployer/verified.json").read_text())["files"]
    assert name not in record and shard.exists()
    assert worker.run("rehash", "--quarantine") == 10
    assert not shard.exists() and (worker.root / f"{name}.bad").exists()
    assert worker.run("range") == 0, worker.log
    (worker.root / f"{name}.bad").unlink()
    assert worker.right()


def line_with(worker: Worker, mark: bytes, within_s: float = 20) -> dict[str, Any]:
    """The first progress line with `mark`, read while the worker lives."""
    ends, data = time.monotonic() + within_s, b""
    while time.monotonic() < ends:
        data += os.read(worker.reader, 65536)
        for line in data.split(b"\n")[:-1]:
            if mark in line:
                found: dict[str, Any] = json.loads(line)
                return found
    raise AssertionError(f"no line with {mark!r}: {data[-500:]!r}")


def test_a_hub_that_is_away_for_a_while_costs_no_try(tmp_path: Path) -> None:
    """A router that starts anew: refused connections in the middle, then all is as before."""
    limits = {"idle_tries": 1, "backoff_s": 0.05, "max_backoff_s": 0.3, "max_pause_s": 30}
    with Hub(tmp_path / "data", shards=2, mb=4, bps=800_000.0) as hub:
        port = int(hub.url.rpartition(":")[2])
        worker = Worker(hub, tmp_path, limits=limits)
        process = worker.start("range")
        assert line_with(worker, b'"phase": "downloading"')["tick"] >= 1
        while not line_with(worker, b'"received"')["received"]:
            assert process.poll() is None
    assert line_with(worker, b'"offline": true')["pause"] > 0
    with Hub(tmp_path / "data", port=port, shards=2, mb=4) as back:
        worker.hub = back
        assert worker.end(process) == 0
        assert worker.right()
    assert "is out of reach" in worker.log


def test_a_hub_that_stays_away_is_given_up_in_time(tmp_path: Path) -> None:
    limits = {"idle_tries": 1, "backoff_s": 0.05, "max_backoff_s": 0.3, "max_pause_s": 2}
    with Hub(tmp_path / "data", shards=2, mb=4, bps=800_000.0) as hub:
        worker = Worker(hub, tmp_path, limits=limits)
        process = worker.start("range")
        while not line_with(worker, b'"received"')["received"]:
            assert process.poll() is None
    assert worker.end(process) == 14
    assert "trying again for 2 s" in worker.log
    assert "refused" in worker.log
    assert any(worker.root.glob("*.part")), "the bytes are kept"
