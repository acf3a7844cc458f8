"""Whether the nodes can meet, before anything ends for a launch of all."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from nodesworld import HOSTS, RANKS, serving
from serverworld import IDENTITY, fact, facts, server_job, state

from deployer.deployment import Deployment
from deployer.model import Facts
from deployer.multinode_meet import KNOCK, LISTEN, heard, verdict
from deployer.remote.transport import Answer
from deployer.state import Launch


class Met:
    """A node as `verdict` looks at it."""

    def __init__(self, want: Deployment, seen: Facts) -> None:
        self.want, self.host, self.facts, self.own = want, want.host_name, seen, state()


@pytest.mark.parametrize(
    ("mine", "theirs", "runs", "host", "told"),
    [
        ("listened", "met", False, "", ""),
        ("taken 98", "open", True, "", ""),
        ("taken 98", "lost refused", False, "kpro5", "20000, is taken on rank 0 (98)"),
        ("taken 98", "lost timed out", True, "kpro6", "is not reached at 192.0.2.5:20000: timed"),
        ("listened", "lost No route to host", False, "kpro6", "No route to host; nothing was"),
        ("listened", "open", False, "kpro6", "answers something else than rank 0 on kpro5"),
        ("", "lost refused", False, "kpro6", "not reached"),
        ("listened", "", False, "", ""),
    ],
)
def test_whether_nodes_can_meet(mine: str, theirs: str, runs: bool, host: str, told: str) -> None:
    nodes: Any = [Met(RANKS[0], serving(RANKS[0]) if runs else facts(fact()))]
    nodes.append(Met(RANKS[1], facts(fact())))
    said = {
        name: heard(Answer(0, f"noise\n{word}\n".encode(), b"no python3"))
        for name, word in zip(HOSTS, (mine, theirs), strict=True)
    }
    problems = verdict(nodes, said)
    assert list(problems) == ([host] if host else [])
    assert not host or told in problems[host].what, problems[host].what


def test_what_a_dead_launch_of_ours_left_on_the_port_is_for_the_stop_to_end() -> None:
    dead = dataclasses.replace(
        server_job(RANKS[0]), alive=False, exit="signal 9", members=(501, 502)
    )
    nodes: Any = [Met(RANKS[0], facts(fact(job=dead))), Met(RANKS[1], facts(fact()))]
    words = ("taken 98", "open")
    said = {
        name: heard(Answer(0, word.encode(), b"")) for name, word in zip(HOSTS, words, strict=True)
    }
    assert verdict(nodes, said) == {}


def test_a_knock_is_heard_and_what_is_in_its_place_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        listen = [sys.executable, "-I", "-c", LISTEN]
        knock = [sys.executable, "-I", "-c", KNOCK]

        def run(*words: str) -> str:
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout

        # Its own loopback is taken by another server, which says nothing.
        assert run(*listen, port, "1", "1", "w").startswith("taken ")
        assert run(*knock, "127.0.0.1", port, "1", "w", "0.1") == "open\n"
    assert run(*knock, "127.0.0.1", port, "0.1", "w", "5").startswith("lost ")
    assert "lost" in run(*knock, "no-such-host.invalid", port, "1", "w", "5")
    server = subprocess.Popen([*listen, port, "5", "1", "w"], stdout=subprocess.PIPE, text=True)
    assert run(*knock, "127.0.0.1", port, "5", "w", "5") == "met\n"
    assert server.communicate(timeout=5)[0] == "listened\n"


def test_a_rank_left_waiting_does_not_use_up_the_knock() -> None:
    """It tries rank 0's port again and again, and says nothing of the kind."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = [sys.executable, "-I", "-c"]
    server = subprocess.Popen(
        [*python, LISTEN, str(port), "10", "1", "w"], stdout=subprocess.PIPE, text=True
    )
    ends = time.monotonic() + 5
    while True:
        try:
            left = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < ends
    with left:
        assert left.recv(1) == b"w"
        knock = [*python, KNOCK, "127.0.0.1", str(port), "5", "w", "5"]
        assert subprocess.run(knock, capture_output=True, text=True).stdout == "met\n"
    assert server.communicate(timeout=5)[0] == "listened\n"


def test_a_stranger_on_the_port_is_not_taken_for_the_server_that_runs() -> None:
    """It meets elsewhere: serve.dist_port was changed to a port that somebody has."""
    nodes: Any = [Met(RANKS[0], serving(RANKS[0])), Met(RANKS[1], serving(RANKS[1]))]
    said = {"kpro5": heard(Answer(0, b"taken 98", b"")), "kpro6": heard(Answer(0, b"open", b""))}
    for port, told in ((20000, []), (20100, ["kpro5"])):
        argv = ["py", "--dist-init-addr", f"192.0.2.5:{port}"]
        nodes[0].own.launches = [Launch(id=IDENTITY.id, variant="mtp", started=1.0, argv=argv)]
        assert list(verdict(nodes, said)) == told
