"""`deploy up` killed again and again on one host: each run continues, and nothing is done twice.

Each kill follows an event of the run, as it comes. The tests run in order and share one path.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from lab import Lab, Machine
from second import HOST, Copy, Event, Run, is_free

pytestmark = pytest.mark.container

REPO_BYTES = 25_183_130
CONNECTIONS = 4
BLOCK = 1 << 20
VENV = "/opt/deployer/venvs/tiny"
MODEL = "/srv/models/tiny-hybrid"
JOBS = "/var/lib/deployer/jobs"
ENDPOINT = "http://127.0.0.1:30106"


def at(kind: str, **fields: str) -> Callable[[Event], bool]:
    """An event of this kind whose fields contain these texts."""
    return lambda event: (
        event["event"] == kind
        and all(text in str(event.get(name, "")) for name, text in fields.items())
    )


POINTS: list[tuple[str, Callable[[Event], bool]]] = [
    ("first look", at("probed", reason="first look")),
    ("host lock taken", at("probed", reason="under the host lock")),
    ("file list pinned", at("note", step="shards", text="files,")),
    ("driver package copied", at("change_done", title="copy the driver package")),
    ("driver job runs", at("job_started", step="driver")),
    ("rebinding", at("progress", step="gpus")),
    ("rebound", at("change_done", step="gpus", title="bind ")),
    ("unit enabled", at("change_done", step="gpus", title="enable")),
    ("container changes", at("change_started", step="container")),
    ("container restarted", at("probed", reason="during container")),
    ("venv job runs", at("job_started", step="venv")),
    ("venv job again", at("job_started", step="venv")),
    ("venv installs", at("progress", step="venv")),
    ("download runs", at("job_started", step="shards")),
    ("download again", at("job_started", step="shards")),
    ("first bytes", at("progress", step="shards")),
    ("TERM sent", at("note", step="stop", text="TERM")),
    ("old server gone", at("note", step="stop", text="stopped:")),
    ("server started", at("job_started", step="launch")),
    ("server starting", at("progress", step="launch")),
    ("server is ready", at("note", step="launch", text="is ready")),
    ("first gate", at("gate_checked", gate="identity")),
    ("fourth gate", at("gate_checked", gate="counting")),
    ("after the gates", at("probed", reason="after verify")),
]
AGENT_TOO = "download again"
"""At this point the job on the target is killed with the run."""

OURS = r"""
is_server() {
  { tr '\0' ' ' <"$1/cmdline"; } 2>/dev/null | grep -q "^$2/bin/python.* sglang.launch_server"
}
for folder in /proc/[0-9]*; do
  is_server "$folder" "$1" || continue
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "$folder/status" 2>/dev/null)
  is_server "/proc/$parent" "$1" || echo "${folder##*/}"
done
"""
FACTS = r"""
cd "$1" && for file in *; do sha256sum "$file"; done
readlink "$2"
head -c 3 "$2/bin/python" >/dev/null && echo python runs
"""


@dataclass(frozen=True)
class EndState:
    """What must not depend on how often the run was killed."""

    drivers: tuple[str, ...]
    devices: tuple[str, ...]
    guest: str
    launched: str
    unit: str
    pinned: str

    @classmethod
    def of(cls, host: Machine, guest: Machine, copy: Copy) -> EndState:
        """As it is now; the names of launches and times are left out."""
        addresses = ("0000:21:00.0", "0000:21:00.1", "0000:41:00.0", "0000:41:00.1")
        config = host.read("/etc/pve/lxc/129.conf").splitlines()
        state = copy.state()
        return cls(
            tuple(host.driver(address) for address in addresses),
            tuple(sorted(row for row in config if row.startswith("dev"))),
            guest.sh(FACTS, MODEL, VENV).ok().out,
            guest.sh("cat -- " + JOBS + "/server-tiny/current/script").ok().out,
            host.read("/etc/systemd/system/deployer-gpus-tiny.service"),
            json.dumps(state["manifest"]["commit"]) + state["launches"][-1]["verdict"],
        )


@dataclass
class Story:
    """What the killed runs did, and what was seen between them."""

    copy: Copy
    kills: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    servers: list[list[str]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    """Bytes that the host's interface had received, before `shards` and after it."""
    exit: int | None = None
    end: EndState | None = None


def own_servers(host: Machine) -> list[str]:
    """Pids of launched servers of ours: first processes, not their children."""
    return host.sh(OURS, VENV).ok().out.split()


def received(host: Machine) -> int:
    """Bytes that the host and its guest received since the reset."""
    return int(host.read("/sys/class/net/eth0/statistics/rx_bytes"))


