"""One server of two nodes on this machine: real jobs, the look-alike's ranks, one verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]
from serverworld import MANIFEST, deployment, facts  # noqa: E402
from test_gates_fallback import Moved  # noqa: E402
from test_lookalike import base, environment  # noqa: E402, F401

from deployer import (  # noqa: E402
    multinode,
    multinode_back,
    multinode_launch,
    multinode_node,
    multinode_work,
)
from deployer.deployment import Deployment, Node  # noqa: E402
from deployer.down import Down  # noqa: E402
from deployer.engine import Engine, Outcome, Selection  # noqa: E402
from deployer.events import Bus, Event  # noqa: E402
from deployer.kept import Kept  # noqa: E402
from deployer.model import Facts, PlanState, ProbeOutput, Where  # noqa: E402
from deployer.multinode_back import NodesBack  # noqa: E402
from deployer.observe import deployment_document  # noqa: E402
from deployer.remote.jobs import Jobs  # noqa: E402
from deployer.rollback import RollBack, made_of, then  # noqa: E402
from deployer.rollback_choice import part_of  # noqa: E402
from deployer.rollback_steps import rollback_steps  # noqa: E402
from deployer.state import DeploymentState, HostState  # noqa: E402
from deployer.state_file import StateFile  # noqa: E402
from deployer.steps.base import Step, StepContext  # noqa: E402
from deployer.steps.launch import LaunchStep  # noqa: E402
from deployer.steps.server_facts import ServerFact, parse_server, server_script_text  # noqa: E402
from deployer.steps.serving_fact import serving_probe  # noqa: E402
from deployer.steps.stop import StopStep  # noqa: E402
from deployer.steps.verify import VerifyStep  # noqa: E402
from deployer.up_options import UpOptions  # noqa: E402
from deployer.up_result import DeploymentResult  # noqa: E402
from tests.local_transport import shell_path  # noqa: E402

pytestmark = pytest.mark.long

HOSTS = ("kpro5", "kpro6")


class Session:
    """The double of HostSession: this machine, with a folder a node in place of a host."""

    guests: dict[str, Moved]

    def __init__(self, host: str, *words: Any) -> None:
        self.host = host

    def transports(self, want: Deployment) -> Mapping[Where, Moved]:
        return dict.fromkeys(Where, self.guests[self.host])

    def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
        return look(self.guests[self.host], want)

    def want_lock(self, run_id: str) -> None:
        """Nobody else is here."""

    def entered(self, step: str) -> None:
        """Nobody asks."""

    def wake(self) -> None:
        """Nothing to close."""

    def close(self, on_problem: Callable[[str], None]) -> None:
        """Nothing to close."""


def look(guest: Moved, want: Deployment) -> Facts:
    probe = serving_probe(want)
    found: list[object] = []
    for script, parse in ((server_script_text(want), parse_server), (probe.script, probe.parse)):
        answer = guest.run(script, timeout_s=30)
        found.append(parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr)))
    return facts(*found)


def free_port() -> int:
    """Below those that the kernel gives to outgoing connections: none of these comes before us."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest - 12000, lowest)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


