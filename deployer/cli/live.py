"""Renderer for a terminal: the plain lines in colour above what is under way, drawn in place."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployer import events as ev
from deployer.cli.bars import UnderWay
from deployer.cli.plain import PlainRenderer

STYLES = {"nothing": "dim", "done": "green", "failed": "bold red"}
REDRAWS_PER_S = 4


class LiveRenderer:
    """Prints changes of state; shows progress below them, redrawn at most 4 times a second."""

    def __init__(
        self,
        *,
        show_plan: bool,
        verbose: bool,
        to_stdout: bool = False,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=not to_stdout, highlight=False)
        self._style = ""
        self._plain = PlainRenderer(self._write, show_plan=show_plan, verbose=verbose)
        self._under_way = UnderWay()
        self._live: Live | None = None
        self._paused = False

    def __call__(self, event: ev.Event) -> None:
        """One event."""
        if isinstance(event, ev.Progress):
            self._under_way.show(event)
            self._start()
            return
        if isinstance(event, ev.StepDone | ev.RunFinished):
            self._under_way.drop(event)
            if not self._under_way:
                self.close()
        self._style = _style(event)
        self._plain(event)

    def pause(self) -> None:
        """Draws nothing in place until `resume`: there is a question."""
        self._paused = True
        self.close()

    def resume(self) -> None:
        """Draws again."""
        self._paused = False

    def close(self) -> None:
        """Takes the drawn lines away."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _start(self) -> None:
        if self._live is not None or self._paused:
            return
        self._live = Live(
            self._under_way,
            console=self.console,
            refresh_per_second=REDRAWS_PER_S,
            transient=True,
            # rich would send what is written to stdout, a file with JSON lines perhaps, to here.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def _write(self, line: str) -> None:
        self.console.print(Text(line, style=self._style), soft_wrap=True)


def _style(event: ev.Event) -> str:
    if isinstance(event, ev.StepDone):
        return STYLES.get(event.outcome, "")
    if isinstance(event, ev.GateChecked):
        return "green" if event.passed else "bold red"
    if isinstance(event, ev.StepPlanned):
        return {"blocked": "red", "changes": "yellow", "nothing": "dim"}.get(event.state, "cyan")
    if isinstance(event, ev.Note) and event.level == "warning":
        return "yellow"
    return ""
