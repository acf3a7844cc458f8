"""The plain renderer: one line a change of state."""

from __future__ import annotations

from deployer import events as ev
from deployer.cli.plain import PlainRenderer, number, progress_text, size_text
from deployer.cli.report import error_lines
from deployer.errors import GateFailed


def shown(*events: ev.Event, show_plan: bool = False, seconds: float = 0.0) -> list[str]:
    """The lines of these events, `seconds` apart."""
    lines: list[str] = []
    now = [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    renderer = PlainRenderer(lines.append, show_plan=show_plan, clock=clock)
    for event in events:
        renderer(event)
    return [line.split(None, 1)[1] for line in lines]


def progress(done: float) -> ev.Progress:
    """A download at `done` of 100 bytes."""
    return ev.Progress("h", "h/d", "shards", "downloading", done, 100.0, "B")


def test_progress_is_one_line_in_thirty_seconds() -> None:
    assert len(shown(*[progress(n) for n in range(60)], seconds=1.0)) == 2


def test_a_new_thing_that_is_waited_for_is_said_at_once() -> None:
    other = ev.Progress("h", "h/d", "shards", "checking", 1.0, 2.0, "files")
    assert shown(progress(1), other) == [
        "shards       downloading 1 B of 100 B (1 %)",
        "shards       checking 1 of 2 files (50 %)",
    ]


def test_the_last_figures_of_a_download_are_said_when_its_step_ends() -> None:
    figures: dict[str, float | str | None] = {"method": "range"}
    told = [
        ev.Progress("h", "h/d", "shards", "download", n, 100.0, "B", "1 MB/s", (), figures)
        for n in (1, 2, 3)
    ]
    failed = ev.StepDone("h", "h/d", "shards", "failed", "x", 1.0)
    assert shown(*told, failed, failed) == [
        "shards       download 1 B of 100 B (1 %) 1 MB/s",
        "shards       download 3 B of 100 B (3 %) 1 MB/s",
        "shards     FAILED",
        "shards     FAILED",
    ]
    assert len(shown(told[0], failed)) == 2
    interrupted = shown(*told, ev.RunFinished("h", "h/d", 130, "interrupted"))
    assert interrupted[1:] == ["shards       download 3 B of 100 B (3 %) 1 MB/s"]


def test_seconds_and_counts_have_no_exponent() -> None:
    waits = [
        ev.Progress("h", "h/d", "verify", "alive", done, total, unit)
        for done, total, unit in ((2.4e-07, 2.0, "s"), (1.26, 2.0, "s"), (0.0, 5678901.0, "files"))
    ]
    assert [progress_text(one) for one in waits] == [
        "alive 0 of 2 s (0 %)",
        "alive 1.3 of 2 s (63 %)",
        "alive 0 of 5678901 files (0 %)",
    ]
    assert number(2.4e-07) == "0"


def test_bytes_are_sizes() -> None:
    download = ev.Progress("h", "h/d", "shards", "download", 25183100.0, 50366200.0, "bytes")
    install = ev.Progress("h", "h/d", "venv", "install", 110592.0, 0.0, "bytes")
    assert shown(download, install) == [
        "shards       download 25.2 MB of 50.4 MB (50 %)",
        "venv         install 110.6 kB",
    ]


def test_figures_have_no_exponent() -> None:
    assert [number(one) for one in (57809784.0, 568.61, 0.57)] == ["57809784", "568.6", "0.57"]


def test_a_failed_gate_shows_a_few_lines_of_evidence() -> None:
    event = ev.GateChecked("h", "h/d", "verify", "quality", False, "it repeats", "thinking\n" * 9)
    assert shown(event) == [
        "verify       FAIL quality: it repeats",
        *["verify            evidence: thinking"] * 3,
    ]


def test_a_failed_gate_shows_its_evidence() -> None:
    event = ev.GateChecked("h", "h/d", "verify", "quality", False, "it repeats", "thinking\\n\\n")
    assert shown(event) == [
        "verify       FAIL quality: it repeats",
        "verify            evidence: thinking\\n\\n",
    ]


def test_a_plan_shows_reason_commands_and_undo() -> None:
    change = {"title": "bind", "reason": "held", "where": "host", "runs": "a\nb", "undo": "c"}
    event = ev.StepPlanned("h", "h/d", "gpus", "changes", "vfio", "", (change,))
    assert shown(event, show_plan=True) == [
        "~ gpus       1 change: vfio",
        "+ bind  [host]",
        "because held",
        "| a",
        "| b",
        "undo: c",
    ]
    assert shown(event) == []


def test_sizes_for_people() -> None:
    assert [size_text(n) for n in (0, 999, 52_100_000_000)] == ["0 B", "999 B", "52.1 GB"]


def test_what_comes_from_afar_cannot_steer_the_terminal() -> None:
    lines: list[str] = []
    text = "\x1b]0;owned\x07\x9b2J Grüße"
    PlainRenderer(lines.append)(ev.Note("kpro5", "kpro5/qwen", "verify", "info", text))
    error = GateFailed("no\nsense", evidence=(text,))
    for line in [*lines, *error_lines(error)]:
        assert line.isprintable()
    assert "Grüße" in lines[0]
    assert error_lines(error)[0] == "deploy: no sense"
