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
