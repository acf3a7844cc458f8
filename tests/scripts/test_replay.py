"""Recorded logs of real servers, played by the look-alike as a job and followed as a launch is.

Nothing is simulated between the two: the job mechanism, the serve agent and the wait of `launch`
are the real ones, on this machine. The controller's clock runs fast.
"""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deployer.deployment import Deployment
from deployer.events import Bus, Event
from deployer.inventory import Host
from deployer.model import Facts, Where
from deployer.playbook import Playbook
from deployer.remote.jobs import JobIdentity, Jobs, JobStatus
from deployer.sglang.diagnosis import Diagnosis, diagnose
from deployer.sglang.failures import MISLEADING
from deployer.sglang.log import PHASES, LaunchLog
from deployer.state import DeploymentState
from deployer.steps.base import StepContext
from deployer.steps.launch_wait import LaunchFailed, LaunchWait
from deployer.steps.server_wanted import server_script
from tests.local_transport import LocalTransport, shell_path

ENGINE = Path(__file__).resolve().parents[2] / "docker" / "engine"
SHORT = Path(__file__).resolve().parents[1] / "fixtures" / "sglang-logs"
FIELD = Path(__file__).resolve().parents[3] / "shared" / "field" / "sglang-logs"
RECORDED = pytest.mark.skipif(not FIELD.exists(), reason="the recorded logs are not here")
FASTER = 20.0
"""A second of the controller's waits lasts this much less."""
READY_TIMEOUT_S = 400
HANGS_S = 80
"""The same for a log that is known to hang."""
SIDE_BY_SIDE = 4

MARKS = (
    ("args", "server_args=ServerArgs("),
    ("distributed", "Init torch distributed begin."),
    ("weights", "Load weight begin."),
    ("kv", "Using KV cache dtype"),
    ("mamba", "Mamba Cache is allocated."),
    ("graphs", "Capture cuda graph begin."),
    ("server", "Started server process ["),
    ("warmup", "Uvicorn running on "),
    ("ready", "The server is fired up and ready to roll!"),
)
"""What a reader of the log would look for, in the order of a launch."""


# ---- a launch that plays a log
class Phases(LaunchLog):
    """Remembers the way."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "phase":
            self.__dict__.setdefault("way", []).append(value)


@dataclass
class Played:
    """What came of it. `failed` None: the launch was ready; `end` is then how it ended later."""

    way: list[str]
    failed: LaunchFailed | None
    end: Diagnosis | None = None
    figures: dict[str, float] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)


@dataclass
class Context(StepContext):
    """A context whose jobs lie in a folder of the test."""

    root: str = ""

    def jobs(self, where: Where) -> Jobs:
        return Jobs(self.on(where), self.root)


class Stage:
    """Plays logs: `play` starts one as a job, follows it, and leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = shell_path("dash", folder)
        self.venv = folder / "venv"
        (self.venv / "bin").mkdir(parents=True)
        python = self.venv / "bin" / "python"
        # No site packages: a start costs a tenth of a second, and nothing else is needed.
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        self.count = 0

    def wanted(self, env: dict[str, str], ready_timeout_s: float) -> Deployment:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        document = {
            "model": {"repo": "acme/x", "path": "/srv/models/x", "served_name": "recorded"},
            "driver": {"version": "580.126.09"},
            "engine": {"version": "0.5.11", "lock": "x.txt", "venv": str(self.venv)},
            "serve": {
                "host": "127.0.0.1",
                "port": port,
                "args": {},
                "env": {"PYTHONPATH": str(ENGINE), "SGLANG_LOOKALIKE_SPEED": "40", **env},
                "ready_timeout_s": ready_timeout_s,
            },
        }
        host = Host.model_validate(
            {
                "ssh": {"address": "192.0.2.5"},
                "gpus": [{"address": "0000:21:00.0"}],
                "containers": {129: {}},
                "deployments": {"qwen": {"container": 129, "playbook": "x"}},
            }
        )
        entry, playbook = host.deployments["qwen"], Playbook.model_validate(document)
        return Deployment("kpro5", "qwen", host, entry, playbook, "x", "", None)

    def play(
        self,
        log: Path,
        exit_code: int | None,
        *,
        cut: int | None = None,
        speed: str = "max",
        hold: str = "ready",
        ready_timeout_s: float = READY_TIMEOUT_S,
        while_it_runs: Callable[[Context, JobIdentity], None] | None = None,
    ) -> Played:
        """`exit_code` None: the recorded server lived on."""
        env = {"LOOKALIKE_REPLAY": f"{log}:{speed}", "LOOKALIKE_REPLAY_HOLD": hold}
        if exit_code is not None:
            env["LOOKALIKE_REPLAY_EXIT"] = str(exit_code)
        if cut is not None:
            env["LOOKALIKE_REPLAY_CUT"] = str(cut)
        want = self.wanted(env, ready_timeout_s)
        self.count += 1
        root = str(self.folder / f"jobs-{self.count}-{want.port}")
        transport = LocalTransport(self.path)
        events: list[Event] = []
        context = Context(
            want=want,
            run_id="r",
            bus=Bus(events.append),
            transports={Where.HOST: transport, Where.GUEST: transport},
            reprobe=lambda: Facts(),
            state=DeploymentState(),
            save=lambda: None,
            step="launch",
            root=root,
        )
        jobs = context.jobs(Where.GUEST)
        argv = [str(self.venv / "bin/python"), "-m", "sglang.launch_server"]
        argv += ["--served-model-name", "recorded", "--port", str(want.port)]
        job = jobs.start("server-qwen", "one", server_script(want, argv))
        phases = Phases()
        wait = LaunchWait(
            context,
            job,
            now=lambda: time.monotonic() * FASTER,
            sleep=lambda seconds: time.sleep(seconds / FASTER),
            log=phases,
        )
        try:
            return self.followed(wait, phases, while_it_runs)
        finally:
            assert jobs.stop(job, grace_s=0.0, kill_s=20).stopped

    def followed(
        self,
        wait: LaunchWait,
        phases: Phases,
        while_it_runs: Callable[[Context, JobIdentity], None] | None,
    ) -> Played:
        context, job = wait.context, wait.job
        assert isinstance(context, Context)
        try:
            answer = wait.until_ready()
        except LaunchFailed as failed:
            return Played(phases.__dict__["way"], failed)
        way = list(phases.__dict__["way"])
        if while_it_runs is not None:
            while_it_runs(context, job)
        titles = [str(one.get("title", "")) for one in answer.get("members", [])]
        played = Played(way, None, None, dict(phases.figures), titles)
        if context.want.playbook.serve.env.get("LOOKALIKE_REPLAY_EXIT"):
            status = ended(context.jobs(Where.GUEST), job)
            data = (Path(context.root) / "server-qwen" / "one" / "log").read_bytes()
            played.end = diagnose(data, exit_code=status.exit)
        return played


