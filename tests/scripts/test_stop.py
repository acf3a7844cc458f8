"""The stop step on real processes: who hides, what is drained, what is ours to clear."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
from serverworld import MANIFEST, Clock, FakeTransport, deployment, fact, facts, state

from deployer.deployment import Deployment
from deployer.down import Down
from deployer.events import Bus, Event
from deployer.model import Facts, PlanState, ProbeOutput, Where
from deployer.remote.jobs import JobIdentity, Jobs, new_job_id
from deployer.remote.transport import Answer
from deployer.sglang.failure import Failure
from deployer.sglang.hostfacts import weigh
from deployer.steps import server_script, stop_leftovers
from deployer.steps.base import StepContext
from deployer.steps.launch_evidence import Evidence
from deployer.steps.server_facts import ServerJob
from deployer.steps.server_wanted import LaunchNote, server_job_name
from deployer.steps.stop import StopStep
from tests.local_transport import LocalTransport, shell_path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="others' processes are not seen")

SERVER = r'''
import ctypes, http.server, json, mmap, os, signal, socket, sys, threading, time
folder, port, name, drained = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
libc = ctypes.CDLL(None)


def hide(title, new_session, bare):
    """Forks twice, renames itself, ignores TERM."""
    if os.fork() == 0:
        if new_session:
            os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            libc.prctl(15, title.encode(), 0, 0, 0)
            with open(os.path.join(folder, "hidden"), "a") as file:
                file.write("%d\n" % os.getpid())
            if bare:
                # As setproctitle does: nothing of the environment is left to be read.
                loop = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(7400)"
                os.execve(sys.executable, ["sglang::scheduler_TP0", "-S", "-c", loop], {})
            time.sleep(7400)
        os._exit(0)
    os.wait()


hide("sglang::schedul", False, True)
hide("kworker/0:1", True, False)
hide("rcu_preempt", True, True)
shm = os.open("/dev/shm/torch_" + name, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(shm, 4096)
memory = mmap.mmap(shm, 4096)
odd = os.open("/dev/shm/odd-" + name, os.O_RDWR | os.O_CREAT, 0o600)
sock = socket.socket(socket.AF_UNIX)
sock.bind(os.environ.get("TMPDIR", "/tmp") + "/tmp" + name)
sock.listen(1)
begun = time.monotonic()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        left = 2 if time.monotonic() - begun < drained else 0
        body = json.dumps([{"dp_rank": 0, "num_reqs": left, "num_waiting_reqs": 0}]).encode()
        self.send_response(200 if self.path == "/get_load" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *rest):
        pass


def end(*rest):
    os.kill(os.getpid(), 9)


signal.signal(signal.SIGTERM, end)
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
open(os.path.join(folder, "up"), "w").close()
server.serve_forever()
'''


class Local(StepContext):
    """Both sides are this machine; jobs lie below a folder of the test."""

    root: str

    def jobs(self, where: Where) -> Jobs:
        return Jobs(self.on(where), self.root)


@dataclass
class Stage:
    """A launch that runs, and the step that ends it."""

    want: Deployment
    context: Local
    job: JobIdentity
    folder: Path
    name: str
    events: list[Event]

    @property
    def shm(self) -> Path:
        return Path("/dev/shm") / f"torch_{self.name}"

    @property
    def odd(self) -> Path:
        return Path("/dev/shm") / f"odd-{self.name}"

    @property
    def socket(self) -> Path:
        return Path(tempfile.gettempdir()) / f"tmp{self.name}"

    @property
    def hidden(self) -> list[int]:
        return [int(one) for one in (self.folder / "hidden").read_text("utf-8").split()]

    def told(self) -> str:
        return "\n".join(getattr(event, "text", "") for event in self.events)

    def look(self) -> Facts:
        """What the step's own probe sees on this machine."""
        [probe] = Down().probes(self.want)
        answer = self.context.on(Where.GUEST).run(probe.script, timeout_s=30)
        return facts(probe.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr)))

    def die(self) -> None:
        """Its session dies of KILL; what has left it lives."""
        session = [pid for pid in pids() if session_of(pid) == self.job.session]
        for pid in session:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(running, session)), "the end of the session")

    def stop(self) -> None:
        job = ServerJob(self.job, True, "", "old", LaunchNote("mtp"), "", (self.job.pid,), ())
        seen = facts(fact(job=job))
        step = StopStep()
        step.apply(self.context, seen, step.plan(self.want, seen, self.context.state))


