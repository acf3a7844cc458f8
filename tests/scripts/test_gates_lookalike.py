"""The gates against the look-alike server: a real process, the real agent, every fault."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]
from serverworld import Clock, FakeJobs, FakeTransport, context, deployment, state  # noqa: E402
from test_lookalike import MTP, Running, base, start  # noqa: E402, F401

from deployer.errors import GateFailed  # noqa: E402
from deployer.events import Event, GateChecked, Note  # noqa: E402
from deployer.playbook import ArgValue  # noqa: E402
from deployer.remote.jobs import JobIdentity, JobStatus  # noqa: E402
from deployer.remote.transport import Answer  # noqa: E402
from deployer.state import Launch  # noqa: E402
from deployer.steps.gates_bench import Bench  # noqa: E402
from deployer.steps.verify_gates import GATES, Gates  # noqa: E402
from tests.local_transport import LocalTransport, shell_path  # noqa: E402

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
SMI = b"0000:21:00.0, 40000\n0000:41:00.0, 40000\n--\n"
ARGS = ["--tp-size", "2", "--reasoning-parser", "qwen3", "--context-length", "4096", *MTP]
SPEC: dict[str, ArgValue] = dict(zip([one[2:] for one in MTP[::2]], MTP[1::2], strict=True))


class OneJob(FakeJobs):
    """The job is the look-alike's process."""

    server: Running

    def poll(self, job: JobIdentity, *, inode: int = 0, offset: int = 0) -> JobStatus:
        code = self.server.process.poll()
        return JobStatus(job, code is None, code, b"", 7, 0, "")


@dataclass
class Trial:
    """One server and its gates."""

    server: Running
    gates: Gates
    events: list[Event]
    base: Path

    def fault(self, name: str) -> None:
        """Switches one fault on; '' switches all off."""
        (self.base / "faults").write_text(f"{name}\n", encoding="utf-8")

    def run(self, *names: str) -> GateFailed | None:
        """The gates of these names, or all; what failed."""
        chosen = [one for one in GATES if not names or one[0] in ("identity", *names)]
        self.events.clear()
        try:
            self.gates.run(chosen)
        except GateFailed as error:
            return error
        return None

    def told(self) -> str:
        """All that was said."""
        checked = [f"{e.gate}: {e.detail}" for e in self.events if isinstance(e, GateChecked)]
        return "\n".join([*checked, *(e.text for e in self.events if isinstance(e, Note))])


