"""One server on two hosts: started together, one verdict, ended together, whoever is killed.

The hosts are containers with addresses of their own; the ranks meet over the network between them.
The tests run in order.
"""

from __future__ import annotations

import json
import os
import signal
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
    """The two hosts."""

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

    def kill_at(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Begins an `up` and ends its controller by SIGKILL at this event."""
        os.environ.update(environ())
        start = Start(self.clones.deploy("--jsonl", "up", "h1/tiny", "--yes"))
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


def test_rollback_and_migrate_refuse_before_anything_is_touched(pair: Pair) -> None:
    before = pair.pids()
    for words in (("rollback", "h1/tiny"), ("migrate", "h1", "h2")):
        done = pair.clones.run(*words, "--yes")
        assert done.exit == 2, done.err
        [what, fix] = done.err.splitlines()
        assert "a server of several nodes" in what and "is one of them" in what
        assert fix.startswith("  -> ")
    assert pair.pids() == before


def test_down_of_one_node_is_of_all(pair: Pair) -> None:
    done = pair.clones.run("down", "h1/tiny", "--yes").ok()
    assert pair.pids() == {"h1": [], "h2": []}
    assert "h2/tiny" in done.err + done.out
    for name in NAMES:
        assert pair.clones.guest(name).sh("ss -tln | grep -c ':30000 ' || :").out.strip() == "0"
