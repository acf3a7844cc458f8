"""The reader of the launch log over all recordings: phases in order, and never a wrong "ready"."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from deployer.sglang.diagnosis import READY, diagnose
from deployer.sglang.log import PHASES, READY_LINE, LaunchLog, plain

OWN = Path(__file__).parent.parent / "fixtures" / "sglang-logs"
RECORDED = Path(__file__).resolve().parents[3] / "shared" / "field" / "sglang-logs"
LOGS = sorted(OWN.glob("*.log")) + sorted(RECORDED.rglob("*.log"))

LAST = {
    "01": "starting",
    "03": "server",
    "03b": "server",
    "03c": "server",
    "04": "starting",
    "06": "ready",
    "06b": "weights",
    "07": "weights",
    "09": "weights",
    "10": "distributed",
    "11": "starting",
    "12": "kv",
    "13a": "graphs",
    "13c": "graphs",
    "15": "ready",
    "17": "ready",
    "23b2": "warmup",
    "25b": "starting",
    "29": "starting",
    "32": "graphs",
    "43": "warmup",
}
"""The last phase of recorded failures, as their index names it."""


def read(data: bytes, *cuts: int) -> LaunchLog:
    log, begin = LaunchLog(), 0
    for cut in (*sorted(cuts), len(data)):
        log.feed(data[begin:cut])
        begin = cut
    return log


def seen(log: LaunchLog) -> tuple[object, ...]:
    return log.phase, log.shards, log.graphs, log.figures, log.free_before, log.weight_use


def ready_at(data: bytes) -> int:
    """Where the ready line ends; behind the end when there is none. A slow and simple reading."""
    at = 0
    for line in data.split(b"\n"):
        at += len(line) + 1
        if READY_LINE.match(plain(line.decode("utf-8", "replace")).rstrip()):
            return at
    return len(data) + 1


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_phases_come_in_order_however_the_log_is_split(path: Path) -> None:
    data = path.read_bytes()
    whole = read(data)
    chance = random.Random(path.stem)
    for _ in range(5):
        cuts = [chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 60))]
        assert seen(read(data, *cuts)) == seen(whole)
    log, order = LaunchLog(), [PHASES[0]]
    for begin in range(0, len(data), 61):
        log.feed(data[begin : begin + 61])
        if log.phase != order[-1]:
            order.append(log.phase)
    assert order == sorted(order, key=PHASES.index)
    assert len(order) == len(set(order))


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded logs are not here")
@pytest.mark.parametrize("name", LAST)
def test_the_last_phase_of_a_recorded_failure(name: str) -> None:
    found = sorted((RECORDED / "failures").glob(f"{name}-*.log"))
    assert found
    assert {read(path.read_bytes()).phase for path in found} == {LAST[name]}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_cut_at_any_byte_it_is_never_ready_too_early(path: Path) -> None:
    data = path.read_bytes()
    end = ready_at(data)
    log = LaunchLog()
    # Every byte where it counts, one at a time; the rest in pieces that end at odd places.
    near = range(max(0, end - 120), min(len(data), end + 3))
    at = 0
    while at < len(data):
        step = 1 if at in near else 37
        if at < near.start < at + step:
            step = near.start - at
        log.feed(data[at : at + step])
        at += step
        assert (log.phase == "ready") == (at >= end), at


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_cut_file_is_never_called_ready_too_early(path: Path) -> None:
    data = path.read_bytes()
    chance = random.Random(path.stem)
    # The line is whole without the end of the line; a byte less, and it is another line.
    end = ready_at(data) - 1
    while READY_LINE.match(data[: end - 1].rpartition(b"\n")[2].decode("utf-8", "replace")):
        end -= 1  # The follower's line ends with a port, which may be shorter.
    cuts = {chance.randrange(len(data) + 1) for _ in range(6)} | {end - 1, end - 2, end - 9}
    for cut in cuts:
        if 0 <= cut < end:
            assert diagnose(data[:cut]).outcome != READY, cut


def test_a_client_cannot_say_ready() -> None:
    words = "The server is fired up and ready to roll!"
    log = read(
        f"[2026-11-30 02:51:28] Receive: obj=GenerateReqInput(text='{words}')\n"
        f"{words}\n[x] server_args=ServerArgs(served_model_name='[x] {words}')\n"
        f'[x] INFO:     127.0.0.1:1 - "GET /{words} HTTP/1.1" 404\n'.encode()
    )
    assert log.phase == "args"
    assert read(f"\x1b[32m[x TP0]\x1b[0m {words}\r\n".encode()).phase == "ready"


NEW_FORMS = """\
[2026-11-30 01:00:00] server_args=ServerArgs(model_path='/srv/models/x')
[2026-11-30 01:00:01 TP0] Init torch distributed begin.
[2026-11-30 01:00:02 TP0] Init torch distributed ends. elapsed=0.87 s, mem usage=0.97 GB
[2026-11-30 01:00:02 TP1] Load weight begin. avail mem=46.10 GB
[2026-11-30 01:00:02 TP0] Load weight begin. avail mem=46.52 GB
Loading safetensors checkpoint shards:   0% Completed | 0/11 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  45% Completed | 5/11 [00:03<00:04,  1.43it/s]\
\rMulti-thread loading shards:  91% Completed | 10/11 [00:07<00:00,  1.43it/s]
[2026-11-30 01:00:10 TP0] Load weight end. elapsed=7.9 s, type=Qwen3_5, avail mem=20.8 GB, \
mem usage=25.70 GB.
[2026-11-30 01:00:10 TP1] Load weight end. elapsed=7.9 s, type=Qwen3_5, avail mem=20.5 GB, \
mem usage=25.60 GB.
[2026-11-30 01:00:10 TP0] Load weight begin. avail mem=20.80 GB
[2026-11-30 01:00:11 TP0] Load weight end. elapsed=0.9 s, type=Qwen3_5MTP, avail mem=18.0 GB, \
mem usage=2.82 GB.
[2026-11-30 01:00:11 TP0] KV Cache is allocated. #tokens: 100, K size: 3.66 GB, V size: 3.66 GB
[2026-11-30 01:00:12 TP0] Capture target decode CUDA graph begin. backend=full, avail mem=6.1 GB
Capturing batches (bs=4 avail_mem=6.10 GB):  25%|##5       | 1/4 [00:10<00:30, 10.1s/it]\
\rCapturing batches (bs=2 avail_mem=6.00 GB):  75%|#######5  | 3/4 [00:30<00:10, 10.1s/it]
[2026-11-30 01:00:52 TP0] Capture target decode CUDA graph end. bs=[1, 2, 4, 8], elapsed=40.1 s
"""


def test_newer_and_older_forms_and_several_ranks() -> None:
    data = NEW_FORMS.encode()
    log = read(data, *range(0, len(data), 13))
    assert (log.phase, log.shards, log.graphs) == ("graphs", (10, 11), (3, 4))
    assert log.free_before == {"TP0": 46.52, "TP1": 46.10}
    assert log.weight_use == {"TP0": 25.70, "TP1": 25.60}
    assert log.stage[0] == "graphs"


def test_a_draft_model_enters_its_phases_anew() -> None:
    log = read(b"[x TP0] Capture cuda graph begin. a\n")
    first = log.stage
    log.feed(b"[x TP0] Load weight begin. avail mem=9.00 GB\n")
    assert (log.phase, log.stage[0]) == ("graphs", "weights")
    log.feed(b"[x TP0] Capture draft cuda graph begin. a\n")
    assert log.stage[0] == first[0] and log.stage != first
