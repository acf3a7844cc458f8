"""One server on two hosts: started together, one verdict, ended together, whoever is killed.

The hosts are containers with addresses of their own; the ranks meet over the network between them.
The tests run in order.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clones import Clones, environ
from conftest import docker_answers
from lab import eventually
from second import Run

pytestmark = [pytest.mark.container, pytest.mark.long]

NAMES = ("h1", "h2")
SERVER = "[s]glang.launch_server"


class Start(Run):
    """`deploy --jsonl up h1/tiny --yes`."""

    DEADLINE_S = 600.0


class Pair:
    """The two hosts. `old` and `new`: launches that have passed."""

    old = new = ""

    def __init__(self, clones: Clones) -> None:
        self.clones = clones

    def pids(self) -> dict[str, list[int]]:
        """Main processes of servers, by host."""
        return {name: self.clones.guest(name).pids(SERVER) for name in NAMES}

    def status(self) -> dict[str, dict[str, Any]]:
        """What `status` says of each node, and its exit code."""
        done = self.clones.run("status", "--all", "--json")
        hosts = json.loads(done.out)["hosts"]
        return {one["host"]: one["deployments"][0] for one in hosts}

    def launches(self) -> set[str]:
        """Ids of the launches that status names."""
        return {str(one["launch"]) for one in self.status().values()}

    def states(self) -> list[dict[str, Any]]:
        """The recorded deployment of each node."""
        folder = self.clones.folder / ".deploy" / "state"
        texts = [(folder / f"{name}.json").read_text() for name in NAMES]
        return [json.loads(text)["deployments"]["tiny"] for text in texts]

    def arguments(self, flag: str) -> list[bool]:
        """Whether the server of each node was started with this flag."""
        found = []
        for name, pids in self.pids().items():
            [pid] = pids
            line = self.clones.guest(name).sh("tr '\\0' ' ' <\"/proc/$1/cmdline\"", str(pid)).out
            found.append(flag in line.split())
        return found

    def one_good_launch(self) -> None:
        """It runs on both and has passed, by what each node says."""
        assert len(self.launches()) == 1
        assert {(one["state"], one["verdict"]) for one in self.status().values()} == {
            ("serving", "good")
        }

    def kill_at(self, wanted: Callable[[dict[str, Any]], bool], *words: str) -> None:
        """Begins an `up`, or these words, and ends its controller by SIGKILL at this event."""
        os.environ.update(environ())
        start = Start(self.clones.deploy("--jsonl", *(words or ("up", "h1/tiny", "--yes"))))
        assert start.until(wanted) is not None, start.said
        start.signal(signal.SIGKILL)
        assert start.end() == -signal.SIGKILL

    def up(self, *words: str) -> str:
        """To its end, which is good; what it said."""
        done = self.clones.run("up", "h1/tiny", "--yes", *words, timeout_s=600).ok()
        return done.err + done.out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two hosts that serve nothing, and a playbook for both."""
    if not docker_answers():
        pytest.skip("no Docker here")
    clones = Clones(tmp_path_factory.mktemp("nodes"), NAMES, "deployer-nodes")
    clones.book["nodes"] = list(NAMES)
    with clones.started():
        clones.entry = lambda name: {
            "variant": "no-mtp",
            "node_address": clones.at[name].address,
            "url": f"http://{clones.at[name].address}:30000",
        }
        clones.write()
        yield Pair(clones)


def started(host: str) -> Callable[[dict[str, Any]], bool]:
    """The server's job of this host has been started."""
    return lambda one: (
        (one["event"], one["host"], one.get("step"))
        == (
            "job_started",
            host,
            "launch",
        )
    )


def test_started_together_with_one_verdict_and_then_nothing_to_do(pair: Pair) -> None:
    pair.up()
    before = pair.pids()
    assert [len(before[name]) for name in NAMES] == [1, 1]
    assert len(pair.launches()) == 1
    told = pair.status()
    assert {name: (one["state"], one["verdict"]) for name, one in told.items()} == dict.fromkeys(
        NAMES, ("serving", "good")
    )
    said = pair.up()
    assert said.count("changed: nothing") == 2, said
    assert pair.pids() == before


def test_a_killed_rank_ends_the_other_and_up_starts_both_again(pair: Pair) -> None:
    old = pair.launches()
    [rank1] = pair.pids()["h2"]
    pair.clones.guest("h2").sh('kill -9 "$1"', str(rank1)).ok()
    eventually(lambda: pair.pids() == {"h1": [], "h2": []}, "both have ended", 40)
    assert {one["state"] for one in pair.status().values()} == {"ended"}
    pair.up()
    assert len(pair.launches()) == 1 and pair.launches() != old


def test_a_half_of_a_killed_run_is_replaced(pair: Pair) -> None:
    """Rank 0 has ended at once; rank 1 waits for it, and nobody follows them any more."""
    pair.clones.run("down", "h1/tiny", "--yes").ok()
    assert pair.pids() == {"h1": [], "h2": []}
    pair.clones.fault("h1", "server-fails-process-limit")
    try:
        pair.kill_at(started("h1"))
        eventually(lambda: pair.pids()["h1"] == [], "rank 0 has ended", 30)
    finally:
        pair.clones.fault("h1", "server-fails-process-limit", on=False)
    half = pair.pids()
    assert len(half["h2"]) == 1
    said = pair.up()
    assert "changed: stop, launch, verify" in said, said
    now = pair.pids()
    assert len(now["h1"]) == 1 and len(now["h2"]) == 1 and now["h2"] != half["h2"]
    assert len(pair.launches()) == 1


