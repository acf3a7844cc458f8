"""Several hosts: the table of a terminal, the lines without one, and the summary."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deployer import events as ev
from deployer.cli.plain import PlainRenderer
from deployer.cli.report import error_dict
from deployer.cli.summary import summary_lines
from deployer.cli.table import Board, TableRenderer
from deployer.engine import Outcome
from deployer.errors import (
    DeployError,
    DocumentError,
    GateFailed,
    Interrupted,
    NotStarted,
    StepFailed,
    Unreachable,
)
from deployer.model import Change, Plan, Procedure, Where
from deployer.up_result import DeploymentResult

NAMES = [f"h{n:02}/m" for n in range(1, 6)]


def console(height: int = 40, width: int = 100) -> Console:
    return Console(file=io.StringIO(), width=width, height=height, record=True, force_terminal=True)


def board() -> Board:
    made = Board(NAMES, clock=lambda: 175.0)
    made.take(ev.RunStarted("h01", "h01/m", "r", "up", time=100.0))
    made.take(ev.StepStarted("h01", "h01/m", "shards"))
    made.take(ev.Progress("h01", "h01/m", "shards", "download", 5e8, 1e9, "bytes"))
    made.take(ev.RunStarted("h02", "h02/m", "r", "up", time=100.0))
    made.take(ev.Progress("h02", "h02/m", "canary", "waits for the canary h01/m"))
    made.take(ev.RunFinished("h03", "", 3, "h03: dark", "fix", time=115.0))
    made.take(ev.RunStarted("h04", "h04/m", "r", "up", time=100.0))
    made.take(ev.RunFinished("h04", "h04/m", 0, "h04/m serves m at URL", time=160.0))
    return made


def drawn(made: Board, height: int) -> list[str]:
    place = console(height)
    place.print(made)
    return [line.rstrip() for line in place.export_text().splitlines()]


def test_a_line_a_deployment() -> None:
    lines = drawn(board(), 40)
    assert lines == [
        "h01/m  at work  shards  1:15  download 500.0 MB of 1.0 GB (50 %)",
        "h02/m  waits    canary  1:15  waits for the canary h01/m",
        "h03/m  failed                 h03: dark",
        "h04/m  done             1:00  serves m at URL",
        "h05/m  queued",
        "1 failed, 1 at work, 1 waits, 1 queued, 1 done",
    ]


def test_a_low_terminal_shows_what_matters_first() -> None:
    lines = drawn(board(), 5)
    assert [line[:5] for line in lines[:-1]] == ["h01/m", "h03/m"]
    assert lines[-1].startswith("1 failed, 1 at work")


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (60, "h01/m  at work  shards  1:15  download 500.0 MB of 1.0 GB (…"),
        (40, "h01/m  at work  shards  1:15"),
        (24, "h01/m  at work  1:15"),
        (20, "h01/m  at work  1:15"),
        (19, "h01/m  at work"),
        (13, "h01…  at work"),
    ],
)
def test_a_narrow_terminal_has_whole_words(width: int, line: str) -> None:
    place = console(20, width)
    place.print(board())
    lines = place.export_text().splitlines()
    assert lines[0].rstrip() == line.rstrip()
    assert len(lines) >= 6 and max(map(len, lines)) <= width


def test_a_terminal_of_one_column_ends_nothing() -> None:
    renderer = TableRenderer(NAMES, verbose=False, console=console(1, 1))
    renderer(ev.RunStarted("h01", "h01/m", "r", "up"))
    renderer.close()


def test_warnings_stay_above_the_table_and_a_question_has_the_terminal() -> None:
    place = console()
    renderer = TableRenderer(NAMES, verbose=False, console=place)
    renderer(ev.RunStarted("h01", "h01/m", "r", "up"))
    renderer(ev.StepDone("h01", "h01/m", "driver", "nothing", "as wanted"))
    renderer.pause()
    renderer(ev.Note("h01", "h01/m", "shards", "warning", "slow"))
    assert "slow" not in place.export_text(clear=False)
    renderer.resume()
    renderer(ev.GateChecked("h01", "h01/m", "verify", "quality", False, "repeats", "la la"))
    renderer.close()
    text = place.export_text()
    assert "warning: slow" in text
    assert "FAIL quality: repeats" in text
    assert "as wanted" not in text
    assert text.rstrip().splitlines()[-1].startswith("h05/m  queued")


def test_without_a_terminal_many_hosts_are_a_line_a_change_and_an_end() -> None:
    lines: list[str] = []
    renderer = PlainRenderer(lines.append, many=True)
    renderer(ev.StepDone("h01", "h01/m", "driver", "nothing", "as wanted"))
    renderer(ev.StepDone("h01", "h01/m", "venv", "done", "built", 2.0))
    renderer(ev.RunFinished("h01", "h01/m", 0, "h01/m serves"))
    renderer(ev.RunFinished("h02", "", 3, "h02: dark"))
    assert [line.split(None, 1) for line in lines] == [
        ["h01/m", "venv       done in 2.0 s: built"],
        ["h01/m", "ok         h01/m serves"],
        ["h02", "FAILED     h02: dark"],
    ]


def result(id_: str, error: DeployError | None = None, **more: object) -> DeploymentResult:
    return DeploymentResult(id_, error=error, **more)  # type: ignore[arg-type]


def test_the_summary_lists_every_failure_with_what_to_do() -> None:
    dark = Unreachable("no answer", where="h02", fix="is it on?")
    results = [
        result("h01/m", outcome=Outcome(changed=["venv"])),
        result("h02/m", dark),
        result("h02/n", dark),
        result("h03/m", GateFailed("repeats itself", where="verify", fix="look", evidence=("la",))),
        result("h04/m", NotStarted("not started: x", where="h04/m", fix="again")),
        result("h05/m", NotStarted("not started: x", where="h05/m", fix="again")),
        result("h06/m", Interrupted("interrupted", where="h06", fix="run it again")),
    ]
    assert list(summary_lines(results, False)) == [
        ("h01/m: changed: venv", False),
        ("deploy: h02: no answer", True),
        ("  -> is it on?", False),
        ("deploy: h03/m: verify: repeats itself", True),
        ("  | la", False),
        ("  -> look", False),
        ("deploy: h04/m, h05/m: not started: x", True),
        ("  -> again", False),
        ("deploy: h06/m: interrupted", True),
        ("  -> run it again", False),
        ("1 of 7 deployments done, 3 failed, 3 not done", False),
    ]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan.nothing("as wanted"), "h01/m: nothing to do"),
        (
            Plan.change("work", Change("t", "r", Procedure(Where.HOST, "x"))),
            "h01/m: to do: venv",
        ),
    ],
)
def test_the_summary_of_a_plan(plan: Plan, said: str) -> None:
    lines = list(summary_lines([result("h01/m", outcome=Outcome({"venv": plan}))], True))
    assert lines == [
        (said, False),
        ("1 of 1 deployments looked at; nothing was changed", False),
    ]


@pytest.mark.parametrize(
    ("error", "way"),
    [
        (StepFailed("no", where="h01"), "run the same command again"),
        (
            StepFailed("no", where="h01", evidence=("E: broken",)),
            "correct what the lines above say",
        ),
        (DocumentError("no", where="h01"), "correct it, then run the same command again"),
    ],
)
def test_every_failure_has_a_line_that_says_what_to_do(error: DeployError, way: str) -> None:
    lines = [line for line, _ in summary_lines([result("h01/m", error)], False)]
    assert lines[0] == "deploy: h01: no"
    assert lines[-2].startswith(f"  -> {way}")
    assert error_dict(error)["fix"] == lines[-2].removeprefix("  -> ")
