from __future__ import annotations

from pathlib import Path

import pytest

from deployer.sglang.log import PHASES, LaunchLog

LOGS = Path(__file__).parent.parent / "fixtures" / "sglang-logs"


def read(data: bytes, step: int = 0) -> LaunchLog:
    log = LaunchLog()
    for begin in range(0, len(data), step or len(data)):
        log.feed(data[begin : begin + (step or len(data))])
    return log


@pytest.mark.parametrize("step", [0, 1, 7, 997])
def test_a_real_start_is_read_in_any_pieces(step: int) -> None:
    log = read((LOGS / "ready.log").read_bytes(), step)
    assert log.phase == "ready"
    assert log.graphs == (9, 9)
    assert log.figures == {
        "max_total_num_tokens": 239785.0,
        "max_running_requests": 10.0,
        "context_len": 32768.0,
    }


@pytest.mark.parametrize(
    "line",
    [
        "Loading safetensors checkpoint shards:  33% Completed | 1/3 [00:00<00:01,  1.2it/s]\r",
        "Multi-thread loading shards:  33% Completed | 1/3 [00:00<00:01,  1.2it/s]\r",
    ],
)
def test_both_forms_of_the_shard_bar(line: str) -> None:
    log = read(line.encode())
    assert (log.phase, log.shards) == ("weights", (1, 3))
    assert log.progress() == ("loading weights", 1, 3, "shards")


def test_phases_do_not_go_back_for_the_draft_model() -> None:
    log = read(b"[x TP0] Capture cuda graph begin. a\n[x TP0] Load weight begin. avail\n")
    assert log.phase == "graphs"


def test_the_new_spelling_of_graph_capture() -> None:
    assert read(b"[x] Capture target decode CUDA graph begin. backend=full\n").phase == "graphs"


# From the format strings of the 0.5.23 wheel.
START_0523 = [
    ("args", "[2026-11-30 01:00:00] server_args={'model_path': '/m', 'tp_size': 2}"),
    ("distributed", "[2026-11-30 01:00:01 TP0] Init parallel begin."),
    ("distributed", "[2026-11-30 01:00:02 TP0] Init parallel ends. elapsed=0.31 s"),
    ("weights", "[2026-11-30 01:00:03 TP0] Load weight begin. avail mem=46.00 GB"),
    ("weights", "Multi-thread loading shards:  50% Completed | 1/2 [00:00<00:00,  1.2it/s]"),
    (
        "weights",
        "[2026-11-30 01:00:04 TP0] Load weight end. elapsed=0.29 s, type=Qwen3ForCausalLM, "
        "avail mem=20.36 GB, mem usage=25.64 GB.",
    ),
    (
        "kv",
        "[2026-11-30 01:00:05 TP0] KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 9, "
        "K size: 3.66 GB, V size: 3.66 GB",
    ),
    ("kv", "[2026-11-30 01:00:05 TP0] Memory pool end. avail mem=9.10 GB"),
    (
        "graphs",
        "[2026-11-30 01:00:06 TP0] Capture target verify CUDA graph begin. backend=full, "
        "num_tokens_per_req=4, avail mem=9.10 GB",
    ),
    ("graphs", "Capturing prefill shape (num_tokens=4 avail_mem=9.10 GB):  50%|###  | 1/2 [00:01]"),
    (
        "server",
        "[2026-11-30 01:00:09] max_total_num_tokens=9, chunked_prefill_size=1, "
        "max_prefill_tokens=2, max_running_requests=3, context_len=4, available_gpu_mem=1.00 GB",
    ),
]


def test_every_mark_of_0_5_23() -> None:
    log, seen = LaunchLog(), []
    for phase, line in START_0523:
        log.feed(f"{line}\n".encode())
        seen.append((phase, log.phase))
    assert seen == [(phase, phase) for phase, _ in START_0523]
    assert (log.shards, log.graphs) == ((1, 2), (1, 2))
    assert (log.free_before, log.weight_use) == ({"TP0": 46.0}, {"TP0": 25.64})
    assert log.figures["max_running_requests"] == 3


@pytest.mark.parametrize(
    "role", ["target decode", "draft decode", "draft extend", "UNO tree draft", "target prefill"]
)
def test_every_capture_of_0_5_23_begins_a_stage(role: str) -> None:
    log = read(b"[x TP0] Load weight begin. avail mem=46.00 GB\n")
    log.feed(f"[x TP0] Capture {role} CUDA graph begin. backend=full\n".encode())
    assert log.stage[0] == "graphs"
    single = read(b"[x TP0] Capture single-CG draft extend begin. This can take several minutes.\n")
    assert single.phase == "graphs"


def test_a_traceback_that_names_the_figures_gives_none() -> None:
    log = read((LOGS / "mem-fraction-0.02.log").read_bytes())
    assert log.figures == {}
    assert log.phase == "kv"


def test_nothing_read_is_the_first_phase() -> None:
    log = LaunchLog()
    assert not log.feed(b"")
    assert log.phase == PHASES[0]
    assert log.tail() == ()


def test_the_tail_has_no_bars() -> None:
    log = read((LOGS / "graph-capture-oom-inside.log").read_bytes())
    assert not any("Capturing batches" in line for line in log.tail())


def test_a_torn_character_does_no_harm() -> None:
    log = LaunchLog()
    word = "[x] Tokenizer geladen: grün\n".encode()
    log.feed(word[:-3])
    log.feed(word[-3:])
    assert log.tail()[-1].endswith("grün")
