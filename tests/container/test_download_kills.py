"""A download whose agent, controller, connection and machine die at random moments, 30 rounds.

Each round has a seed of its own, printed with its story. `KILLS_SEED=n` repeats a whole run,
`KILLS_ROUNDS=3,17` only some of its rounds.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agentwatch import AgentWatch
from fetching import CONNECTIONS, IN_FLIGHT, JOB, MODEL, Project, Up, bound_buffers, sent, wrongs
from hub import Hub
from target import Target, bridge_address, need_image

pytestmark = pytest.mark.container

ROUNDS = 30
LANES = 4
RUNS = 3
"""How often the command may be needed after the last kill."""
SHARDS, SHARD_MIB = 8, 5.0
BYTES_PER_S = 2_000_000.0
"""Of one connection: 40 MB take about 5 s."""
AGENT_S = 15.0
"""Within so many seconds a running `up` has an agent on the target."""
UNREACHABLE = 3
"""How a run may end whose connection died before it had a job to follow."""
SETTLED_S = 1.0
"""A run whose agent lives this long is past its start: it follows, and no death may end it."""
AGENT_BLOCK = 1 << 20
KINDS = ("supervisor", "worker", "controller", "session", "reboot")
AGENT_DIES = ("supervisor", "worker", "reboot")

KILL = r"""
import os, random, signal, sys
def children(pid):
    found = []
    for task in os.listdir("/proc/%d/task" % pid):
        with open("/proc/%d/task/%s/children" % (pid, task)) as stream:
            found += map(int, stream.read().split())
    return found
def of(folder, name):
    with open(os.path.join(folder, name)) as stream:
        return int(stream.read())
what, job = sys.argv[1:]
try:
    if what == "session":
        pid = random.choice(children(of("/run", "sshd.pid")) or [0])
    else:
        pid = of(job, "pid")
        with open("/proc/%d/stat" % pid) as stream:
            start = int(stream.read().rpartition(")")[2].split()[19])
        if start != of(job, "start"):
            pid = 0
        elif what == "worker":
            pid = (children(pid) or [pid])[0]
    if pid:
        os.kill(pid, signal.SIGKILL)
    print(pid)
except (FileNotFoundError, ProcessLookupError):
    print(0)
"""
"""Ends one process, known by the job's own files or as a child of sshd; prints its pid or 0."""


@dataclass
class Story:
    """One round: what died when, what the runs said, what was found at the end."""

    number: int
    seed: str
    kills: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    said: str = ""
    wrong: list[str] = field(default_factory=list)
    crowds: list[str] = field(default_factory=list)
    looks: int = 0
    agents: int = 0
    size: int = 0
    sent: int = 0
    allowed: int = 0
    broken: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"round {self.number}, KILLS_SEED={self.seed}: {', '.join(self.kills) or 'no kill'}"
            + (f" (missed: {', '.join(self.missed)})" if self.missed else "")
            + f"; exits {self.exits}; {self.agents} agents in {self.looks} looks; sent {self.sent}"
            + f" of {self.allowed} allowed; {self.seconds:.1f} s"
        )


class Lane:
    """One target with a hub of its own; rounds on it follow each other."""

    def __init__(self, number: int, folder: Path, hub: Hub) -> None:
        self.hub = hub
        bound_buffers(hub)
        self.folder = folder
        folder.mkdir()
        self.target = Target(f"kills-{number}", folder)

    def close(self) -> None:
        """Removes the target."""
        self.target.remove()

    def play(self, story: Story) -> None:
        """One round, from an empty folder to the end of a run that nobody killed."""
        self.hub.shared.reset()
        began = time.monotonic()
        self.target.sh('rm -rf -- "$1" "$2"', MODEL, JOB).ok()
        project = Project(self.folder / f"round-{story.number}", self.target, self.hub)
        watch = AgentWatch(self.target)
        try:
            Round(self, project, watch, story).play()
            story.wrong = wrongs(self.target, project, self.hub)
        except (AssertionError, OSError) as error:
            story.broken = f"{type(error).__name__}: {error}"
        finally:
            watch.stop()
        story.crowds, story.looks = watch.faults(), watch.looks
        story.said += self.logs()
        story.agents = len({(a.pid, a.start) for agents in watch.seen for a in agents})
        story.sent = sent(self.hub, self.target)
        deaths = sum(kill.startswith(AGENT_DIES) for kill in story.kills)
        story.size = size = self.hub.repo.size
        # A connection is ended where another has taken over its rest, death or not.
        cut_short = CONNECTIONS * IN_FLIGHT
        story.allowed = size + cut_short + deaths * CONNECTIONS * (AGENT_BLOCK + IN_FLIGHT)
        story.seconds = time.monotonic() - began

    def logs(self) -> str:
        """What the jobs of this round logged, and what the hub was asked for."""
        told = self.target.sh('tail -n 60 "$1"/*/log', JOB).out
        rows = [row for row in self.hub.stats()["log"] if row["body"]]
        asked = [f"{row['file']} {row['range']} {row['sent']} {row['t']}" for row in rows]
        return "\n".join([told, *asked])


