from __future__ import annotations

from pathlib import Path

import pytest

from deployer.sglang.failures import MISLEADING, classify, fatal_while_alive, telling_lines
from deployer.sglang.log import LaunchLog

LOGS = Path(__file__).parent.parent / "fixtures" / "sglang-logs"
RECORDED = Path(__file__).resolve().parents[3] / "shared" / "field" / "sglang-logs" / "failures"

CLASSES = {
    "unknown-flag": (2, "bad-arguments", "unrecognized arguments: --enable-warp-drive", False),
    "port-in-use-silent-owner": (None, "port-in-use", "[Errno 98]", False),
    "shard-truncated": (-9, "weights-corrupt", "incomplete metadata", False),
    "graph-capture-oom-inside": (-9, "graph-capture-out-of-memory", "Capture cuda graph", True),
    "scheduler-sigkill": (-9, "child-killed", "crashed with exit code -9", False),
    "scheduler-sigkill-in-capture": (1, "child-killed", "died during initialization", False),
    "spec-default-strategy": (1, "speculation-needs-extra-buffer", "no_buffer", False),
    "sgl-kernel-wrong-cuda-lib": (1, "library-missing", "libnvrtc.so.12", False),
    "no-nvcc": (-9, "compiler-missing", "nvcc: not found", False),
    "mem-fraction-0.02": (-9, "not-enough-memory", "Not enough memory", True),
    "shard-missing": (-9, "bad-numbers", "probability tensor", False),
    "rank1-scheduler-sigkill": (3, "child-killed", "terminated with -9", False),
    "rank0-peer-gone": (-9, "distributed-timeout", "Connection closed by peer", False),
}

RECORDED_CLASSES = {
    "01": "bad-arguments",
    "02": "bad-arguments",
    "02b": "bad-arguments",
    "03": "port-in-use",
    "03b": "port-in-use",
    "03c": "port-in-use",
    "04": "model-path-missing",
    "04b": "model-config-missing",
    "04d": "hub-unreachable",
    "05": "unknown-model-type",
    "06": "bad-numbers",
    "06b": "weights-missing",
    "07": "weights-corrupt",
    "09": "weights-corrupt",
    "10": "too-few-gpus",
    "11": "context-too-long",
    "12": "not-enough-memory",
    "13a": "graph-capture-out-of-memory",
    "13c": "graph-capture-out-of-memory",
    "15": "child-killed",
    "17": "asked-to-stop",
    "25": "extra-buffer-needs-radix",
    "25b": "speculation-needs-extra-buffer",
    "26a": "quantization-mismatch",
    "28a": "library-missing",
    "28c": "engine-not-installed",
    "28d": "library-missing",
    "29": "no-gpu",
    "43": "compiler-missing",
}


def phase_of(path: Path) -> str:
    log = LaunchLog()
    log.feed(path.read_bytes())
    return log.phase


@pytest.mark.parametrize("name", CLASSES)
def test_class_cause_and_ladder(name: str) -> None:
    code, cls, cause, ladder = CLASSES[name]
    path = LOGS / f"{name}.log"
    failure = classify(path.read_text(encoding="utf-8"), code, phase_of(path))
    assert failure.cls == cls
    assert cause in failure.cause_line
    assert failure.next_variant_allowed is ladder
    assert failure.action


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded logs are not here")
def test_every_recorded_failure() -> None:
    seen = 0
    for path in sorted(RECORDED.glob("*.log")):
        expected = RECORDED_CLASSES.get(path.name.split("-")[0])
        if expected is None:
            continue
        failure = classify(path.read_text(errors="replace"), -9, phase_of(path))
        assert failure.cls == expected, path.name
        assert not MISLEADING.search(failure.cause_line)
        seen += 1
    assert seen >= 29


def test_died_before_a_word() -> None:
    failure = classify("", 139, "starting")
    assert failure.cls == "died-silent"
    assert "exit code 139" in failure.action
    assert classify("Killed\n", -9, "starting").cls == "died-silent"


def test_killed_from_outside() -> None:
    failure = classify("[x] Load weight begin. avail mem=9 GB\nKilled\n", -9, "weights")
    assert failure.cls == "killed"
    assert "dmesg" in failure.action


def test_unknown_is_said_honestly() -> None:
    failure = classify("the flux capacitor is cold\n", 1, "args")
    assert failure.cls == "unknown"
    assert failure.cause_line == "the flux capacitor is cold"
    assert "exit code 1" in failure.action
    assert not failure.next_variant_allowed


def test_an_exception_that_is_not_in_the_table() -> None:
    text = (
        "Traceback (most recent call last):\nFooError: no luck\n[x] Received sigquit from a child"
    )
    early = classify(text, -9, "weights")
    assert (early.cls, early.cause_line) == ("exception", "FooError: no luck")
    assert not early.next_variant_allowed
    assert classify(text, -9, "graphs").next_variant_allowed


def test_out_of_memory_by_phase() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.89 GiB."
    assert classify(text, -9, "graphs").cls == "graph-capture-out-of-memory"
    assert classify(text, -9, "weights").cls == "out-of-memory"


def test_a_term_while_loading() -> None:
    assert classify("[x] Capture cuda graph bs [1, 2]\n", -15, "graphs").cls == "asked-to-stop"


def test_a_lost_port_is_fatal_although_the_process_lives() -> None:
    text = (LOGS / "port-in-use-silent-owner.log").read_text(encoding="utf-8")
    assert fatal_while_alive(text)
    assert not fatal_while_alive((LOGS / "ready.log").read_text(encoding="utf-8"))


def test_telling_lines_leave_out_headlines_traffic_and_bars() -> None:
    text = (
        "ValueError: no\n[x] Received sigquit from a child process.\n"
        '[x] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n'
        "Capturing batches (bs=1):  11%|#| 1/9 [00:42<05:41, 42.70s/it]\n"
    )
    assert telling_lines(text) == ("ValueError: no",)


def test_a_peer_that_left_is_not_told_as_one_that_was_never_met() -> None:
    log = (LOGS / "rank0-peer-gone.log").read_text()
    assert classify(log, -9, "ready").action.startswith("another rank is gone")


@pytest.mark.parametrize(
    ("cause", "cls"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "memory"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "mem"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda"),
        ("Exception: Capture cuda graph failed: CUDA out of memory", "graph-capture"),
    ],
)
@pytest.mark.parametrize(
    "peer", ["127.0.1.1]:930: Connection refused", "]: Connection closed by peer"]
)
def test_a_peers_last_words_do_not_hide_the_cause(cause: str, cls: str, peer: str) -> None:
    """One rank fails, and the others miss it."""
    log = (
        "[2026-11-30 02:51:30] server_args=ServerArgs(model_path='/srv/models/x', tp_size=2)\n"
        "[2026-11-30 02:51:59 TP0] Load weight begin. avail mem=78.00 GB\n"
        "[2026-11-30 02:53:00 TP0] The IPv6 network addresses of (n1, 2) cannot be retrieved\n"
        "[2026-11-30 02:54:01 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        f"{cause}\n"
        "[2026-11-30 02:54:03 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        f"RuntimeError: [/pytorch/gloo/gloo/transport/tcp/pair.cc:547] connect [{peer}\n"
        "[2026-11-30 02:54:05] Received sigquit from a child process.\n"
    )
    found = classify(log, -9, "weights")
    assert cls in found.cls and found.next_variant_allowed, found
