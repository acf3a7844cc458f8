"""The wait for a launch: deadlines by phase, workers that die, and what the machine adds."""

from __future__ import annotations

from typing import Any

import pytest
from serverworld import (
    IDENTITY,
    Clock,
    FakeJobs,
    FakeTransport,
    Script,
    context,
    deployment,
    state,
)

from deployer.errors import ConnectionLost
from deployer.playbook import Phases
from deployer.remote.jobs import JobIdentity, JobStatus
from deployer.remote.transport import Answer
from deployer.sglang.log import PHASES, LaunchLog
from deployer.steps import launch_wait
from deployer.steps.launch_clock import LIMITS, PhaseClock
from deployer.steps.launch_wait import LaunchFailed, LaunchWait
from deployer.steps.launch_workers import Workers

MAIN = {"pid": 4242, "start": 1000, "title": "python -m sglang.launch_server"}
TRACKER = {"pid": 4243, "start": 1001, "title": "python3 -B -c from multiprocessing.resource_tr"}
SCHEDULER = {"pid": 4244, "start": 1002, "title": "sglang::scheduler_TP0"}
LOADING = [
    b"[x] server_args=ServerArgs(x)\n[x TP0] Init torch distributed begin.\n",
    b"[x TP0] Load weight begin. avail mem=46.00 GB\n",
]
BAR = b"\rLoading safetensors checkpoint shards:  45%% Completed | %d/11 [00:03<00:04,  1.43it/s]"


def answer(*members: dict[str, Any], alive: bool = True) -> dict[str, Any]:
    return {"do": "x", "ok": True, "alive": alive, "members": list(members), "listening": False}


