from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from deployer.cli.explain import command, read_ends
from deployer.sglang.diagnosis import clean, diagnose

LOGS = Path(__file__).parent.parent / "fixtures" / "sglang-logs"
RECORDED = Path(__file__).resolve().parents[3] / "shared" / "field" / "sglang-logs"
BEGIN = (
    b"/v/launch_server.py:54: UserWarning: 'python -m sglang.launch_server' is still supported,"
    b" but 'sglang serve' is the recommended entrypoint.\n"
    b"[2026-11-30 02:51:30] server_args=ServerArgs(model_path='/m', watchdog_timeout=300)\n"
)
SIGQUIT = (
    b"\n[2026-11-30 02:52:00] Received sigquit from a child process. It usually means the child"
    b" failed.\n"
)
READY = b"[2026-11-30 02:53:23] The server is fired up and ready to roll!\n"
TRACE = (
    b"[2026-11-30 02:51:59] Scheduler hit an exception: Traceback (most recent call last):\n"
    b'  File "/v/scheduler.py", line 1, in run\n    x()\n    ^^^\n'
)

UNSEEN = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "out-of-memory",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried": "out-of-memory",
    "RuntimeError: NCCL error: unhandled system error, NCCL version 2.27.3": "nccl",
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/x.cpp:3690": "nccl",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12040).": (
        "driver-too-old"
    ),
    "RuntimeError: CUDA driver version is insufficient for CUDA runtime version": "driver-too-old",
    "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch": "driver-mismatch",
    "RuntimeError: No CUDA GPUs are available": "no-gpu",
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up": "no-gpu",
    "ModuleNotFoundError: No module named 'outlines'": "python-module-missing",
    "ImportError: cannot import name 'Qwen3VL' from 'transformers'": "python-module-missing",
    "OSError: Can't load tokenizer for '/srv/models/x'. If you were trying": "tokenizer",
    "Exception: data did not match any variant of untagged enum ModelWrapper at line 1": (
        "tokenizer"
    ),
    "ValueError: Couldn't instantiate the backend tokenizer from one of:": "tokenizer",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered": "cuda-fault",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": (
        "gpu-unsupported"
    ),
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "gpu-broken",
    "[2026-11-30 02:51:59 TP0] Watchdog timeout (self.watchdog_timeout=300)": "watchdog",
    "OSError: [Errno 28] No space left on device": "disk-full",
    "RuntimeError: unable to write to file </dev/shm/x>: No space left on device (28)": (
        "shared-memory-full"
    ),
    "huggingface_hub.errors.GatedRepoError: 401 Client Error.": "hub-refused",
    "OSError: You are trying to access a gated repo.": "hub-refused",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local": (
        "port-in-use"
    ),
    "RuntimeError: [alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory": (
        "host-out-of-memory"
    ),
    "AssertionError: 40 is not divisible by 3": "tp-size-mismatch",
    "KeyError: 'model.layers.3.mlp.gate_proj.qweight'": "weights-mismatch",
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 1": (
        "kernel-too-large"
    ),
    "PermissionError: [Errno 13] Permission denied: '/srv/models/x/config.json'": "permission",
    "Fatal Python error: Segmentation fault": "crashed",
    "FrobnicationError: nothing that anybody has met": "exception",
}


