"""Renderer for a terminal: the plain lines in colour above one live line of what is awaited."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text

from deployer import events as ev
from deployer.cli.plain import PlainRenderer, printable, progress_text

STYLES = {"nothing": "dim", "done": "green", "failed": "bold red"}


class LiveRenderer:
    """Prints state changes; shows progress on one line that is redrawn."""

    def __init__(self, *, show_plan: bool, verbose: bool, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._style = ""
        self._plain = PlainRenderer(self._write, show_plan=show_plan, verbose=verbose)
        self._status: Status | None = None

    def __call__(self, event: ev.Event) -> None:
        """One event."""
        if isinstance(event, ev.Progress):
            self._show(printable(f"{event.deployment} {event.step}: {progress_text(event)}"))
            return
        if isinstance(event, ev.StepDone | ev.RunFinished):
            self.close()
        self._style = _style(event)
        self._plain(event)

    def close(self) -> None:
        """Takes the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _show(self, text: str) -> None:
        if self._status is None:
            self._status = self.console.status(Text(text), refresh_per_second=4)
            self._status.start()
        else:
            self._status.update(Text(text))

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