def until(condition: Callable[[], object], what: str) -> None:
    ends = time.monotonic() + 30
    while not condition():
        if time.monotonic() > ends:
            raise AssertionError(f"not in time: {what}")
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return text.rpartition(") ")[2].split()[0] not in "ZX"


def pids() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    """Starts a launch: `drained` seconds after its start it has no request left."""
    root = tmp_path / "jobs"
    monkeypatch.setattr(stop_leftovers, "ROOT", str(root))
    monkeypatch.setattr(server_script, "ROOT", str(root))
    made: list[Stage] = []

    def start(drained: float = 0.0, **stop: Any) -> Stage:
        want = deployment(
            serve={"port": free_port()},
            engine={"venv": sys.prefix},
            stop={"grace_s": 3, "kill_s": 5, **stop},
        )
        transport = LocalTransport(shell_path("dash", tmp_path))
        smi = b"0000:21:00.0, 4\n0000:41:00.0, 4\n--\n++\n"
        host = FakeTransport(lambda script: Answer(0, smi, b""))
        events: list[Event] = []
        context = Local(
            want=want,
            run_id="r1",
            bus=Bus(events.append),
            transports={Where.HOST: host, Where.GUEST: transport},
            reprobe=Facts,
            state=state(),
            save=lambda: None,
            step="stop",
        )
        context.root = str(root)
        name = "".join(c if c.isalnum() else "_" for c in tmp_path.name.lower())[-4:]
        name = f"{name}{os.getpid() % 10000:04d}"
        server = tmp_path / "server.py"
        server.write_text(SERVER, "utf-8")
        command = f"exec {sys.executable} {server} {tmp_path} {want.port} {name} {drained}\n"
        job = Jobs(transport, str(root)).start(server_job_name(want), new_job_id(), command)
        stage = Stage(want, context, job, tmp_path, name, events)
        made.append(stage)
        until((tmp_path / "up").exists, "the server's start")
        until(lambda: len(stage.hidden) == 3, "the hidden processes")
        return stage

    yield start
    for stage in made:
        Jobs(stage.context.on(Where.GUEST), str(root)).stop(stage.job, grace_s=0.1)
        for pid in stage.hidden:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        for path in (stage.shm, stage.odd, stage.socket):
            path.unlink(missing_ok=True)


def test_nobody_hides_and_nothing_is_left(begin: Callable[..., Stage]) -> None:
    stage = begin()
    assert stage.shm.exists() and stage.odd.exists() and stage.socket.exists()
    assert all(running(pid) for pid in stage.hidden)
    stage.stop()
    assert not running(stage.job.pid)
    assert not [pid for pid in stage.hidden if running(pid)]
    assert not stage.shm.exists()
    # No name that is known, but the launch had it open when it was stopped.
    assert not stage.odd.exists()
    assert not stage.socket.exists()
    assert f"removed what launch {stage.job.id} had left" in stage.told()


