"""Three replicas behind a real smg, rolled one at a time under a client of 50 ms.

The tests run in order: the first `up`, one that has nothing to do, a roll whose controller is
killed twice, a roll that one replica's gates stop.
"""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clones import Clones, environ
from conftest import docker_answers
from lab import eventually
from migratelab import SMG, Background, Client, Router, assert_none_failed
from second import Run

pytestmark = [
    pytest.mark.container,
    pytest.mark.long,
    pytest.mark.skipif(SMG is None, reason="smg is not installed (pip install smg)"),
]

NAMES = ("h1", "h2", "h3")
WATCH_S = 0.05


class Smg(Router):
    """A running smg without workers."""

    def ready(self) -> list[str]:
        """URLs that get requests."""
        return [url for url, status in self.workers().items() if status == "ready"]

    def answers(self) -> bool:
        """Does it answer at all?"""
        try:
            self.workers()
        except OSError:
            return False
        return True


class Watch(Background):
    """How many replicas get requests, all the time; the fewest is kept."""

    def __init__(self, router: Smg) -> None:
        super().__init__()
        self.router, self.fewest = router, len(NAMES)
        self.looks, self.problems = 0, list[str]()

    def work(self) -> None:
        while not self.ended.wait(WATCH_S):
            try:
                self.fewest = min(self.fewest, len(self.router.ready()))
                self.looks += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.problems.append(f"{type(error).__name__}: {error}")

    def assert_two_served(self) -> None:
        """At every look, and it was looked."""
        assert self.problems == [] and self.looks > 50
        assert self.fewest == 2


class Roll(Run):
    """`deploy --jsonl up --all --yes`."""

    DEADLINE_S = 600.0


class Box:
    """The hosts, the router, and what is wanted."""

    def __init__(self, clones: Clones, router: Smg) -> None:
        self.clones, self.router = clones, router

    def want(self, **args: Any) -> None:
        """Other arguments from now on."""
        self.clones.book["serve"]["args"].update(args)
        self.clones.write()

    def roll(self) -> Roll:
        """Started."""
        os.environ.update(environ())
        return Roll(self.clones.deploy("--jsonl", "up", "--all", "--yes"))

    def kill_at(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Begins a roll and ends its controller by SIGKILL at this event."""
        roll = self.roll()
        seen = roll.until(wanted)
        assert seen is not None, roll.said
        roll.signal(signal.SIGKILL)
        assert roll.end() == -signal.SIGKILL
        return seen

    def urls(self, *names: str) -> set[str]:
        """As the router lists them."""
        return {f"http://{self.clones.at[name].address}:30000" for name in names}

    def argv(self, name: str) -> str:
        """The command line of its server."""
        pids = self.clones.guest(name).pids("[s]glang.launch_server")
        assert pids, f"no server on {name}"
        return self.clones.guest(name).read(f"/proc/{pids[0]}/cmdline").replace("\0", " ")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Three hosts that serve nothing, and a router without workers."""
    if not docker_answers():
        pytest.skip("no Docker here")
    folder = tmp_path_factory.mktemp("replicas")
    router = Smg(folder)
    try:
        clones = Clones(folder, NAMES, "deployer-replicas")
        eventually(router.answers, "the router listens", 20)
        with clones.started():
            clones.entry = lambda name: {
                "variant": "no-mtp",
                "url": f"http://{clones.at[name].address}:30000",
                "replica": {"router": {"url": router.url}, "drain_s": 20},
            }
            clones.write()
            yield Box(clones, router)
    finally:
        os.killpg(router.process.pid, signal.SIGKILL)
        router.process.wait()


def at(event: str, step: str, host: str = "") -> Callable[[dict[str, Any]], bool]:
    """The event of this kind and step, of any host or one."""
    return lambda one: (
        (one["event"], one.get("step")) == (event, step) and one["host"] in (host or one["host"],)
    )


def test_those_that_have_passed_are_put_into_the_router(box: Box) -> None:
    done = box.clones.run("up", "--all", "--yes", timeout_s=600).ok()
    assert "3 of 3 deployments done" in done.err + done.out
    assert set(box.router.ready()) == box.urls(*NAMES)
    before = [box.argv(name) for name in NAMES]
    again = box.clones.run("up", "--all", "--yes").ok()
    assert (again.err + again.out).count("changed: nothing") == 3
    assert [box.argv(name) for name in NAMES] == before


def test_two_serve_at_any_time_though_the_controller_is_killed_twice(box: Box) -> None:
    box.want(**{"max-running-requests": 8})
    with Client(box.router) as client, Watch(box.router) as watch:
        first = box.kill_at(at("step_started", "launch"))["host"]
        assert set(box.router.ready()) == box.urls(*(n for n in NAMES if n != first))
        # It has passed and gets no requests yet.
        assert box.kill_at(at("step_done", "verify", first))["host"] == first
        roll = box.roll()
        order = []
        for event in roll:
            if at("step_started", "stop")(event):
                order.append(event["host"])
            if at("step_done", "verify")(event) and event["host"] != first:
                assert not box.urls(event["host"]) & set(box.router.ready())
        assert roll.end() == 0, roll.said
    assert_none_failed(client)
    watch.assert_two_served()
    assert set(order) == set(NAMES) - {first} and len(order) == 2
    assert set(box.router.ready()) == box.urls(*NAMES)
    for name in NAMES:
        assert "--max-running-requests 8" in box.argv(name)


def test_failed_gates_of_one_stop_the_roll_and_the_others_serve(box: Box) -> None:
    box.want(**{"max-running-requests": 4})
    box.clones.fault("h2", "server-degenerate")
    try:
        with Client(box.router) as client, Watch(box.router) as watch:
            roll = box.roll()
            assert roll.end() == 5, roll.said
    finally:
        box.clones.fault("h2", "server-degenerate", on=False)
    assert_none_failed(client)
    watch.assert_two_served()
    ended = {one["host"]: one for one in roll.named("run_finished")}
    assert (ended["h1"]["exit_code"], ended["h2"]["exit_code"]) == (0, 5)
    assert "not started: the replica h2/tiny failed" in ended["h3"]["summary"]
    assert "--max-running-requests 4" in box.argv("h1")
    for name in ("h2", "h3"):
        assert "--max-running-requests 8" in box.argv(name)
    # What passed before serves there again, and gets requests.
    assert set(box.router.ready()) == box.urls(*NAMES)
    # The same command does not go on to the others either: h2 has failed with this wish.
    same = box.clones.run("up", "--all", "--yes", timeout_s=600)
    assert same.exit == 5, same.err
    assert "h3/tiny: not started: the replica h2/tiny failed" in same.err
    assert "--max-running-requests 8" in box.argv("h3")
    done = box.clones.run("up", "--all", "--yes", "--retry", timeout_s=600)
    assert done.exit == 0, done.err
    for name in NAMES:
        assert "--max-running-requests 4" in box.argv(name)
