"""Plain renderer: one line a change of state, on stderr. For CI, pipes and NO_COLOR."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployer import events as ev
from deployer.cli.planned import planned_lines

PROGRESS_EVERY_S = 30.0
EVIDENCE_LINES = 3
"""Of a failed gate; the error at the end shows more."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_CONTROLS |= {ord(blank): " " for blank in "\t\n\r"}


def printable(text: str) -> str:
    """`text` as one line that cannot steer a terminal: logs and a model may say anything."""
    return text.translate(_CONTROLS)


def size_text(count: float) -> str:
    """Bytes for people: 52.1 GB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def number(value: float) -> str:
    """A figure without an exponent: `57809784`, `568.6`, `2.71`."""
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if "e" in text else text


def _amount(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else number(round(value, 1))


def progress_text(event: ev.Progress) -> str:
    """`what 12.0 MB of 24.0 MB (50 %) detail`."""
    if event.unit in ("B", "bytes"):
        figures = size_text(event.done)
        figures += f" of {size_text(event.total)}" if event.total else ""
    elif event.total:
        figures = f"{_amount(event.done)} of {_amount(event.total)} {event.unit}".rstrip()
    else:
        figures = f"{_amount(event.done)} {event.unit}".rstrip() if event.done else ""
    share = f"({100 * event.done / event.total:.0f} %)" if event.total else ""
    return " ".join(part for part in (event.what, figures, share, event.detail) if part)


class PlainRenderer:
    """Turns events into lines and hands them to `write`."""

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        show_plan: bool = False,
        verbose: bool = False,
        many: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`many`: several hosts, so what has nothing to do is one line, and each end another."""
        self.write = write
        self.many = many
        self.show_plan = show_plan
        self.verbose = verbose
        self.clock = clock
        self._last_progress: dict[tuple[str, str], tuple[float, str]] = {}
        self._unsaid: dict[tuple[str, str], ev.Progress] = {}
        """Figures that came since the last line of their step."""

    def __call__(self, event: ev.Event) -> None:
        """One event, at most a few lines."""
        label = event.deployment or event.host
        for line in self.lines(event):
            self.write(printable(f"{label:<14} {line}" if label else line))

    def lines(self, event: ev.Event) -> list[str]:
        """The lines of one event, without the label."""
        match event:
            case ev.Probed():
                return [f"looked in {event.seconds:.2f} s ({event.reason})"] if self.verbose else []
            case ev.StepPlanned():
                return planned_lines(event, verbose=self.verbose) if self.show_plan else []
            case ev.StepStarted():
                return [f"{event.step:<10} ..."]
            case ev.ChangeStarted():
                return [f"{event.step:<10} + {event.title}"]
            case ev.ChangeDone():
                return [f"{event.step:<10}   done in {event.seconds:.1f} s"] if self.verbose else []
            case ev.JobStarted():
                verb = "joined running" if event.attached else "started"
                return [f"{event.step:<10}   {verb} job {event.job} (pid {event.pid})"]
            case ev.Progress():
                return self._progress(event)
            case ev.Note():
                mark = "warning: " if event.level == "warning" else ""
                return [f"{event.step:<10}   {mark}{event.text}"]
            case ev.GateChecked():
                mark = "ok  " if event.passed else "FAIL"
                lines = [f"{event.step:<10}   {mark} {event.gate}: {event.detail}"]
                if not event.passed and event.evidence:
                    told = event.evidence.splitlines()[:EVIDENCE_LINES]
                    lines += [f"{event.step:<10}        evidence: {text}" for text in told]
                return lines
            case ev.StepDone():
                return [*self._last_figures(event.deployment, event.step), *self._done(event)]
            case ev.RunFinished():
                # An interrupt ends a run without an end of its step.
                keys = [key for key in self._unsaid if key[0] == event.deployment]
                lines = [line for key in keys for line in self._last_figures(*key)]
                return [*lines, _end(event)] if self.many else lines
            case _:
                return []

    def _progress(self, event: ev.Progress) -> list[str]:
        key, now = (event.deployment, event.step), self.clock()
        last, what = self._last_progress.get(key, (-PROGRESS_EVERY_S, ""))
        if now - last < PROGRESS_EVERY_S and what == event.what:
            if event.figures:
                self._unsaid[key] = event
            return []
        self._unsaid.pop(key, None)
        self._last_progress[key] = (now, event.what)
        return [f"{event.step:<10}   {progress_text(event)}"]

    def _last_figures(self, deployment: str, step: str) -> list[str]:
        """How far a download had come when its step ended, well or not."""
        unsaid = self._unsaid.pop((deployment, step), None)
        self._last_progress.pop((deployment, step), None)
        return [f"{step:<10}   {progress_text(unsaid)}"] if unsaid is not None else []

    def _done(self, event: ev.StepDone) -> list[str]:
        if event.outcome == "nothing" and self.many and not self.verbose:
            return []
        if event.outcome == "nothing":
            return [f"{event.step:<10} nothing to do: {event.reason}"]
        if event.outcome == "done":
            return [f"{event.step:<10} done in {event.seconds:.1f} s: {event.reason}"]
        return [f"{event.step:<10} FAILED"]


def _end(event: ev.RunFinished) -> str:
    if event.exit_code:
        return f"FAILED     {event.summary}"
    return f"ok         {event.summary}"
