"""The terminal renderer: lines above, bars below, and nothing left behind."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from deployer import events as ev
from deployer.cli.bars import MOST_PARTS, UnderWay
from deployer.cli.live import LiveRenderer

DETAIL = "412.0 MB/s, mean 390.1 MB/s, 0:47 left, 9 of 15 files, range, 2 retries, 1 stall"


def parts(count: int) -> tuple[ev.Part, ...]:
    return tuple(
        ev.Part(f"model-{n:05d}-of-00015.safetensors", n * 1e8, 3.5e9) for n in range(count, 0, -1)
    )


def download(count: int = 3, where: str = "kpro5/qwen", detail: str = DETAIL) -> ev.Progress:
    figures: dict[str, float | str | None] = {"speed_bytes_per_s": 1.0}
    host = where.partition("/")[0]
    return ev.Progress(
        host, where, "shards", "download", 33.1e9, 52.4e9, "bytes", detail, parts(count), figures
    )


def drawn(*events: ev.Progress, width: int = 100, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    under_way = UnderWay()
    for event in events:
        under_way.show(event)
    console.print(under_way)
    return console.export_text().splitlines()


def test_a_download_has_a_bar_its_figures_and_a_bar_a_file() -> None:
    lines = drawn(download(2))
    assert re.fullmatch(r"kpro5/qwen download +━+╸? +63 %  33\.1 GB of 52\.4 GB *", lines[0])
    assert lines[1].strip() == DETAIL
    assert re.fullmatch(r"  model-00002-of-00015 +━*╸? + 6 %  200\.0 MB of 3\.5 GB *", lines[2])
    assert len(lines) == 4


def test_many_files_are_eight_bars_and_a_number() -> None:
    lines = drawn(download(11))
    assert sum("of-00015" in line for line in lines) == MOST_PARTS
    assert lines[-1].strip() == "and 3 more"
    assert "more" not in drawn(download(8))[-1]


@pytest.mark.parametrize("width", [1, 5, 12, 20, 33, 40, 47, 60, 80, 81, 200])
@pytest.mark.parametrize("height", [1, 3, 6, 10, 24])
def test_no_line_is_wider_and_the_region_not_higher_than_the_terminal(
    width: int, height: int
) -> None:
    odd = ev.Part("長い名前" * 30 + "\x1b[2J\n.safetensors", 5, 0)
    strange = ev.Progress("h", "h/d", "shards", "download", 0, 0, "bytes", "x" * 300, (odd,))
    plain = ev.Progress("h", "h/e", "venv", "installing", 3, 0, "packages", "torch " * 40)
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    under_way = UnderWay()
    for event in (download(11), strange, plain):
        under_way.show(event)
    rows = console.render_lines(under_way, console.options, pad=False)
    assert all(sum(segment.cell_length for segment in row) <= width for row in rows)
    assert len(rows) <= max(1, height - 1)
    assert not any("\x1b" in segment.text for row in rows for segment in row)


def test_a_narrow_terminal_keeps_the_numbers() -> None:
    lines = drawn(download(1), width=50)
    assert "63 %  33.1 GB of 52.4 GB" in lines[0] and "━" not in lines[0]
    assert "1 stall" in lines[2]
    assert "00001-of-00015" in lines[3]


def test_figures_that_are_old_are_called_so() -> None:
    event = download(1)
    under_way = UnderWay(clock=lambda: event.time + 12.3)
    under_way.show(event)
    console = Console(file=io.StringIO(), width=120, height=20, record=True)
    console.print(under_way)
    assert f"no word for 12 s; {DETAIL}" in console.export_text()


def test_hosts_in_parallel_share_the_lines() -> None:
    under_way = UnderWay()
    for host in ("a", "b", "c"):
        under_way.show(download(1, f"{host}/m"))
    under_way.show(download(0, "b/m", "half"))
    under_way.drop(ev.StepDone("a", "a/m", "shards", "done"))
    under_way.drop(ev.RunFinished("c", "", 3))
    console = Console(file=io.StringIO(), width=80, height=40, record=True)
    console.print(under_way)
    text = console.export_text()
    assert "b/m" in text and "half" in text and "a/m" not in text and "c/m" not in text
    under_way.drop(ev.StepDone("b", "b/m", "shards", "done"))
    assert not under_way


def test_more_hosts_than_lines_are_a_number() -> None:
    lines = drawn(*[download(4, f"h{n:02d}/m") for n in range(30)], height=14)
    assert lines[-1].strip() == "and 21 more" and len(lines) == 10


def test_an_ascii_terminal_gets_ascii() -> None:
    plain = ev.Progress("h", "h/e", "venv", "installing", 3, 0, "packages", "torch")
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80, height=20)
    under_way = UnderWay()
    under_way.show(plain)
    under_way.show(download(2))
    console.print(under_way)
    file.flush()


def test_a_line_stays_while_others_wait_and_the_region_goes_with_the_last() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=90, height=30, color_system=None)
    live = LiveRenderer(show_plan=False, verbose=False, console=console)
    live(download(1, "a/m"))
    live(download(1, "b/m"))
    live(ev.StepDone("a", "a/m", "shards", "done", "all there", 1.0))
    assert live._live is not None
    live(ev.StepDone("b", "b/m", "shards", "failed", "broken", 1.0))
    assert live._live is None
    assert out.getvalue().count("all there") == 1
    live.close()


SCRIPT = r"""
import json, sys, threading, time
from deployer import events as ev
from deployer.cli.live import LiveRenderer
live = LiveRenderer(show_plan=False, verbose=False)
ends = time.monotonic() + 1.2
said = n = 0
while time.monotonic() < ends:
    n += 1
    part = ev.Part("model-00001-of-00002.safetensors", n, 100.0)
    live(ev.Progress("h", "h/d", "shards", "download", n, 100.0, "bytes", f"tick{n}", (part,),
                     {"x": 1}))
    if n == 20:
        live(ev.Note("h", "h/d", "shards", "warning", "range stalled"))
    print(json.dumps({"n": n}), flush=True)
    time.sleep(0.02)