def ended(jobs: Jobs, job: JobIdentity) -> JobStatus:
    deadline = time.monotonic() + 30
    while (status := jobs.poll(job)).alive:
        assert time.monotonic() < deadline, "the recorded end did not come"
        time.sleep(0.05)
    return status


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("replay"))


def way_of(log: Path) -> list[str]:
    """The phases that a reader finds in the log, each further than the one before."""
    text = log.read_text(encoding="utf-8", errors="replace")
    names = [phase for phase, _ in MARKS]
    places = sorted((text.index(words), phase) for phase, words in MARKS if words in text)
    way: list[str] = []
    for _, phase in places:
        if not way or names.index(phase) > names.index(way[-1]):
            way.append(phase)
    return way


def check_way(played: Played, log: Path) -> None:
    """Forward only, and through every phase that the log shows."""
    order = [PHASES.index(phase) for phase in played.way]
    assert order == sorted(set(order)), played.way
    seen = [phase for phase in played.way if phase in dict(MARKS)]
    expected = way_of(log)
    if played.failed is None and "ready" not in seen:
        # The server was asked, and was ready, before its line was read.
        assert seen == expected[: len(seen)], (seen, log)
    else:
        assert seen == expected, (seen, log)


# ---- the short logs of this repository
SHORT_LOGS: dict[str, tuple[int | None, str, str, str]] = {
    # name: exit code, class, words of the cause, phase
    "unknown-flag": (2, "bad-arguments", "--enable-warp-drive", "starting"),
    "spec-default-strategy": (1, "speculation-needs-extra-buffer", "no_buffer", "starting"),
    "sgl-kernel-wrong-cuda-lib": (1, "library-missing", "libnvrtc.so.12", "starting"),
    "shard-truncated": (-9, "weights-corrupt", "incomplete metadata", "weights"),
    "mem-fraction-0.02": (-9, "not-enough-memory", "Not enough memory", "kv"),
    "graph-capture-oom-inside": (-9, "graph-capture-out-of-memory", "Capture cuda", "graphs"),
    "port-in-use-silent-owner": (None, "port-in-use", "[Errno 98]", "server"),
    "no-nvcc": (-9, "compiler-missing", "nvcc: not found", "warmup"),
}


