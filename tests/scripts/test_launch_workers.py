"""The wait for a launch on real processes: a worker that dies while its parent lives."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
from serverworld import deployment, state

from deployer.events import Bus, Event
from deployer.model import Facts, Where
from deployer.remote.jobs import JobIdentity, Jobs
from deployer.steps.base import StepContext
from deployer.steps.launch_wait import LaunchFailed, LaunchWait
from tests.local_transport import LocalTransport, shell_path

FASTER = 10.0
"""A second of the controller's waits lasts this much less."""

SERVER = r"""
import os, subprocess, sys, time
folder, watches = sys.argv[1], sys.argv[2] == "watches"
say = lambda text: (sys.stdout.write("[2026-11-30 02:51:30] %s\n" % text), sys.stdout.flush())
say("server_args=ServerArgs(model_path='x')")
say("Init torch distributed begin.")
say("Load weight begin. avail mem=46.31 GB")
title = "sglang::scheduler_TP0"
loop = "import time; time.sleep(7400)"
worker = subprocess.Popen([title, "-S", "-c", loop], executable=sys.executable)
with open(os.path.join(folder, "worker"), "w") as file:
    file.write("%d\n" % worker.pid)
while True:
    time.sleep(0.1)
    if watches and worker.poll() is not None:
        say("Subprocess scheduler_0 (pid=%d) crashed with exit code -9." % worker.pid)
        os.kill(os.getpid(), 9)
"""


class Local(StepContext):
    """Both sides are this machine; jobs lie below a folder of the test."""

    root: str

    def jobs(self, where: Where) -> Jobs:
        return Jobs(self.on(where), self.root)


Starter = Callable[[str], tuple[LaunchWait, int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts the server; gives the wait for it and the pid of its worker."""
    root, jobs, made = str(tmp_path / "jobs"), [], []

    def begin(kind: str) -> tuple[LaunchWait, int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        want = deployment(serve={"port": port}, engine={"venv": sys.prefix})
        transport = LocalTransport(shell_path("dash", tmp_path))
        events: list[Event] = []
        context = Local(
            want=want,
            run_id="r1",
            bus=Bus(events.append),
            transports={Where.HOST: transport, Where.GUEST: transport},
            reprobe=Facts,
            state=state(),
            save=lambda: None,
            step="launch",
        )
        context.root = root
        server = tmp_path / "server.py"
        server.write_text(SERVER, "utf-8")
        script = f"exec {sys.executable} -S {server} {tmp_path} {kind}\n"
        job: JobIdentity = Jobs(transport, root).start("server-qwen", "one", script)
        jobs.append(Jobs(transport, root))
        made.append(job)
        ends = time.monotonic() + 20
        while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text("utf-8"):
            assert time.monotonic() < ends
            time.sleep(0.02)
        wait = LaunchWait(
            context,
            job,
            now=lambda: time.monotonic() * FASTER,
            sleep=lambda seconds: time.sleep(seconds / FASTER),
        )
        return wait, int((tmp_path / "worker").read_text("utf-8"))

    yield begin
    for one, job in zip(jobs, made, strict=True):
        assert one.stop(job, grace_s=0.1).stopped


def failed(wait: LaunchWait, worker: int) -> LaunchFailed:
    """Kills the worker once the wait has seen it."""

    def kill() -> None:
        ends = time.monotonic() + 30
        while not wait.workers.seen and time.monotonic() < ends:
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(LaunchFailed) as caught:
        wait.until_ready()
    killer.join()
    return caught.value


def test_a_zombie_service_is_noticed(start: Starter) -> None:
    wait, worker = start("blind")
    began = time.monotonic()
    error = failed(wait, worker)
    assert error.failure.cls == "worker-died"
    assert "sglang::scheduler_TP0 -S -c" in error.failure.cause_line
    assert f"(pid {worker})" in error.failure.cause_line
    assert error.exit_code is None
    assert error.phase == "weights"
    assert time.monotonic() - began < 30
    # What was still there is told: the parent lives.
    assert any(line.startswith(f"process: {wait.job.pid} ") for line in error.evidence)


def test_a_server_that_watches_its_workers_tells_it_itself(start: Starter) -> None:
    wait, worker = start("watches")
    error = failed(wait, worker)
    assert error.failure.cls == "child-killed"
    assert error.exit_code == -9