def trial(server: Running, base: Path, folder: Path, args: list[str], **rules: Any) -> Trial:  # noqa: F811
    """A bench for a server that runs; time of waits is the clock's, time of requests is real."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text(encoding="utf-8")
    begun = int(fields.rpartition(") ")[2].split()[19])
    pid = server.process.pid
    job = JobIdentity("server-qwen", "one", pid, begun, BOOT, pid)
    want = deployment(
        model={"path": str(base / "model")},
        serve={"port": server.port, "args": {"tp-size": 2, "context-length": 4096}},
        gates={"request_timeout_s": 10, "alive_after_s": 1, **rules},
    )
    jobs = OneJob(root=str(folder / "jobs"))
    jobs.server = server
    log = folder / "jobs" / "server-qwen" / "one"
    log.mkdir(parents=True)
    (log / "log").symlink_to(server.log)
    own = state()
    own.launches.append(Launch(id="one", variant="mtp", started=1.0))
    host = FakeTransport(lambda script: Answer(0, SMI, b""))
    guest: Any = LocalTransport(shell_path("dash", folder))
    made, events = context(want, own, jobs, host=host, guest=guest)
    clock = Clock()
    flags: dict[str, ArgValue] = {
        "tp-size": 2,
        **({key: value for key, value in SPEC.items()} if MTP[0] in args else {}),
    }
    bench = Bench(made, job, "mtp", flags, "qwen3_5", "", clock.now, clock.sleep)
    return Trial(server, Gates(bench), events, base)


@pytest.fixture(scope="module")
def shared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:  # noqa: F811
    """One good server for all faults that it survives."""
    server = Running(base, *ARGS)
    try:
        yield trial(server.ready(), base, tmp_path_factory.mktemp("trial"), ARGS)
    finally:
        server.kill()
        (base / "faults").write_text("", encoding="utf-8")


def test_all_gates_pass(shared: Trial) -> None:
    shared.fault("")
    error = shared.run()
    assert error is None, (error, shared.told())
    figures = shared.gates.bench.figures
    told = shared.told()
    assert "code word found" in told
    assert "of 4096 answered" in told
    assert "thinking off" in told
    assert "without effect" not in told
    assert 1 < figures["accept_length"] < 4
    assert 0 < figures["accept_rate"] < 1
    assert figures["tokens_per_s"] > 100
    assert figures["ttft_s"] < 5
    assert figures["parallel_tokens_per_s"] > figures["tokens_per_s"]


@pytest.mark.parametrize(
    ("fault", "gate", "why"),
    [
        ("server-degenerate", "answers", "thinking"),
        ("server-empty", "answers", "the answer is empty"),
        ("server-degenerates-late", "quality", "'!' "),
        ("server-degenerates-long", "long prompt", "'and so on'"),
        ("server-thinks-aloud", "answers", "thoughts stand in the content"),
        ("server-swallows", "answers", "the model answers well, but all of it came as reasoning"),
    ],
)
def test_a_fault_fails_its_gate(shared: Trial, fault: str, gate: str, why: str) -> None:
    shared.fault(fault)
    error = shared.run("answers", "quality", "counting", "long prompt")
    assert error is not None, shared.told()
    assert f"gate {gate!r} failed" in error.what, shared.told()
    assert why in error.what
    if fault in ("server-thinks-aloud", "server-swallows"):
        assert "reasoning-parser" in error.fix
    shared.fault("")
    assert shared.run("answers") is None


def test_thoughts_without_end(shared: Trial) -> None:
    shared.gates.bench.context_tokens = 0
    shared.fault("server-thinks-on")
    error = shared.run("answers")
    shared.fault("")
    assert error is not None
    assert "still thinks after" in error.what or "times in a row" in error.what


def test_a_refused_switch_is_no_failure(shared: Trial) -> None:
    shared.fault("server-refuses-thinking")
    error = shared.run("answers", "quality")
    shared.fault("")
    assert error is None, error
    assert "thinking off cannot be asked for" in shared.told()


def test_speculation_off_is_said(start: Any, base: Path, tmp_path: Path) -> None:  # noqa: F811
    args = [*ARGS[:6]]
    one = trial(start(*args).ready(), base, tmp_path, args)
    one.fault("server-degenerate-mtp")
    assert one.run("answers", "quality", "speculation") is None, one.told()
    assert "speculation: none" in one.told()


def test_metrics_and_the_definitions_of_two_versions(
    start: Any,  # noqa: F811
    base: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    for number, version in enumerate(("0.5.11", "0.5.9")):
        flags = ["--reasoning-parser", "qwen3", "--context-length", "4096", "--enable-metrics"]
        spec = MTP if version == "0.5.11" else MTP[:8]
        server = start(*flags, *spec, version=version).ready()
        folder = tmp_path / str(number)
        folder.mkdir()
        one = trial(server, base, folder, [*flags, *spec])
        one.fault("")
        assert one.run("answers", "speculation") is None, one.told()
        assert "metrics: length" in one.told(), one.told()
        assert "meta: length" in one.told()
        assert "does not follow" not in one.told(), one.told()
        server.kill()


def test_death_at_the_edge(start: Any, base: Path, tmp_path: Path) -> None:  # noqa: F811
    one = trial(start(*ARGS).ready(), base, tmp_path, ARGS)
    one.gates.bench.sleep, one.gates.bench.now = time.sleep, time.monotonic
    one.fault("server-dies-at-edge")
    error = one.run("context edge")
    assert error is not None, one.told()
    assert "the server died during this gate" in error.what
    assert "illegal memory access" in "\n".join(error.evidence)


def test_a_hang(start: Any, base: Path, tmp_path: Path) -> None:  # noqa: F811
    one = trial(start(*ARGS).ready(), base, tmp_path, ARGS, request_timeout_s=2)
    one.fault("server-hangs")
    error = one.run("answers")
    assert error is not None
    assert "the server hangs, although /health and /v1/models say 200" in error.what


def test_a_lost_worker(start: Any, base: Path, tmp_path: Path) -> None:  # noqa: F811
    """0.5.9 lives on without its scheduler; the gate sees that it is gone."""
    flags = ["--reasoning-parser", "qwen3", "--context-length", "4096"]
    server = start(*flags, version="0.5.9").ready()
    one = trial(server, base, tmp_path, flags)
    one.fault("")
    one.gates.bench.args = {}
    assert one.run("answers") is None
    os.kill(max(one.gates.bench.members), signal.SIGKILL)
    with pytest.raises(GateFailed, match="worker processes ended"):
        one.gates.run([gate for gate in GATES if gate[0] == "alive"])
