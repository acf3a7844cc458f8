"""The figures of a download and where they go."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deployer.agents.fetch.common import GAVE_UP, Fatal, log
from deployer.agents.fetch.gauge import SHOWN, Gauge, Reporter


def test_the_progress_line() -> None:
    gauge = Gauge(10, 2)
    gauge.add(valid=4, moved=6, received=3)
    gauge.shards = lambda: [("small", 1, 2), ("large", 3, 9)]
    row = json.loads(gauge.line())
    assert (row["bytes"], row["total"], row["moved"], row["received"]) == (4, 10, 6, 3)
    assert (row["files"], row["files_done"], row["tick"], row["pause"]) == (2, 0, 1, 0)
    assert row["shards"] == [["large", 3, 9], ["small", 1, 2]]
    assert row["eta"] is None, "no speed yet"
    assert json.loads(gauge.line())["tick"] == 2


def test_at_most_16_shards_are_told_the_largest_ones() -> None:
    gauge = Gauge(10, 40)
    gauge.shards = lambda: [(str(n), 0, n) for n in range(40)]
    sizes = [size for _, _, size in gauge.row()["shards"]]
    assert sizes == list(range(39, 39 - SHOWN, -1))


def test_a_pause_is_told_and_the_longest_counts() -> None:
    gauge = Gauge(10, 1)
    gauge.retry(60.0, "a: 429")
    gauge.retry(5.0, "a: 503")
    gauge.retry(0.0, "b: refused")
    row = gauge.row()
    assert row["retries"] == 3 and 55 <= row["pause"] <= 60
    assert row["trouble"] == "b: refused" and "trouble" not in Gauge(10, 1).row()


def test_a_line_reaches_the_supervisor_whole_or_not_at_all() -> None:
    reader, writer = os.pipe()
    reporter = Reporter(writer)
    lines = [json.dumps({"n": n, "fill": "x" * 3000}) for n in range(64)]
    for line in lines:
        reporter.tell(line)  # the pipe holds 64 KiB: later lines find it full
    data = os.read(reader, 1 << 20)
    reporter.tell(lines[-1])
    reporter.tell(lines[-1])
    data += os.read(reader, 1 << 20)
    got = [line for line in data.decode().split("\n") if line]
    assert got[0] == lines[0] and got[-1] == lines[-1]
    assert all(line in lines for line in got)
    os.close(reader)
    with pytest.raises(Fatal, match="supervisor is gone") as caught:
        reporter.tell(lines[0])
    assert caught.value.code == GAVE_UP
    os.close(writer)


def test_without_a_supervisor_the_line_goes_to_a_file(tmp_path: Path) -> None:
    reporter = Reporter(None, str(tmp_path / "progress"))
    reporter.tell("one")
    reporter.tell("two")
    assert (tmp_path / "progress").read_text() == "two\n"
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]


def test_a_line_of_the_log_is_one_line_whatever_a_server_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log("403 No\x1b[2J\u2028pe\r\x85\udcff, modèle")
    assert capsys.readouterr().out[9:] == "403 No?[2J?pe???, modèle\n"
