"""What is under way, as lines of a terminal: a bar for each download and for each of its files.

Everything is drawn anew from the last event of each deployment; hosts in parallel share the lines.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deployer import events as ev
from deployer.cli.plain import printable, progress_text, size_text

MOST_PARTS = 8
"""Of one deployment; the rest is a number."""
SHORTEST_NAME, LONGEST_NAME = 18, 40
"""A bar is not worth a name that nobody can tell from the next."""
NARROWEST_BAR = 8
WIDEST_BAR = 40
STALE_S = 5.0
SPARE_LINES = 4
"""Of the terminal's height, for what is printed above."""

_ENDINGS = (".safetensors",)
_DOTS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_DASHES = "-\\|/"


@dataclass(frozen=True)
class _Row:
    """One line with a bar."""

    name: str
    done: float
    total: float
    unit: str
    style: str = ""

    @property
    def figures(self) -> str:
        share = f"{100 * min(self.done / self.total, 1.0):3.0f} %  " if self.total else ""
        if self.unit in ("B", "bytes"):
            said = size_text(self.done)
            return share + (f"{said} of {size_text(self.total)}" if self.total else said)
        return share + f"{self.done:g} of {self.total:g} {self.unit}".rstrip()


class UnderWay:
    """A renderable of the last progress of every deployment, in the order they came."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` is that of the events, in Unix seconds."""
        self._events: dict[str, ev.Progress] = {}
        self._clock = clock

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(self._events)

    def show(self, event: ev.Progress) -> None:
        """From now on this is how far its deployment is."""
        self._events[event.deployment or event.host] = event

    def drop(self, event: ev.Event) -> None:
        """The deployment of `event`, or all of its host, wait for nothing any more."""
        key = event.deployment or event.host
        for name in list(self._events):
            if name == key or (not event.deployment and name.startswith(f"{key}/")):
                del self._events[name]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The drawing thread is not the one that takes events: this list is its own.
        shown = list(self._events.values())
        lines = max(1, console.height - SPARE_LINES)
        room = lines if len(shown) <= lines else max(1, lines - 1)
        share = max(1, lines // max(1, len(shown)))
        for event in shown[:room]:
            if event.figures or event.parts:
                yield from self._bars(event, options, share)
            else:
                frames = _DASHES if options.ascii_only else _DOTS
                frame = frames[int(console.get_time() * 10) % len(frames)]
                text = f"{frame} {event.deployment} {event.step}: {progress_text(event)}"
                yield _line(text, options.max_width)
        if room < len(shown) and room < lines:
            yield _line(f"and {len(shown) - room} more", options.max_width, "dim")

    def _bars(
        self, event: ev.Progress, options: ConsoleOptions, lines: int
    ) -> Iterator[Table | Text]:
        """The whole, its figures, and its parts, in at most `lines` lines."""
        title = f"{event.deployment} {event.what}"
        whole = _Row(title, event.done, event.total, event.unit, "bold")
        age = self._clock() - event.time
        # The figures are as old as the event: a silent connection must not look like a fast one.
        detail = f"no word for {age:.0f} s; {event.detail}" if age >= STALE_S else event.detail
        said = _wrapped(detail, options.max_width)[: max(0, lines - 1)]
        most = min(MOST_PARTS, lines - 1 - len(said))
        parts = event.parts
        if len(parts) > most:
            parts = parts[: max(0, most - 1)] if most < MOST_PARTS else parts[:most]
        rows = [_Row(f"  {_short(p.name)}", p.done, p.total, event.unit) for p in parts]
        table, *below = _tables(whole, rows, options.max_width)
        yield table
        for line in said:
            yield _line(line, options.max_width, "dim")
        yield from below
        left = len(event.parts) - len(parts)
        if left and most > 0:
            yield _line(f"  and {left} more", options.max_width, "dim")


def _tables(whole: _Row, rows: Sequence[_Row], width: int) -> list[Table]:
    """Every row as a line of its own, their columns in line with each other."""
    every = [whole, *rows]
    figures = max(cell_len(row.figures) for row in every)
    names = min(max(cell_len(printable(row.name)) for row in every), LONGEST_NAME)
    room = width - figures - 4
    bar = min(room - names, WIDEST_BAR)
    if bar < NARROWEST_BAR and room - NARROWEST_BAR >= SHORTEST_NAME:
        names, bar = room - NARROWEST_BAR, NARROWEST_BAR
    elif bar < NARROWEST_BAR:
        names, bar = max(1, min(names, room + 2)), 0
    made = []
    for row in every:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=names, no_wrap=True)
        name = printable(row.name)
        fitted = set_cell_size(name, names) if row is whole else _fit(name, names)
        cells: list[Text | ProgressBar] = [Text(fitted, style=row.style)]
        if bar:
            table.add_column(width=bar)
            # A bar without a total would move by itself; an empty one says as much.
            cells.append(ProgressBar(total=row.total or 1.0, completed=row.done, width=bar))
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row(*cells, Text(row.figures, style=row.style))
        made.append(table)
    return made


def _wrapped(detail: str, width: int) -> list[str]:
    """The figures in words, on two lines where one is too narrow."""
    indent = "  "
    lines = textwrap.wrap(
        printable(detail), max(width, 10), initial_indent=indent, subsequent_indent=indent
    )
    return [*lines[:1], indent + " ".join(line.strip() for line in lines[1:])][: len(lines)]


def _short(name: str) -> str:
    """The part of a file's name that tells it from the others."""
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _fit(name: str, width: int) -> str:
    """Shards differ at the end of their names, so a long one loses its front."""
    if cell_len(name) <= width:
        return name
    cut = name
    while cell_len(cut) > max(0, width - 1):
        cut = cut[1:]
    return set_cell_size(f"…{cut}", width)


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(printable(text), style=style, no_wrap=True, overflow="ellipsis", end="\n")
    line.truncate(width, overflow="ellipsis")
    return line