def test_what_is_not_provably_ours_stays(begin: Callable[..., Stage]) -> None:
    early = Path("/dev/shm") / f"torch_early{os.getpid()}"
    early.write_bytes(b"before the launch")
    past = time.time() - 3600
    os.utime(early, (past, past))
    stage = begin()
    used = Path("/dev/shm") / f"torch_used{os.getpid()}"
    other = Path("/dev/shm") / f"torch_other{os.getpid()}"
    foreign = Path("/dev/shm") / f"psm_{os.getpid()}"
    bound = Path(tempfile.gettempdir()) / f"tmpb{os.getpid() % 10**7:07d}"
    for path in (used, other, foreign):
        path.write_bytes(b"x" * 10)
    os.chown(other, 65534, 65534)
    holder = subprocess.Popen(
        [
            *(sys.executable, "-S", "-c"),
            "import mmap, socket, sys, time\n"
            "file = open(sys.argv[1], 'r+b'); memory = mmap.mmap(file.fileno(), 0)\n"
            "file.close(); one = socket.socket(socket.AF_UNIX); one.bind(sys.argv[2])\n"
            "print('up', flush=True); time.sleep(7400)",
            *(str(used), str(bound)),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        stage.stop()
        assert not stage.shm.exists()
        assert used.exists() and other.exists() and foreign.exists() and bound.exists()
        assert early.exists()
        # They were never the launch's: nothing to tell its user about.
        assert str(used) not in stage.told() and str(bound) not in stage.told()
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()
        for path in (early, used, other, foreign, bound):
            path.unlink(missing_ok=True)


def test_a_launch_that_was_killed_is_cleaned_by_its_time_and_names(
    begin: Callable[..., Stage],
) -> None:
    stage = begin()
    for pid in (*stage.hidden, stage.job.pid):
        os.kill(pid, signal.SIGKILL)
    jobs = stage.context.jobs(Where.GUEST)
    until(lambda: jobs.poll(stage.job).exit is not None, "the end of the job")
    end = Path(stage.context.root) / stage.job.name / stage.job.id / "exit"
    really = end.stat().st_mtime
    os.utime(end, (really - 60, really - 60))
    stop_leftovers.clear(stage.context, stage.job, [])
    # Made after the launch had ended: somebody else's.
    assert stage.shm.exists()
    os.utime(end, (really, really))
    stop_leftovers.clear(stage.context, stage.job, [])
    assert not stage.shm.exists()
    assert not stage.socket.exists()
    # Its name says nothing, and nobody saw the launch use it.
    assert stage.odd.exists()


def test_another_boot_is_left_alone(begin: Callable[..., Stage]) -> None:
    stage = begin()
    stop_leftovers.clear(stage.context, replace(stage.job, boot="other"), [])
    assert stage.shm.exists()
    stop_leftovers.clear(stage.context, stage.job, [])
    assert stage.shm.exists()
    assert "the launch still runs" in stage.told()


def test_requests_are_waited_for(begin: Callable[..., Stage]) -> None:
    stage = begin(drained=3.0, drain_s=30)
    began = time.monotonic()
    stage.stop()
    assert "drained: no request runs or waits" in stage.told()
    assert time.monotonic() - began >= 3.0


def test_but_not_for_ever(begin: Callable[..., Stage]) -> None:
    stage = begin(drained=1000.0, drain_s=2)
    stage.stop()
    assert "2 requests still ran after 2 s of draining" in stage.told()
    assert not running(stage.job.pid)


def test_down_finds_what_left_a_dead_launch_and_nothing_else(begin: Callable[..., Stage]) -> None:
    """One is marked by its environment, one only holds the log; both ignore TERM, renamed."""
    stage = begin()
    stage.die()
    left = [pid for pid in stage.hidden if running(pid)]
    assert len(left) == 2
    assert all(session_of(pid) != stage.job.session for pid in left)
    folder = Path(stage.context.root) / stage.job.name / stage.job.id
    other = {**os.environ, "DEPLOYER_JOBS": stage.context.root, "DEPLOYER_JOB": "server-qwen2/1"}
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(7400)"]
    with (folder / "log").open("rb") as log:
        strangers = [
            subprocess.Popen(sleep, stdin=log),
            subprocess.Popen(sleep, cwd=folder),
            subprocess.Popen(sleep, env=other),
        ]
    down = Down()
    try:
        before = stage.look()
        plan = down.plan(stage.want, before, stage.context.state)
        assert plan.state is PlanState.CHANGES
        told = f"launch {stage.job.id} died and left processes: {', '.join(map(str, sorted(left)))}"
        assert [change.reason for change in plan.changes] == [told]
        down.apply(stage.context, before, plan)
        assert not [pid for pid in left if running(pid)]
        assert all(one.poll() is None for one in strangers)
        after = down.plan(stage.want, stage.look(), stage.context.state)
        assert (after.state, after.reason) == (PlanState.NOTHING, "no launch of kpro5/qwen runs")
        assert "stopped: no process left" in stage.told()
    finally:
        for one in strangers:
            one.kill()
            one.wait()


def test_down_ends_what_an_earlier_launch_has_left(begin: Callable[..., Stage]) -> None:
    stage = begin()
    stage.die()
    left = [pid for pid in stage.hidden if running(pid)]
    jobs = stage.context.jobs(Where.GUEST)
    newer = jobs.start(stage.job.name, new_job_id(), "exec sleep 7400")
    try:
        down, seen = Down(), stage.look()
        plan = down.plan(stage.want, seen, stage.context.state)
        assert [change.title.partition(" (")[0] for change in plan.changes] == [
            f"stop launch {newer.id}",
            f"stop what is left of launch {stage.job.id}",
        ]
        down.apply(stage.context, seen, plan)
        assert not [pid for pid in (*left, newer.pid) if running(pid)]
        after = down.plan(stage.want, stage.look(), stage.context.state)
        assert after.state is PlanState.NOTHING
    finally:
        jobs.stop(newer, grace_s=0.1)


SMI = """\
#!/bin/sh
# Both cards; on the first a process that is no launch's.
case $1 in
  --query-gpu=*total*) printf '0000:21:00.0, 46000, 9000\\n0000:41:00.0, 46000, 4\\n' ;;
  --query-gpu=*) printf '0000:21:00.0, 9000\\n0000:41:00.0, 4\\n' ;;
  --query-compute-apps=gpu_bus_id,pid,used*) printf '00000000:21:00.0, PID, 8990, python\\n' ;;
  --query-compute-apps=*) printf '00000000:21:00.0, PID, python, 8990\\n' ;;
esac
"""


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody's process that holds the first card, by the word of the host's nvidia-smi."""
    code = "import time; time.sleep(7400)"
    process = subprocess.Popen([sys.executable, "-S", "-c", code, "train.py"])
    smi = tmp_path / "host" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI.replace("PID", str(process.pid)), "utf-8")
    smi.chmod(0o755)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("kind", [StopStep, Down])
def test_a_stranger_on_the_gpu_is_named_and_left_alone(
    begin: Callable[..., Stage],
    trainer: subprocess.Popen[bytes],
    tmp_path: Path,
    kind: type[StopStep],
) -> None:
    """By the stop of `up` and of `down`; and what a failed launch says of it."""
    stage = begin()
    path = f"{tmp_path / 'host'}:{shell_path('dash', tmp_path)}"
    guest = stage.context.on(Where.GUEST)
    stage.context.transports = {Where.HOST: LocalTransport(path), Where.GUEST: guest}
    if kind is StopStep:
        seen = Evidence(stage.context, stage.job).gather()
        [holder] = seen.strangers
        assert str(holder).startswith(f"pid {trainer.pid} ({sys.executable} ")
        short = Failure("not-enough-memory", "Not enough memory.", "lower it", True)
        cause = weigh(short, -9, seen)
        assert (cause.cls, cause.next_variant_allowed) == ("gpu-occupied", False)
        assert f"pid {trainer.pid} " in cause.cause_line
    clock = Clock()
    step, before = kind(clock.now, clock.sleep), stage.look()
    stage.context.state.manifest = MANIFEST
    step.apply(stage.context, before, step.plan(stage.want, before, stage.context.state))
    assert not [pid for pid in (stage.job.pid, *stage.hidden) if running(pid)]
    assert trainer.poll() is None
    told = stage.told()
    assert "by others, which are left alone: " in told
    assert f"pid {trainer.pid} ({sys.executable} -S -c import time" in told
    assert "train.py) 8990 MiB on 00000000:21:00.0" in told
    assert "GPU memory used by others" in told