class Round:
    """One round's kills, drawn from its seed."""

    def __init__(self, lane: Lane, project: Project, watch: AgentWatch, story: Story) -> None:
        self.lane, self.project, self.watch, self.story = lane, project, watch, story
        self.random = random.Random(f"{story.seed}/{story.number}")
        self.up: Up = project.up()
        self.killed = False
        """The controller was killed, and nobody has run the command again yet."""
        self.calm = True
        """Nothing died while this run still planned, or started its job."""

    def play(self) -> None:
        """Kills, then lets the command come to its end."""
        try:
            kills = self.random.randint(1, 3)
            for _ in range(kills):
                self.kill(self.random.choice(KINDS))
            if self.killed:
                self.again()
            for _ in range(RUNS):
                code = self.up.end().exit
                self.story.exits.append(code)
                if code == 0:
                    return
                assert code == UNREACHABLE, f"a run ended with {code}"
                assert not self.calm, f"a run that followed its download ended with {code}"
                self.again()
            raise AssertionError(f"{RUNS} runs after the last kill did not end with 0")
        finally:
            if self.up.alive:
                self.up.kill()
            logs = sorted(self.project.folder.glob("up-*.log"))
            self.story.said = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)

    def again(self) -> None:
        """The same command once more."""
        self.up, self.killed, self.calm = self.project.up(), False, True

    def kill(self, kind: str) -> None:
        """One death, usually while bytes come, sometimes at any moment of the run."""
        if self.random.random() < 0.8:
            self.await_agent()
            delay = self.random.uniform(0, 3)
        else:
            delay = self.random.uniform(0, 6)
        time.sleep(delay)
        follows = any(word in self.up.said for word in ("started job", "joined running job"))
        settled = follows and self.watch.settled_s() >= SETTLED_S
        if kind == "reboot":
            self.lane.target.reboot()
            done = True
        elif kind == "controller":
            done = self.up.alive
            if done:
                self.up.kill()
                self.story.exits.append(-signal.SIGKILL)
                self.killed = True
        else:
            words = self.lane.target.sh('exec python3 -I -S -c "$1" "$2" "$3"', KILL, kind, JOB_NOW)
            done = int(words.ok().out) != 0
        self.calm = self.calm and (settled or not done)
        told = f"{kind} +{delay:.2f} s"
        (self.story.kills if done else self.story.missed).append(told)
        if self.killed and self.random.random() < 0.5:
            self.again()

    def await_agent(self) -> None:
        """Returns when an agent is alive, or when none will come any more."""
        deadline = time.monotonic() + AGENT_S
        while not self.watch.alive and self.up.alive and time.monotonic() < deadline:
            time.sleep(0.02)


JOB_NOW = f"{JOB}/current"


def numbers() -> list[int]:
    """The rounds that are asked for."""
    wanted = os.environ.get("KILLS_ROUNDS", "")
    return [int(word) for word in wanted.split(",") if word] or list(range(ROUNDS))


@pytest.fixture(scope="module")
def stories(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[int, Story]]:
    """All rounds, played in lanes at the same time; each is told on the terminal."""
    seed = os.environ.get("KILLS_SEED") or str(random.SystemRandom().randrange(10**6))
    need_image()
    folder = tmp_path_factory.mktemp("kills")
    rounds = numbers()
    told = {number: Story(number, seed) for number in rounds}
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with ExitStack() as stack:
        lanes = []
        for number in range(min(LANES, len(rounds))):
            hub = Hub(
                folder / "hub",
                host=bridge_address(),
                shards=SHARDS,
                mb=SHARD_MIB,
                bps=BYTES_PER_S,
            )
            stack.enter_context(hub)
            lane = Lane(number, folder / f"lane-{number}", hub)
            lanes.append(stack.enter_context(closing(lane)))
        left = list(reversed(rounds))

        def ride(lane: Lane) -> None:
            while left:
                lane.play(told[left.pop()])

        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(ride, lanes))
        with capture.global_and_fixture_disabled():
            print("", *told.values(), sep="\n", flush=True)
        yield told


@pytest.mark.parametrize("number", numbers())
def test_round(stories: dict[int, Story], number: int) -> None:
    story = stories[number]
    assert not story.broken, f"{story}\n{story.broken}\n{story.said}"
    assert not story.wrong, f"{story}\n{story.wrong}\n{story.said}"
    assert not story.crowds, f"{story}\n{story.crowds}"
    assert story.agents >= 1 and story.looks >= 10, story
    assert story.sent <= story.allowed, f"{story}\n{story.said}"
    assert "Traceback" not in story.said, story.said


def test_every_kind_of_death_was_met(stories: dict[int, Story]) -> None:
    if len(stories) < ROUNDS:
        pytest.skip("only some rounds were asked for")
    kills = [kill.split()[0] for story in stories.values() for kill in story.kills]
    assert len(kills) >= ROUNDS, kills
    assert set(kills) == set(KINDS), kills
    again = sum(story.sent - story.size for story in stories.values())
    deaths = sum(kill in AGENT_DIES for kill in kills)
    print(f"{deaths} deaths of an agent: {again / max(1, deaths * CONNECTIONS):.0f} bytes again")