@pytest.mark.parametrize("name", SHORT_LOGS)
def test_a_failed_launch_has_one_cause(stage: Stage, name: str) -> None:
    code, cls, words, phase = SHORT_LOGS[name]
    played = stage.play(SHORT / f"{name}.log", code)
    assert played.failed is not None
    assert played.failed.failure.cls == cls
    assert words in played.failed.failure.cause_line
    assert played.failed.exit_code == code
    assert played.failed.phase == phase == played.way[-1]


def test_a_good_launch_is_ready_after_its_warm_up(stage: Stage) -> None:
    log = SHORT / "ready.log"
    played = stage.play(log, None, hold="warmup,ready")
    assert played.failed is None
    check_way(played, log)
    found = re.search(r"max_total_num_tokens=(\d+)", log.read_text(encoding="utf-8"))
    assert found is not None
    assert played.figures["max_total_num_tokens"] == float(found[1])
    assert any(title.startswith("sglang::scheduler") for title in played.members)
    assert any(title.startswith("sglang::detokenizer") for title in played.members)


def test_a_log_can_be_played_at_its_own_pace(stage: Stage) -> None:
    log = SHORT / "ready.log"
    text = log.read_text(encoding="utf-8")
    times = re.findall(r"^\[\d{4}-\d\d-\d\d (\d\d):(\d\d):(\d\d)", text, re.M)
    first, last = (int(h) * 3600 + int(m) * 60 + int(s) for h, m, s in (times[0], times[-1]))
    assert last > first
    began = time.monotonic()
    played = stage.play(log, None, speed=str((last - first) / 2))
    assert played.failed is None
    assert time.monotonic() - began > 1.5, "two seconds of it stand before the ready line"


@pytest.mark.parametrize(
    ("name", "code", "cls"),
    [("scheduler-sigkill", -9, "child-killed"), ("shard-missing", -9, "bad-numbers")],
)
def test_ready_and_then_dead(stage: Stage, name: str, code: int, cls: str) -> None:
    played = stage.play(SHORT / f"{name}.log", code)
    assert played.failed is None
    assert played.end is not None and played.end.failure is not None
    assert (played.end.outcome, played.end.failure.cls) == ("failed", cls)


def cuts() -> list[tuple[str, int]]:
    """Places in the good log where a reader could be wrong: in and at the ends of telling lines."""
    data = (SHORT / "ready.log").read_bytes()
    found = [("nothing at all", 0)]
    for name, words in (("weights", b"Load weight end"), ("server", b"Uvicorn running on")):
        found.append((f"before {name}", data.index(words)))
    ready = data.index(b"The server is fired up")
    found += [("inside the ready line", ready + 20), ("its last byte", data.index(b"\n", ready))]
    return found


@pytest.mark.parametrize("code", [-9, None], ids=["killed", "hangs"])
def test_a_cut_log_is_never_ready(stage: Stage, code: int | None) -> None:
    def play(cut: int) -> Played:
        return stage.play(SHORT / "ready.log", code, cut=cut, ready_timeout_s=HANGS_S)

    places = cuts()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        done = list(pool.map(play, [cut for _, cut in places]))
    for (where, _), played in zip(places, done, strict=True):
        assert played.failed is not None, where
        assert "ready" not in {played.failed.failure.cls, played.failed.phase}, where
        assert played.failed.exit_code == code
        allowed = {"not-ready-in-time", "silent"} if code is None else {"killed", "died-silent"}
        assert played.failed.failure.cls in allowed, where


def test_ready_needs_the_server_and_not_only_its_words(stage: Stage, tmp_path: Path) -> None:
    """The log says ready, but no port was ever opened."""
    log = tmp_path / "words.log"
    text = (SHORT / "ready.log").read_text(encoding="utf-8")
    lines = [line for line in text.split("\n") if "Uvicorn running on" not in line]
    log.write_text("\n".join(lines), encoding="utf-8")
    played = stage.play(log, None, hold="", ready_timeout_s=HANGS_S)
    assert played.failed is not None
    assert played.failed.failure.cls == "not-ready-in-time"


def test_sigterm_ends_it_as_the_real_one(stage: Stage) -> None:
    """Ready, then TERM: 503 at once, rc -9."""
    seen: list[int | None] = []

    def stop(context: Context, job: JobIdentity) -> None:
        jobs = context.jobs(Where.GUEST)
        proof = jobs.stop(job, grace_s=10, kill_s=5)
        assert (proof.stopped, proof.how) == (True, "TERM")
        seen.append(jobs.poll(job).exit)

    stage.play(SHORT / "ready.log", None, while_it_runs=stop)
    assert seen == [-signal.SIGKILL]