def test_a_whole_launch_of_a_killed_run_is_joined(pair: Pair) -> None:
    pair.clones.run("down", "h1/tiny", "--yes").ok()
    pair.kill_at(started("h1"))
    before = pair.pids()
    assert [len(before[name]) for name in NAMES] == [1, 1]
    pair.up()
    assert pair.pids() == before
    assert {one["verdict"] for one in pair.status().values()} == {"good"}


def test_migrate_refuses_before_anything_is_touched(pair: Pair) -> None:
    before = pair.pids()
    done = pair.clones.run("migrate", "h1", "h2", "--yes")
    assert done.exit == 2, done.err
    [what, fix] = done.err.splitlines()
    assert "a server of several nodes" in what and "is one of them" in what
    assert fix.startswith("  -> `deploy down h1/tiny`")
    assert pair.pids() == before


def test_an_address_that_the_other_does_not_reach_ends_nothing(pair: Pair) -> None:
    """Of a network that is nowhere (RFC 5737): the ranks would wait ten minutes for each other."""
    before, real = pair.pids(), pair.clones.entry
    pair.clones.entry = lambda name: {**real(name), "node_address": "192.0.2.9"}
    pair.clones.write()
    try:
        began = time.monotonic()
        done = pair.clones.run("up", "h1/tiny", "--yes")
    finally:
        pair.clones.entry = real
        pair.clones.write()
    assert done.exit == 1 and time.monotonic() - began < 90, done.err
    assert "rank 0 is not reached at 192.0.2.9:20000" in done.err, done.err
    assert "nothing was stopped" in done.err and "node_address" in done.err
    assert pair.pids() == before


def test_both_go_back_as_one_launch(pair: Pair) -> None:
    pair.old = next(iter(pair.launches()))
    pair.clones.book["serve"]["args"]["log-level"] = "info"
    pair.clones.write()
    pair.up()
    pair.new, before = next(iter(pair.launches())), pair.pids()
    assert pair.new != pair.old and pair.arguments("--log-level") == [True, True]
    # A file of rank 1's is gone meanwhile: what would be fetched is said for each.
    [shard] = pair.clones.guest("h2").sh("ls /srv/models/tiny-hybrid/*.safetensors").out.split()[:1]
    pair.clones.guest("h2").sh('rm "$1"', shard).ok()
    said = pair.clones.run("rollback", "h2/tiny").ok()
    assert f"h1/tiny: goes back to launch {pair.old}" in said.out
    assert "one server of the nodes h1/tiny, h2/tiny" in said.out
    assert "h1: venv: there; weights: there" in said.out, said.out
    assert "h2: venv: there; weights: 1 files to fetch" in said.out, said.out
    told = json.loads(pair.clones.run("--json", "rollback", "h1").ok().out)
    assert (told["to"], told["nodes"]) == (pair.old, ["h1/tiny", "h2/tiny"])
    assert told["choices"][0]["nodes"]["h2"]["weights"].startswith("1 files to fetch")
    plan = pair.clones.run("rollback", "h1/tiny", "--dry-run").ok()
    assert "shards" in plan.out and pair.pids() == before
    pair.clones.run("rollback", "h2/tiny", "--yes", timeout_s=600).ok()
    pair.one_good_launch()
    assert pair.arguments("--log-level") == [False, False]
    pair.clones.guest("h2").sh('test -f "$1"', shard).ok()
    for own in pair.states():
        assert own["rollback"]["outcome"] == "done" and own["rollback"]["left"] == pair.new
        assert own["launches"][-1]["back"]["to"] == pair.old
    again = pair.clones.run("rollback", "h1/tiny", "--yes").ok()
    assert "rolled back to launch" in again.out + again.err
    now = pair.pids()
    for words in (("up", "h2/tiny"), ("restart", "h1")):
        done = pair.clones.run(*words, "--yes")
        assert done.exit == 1 and "rolled back to launch" in done.err, done.err
    assert pair.pids() == now


def test_a_killed_rollback_goes_on_with_the_same_command(pair: Pair) -> None:
    words = ("rollback", "h1/tiny", pair.new, "--yes")
    pair.kill_at(started("h1"), *words)
    before = pair.pids()
    pair.clones.run(*words, timeout_s=600).ok()
    pair.one_good_launch()
    assert pair.pids() == before, "it was joined"
    assert pair.arguments("--log-level") == [True, True]


def test_a_rollback_that_fails_its_gates_brings_back_what_served_on_both(pair: Pair) -> None:
    before = next(iter(pair.launches()))
    pair.clones.fault("h1", "server-degenerate")
    try:
        done = pair.clones.run("rollback", "h1/tiny", pair.old, "--yes", timeout_s=600)
    finally:
        pair.clones.fault("h1", "server-degenerate", on=False)
    assert done.exit == 5, done.err
    assert f"what served before (launch {before}) serves again as launch" in done.err, done.err
    assert pair.arguments("--log-level") == [True, True] and len(pair.launches()) == 1
    assert {own["rollback"]["outcome"] for own in pair.states()} == {"failed"}


def test_down_of_one_node_is_of_all(pair: Pair) -> None:
    done = pair.clones.run("down", "h1/tiny", "--yes").ok()
    assert pair.pids() == {"h1": [], "h2": []}
    assert "h2/tiny" in done.err + done.out
    for name in NAMES:
        assert pair.clones.guest(name).sh("ss -tln | grep -c ':30000 ' || :").out.strip() == "0"
