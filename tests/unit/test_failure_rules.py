"""Each class of failures has a fixture, and what differs between machines changes no class.

The first line of a fixture tells what is expected; the log follows.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from deployer.sglang.diagnosis import diagnose
from deployer.sglang.failure_rules import RULES
from deployer.sglang.failures import MISLEADING, Failure, classify
from deployer.sglang.log import LaunchLog

FIXTURES = Path(__file__).parent.parent / "fixtures" / "failure-rules"
RECORDED = Path(__file__).resolve().parents[3] / "shared" / "field" / "sglang-logs"
FAILED = sorted((RECORDED / "failures").glob("*.log")) if RECORDED.exists() else []
HEAD = re.compile(r"# exit=(\S+) phase=(\S+) next=(yes|no) cause=(.*)")


def load(name: str) -> tuple[int | None, str, bool, str, str]:
    """(exit code, phase, next variant, part of the cause line, log)."""
    head, _, text = (FIXTURES / f"{name}.log").read_bytes().decode().partition("\n")
    found = HEAD.fullmatch(head)
    assert found is not None, name
    code = None if found[1] == "None" else int(found[1])
    return code, found[2], found[3] == "yes", found[4], text


def judged(text: str, code: int | None) -> tuple[Failure, str]:
    log = LaunchLog()
    log.feed(text.encode())
    return classify(log.text(), code, log.phase), log.phase


NAMES = sorted(path.stem for path in FIXTURES.glob("*.log"))


def test_every_class_has_its_fixture() -> None:
    assert {rule.cls for rule in RULES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_row(name: str) -> None:
    code, phase, further, cause, text = load(name)
    failure, reached = judged(text, code)
    assert (failure.cls, reached) == (name, phase)
    assert cause.lower() in failure.cause_line.lower()
    assert failure.next_variant_allowed is further
    assert not MISLEADING.search(failure.cause_line)
    assert failure.action
    explained = diagnose(text.encode(), exit_code=code).failure
    assert explained is not None
    assert explained.cls == name


def elsewhere(text: str, chance: random.Random) -> str:
    """The same failure on another machine, at another time, with more GPUs."""
    shift = chance.randrange(1, 9)
    text = re.sub(r"\[20\d\d-\d\d-\d\d (\d\d)", f"[2027-0{shift}-1{shift} \\1", text)
    text = re.sub(r"\bTP([01])\b", lambda rank: f"TP{int(rank[1]) + shift}", text)
    text = re.sub(r"(scheduler_)0\b", rf"\g<1>{shift}", text)
    text = re.sub(r"\bpid=\d+", f"pid={chance.randrange(300, 4_000_000)}", text)
    text = re.sub(r"\[4242\]", f"[{chance.randrange(300, 4_000_000)}]", text)
    text = text.replace("/srv/models/", f"/mnt/tank {shift}/weights/".replace(" ", "-"))
    text = text.replace("/srv/venv/", "/home/user/.venvs/new/")
    return text.replace("tp_size=2", f"tp_size={2 * shift}")


def more_ranks(text: str) -> str:
    """Every rank says what one said: a traceback more for each."""
    begin = text.find("] Scheduler hit an exception")
    if begin < 0:
        return text
    begin = text.rfind("\n", 0, begin) + 1
    block = text[begin:]
    return text[:begin] + "".join(re.sub(r" TP\d\]", f" TP{n}]", block) for n in range(8))


def coloured(text: str) -> str:
    return re.sub(r"^(\[[^\]]*\])", "\x1b[32m\\1\x1b[0m", text, flags=re.M).replace(
        "INFO: ", "\x1b[32mINFO\x1b[0m: "
    )


STAMPS = {
    "journald": "Nov 30 02:51:28 kpro5 sglang[4242]: ",
    "docker": "2026-11-30T02:51:28.123456789Z stdout F ",
    "compose": "qwen-1  | ",
}


def stamped(text: str, stamp: str) -> str:
    return "".join(f"{stamp}{line}\n" for line in text.split("\n"))


@pytest.mark.parametrize("name", NAMES)
def test_no_detail_changes_the_class(name: str) -> None:
    code, phase, _, _, text = load(name)
    chance = random.Random(name)
    for _ in range(3):
        other = elsewhere(text, chance)
        for changed in (other, more_ranks(other), coloured(other), other.replace("\n", "\r\n")):
            failure, reached = judged(changed, code)
            assert (failure.cls, reached) == (name, phase), changed
            assert not MISLEADING.search(failure.cause_line)
        for stamp in STAMPS.values():
            explained = diagnose(stamped(coloured(other), stamp).encode(), exit_code=code)
            assert explained.failure is not None
            assert (explained.failure.cls, explained.phase) == (name, phase), stamp


@pytest.mark.skipif(not FAILED, reason="the recorded logs are not here")
@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_no_detail_changes_what_a_recording_is_called(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", "replace")
    code = None if diagnose(text.encode()).failure is None else -9
    first = diagnose(text.encode(), exit_code=code)
    chance = random.Random(path.stem)
    other = elsewhere(text, chance)
    for changed in (other, coloured(other), *(stamped(other, one) for one in STAMPS.values())):
        again = diagnose(changed.encode(), exit_code=code)
        assert (again.outcome, again.phase) == (first.outcome, first.phase)
        assert (again.failure and again.failure.cls) == (first.failure and first.failure.cls)


SURVIVED = (
    "'[Errno -3] Temporary failure in name resolution' thrown while requesting HEAD https://h/x\n"
    "node:77:201 [0] NCCL WARN Failed to open libibverbs.so[.1]: error\n"
    "ModuleNotFoundError: No module named 'torchcodec'\n"
    "OSError: [Errno 30] Read-only file system: '/root/.cache/x'\n"
)


@pytest.mark.parametrize(
    "name",
    [
        *("not-enough-memory", "graph-capture-out-of-memory", "weights-corrupt", "cuda-fault"),
        *("child-killed", "asked-to-stop", "gpu-broken", "watchdog", "port-in-use"),
    ],
)
def test_what_the_launch_survived_is_not_its_cause(name: str) -> None:
    code, _, _, _, text = load(name)
    text = text.replace("server_args=", SURVIVED + "[2026-11-30 02:51:30] server_args=", 1)
    assert judged(text, code)[0].cls == name


def test_a_rank_that_died_first_is_the_cause_although_another_went_on() -> None:
    _, _, _, _, text = load("library-missing")
    late = (
        "[2026-11-30 02:52:12 TP0] Using KV cache dtype: torch.bfloat16\n"
        "[2026-11-30 02:54:00] Subprocess scheduler_1 (pid=3823) crashed with exit code 1. "
        "Triggering SIGQUIT for cleanup...\n"
    )
    assert judged(text + late, -9)[0].cls == "library-missing"


def test_the_first_cause_is_kept_behind_thousands_of_lines() -> None:
    code, _, _, _, text = load("too-few-gpus")
    noise = "".join(f'  File "/srv/venv/x.py", line {n}, in f\n    x = f(x)\n' for n in range(1500))
    failure, _ = judged(text + noise + "RuntimeError: consequence\n", code)
    assert failure.cls == "too-few-gpus"


def test_torch_names_who_else_is_on_the_gpu() -> None:
    code, _, _, _, text = load("graph-capture-out-of-memory")
    free = "of which 348.31 MiB is free."
    other = f"{free} Process 77 has 30.00 GiB memory in use. Process 5 has 0.30 GiB memory in use."
    own = " Including non-PyTorch memory, this process has 16.99 GiB memory in use."
    failure, _ = judged(text.replace(free, other + own), code)
    assert (failure.cls, failure.next_variant_allowed) == ("gpu-occupied", False)
    assert "pid 77 holds 30.00 GiB" in failure.action and "pid 5" not in failure.action
    assert judged(text.replace(free, free + own), code)[0].cls == "graph-capture-out-of-memory"


def test_what_a_worker_raised_comes_before_its_end() -> None:
    _, _, _, _, text = load("child-crashed")
    own = (
        "[x TP1] Scheduler hit an exception: Traceback (most recent call last):\nFluxError: cold\n"
    )
    ends = (
        "[x] Subprocess scheduler_0 (pid=38) crashed with exit code 1. Triggering SIGQUIT\n",
        "[x] Rank 1 scheduler is dead. Please check if there are relevant logs.\n"
        "[x] Exit code: 1\nEOFError: \n",
        "RuntimeError: Rank 1 scheduler died during initialization (exit code: 1).\n",
    )
    for end in ends:
        failure, _ = judged(text[: text.index("[2026-11-30 02:54:00]")] + own + end, -9)
        assert (failure.cls, failure.cause_line) == ("exception", "FluxError: cold")
        assert judged(end, 1)[0].cls == "child-crashed"
    killed = "[x] Rank 0 scheduler is dead.\n[x] Exit code: -9\nEOFError: \n"
    assert judged(killed, 1)[0].cls == "child-killed"


@pytest.mark.parametrize(
    ("line", "cls"),
    [
        ("/bin/sh: 1: exec: /opt/venvs/qwen/bin/python: not found", "engine-not-installed"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "out-of-memory"),
        ("ImportError: /x/common_ops.abi3.so: undefined symbol: _ZNK3c1", "library-missing"),
        ("KeyError: 'qwen3_5'", "unknown-model-type"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling x", "cuda-fault"),
        ("torch.AcceleratorError: CUDA error: something new", "cuda-fault"),
        ("ValueError: x is larger than the profiled value -561981. y", "not-enough-memory"),
        ("RuntimeError: Loaded weights leave no GPU memory for the KV cache", "not-enough-memory"),
        ("RuntimeError: Could not find nvcc and default cuda_home", "compiler-missing"),
        (
            "Exception: flashinfer_python is installed with version 0.6.1, which is less than the "
            "minimum required version 0.6.8.",
            "python-module-missing",
        ),
    ],
)
def test_forms_seen_in_public_reports(line: str, cls: str) -> None:
    text = f"Traceback (most recent call last):\n{line}\n"
    assert judged(text, 1)[0].cls == cls


def test_arguments_that_the_engine_refuses_in_its_own_words() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/v/sglang/srt/server_args.py", line 24, in f\n'
        "    assert steps\nAssertionError: {} must be given\n"
    )
    failure, _ = judged(text.format("steps and topk"), 1)
    assert (failure.cls, failure.next_variant_allowed) == ("arguments-refused", False)
    assert failure.cause_line == "AssertionError: steps and topk must be given"