class World:
    """Two nodes, each with its folder, its venv, its faults and its port."""

    def __init__(self, base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        self.folder, self.events = folder, list[Event]()
        self.guests, self.wants = dict[str, Moved](), list[Deployment]()
        init = f"127.0.0.1:{free_port()}"
        for rank, host in enumerate(HOSTS):
            here = folder / host
            self._venv(base, here)
            want = deployment(
                model={"path": str(base / "model")},
                nodes=list(HOSTS),
                engine={"venv": str(here / "venv")},
                serve={
                    "args": {"tp-size": 2, "context-length": 4096, "reasoning-parser": "qwen3"},
                    "ready_timeout_s": 60,
                },
                variants=[{"name": "one"}],
                stop={"grace_s": 1},
                gates={
                    "request_timeout_s": 20,
                    "alive_after_s": 0,
                    "parallel": 2,
                    "burst": 2,
                    "long_prompt_tokens": 0,
                    "context_edge": False,
                    "thinking": "default",
                    "min_tokens": 40,
                    "max_tokens": 120,
                },
            )
            entry = want.entry.model_copy(update={"port": free_port()})
            node = Node(rank, HOSTS, init)
            self.wants.append(dataclasses.replace(want, host_name=host, entry=entry, node=node))
            self.guests[host] = Moved(shell_path("dash", here))
            self.guests[host].root = str(here / "jobs")
        monkeypatch.setattr(Session, "guests", self.guests, raising=False)
        monkeypatch.setattr(multinode_node, "HostSession", Session)
        monkeypatch.setattr(
            StepContext,
            "jobs",
            lambda self, where: Jobs(self.on(where), self.on(where).root),
        )
        for host in HOSTS:
            own = HostState(host=host, deployments={"qwen": DeploymentState(manifest=MANIFEST)})
            self.state_file(host).save(own)

    def _venv(self, base: Path, here: Path) -> None:  # noqa: F811
        venv = here / "venv" / "bin"
        venv.mkdir(parents=True)
        (here / "faults").write_text("")
        words = environment(base)
        names = ("PYTHONPATH", "SGLANG_LOOKALIKE_DEV", "SGLANG_LOOKALIKE_SPEED")
        lines = [f"export {name}='{words[name]}'" for name in names]
        lines += [f"export LAB_FAULTS='{here}/faults'", f"export PATH='{base}/bin':$PATH"]
        (venv / "python").write_text(
            "#!/bin/sh\n"
            f'case $* in *launch_server*) ;; *) exec "{sys.executable}" "$@" ;; esac\n'
            + "\n".join(lines)
            + f'\nexec "{sys.executable}" -S "$@"\n'
        )
        (venv / "python").chmod(0o755)

    def state_file(self, host: str) -> StateFile:
        return StateFile(self.folder / ".deploy" / "state", host)

    def own(self, host: str) -> DeploymentState:
        return self.state_file(host).load().deployments["qwen"]

    def fault(self, host: str, name: str) -> None:
        (self.folder / host / "faults").write_text(f"{name}\n")

    def up(self) -> list[DeploymentResult]:
        options = UpOptions(
            base=self.folder / "inventory",
            steps=lambda: [StopStep(), LaunchStep(), VerifyStep()],
            environ={},
        )
        return multinode.up_nodes(self.wants, options, Bus(self.events.append))

    def server(self, host: str) -> ServerFact:
        want = next(one for one in self.wants if one.host_name == host)
        return look(self.guests[host], want).need(ServerFact)

    def launches(self) -> dict[str, str]:
        """Host -> id of the launch that is alive there."""
        jobs = {host: self.server(host).job for host in HOSTS}
        return {host: job.identity.id for host, job in jobs.items() if job and job.alive}

    def kill(self, host: str) -> None:
        job = self.server(host).job
        assert job is not None
        os.kill(job.identity.pid, signal.SIGKILL)

    def until(self, true: Callable[[], bool], seconds: float = 20) -> None:
        ends = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < ends
            time.sleep(0.1)

    def down(self, want: Deployment) -> list[str]:
        """As `deploy down` does it, a node alone."""
        guest = self.guests[want.host_name]
        state = self.state_file(want.host_name).load()
        outcome = Outcome()
        engine = Engine(
            want,
            [Down()],
            lambda: look(guest, want),
            dict.fromkeys(Where, guest),
            state=state.deployments["qwen"],
            save=lambda: self.state_file(want.host_name).save(state),
            bus=Bus(self.events.append),
            run_id="r",
            environ={},
        )
        engine.apply(outcome, look(guest, want), Selection())
        return outcome.changed


@pytest.fixture
def world(
    base: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    made = World(base, tmp_path, monkeypatch)
    yield made
    for want in made.wants:
        made.fault(want.host_name, "")
        made.down(want)


def errors(results: Sequence[DeploymentResult]) -> list[str]:
    return [str(one.error) for one in results if one.error is not None]


def test_one_server_of_two_nodes(world: World) -> None:
    results = world.up()
    assert errors(results) == []
    assert results[0].result["verdict"] == "good"
    ids = world.launches()
    assert list(ids) == list(HOSTS) and len(set(ids.values())) == 1
    assert [world.own(host).known_good for host in HOSTS] == list(ids.values())
    # The same command has nothing to do, and status calls both nodes good.
    again = world.up()
    assert errors(again) == [] and again[0].result["launch"] == ids["kpro5"]
    assert not any(one.outcome is None or one.outcome.pending for one in again)
    for want in world.wants:
        seen = look(world.guests[want.host_name], want)
        told = deployment_document(want, seen, world.own(want.host_name))
        assert (told["state"], told["verdict"], told["answer_problem"]) == ("serving", "good", "")

    # Rank 1 dies while it serves: rank 0 misses it and ends, status tells both.
    world.kill("kpro6")
    world.until(lambda: world.launches() == {})
    told = deployment_document(
        world.wants[1], look(world.guests["kpro6"], world.wants[1]), world.own("kpro6")
    )
    assert told["state"] == "ended"
    results = world.up()
    assert errors(results) == []
    new = world.launches()
    assert list(new) == list(HOSTS) and len(set(new.values())) == 1 and new != ids

    assert world.down(world.wants[0]) == ["stop"]
    # Rank 1 ends with rank 0, if it has not been stopped first.
    world.until(lambda: world.launches() == {})
    world.down(world.wants[1])
    assert world.launches() == {}
    for host in HOSTS:
        server = world.server(host)
        assert not server.listening and not server.leftovers
        assert server.job is not None and not server.job.members


def test_the_cause_is_of_the_node_that_died_first(world: World) -> None:
    world.fault("kpro6", "server-fails-exception")
    results = world.up()
    told = errors(results)
    assert "rank 1 on kpro6: FooBarError: the flux capacitor is cold" in told[0], told
    assert "kpro5/qwen launch" in told[0]
    assert "its nodes are one server, and kpro5/qwen failed" in told[1]
    assert world.launches() == {}
    for host in HOSTS:
        job = world.server(host).job
        assert job is not None and not job.members
        assert world.own(host).launches[-1].verdict.startswith("failed: ")
    assert results[0].error is not None
    assert any(line.startswith("rank 1 on kpro6: ") for line in results[0].error.evidence)


def test_a_failed_gate_brings_back_what_served_on_all_nodes(world: World) -> None:
    assert errors(world.up()) == []
    good = world.launches()["kpro5"]
    with_log_level(world)
    world.fault("kpro5", "server-degenerate")
    results = world.up()
    assert [one.exit_code for one in results] == [5, 1]
    assert f"the last known-good arguments (launch {good}) run again" in errors(results)[0]
    ids = world.launches()
    assert list(ids) == list(HOSTS) and len(set(ids.values())) == 1 and good not in ids.values()
    for host in HOSTS:
        job = world.server(host).job
        assert job is not None
        assert "--log-level" not in Path(f"/proc/{job.identity.pid}/cmdline").read_text()
    # The next run leaves it alone: this very wish has failed.
    again = errors(world.up())
    assert "was left alone" in again[0], again
    assert world.launches() == ids


def start_rank_1_and_die(world: World) -> None:
    """Runs in a process of its own: the controller is killed before it starts rank 0."""

    def dies(*words: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    multinode_launch.LaunchStep.start_rung = dies  # type: ignore[assignment]
    world.up()


def test_a_killed_controller_leaves_a_half_that_the_next_run_replaces(world: World) -> None:
    controller = multiprocessing.get_context("fork").Process(
        target=start_rank_1_and_die, args=(world,)
    )
    controller.start()
    controller.join(60)
    assert controller.exitcode == -signal.SIGKILL
    half = world.launches()
    assert list(half) == ["kpro6"]
    results = world.up()
    assert errors(results) == []
    ids = world.launches()
    assert list(ids) == list(HOSTS) and len(set(ids.values())) == 1
    assert ids["kpro6"] != half["kpro6"]
    plan = results[1].outcome
    assert plan is not None and "none runs on kpro5" in plan.plans["stop"].reason


def follow_and_die(world: World) -> None:
    """Runs in a process of its own: the controller is killed when both have been started."""

    def dies(*words: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    multinode_launch.NodesLaunch.follow = dies  # type: ignore[assignment]
    world.up()


def test_a_launch_that_is_whole_is_joined(world: World) -> None:
    controller = multiprocessing.get_context("fork").Process(target=follow_and_die, args=(world,))
    controller.start()
    controller.join(60)
    assert controller.exitcode == -signal.SIGKILL
    started = world.launches()
    assert list(started) == list(HOSTS)
    results = world.up()
    assert errors(results) == []
    assert world.launches() == started
    stop = results[0].outcome
    assert stop is not None and stop.plans["stop"].state is PlanState.NOTHING


def back(world: World, launch_id: str) -> list[DeploymentResult]:
    """As `deploy rollback` does it."""
    parts, wants = list[RollBack](), list[Deployment]()
    kept = Kept(world.folder / ".deploy" / "kept")
    for want in world.wants:
        part = part_of(world.own(want.host_name), launch_id)
        assert part is not None
        recipe, lock_text = made_of(kept, part, want.id)
        wants.append(then(want, recipe, lock_text, part))
        parts.append(RollBack(want, part, recipe, kept))
    options = UpOptions(base=world.folder / "inventory", command="rollback", environ={})
    return multinode.up_nodes(wants, options, Bus(world.events.append), NodesBack(parts))


def with_log_level(world: World) -> None:
    """The playbook changes."""
    for index, want in enumerate(world.wants):
        args = {**want.playbook.serve.args, "log-level": "info"}
        serve = want.playbook.serve.model_copy(update={"args": args})
        playbook = want.playbook.model_copy(update={"serve": serve})
        world.wants[index] = dataclasses.replace(want, playbook=playbook)


def arguments(world: World) -> list[str]:
    """Of the servers that run, by rank."""
    jobs = [world.server(host).job for host in HOSTS]
    return [Path(f"/proc/{job.identity.pid}/cmdline").read_text() for job in jobs if job]


def back_and_die(world: World, launch_id: str, at: str) -> None:
    """Runs in a process of its own: the controller is killed at this point."""

    def dies(*words: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    where: dict[str, tuple[Any, str]] = {
        "leader stopped": (multinode_work, "together"),
        "followers started": (multinode_launch.LaunchStep, "start_rung"),
        "all started": (multinode_launch.NodesLaunch, "follow"),
        "followers judged": (VerifyStep, "_record"),
    }
    holder, name = where[at]
    if at in ("leader stopped", "followers judged"):
        real, seen = getattr(holder, name), list[int]()

        def later(*words: Any, **more: Any) -> Any:
            seen.append(1)
            # Looks come before the stop of the others; rank 1's record before rank 0's.
            if len(seen) == (3 if at == "leader stopped" else 2):
                dies()
            return real(*words, **more)

        setattr(holder, name, later)
    else:
        setattr(holder, name, dies)
    back(world, launch_id)


@pytest.fixture
def two(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two launches have passed; the second serves."""
    real = rollback_steps

    def steps(launch: Any, *, asked: bool = True) -> list[Step]:
        return [s for s in real(launch, asked=asked) if s.name in ("stop", "launch", "verify")]

    monkeypatch.setattr(multinode_back, "rollback_steps", steps)
    assert errors(world.up()) == []
    with_log_level(world)
    assert errors(world.up()) == []
    return world


def test_all_nodes_go_back_as_one_launch(two: World) -> None:
    old, new = (one.id for one in two.own("kpro5").launches)
    results = back(two, old)
    assert errors(results) == []
    ids = two.launches()
    assert list(ids) == list(HOSTS) and len(set(ids.values())) == 1
    assert not any("--log-level" in one for one in arguments(two))
    assert f"--node-rank\0{1}" in arguments(two)[1]
    for host in HOSTS:
        own = two.own(host)
        assert own.known_good == ids[host] and own.launches[-1].verdict == "good"
        record, told = own.rollback, own.launches[-1].back
        assert record is not None and (record.to, record.left) == (old, new)
        assert record.outcome == "done" and told is not None
        assert (told.to, told.left, told.asked) == (old, new, True)
        assert own.launches[-1].recipe == own.launches[0].recipe
    # `up` does not undo it, on no node, and nothing ends.
    assert any("rolled back to launch" in one for one in errors(two.up()))
    assert two.launches() == ids
    # It fails its gates on the way to the other one: what served before serves again on both.
    two.fault("kpro5", "server-degenerate")
    results = back(two, new)
    assert [one.exit_code for one in results] == [5, 1], errors(results)
    assert f"what served before (launch {ids['kpro5']}) serves again" in errors(results)[0]
    again = two.launches()
    assert list(again) == list(HOSTS) and len(set(again.values())) == 1
    assert not any("--log-level" in one for one in arguments(two))
    assert {two.own(host).rollback.outcome for host in HOSTS} == {"failed"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "at", ["leader stopped", "followers started", "all started", "followers judged"]
)
def test_a_killed_rollback_goes_on(two: World, at: str) -> None:
    old, new = (one.id for one in two.own("kpro5").launches)
    controller = multiprocessing.get_context("fork").Process(
        target=back_and_die, args=(two, old, at)
    )
    controller.start()
    controller.join(60)
    assert controller.exitcode == -signal.SIGKILL
    before = two.launches()
    record = two.own("kpro5").rollback
    assert record is not None and record.outcome == ""
    assert any("rolled back to launch" in one for one in errors(two.up()))
    assert two.launches() == before
    assert errors(back(two, old)) == []
    ids = two.launches()
    assert list(ids) == list(HOSTS) and len(set(ids.values())) == 1
    assert not any("--log-level" in one for one in arguments(two))
    if at in ("all started", "followers judged"):
        assert ids == before, "it was joined"
    for host in HOSTS:
        record = two.own(host).rollback
        assert record is not None and (record.to, record.left, record.outcome) == (old, new, "done")
