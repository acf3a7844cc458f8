"""The event stream: what a run does, as typed data. Renderers and files subscribe to it.

Library code emits events and never prints. An event is a frozen dataclass; `to_dict` gives the JSON
form: {"event": <kind>, "time": <unix s>, ...fields}.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base. `host` is the inventory name, `deployment` is HOST/NAME or ''."""

    kind: ClassVar[str] = "event"
    host: str = ""
    deployment: str = ""
    time: float = field(default_factory=time.time, kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"event": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class RunStarted(Event):
    kind: ClassVar[str] = "run_started"
    run_id: str = ""
    command: str = ""


@dataclass(frozen=True)
class Probed(Event):
    """All facts of a host were gathered. `seconds` is wall time."""

    kind: ClassVar[str] = "probed"
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class StepPlanned(Event):
    """`state` is nothing|changes|blocked|unknown."""

    kind: ClassVar[str] = "step_planned"
    step: str = ""
    state: str = ""
    reason: str = ""
    fix: str = ""
    changes: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepStarted(Event):
    kind: ClassVar[str] = "step_started"
    step: str = ""


@dataclass(frozen=True)
class ChangeStarted(Event):
    kind: ClassVar[str] = "change_started"
    step: str = ""
    title: str = ""


@dataclass(frozen=True)
class ChangeDone(Event):
    kind: ClassVar[str] = "change_done"
    step: str = ""
    title: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Part:
    """One piece of a wait that is under way. `done`/`total` in the unit of the whole."""

    name: str
    done: float
    total: float


@dataclass(frozen=True)
class Progress(Event):
    """Figures of a wait: what it waits for, and how far it is. `done`/`total` in `unit`.

    `detail` is for people; `figures` has the same for programs, units in the names. `parts` are the
    pieces under way, the most interesting first.
    """

    kind: ClassVar[str] = "progress"
    step: str = ""
    what: str = ""
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    detail: str = ""
    parts: tuple[Part, ...] = ()
    figures: dict[str, float | str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Note(Event):
    """One line that a user should read. `level` is info|warning."""

    kind: ClassVar[str] = "note"
    step: str = ""
    level: str = "info"
    text: str = ""


@dataclass(frozen=True)
class JobStarted(Event):
    """A detached job runs on the target (or was found running: `attached`)."""

    kind: ClassVar[str] = "job_started"
    step: str = ""
    job: str = ""
    pid: int = 0
    attached: bool = False


@dataclass(frozen=True)
class GateChecked(Event):
    kind: ClassVar[str] = "gate_checked"
    step: str = "verify"
    gate: str = ""
    passed: bool = False
    detail: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class StepDone(Event):
    """`outcome` is done|nothing|failed."""

    kind: ClassVar[str] = "step_done"
    step: str = ""
    outcome: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class RunFinished(Event):
    """`result` holds endpoint, launch, figures, or the error."""

    kind: ClassVar[str] = "run_finished"
    exit_code: int = 0
    summary: str = ""
    fix: str = ""
    result: dict[str, Any] = field(default_factory=dict)


Subscriber = Callable[[Event], None]


class Bus:
    """Delivers each event to every subscriber, in order, in the emitting thread."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = list(subscribers)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Adds a subscriber for the events from now on."""
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        """Hands `event` to all subscribers; an error of one is the caller's to see."""
        for subscriber in self._subscribers:
            subscriber(event)