@pytest.fixture(scope="module")
def story(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """From pristine to the end, killed at every point that a run comes to."""
    lab.reset(HOST)
    host = lab.hosts[HOST]
    told = Story(Copy(tmp_path_factory.mktemp("kill")))
    following = 0
    while told.exit is None:
        run = told.copy.up()
        told.runs.append(run)
        hit = None
        for event in run:
            if event["event"] == "step_started" and event["step"] in ("shards", "stop"):
                told.received.append(received(host))
            # What a killed run had done, the next does not do again: its points are passed by.
            ahead = range(following, len(POINTS))
            hit = next((index for index in ahead if POINTS[index][1](event)), None)
            if hit is not None:
                run.signal(signal.SIGKILL)
                break
        code = run.end()
        told.servers.append(own_servers(host))
        if hit is None:
            told.exit = code
            break
        assert code == -signal.SIGKILL, (POINTS[hit][0], code, run.said)
        told.kills.append(POINTS[hit][0])
        if POINTS[hit][0] == AGENT_TOO:
            host.sh("pkill -9 -f fetch.pyz || :")
        following = hit + 1
    told.end = EndState.of(host, lab.guests[HOST], told.copy)
    return told


def test_it_was_killed_often_and_came_to_the_end(story: Story) -> None:
    last = story.runs[-1]
    assert story.exit == 0, (story.kills, last.said)
    assert len(story.kills) >= 12, story.kills
    for must in ("rebinding", "venv job runs", "download runs", "server started", "first gate"):
        assert must in story.kills, story.kills


def test_never_two_servers(lab: Lab, story: Story) -> None:
    assert max(map(len, story.servers)) == 1, story.servers
    pids = {pid for seen in story.servers for pid in seen}
    assert len(pids) == 1, f"one server from the first launch to the end: {story.servers}"
    launches = lab.guests[HOST].sh(f'ls "{JOBS}/server-tiny"').ok().out.split()
    assert len([name for name in launches if name != "current"]) == 1, launches
    [launch] = story.copy.state()["launches"]
    assert launch["verdict"] == "good"
    with urllib.request.urlopen(f"{ENDPOINT}/v1/models", timeout=10) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["tiny-hybrid"]


def test_finished_steps_are_not_run_again(story: Story) -> None:
    finished: set[str] = set()
    for kill, run in zip([*story.kills, "the end"], story.runs, strict=True):
        started = {event["step"] for event in run.named("step_started")}
        assert not started & finished, (kill, started & finished)
        finished |= {step for step, state in run.planned().items() if state == "nothing"}
        done = [event for event in run.named("step_done") if event["outcome"] == "done"]
        finished |= {event["step"] for event in done}
    assert {"driver", "gpus", "container", "venv", "shards", "stop", "launch"} <= finished


def test_jobs_are_joined_and_it_is_said(lab: Lab, story: Story) -> None:
    joined = {
        event["step"]: run.said
        for run in story.runs
        for event in run.named("job_started")
        if event["attached"]
    }
    assert "venv" in joined, joined.keys()
    guest = lab.guests[HOST]
    # A server that listens by the time of the next look is not joined, but found serving.
    once = () if "launch" in joined else ("server-tiny",)
    for name in ("venv-tiny", "driver-userspace", *once):
        made = guest.sh(f'ls "{JOBS}/{name}"').ok().out.split()
        assert len([one for one in made if one != "current"]) == 1, (name, made)
    said = "\n".join(run.said for run in story.runs)
    assert "joined running job venv-tiny/" in said
    assert once or "joined running job server-tiny" in said


def test_bytes_are_not_fetched_twice(story: Story) -> None:
    sent = max(story.received) - min(story.received)
    # Headers of packets and our own connections come on top of the files.
    assert sent <= (REPO_BYTES + CONNECTIONS * BLOCK) * 1.05, sent
    assert sent >= REPO_BYTES


def test_locks_of_the_killed_were_taken_over(story: Story) -> None:
    notes = [
        event["text"]
        for run in story.runs
        for event in run.named("note")
        if "took over the lock of a dead run" in event["text"]
    ]
    # Not one a kill: before the lock there is none, and a run that has nothing to do takes none.
    assert len(notes) >= len(story.kills) - 3, (len(notes), story.kills)


def test_next_run_has_nothing_to_do(story: Story) -> None:
    run = story.copy.up()
    assert run.end() == 0, run.said
    assert set(run.planned().values()) == {"nothing"}


@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param(at("step_planned", step="driver"), signal.SIGINT, id="planning"),
        pytest.param(at("step_planned", step="verify"), signal.SIGTERM, id="asking for the lock"),
        pytest.param(at("probed", reason="under the host"), signal.SIGINT, id="lock taken"),
        pytest.param(at("job_started", step="launch"), signal.SIGTERM, id="server started"),
        pytest.param(at("progress", step="launch"), signal.SIGINT, id="server starting"),
    ],
)
def test_interrupted(
    lab: Lab, story: Story, point: Callable[[Event], bool], number: signal.Signals
) -> None:
    host = lab.hosts[HOST]
    story.copy.deploy("down", HOST).ok()
    run = story.copy.up()
    assert run.until(point), run.said
    began = time.monotonic()
    run.signal(number)
    assert run.end() == 130, run.said
    assert time.monotonic() - began < 10
    assert is_free(host)
    assert "interrupted" in run.said
    assert "Traceback" not in run.said
    assert run.named("run_finished")[-1]["exit_code"] == 130


def test_uninterrupted_run_ends_the_same(lab: Lab, story: Story) -> None:
    host, guest = lab.hosts[HOST], lab.guests[HOST]
    lab.reset(HOST)
    once_copy = Copy(story.copy.folder / "once")
    once_copy.deploy("up", HOST, "--yes").ok()
    once = EndState.of(host, guest, once_copy)
    assert story.end == once
    assert once.drivers[0] == once.drivers[2] == "nvidia"
    assert len(once.devices) == 5
    assert len(own_servers(host)) == 1
