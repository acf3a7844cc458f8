"""Renderer for several hosts on a terminal: one table, one line a deployment, drawn in place.

What a person has to read (warnings, failed gates) is printed above it and stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deployer import events as ev
from deployer.cli.plain import PlainRenderer, printable, progress_text

REDRAWS_PER_S = 4
NAME, STATE, STEP, SECONDS, TEXT = range(5)
"""The columns, from left to right."""
GAP = 2
LEAST_TEXT = 12
"""Narrower, the last column says nothing."""
SPARE_LINES = 3
"""Of the terminal's height: the count below the table, and what is printed above."""

QUEUED, AT_WORK, WAITS, DONE, FAILED = "queued", "at work", "waits", "done", "failed"
STYLES = {QUEUED: "dim", AT_WORK: "", WAITS: "dim", DONE: "green", FAILED: "bold red"}
FIRST = (FAILED, AT_WORK, WAITS, QUEUED, DONE)
"""What is shown first when not all lines fit."""


@dataclass
class Row:
    """One deployment. Times in Unix seconds; 0: not yet."""

    name: str
    state: str = QUEUED
    step: str = ""
    text: str = ""
    began: float = 0.0
    ended: float = 0.0

    def seconds(self, now: float) -> str:
        """How long it has been at work."""
        if not self.began:
            return ""
        whole = int((self.ended or now) - self.began)
        return f"{whole // 60}:{whole % 60:02}"


class Board:
    """The rows, as the events leave them; a renderable of rich."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.time) -> None:
        self.rows = {name: Row(name) for name in names}
        self._clock = clock

    def take(self, event: ev.Event) -> None:
        """One event."""
        if isinstance(event, ev.RunFinished) and not event.deployment:
            for name in self.rows:
                if name.startswith(f"{event.host}/"):
                    self._finish(self.rows[name], event)
            return
        row = self.rows.get(event.deployment)
        if row is None:
            return
        match event:
            case ev.RunStarted():
                row.state, row.began, row.text = AT_WORK, event.time, "looks"
            case ev.StepStarted():
                row.state, row.step, row.text = AT_WORK, event.step, ""
            case ev.ChangeStarted():
                row.text = event.title
            case ev.Progress():
                row.state = WAITS if event.step == "canary" else AT_WORK
                row.step, row.text = event.step, progress_text(event)
            case ev.GateChecked():
                row.text = f"{'ok' if event.passed else 'FAIL'} {event.gate}"
            case ev.RunFinished():
                self._finish(row, event)
            case _:
                pass

    def _finish(self, row: Row, event: ev.RunFinished) -> None:
        row.state = FAILED if event.exit_code else DONE
        row.ended = event.time
        row.text = event.summary.removeprefix(f"{row.name} ")
        if not event.exit_code:
            row.step = ""

    def count(self) -> str:
        """`3 failed, 12 at work, 34 done`."""
        states = [row.state for row in self.rows.values()]
        return ", ".join(f"{states.count(one)} {one}" for one in FIRST if one in states)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width, max(1, console.height - SPARE_LINES))
        yield Text(self.count(), style="dim")

    def table(self, width: int, lines: int | None = None) -> Table:
        """So wide at most, and at most so many lines; None: all."""
        rows = list(self.rows.values())
        if lines is not None and len(rows) > lines:
            chosen = sorted(rows, key=lambda row: FIRST.index(row.state))[:lines]
            rows = [row for row in rows if row in chosen]
        now = self._clock()
        cells = [(row.name, row.state, row.step, row.seconds(now), row.text) for row in rows]
        sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
        kept = _fitting(sizes, width)
        table = Table.grid(padding=(0, GAP, 0, 0))
        # A whole word of some says more than pieces of all.
        sizes[NAME] = min(sizes[NAME], max(1, width - sizes[STATE] - GAP))
        sizes[TEXT] = max(1, width - sum(sizes[index] + GAP for index in kept if index != TEXT))
        for index in kept:
            side: JustifyMethod = "right" if index == SECONDS else "left"
            table.add_column(no_wrap=True, width=sizes[index], justify=side)
        for row, words in zip(rows, cells, strict=True):
            texts = [Text(printable(words[index]), style=STYLES[row.state]) for index in kept]
            for index, text in zip(kept, texts, strict=True):
                text.truncate(sizes[index], overflow="ellipsis")
            table.add_row(*texts)
        return table


def _fitting(sizes: Sequence[int], width: int) -> list[int]:
    """The columns that a line so wide has room for, in their order."""
    kept, left = [NAME, STATE], width - sizes[NAME] - GAP - sizes[STATE]
    for index in (SECONDS, STEP, TEXT):
        left -= GAP + (LEAST_TEXT if index == TEXT else sizes[index])
        if left < 0:
            break
        kept.append(index)
    return sorted(kept)


class TableRenderer:
    """The board, drawn at most 4 times a second, with the lines that stay above it."""

    def __init__(
        self, names: Sequence[str], *, verbose: bool, console: Console | None = None
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.board = Board(names)
        self._plain = PlainRenderer(self._write, verbose=verbose)
        self._style = ""
        self._held: list[tuple[str, str]] | None = None
        self._live: Live | None = None

    def __call__(self, event: ev.Event) -> None:
        """One event."""
        self.board.take(event)
        if isinstance(event, ev.Note) and event.level == "warning":
            self._say(event, "yellow")
        elif isinstance(event, ev.GateChecked) and not event.passed:
            self._say(event, "bold red")
        elif self._plain.verbose and not isinstance(event, ev.Progress):
            self._say(event, "dim")
        if self._live is None and self._held is None:
            self._start()

    def pause(self) -> None:
        """Takes the table away, for a question; lines are held back."""
        self._held = self._held or []
        self._stop()

    def resume(self) -> None:
        """Draws again."""
        held, self._held = self._held or [], None
        for line, style in held:
            self.console.print(Text(line, style=style), soft_wrap=True)
        self._start()

    def close(self) -> None:
        """Leaves the whole table as it is now."""
        self._held = None
        self._stop()
        self.console.print(self.board.table(self.console.width))

    def _say(self, event: ev.Event, style: str) -> None:
        self._style = style
        self._plain(event)

    def _start(self) -> None:
        self._live = Live(
            self.board,
            console=self.console,
            refresh_per_second=REDRAWS_PER_S,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _write(self, line: str) -> None:
        if self._held is not None:
            self._held.append((line, self._style))
        else:
            self.console.print(Text(line, style=self._style), soft_wrap=True)