# ---- every real log
@dataclass(frozen=True)
class Row:
    """A line of INDEX.md. `exit` None: the recorded server lived on."""

    log: Path
    exit: int | None
    ready: bool
    cause: str
    phase: str


WORDS = {
    "argparse": "starting",
    "import": "starting",
    "argument/model-config": "starting",
    "torch.distributed": "distributed",
    "weight": "weights",
    "weights": "kv",
    "CUDA": "graphs",
    "uvicorn": "server",
    "HTTP": "warmup",
    "READY": "ready",
}
"""The first word of INDEX.md's last phase, as `log.PHASES` has it."""
BESIDE = {
    "27b-tp2-gpu-occupied": (-9, "Not enough memory", "kv"),
    "27b-tp2-mtp-ready": (None, "", "ready"),
    "dense-ready": (-9, "", "ready"),
    "dense-slow-first-health": (None, "", "ready"),
    "hybrid-mtp-ready": (None, "", "ready"),
    "hybrid-mtp-warmup-crash": (-9, "cannot import name 'flash_ops'", "warmup"),
    "not-enough-memory": (-9, "Not enough memory", "kv"),
    "spec-needs-extra-buffer": (1, "is not compatible with radix cache", "starting"),
}
"""The logs beside the folder of failures."""


def rows() -> Iterator[Row]:
    for name, (code, cause, phase) in BESIDE.items():
        yield Row(FIELD / f"{name}.log", code, phase == "ready", cause, phase)
    text = (FIELD / "failures" / "INDEX.md").read_text(encoding="utf-8")
    table = text[text.index("## Table") : text.index("## HTTP on a ready")]
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 8 or not re.match(r"\d\d", cells[0]):
            continue
        name, _, ending, _, cause, _, phase, _ = cells
        end = re.match(r"(\d+)$|signal \d+ \(rc (-\d+)\)", ending)
        quoted = re.search(r"`(.*)`", cause)
        yield Row(
            FIELD / "failures" / f"{name}.log",
            int(end[1] or end[2]) if end else None,
            phase == "READY",
            quoted[1].rstrip("…").replace("\\|", "|") if quoted else "",
            WORDS[phase.split()[0]],
        )


def plain(text: str) -> str:
    """Without stamps and with one kind of quote: as INDEX.md writes it."""
    return re.sub(r"^\[[^\]]*\] ", "", text).replace("`", "'")


def play_row(stage: Stage, row: Row) -> Played:
    """Its own ready timeout where it is known to hang."""
    hangs = row.exit is None and not row.ready
    return stage.play(row.log, row.exit, ready_timeout_s=HANGS_S if hangs else READY_TIMEOUT_S)


@pytest.fixture(scope="module")
def all_played(stage: Stage) -> dict[str, tuple[Row, Played]]:
    """Each log once, some side by side."""
    found = list(rows())
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        played = list(pool.map(lambda row: play_row(stage, row), found))
    return {row.log.stem: (row, one) for row, one in zip(found, played, strict=True)}


@RECORDED
def test_every_recorded_log_is_played(all_played: dict[str, tuple[Row, Played]]) -> None:
    assert set(all_played) == {path.stem for path in FIELD.rglob("*.log")}
    assert len(all_played) >= 52


@RECORDED
def test_phases_are_those_of_the_log(all_played: dict[str, tuple[Row, Played]]) -> None:
    for row, played in all_played.values():
        check_way(played, row.log)
        if played.failed is not None:
            assert played.failed.phase == row.phase, row.log


@RECORDED
def test_ready_is_said_of_those_that_were(all_played: dict[str, tuple[Row, Played]]) -> None:
    for name, (row, played) in all_played.items():
        told = played.failed.failure if played.failed else None
        assert (played.failed is None) == row.ready, (name, told)


@RECORDED
def test_the_cause_is_the_one_line(all_played: dict[str, tuple[Row, Played]]) -> None:
    named = 0
    for name, (row, played) in all_played.items():
        failure = played.failed.failure if played.failed else None
        if failure is None and played.end is not None:
            failure = played.end.failure
        if row.exit is None and row.ready:
            assert failure is None, name
            continue
        assert failure is not None, name
        assert not MISLEADING.search(failure.cause_line), name
        if row.cause and failure.cls != "asked-to-stop":
            words = plain(row.cause)[:60]
            assert words in plain(failure.cause_line), (name, failure.cause_line)
            named += 1
    assert named >= 30