class Wait:
    """One wait whose agent answers through `answers`, the last one for ever."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        jobs: FakeJobs,
        *answers: dict[str, Any],
        guest: FakeTransport | None = None,
        host: FakeTransport | None = None,
        **serve: Any,
    ) -> None:
        left = list(answers) or [answer(MAIN)]
        self.asked: list[str] = []

        def ask(transport: object, want: object, commands: list[Any], **more: Any) -> list[Any]:
            self.asked.append(commands[0]["do"])
            return [left.pop(0) if len(left) > 1 else left[0]]

        monkeypatch.setattr(launch_wait, "ask", ask)
        self.clock = Clock()
        self.began = self.clock.time
        want = deployment(serve=serve)
        made, _ = context(want, state(), jobs, guest=guest, host=host)
        self.wait = LaunchWait(made, IDENTITY, "", self.clock.now, self.clock.sleep)

    def fails(self) -> LaunchFailed:
        with pytest.raises(LaunchFailed) as caught:
            self.wait.until_ready()
        return caught.value

    @property
    def seconds(self) -> float:
        return self.clock.time - self.began


def test_every_phase_has_a_limit_that_the_playbook_can_set() -> None:
    assert set(LIMITS) == set(PHASES)
    assert {limit.setting for limit in LIMITS.values()} == set(Phases.model_fields)


def test_a_phase_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is never silent: a bar moves once a second.
    logs = [*LOADING, *(BAR % (n % 11) for n in range(3000))]
    jobs = FakeJobs([])
    jobs.running = Script(logs)
    waited = Wait(monkeypatch, jobs, phases={"weights_s": 90}, silence_timeout_s=30)
    error = waited.fails()
    assert error.failure.cls == "phase-overdue"
    assert "phase `weights` (loading weights) takes longer than 90 s" in error.failure.cause_line
    assert "of 11 shards" in error.failure.cause_line
    assert "serve.phases.weights_s" in error.failure.action
    assert not error.failure.next_variant_allowed
    assert error.exit_code is None
    assert 90 < waited.seconds < 100


@pytest.mark.parametrize(
    ("line", "setting", "further", "hint"),
    [
        ("", "start_s", False, "disk of the venv"),
        ("[x TP0] Init torch distributed begin.\n", "distributed_s", False, "NCCL_P2P_DISABLE"),
        ("[x TP0] Using KV cache dtype: a\n", "pools_s", False, "Xid"),
        ("[x TP0] Capture cuda graph begin. a\n", "graphs_s", True, "cuda-graph-max-bs"),
        ("[x] INFO:     Uvicorn running on http://h\n", "warmup_s", True, "nvcc"),
    ],
)
def test_which_limit_holds(line: str, setting: str, further: bool, hint: str) -> None:
    limits = Phases.model_validate(dict.fromkeys(Phases.model_fields, 1000.0) | {setting: 10.0})
    clock, log = PhaseClock(limits, 0.0), LaunchLog()
    log.feed(line.encode())
    assert clock.overdue(log, 0.0) is None
    assert clock.overdue(log, 10.0) is None
    failure = clock.overdue(log, 10.5)
    assert failure is not None
    assert failure.next_variant_allowed is further
    assert hint in failure.action and setting in failure.action


def test_a_draft_model_has_the_phases_once_more() -> None:
    clock, log = PhaseClock(Phases(weights_s=10, graphs_s=10), 0.0), LaunchLog()
    log.feed(b"[x TP0] Load weight begin. avail mem=46.00 GB\n")
    assert clock.overdue(log, 9.0) is None
    log.feed(b"[x TP0] Capture cuda graph begin. a\n")
    assert clock.overdue(log, 11.0) is None
    log.feed(b"[x TP0] Load weight begin. avail mem=9.00 GB\n")
    assert clock.overdue(log, 20.0) is None
    assert clock.overdue(log, 30.5) is not None


def test_kernels_that_are_compiled_have_the_time_of_graphs() -> None:
    clock, log = PhaseClock(Phases(pools_s=10, graphs_s=50), 0.0), LaunchLog()
    log.feed(b"[x TP0] Using KV cache dtype: a\n")
    assert clock.overdue(log, 5.0) is None
    log.feed(b"[x TP0] Entering DeepGEMM JIT Pre-Compile session.\n")
    assert log.phase == "kv"
    assert clock.overdue(log, 8.0) is None
    assert clock.overdue(log, 40.0) is None
    assert clock.overdue(log, 59.0) is not None


def test_phases_of_one_limit_share_its_time() -> None:
    clock, log = PhaseClock(Phases(start_s=10), 0.0), LaunchLog()
    log.feed(b"[x] server_args=ServerArgs(x)\n")
    assert clock.overdue(log, 9.0) is None
    assert clock.overdue(log, 10.5) is not None


def test_a_worker_that_dies_while_the_main_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs([])
    jobs.running = Script([*LOADING, *(BAR % (n % 11) for n in range(3000))])
    whole, less = answer(MAIN, TRACKER, SCHEDULER), answer(MAIN, TRACKER)
    waited = Wait(monkeypatch, jobs, whole, whole, less)
    error = waited.fails()
    assert error.failure.cls == "worker-died"
    assert "sglang::scheduler_TP0 (pid 4244)" in error.failure.cause_line
    assert waited.seconds < 60
    assert set(waited.asked) == {"identity"}


def test_a_server_that_ends_itself_says_why_in_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"[x TP0] Scheduler hit an exception: Traceback\nRuntimeError: Not enough memory. x\n"
    jobs = FakeJobs([])
    jobs.running = Script([*LOADING, *([b"."] * 11), text], -9, True)
    waited = Wait(monkeypatch, jobs, answer(MAIN, SCHEDULER), answer(MAIN))
    assert waited.fails().failure.cls == "not-enough-memory"


def test_workers_are_known_by_pid_and_start_time() -> None:
    workers = Workers()
    workers.look(answer(MAIN, TRACKER, SCHEDULER), 0.0)
    workers.look(answer(MAIN, SCHEDULER), 10.0)
    assert workers.lost_s(99.0) == 0
    workers.look(answer(MAIN, {**SCHEDULER, "start": 9999}), 20.0)
    assert workers.lost_s(26.0) == 6.0
    fresh = Workers()
    fresh.look(answer(MAIN, SCHEDULER), 0.0)
    # The whole server is gone, or the agent could not look: no word about a worker.
    fresh.look(answer(alive=False), 10.0)
    fresh.look({"do": "x", "ok": True, "alive": True}, 20.0)
    assert fresh.lost_s(99.0) == 0


def test_the_machine_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    guest = FakeTransport(lambda script: Answer(0, b"oom_kills=2\noom_before=1\nend=yes\n", b""))
    jobs = FakeJobs([])
    jobs.running = Script([*LOADING, b"Killed\n"], -9, True)
    waited = Wait(monkeypatch, jobs, guest=guest)
    error = waited.fails()
    assert error.failure.cls == "host-out-of-memory"
    assert "1 killed for memory since the launch began" in "\n".join(error.evidence)
    assert (error.seen.before, error.phase) == (46.0, "weights")


def test_a_dead_process_ends_the_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FakeJobs([])
    jobs.running = Script([*LOADING], -9, True)
    waited = Wait(monkeypatch, jobs)
    assert waited.fails().failure.cls == "killed"
    assert waited.seconds < 5


class CutJobs(FakeJobs):
    """Each look at a dead process, or at one that serves, is cut `cuts` times."""

    cuts = 0
    dead = False

    def poll(self, job: JobIdentity, *, inode: int = 0, offset: int = 0) -> JobStatus:
        if self.dead and self.cuts:
            self.cuts -= 1
            raise ConnectionLost("cut")
        status = super().poll(job, inode=inode, offset=offset)
        self.dead = not status.alive
        return status


@pytest.mark.parametrize(("cuts", "told"), [(3, False), (1000, True)])
def test_a_cut_connection_does_not_lose_the_class(
    monkeypatch: pytest.MonkeyPatch, cuts: int, told: bool
) -> None:
    text = b"[x TP0] Scheduler hit an exception: Traceback\nRuntimeError: Not enough memory. x\n"
    jobs = CutJobs([])
    jobs.cuts = cuts
    jobs.running = Script([*LOADING, text], -9, True)
    waited = Wait(monkeypatch, jobs)
    error = waited.fails()
    assert error.failure.cls == "not-enough-memory"
    assert ("the end of the log was not read: cut" in error.evidence) is told
    assert waited.seconds < 200


def test_the_figures_are_read_though_it_came_up_while_it_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs are captured in silence; the server is up before the next look at its log."""
    figures = b"[x] max_total_num_tokens=7, max_running_requests=3, context_len=5\n"
    jobs = FakeJobs([])
    jobs.running = Script([*LOADING, *([b""] * 6), figures])
    ready = {**answer(MAIN), "owned": True, "models": {"ids": ["tiny"]}, "health": 200}
    waited = Wait(monkeypatch, jobs, ready)
    assert waited.wait.until_ready() == ready
    assert waited.wait.log.figures["max_running_requests"] == 3