live(ev.StepDone("h", "h/d", "shards", "done", "all there", 1.0))
live.close()
"""


def test_on_a_real_terminal_it_redraws_four_times_a_second_and_leaves_no_bar(
    tmp_path: Path,
) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI")}
    stdout = tmp_path / "events.jsonl"
    with stdout.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=slave,
            stdout=file,
            stderr=slave,
            env={**env, "TERM": "xterm-256color"},
            cwd=Path(__file__).resolve().parents[2],
        )
        os.close(slave)
        raw = b""
        try:
            while piece := os.read(master, 65536):
                raw += piece
        except OSError:
            pass  # the child has closed its side
        assert child.wait(20) == 0
    os.close(master)
    text = raw.decode()
    ticks = len(set(re.findall(r"tick\d+", text)))
    assert 2 <= ticks <= 9, ticks
    assert text.count("range stalled") == 1 and text.count("all there") == 1
    assert "\x1b[?25h" in text.rpartition("tick")[2], "the cursor is shown again"
    screen = Screen(80)
    screen.feed(text)
    assert [line.split(None, 1)[1] for line in screen.lines() if line] == [
        "shards       warning: range stalled",
        "shards     done in 1.0 s: all there",
    ]
    assert stdout.read_text().startswith('{"n": 1}\n{"n": 2}\n')
    assert "\x1b" not in stdout.read_text()


class Screen:
    """A terminal that knows what rich's live display uses; anything else is an error."""

    def __init__(self, width: int) -> None:
        self.rows: list[list[str]] = [[]]
        self.width, self.x, self.y = width, 0, 0

    def feed(self, text: str) -> None:
        for match in re.finditer(r"\x1b\[([?\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", text):
            code, kind, back, down, plain = match.groups()
            if kind == "A":
                self.y = max(0, self.y - int(code or 1))
            elif kind == "K":
                assert code == "2"
                self.rows[self.y] = []
            elif back:
                self.x = 0
            elif down:
                self.y += 1
                while len(self.rows) <= self.y:
                    self.rows.append([])
            elif plain:
                row = self.rows[self.y]
                row.extend(" " * (self.x + len(plain) - len(row)))
                row[self.x : self.x + len(plain)] = plain
                self.x += len(plain)
                assert self.x <= self.width, "a line runs over the edge"
            else:
                assert kind in ("m", "h", "l"), match.group()

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]