def explain(*words: str, stdin: bytes | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(command, list(words), input=stdin, standalone_mode=False)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return int(result.return_value or 0), result.stdout


@pytest.mark.parametrize("cause", UNSEEN)
def test_unseen_failures_are_classified_or_quoted(cause: str) -> None:
    found = diagnose(BEGIN + TRACE + cause.encode() + b"\n" + SIGQUIT)
    assert found.outcome == "failed"
    assert found.failure is not None
    assert found.failure.cls == UNSEEN[cause]
    assert found.failure.cause_line == cause
    assert found.failure.action
    assert found.line == 7


def test_a_ready_log_is_said_to_be_ready() -> None:
    code, text = explain(str(LOGS / "ready.log"))
    assert code == 0
    assert "the log's claim, not a proof" in text
    assert "max_running_requests 10" in text


def test_a_failure_names_class_cause_line_and_action() -> None:
    code, text = explain(str(LOGS / "shard-truncated.log"), "--exit", "-9")
    assert code == 1
    assert text.startswith("failed: weights-corrupt")
    assert "incomplete metadata" in text
    assert "deploy up --from shards" in text
    assert "sigquit" not in text.lower()


def test_json() -> None:
    code, text = explain(str(LOGS / "scheduler-sigkill.log"), "--json", "--exit", "137")
    document = json.loads(text)
    assert code == 1
    assert (document["outcome"], document["class"]) == ("failed", "child-killed")
    assert (document["phase"], document["ready"], document["exit_code"]) == ("ready", False, -9)
    assert document["bytes_unread"] == 0


def test_standard_input_and_the_empty_log() -> None:
    assert explain("-", stdin=BEGIN + READY)[0] == 0
    code, text = explain("-", stdin=b"")
    assert code == 1
    assert text.splitlines() == [
        "unknown: the log is empty, or has no line of a launch",
        "  -> is it the right file? If its process has ended, say how: --exit CODE",
    ]
    code, text = explain("-", "--exit", "1", stdin=b"")
    assert code == 1
    assert text.splitlines()[:2] == ["failed: died-silent", "  exit    1"]


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    from deployer.errors import UsageError

    with pytest.raises(UsageError, match="cannot read the log"):
        explain(str(tmp_path / "no.log"))


@pytest.mark.parametrize("cut", range(1, len(READY) - 1))
def test_a_cut_ready_line_is_no_claim(cut: int) -> None:
    assert diagnose(BEGIN + READY[:-1][: cut - 1]).outcome == "unfinished"


def test_an_unfinished_start_and_its_exit_code() -> None:
    text = BEGIN + b"[x TP0] Load weight begin. avail mem=9 GB\n"
    assert diagnose(text).outcome == "unfinished"
    killed = diagnose(text, exit_code=-9)
    assert (killed.outcome, killed.failure and killed.failure.cls) == ("failed", "killed")
    assert diagnose(text + b"Killed\n").failure == killed.failure
    assert diagnose(text, exit_code=1).outcome == "unknown"


def test_a_ready_line_after_a_lost_port_is_the_other_servers() -> None:
    lost = b"[x] ERROR:    [Errno 98] error while attempting to bind: address already in use\n"
    found = diagnose(BEGIN + lost + READY)
    assert (found.outcome, found.failure and found.failure.cls) == ("failed", "port-in-use")


def test_a_ready_line_in_a_prompt_is_no_claim() -> None:
    logged = b"[x] Receive: obj=GenerateReqInput(text='" + READY[:-1] + b"')\n"
    assert diagnose(BEGIN + logged).outcome == "unfinished"
    crash = b"[x] Receive: obj=GenerateReqInput(text='SIGQUIT received. CUDA error: x')\n"
    assert diagnose(BEGIN + READY + crash).outcome == "ready"


def test_a_death_after_ready_is_a_failure() -> None:
    late = b"torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    found = diagnose(BEGIN + READY + TRACE + late + SIGQUIT)
    assert (found.outcome, found.phase) == ("failed", "ready")
    assert found.failure and found.failure.cls == "cuda-fault"
    ended = diagnose(BEGIN + READY, exit_code=1)
    assert ended.outcome == "unknown"
    assert diagnose(BEGIN + READY + b"Killed\n").failure.cls == "killed"  # type: ignore[union-attr]


def test_told_to_stop_after_ready_is_no_failure() -> None:
    term = b"[x] SIGTERM received. signum=None frame=None. Draining requests and shutting down...\n"
    child = b"[x] Subprocess scheduler_0 (pid=3) crashed with exit code -9. Triggering SIGQUIT\n"
    assert diagnose(BEGIN + READY + term + child, exit_code=-9).outcome == "stopped"
    assert diagnose(BEGIN + term).outcome == "failed"
    crashed = diagnose(BEGIN + READY + child + term)
    assert (crashed.outcome, crashed.failure and crashed.failure.cls) == ("failed", "child-killed")


def test_the_last_of_several_launches_is_explained() -> None:
    failed = BEGIN + TRACE + b"OSError: [Errno 28] No space left on device\n" + SIGQUIT
    again = diagnose(failed + BEGIN + READY)
    assert (again.outcome, again.launches) == ("ready", 2)
    assert diagnose(BEGIN + READY + failed).outcome == "failed"
    assert diagnose(BEGIN + READY + BEGIN).outcome == "unfinished"


def test_a_warning_that_the_launch_outlived_is_no_cause() -> None:
    warned = b"RuntimeWarning: OSError: [Errno 28] No space left on device\n"
    assert diagnose(BEGIN + warned + b"[x TP0] Load weight begin. avail\n").outcome == "unfinished"


@pytest.mark.parametrize(
    "stamp",
    [
        b"Nov 30 02:51:30 kpro5 sglang[812]: ",
        b"2026-11-30T02:51:30.123456789Z ",
        b"2026-11-30T02:51:30.1Z stderr F ",
        b"sglang-1  | ",
        b"\x1b[32m",
        b"Nov 30 02:51:30.123456 kpro5 sglang[812]: ",
        b"\x1b[36m(SGLangWorker pid=38138, ip=10.0.0.1)\x1b[0m ",
        b"[pod/sglang-0/server] ",
        b"sglang-0 server ",
        b"2026-11-30 02:51:30,488 - __main__ - INFO - ",
        b"[rank0]: ",
        b"Nov 30 02:51:30 ",
    ],
)
def test_stamps_of_journald_containers_and_colours(stamp: bytes) -> None:
    text = b"".join(stamp + line + b"\r\n" for line in (BEGIN + READY).split(b"\n"))
    assert diagnose(text).outcome == "ready"
    assert clean(text)[2].text == READY.decode().rstrip()


def test_what_is_no_log_of_sglang_is_unknown() -> None:
    assert diagnose(b"root:x:0:0::/root:/bin/sh\n").outcome == "unknown"
    assert diagnose(bytes(range(256)) * 40).outcome == "unknown"


def test_head_and_tail_of_a_large_log(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    traffic = b"[x TP0] Decode batch, #running-req: 1, #token: 499, gen throughput\n" * 3000
    path.write_bytes(BEGIN + READY + traffic + TRACE + b"RuntimeError: NCCL error: x\n" + SIGQUIT)
    with path.open("rb") as file:
        head, tail, size = read_ends(file, 4096, 4096)
    assert (len(head), len(tail), size) == (4096, 4096, path.stat().st_size)

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    again = read_ends(Pipe(path.read_bytes()), 4096, 4096)
    assert (again[0], again[2], again[1][-4096:]) == (head, size, tail)
    found = diagnose(head, tail)
    assert (found.outcome, found.failure and found.failure.cls) == ("failed", "nccl")
    assert found.line == 0


RECORDED_READY = (
    *("27b-tp2-mtp-ready", "dense-slow-first-health", "hybrid-mtp-ready", "failures/00"),
    *("failures/06a", "failures/06c", "failures/14-", "failures/14b", "failures/20"),
    *("failures/23a", "failures/23b-", "failures/23d", "failures/24", "failures/27"),
)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded logs are not here")
def test_every_recorded_log_and_its_cuts() -> None:
    logs = sorted(RECORDED.rglob("*.log"))
    assert len(logs) >= 40
    for path in logs:
        name = str(path.relative_to(RECORDED))
        data = path.read_bytes()
        found = diagnose(data)
        if name.startswith(RECORDED_READY):
            assert found.outcome == "ready", name
        elif name.startswith(("dense-ready", "failures/17")):
            assert found.outcome == "stopped", name
        elif name.startswith(("failures/23b2", "failures/32")):
            assert found.outcome == "unfinished", name
        else:
            assert found.outcome == "failed", name
            assert found.failure and found.failure.cls not in ("exception", "unknown"), name
            assert found.line, name
        claim = data.find(b"ready to roll!")
        cuts = [len(data) * i // 8 for i in range(1, 8)]
        cuts += [claim + 13, claim - 1] if claim > 0 else []
        for cut in cuts:
            early = diagnose(data[:cut]).outcome
            assert early != "ready" or 0 < claim < cut - 13, (name, cut)
            if found.outcome == "ready":
                assert early in ("ready", "unfinished"), (name, cut)


def test_two_starts_of_0_5_23_are_told_apart() -> None:
    begin = b"[2026-11-30 02:51:30] server_args={'model_path': '/m', 'tp_size': 1}\n"
    found = diagnose(b"".join([begin, TRACE, b"RuntimeError: x\n", begin, READY]))
    assert (found.outcome, found.launches) == ("ready", 2)
