"""Plain data of the step contract (DESIGN section 3): probes, facts, changes, plans."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar, cast


class Where(Enum):
    """The machine that a probe or a change runs on."""

    HOST = "host"
    GUEST = "guest"


@dataclass(frozen=True)
class ProbeOutput:
    """One framed answer. `exit` is the snippet's status; `timed_out` means it was cut off."""

    exit: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False

    @property
    def text(self) -> str:
        """stdout, decoded once; undecodable bytes become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr, decoded once."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class Probe:
    """A read-only POSIX sh snippet and the pure parser of its output.

    `name` is unique within a target. `parse` returns a fact: a frozen dataclass whose *type* is the
    key under which plans find it. It must cope with any output, `timed_out` included.
    """

    name: str
    where: Where
    script: str
    parse: Callable[[ProbeOutput], object]
    timeout_s: float = 10.0


T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What the probes of one deployment saw, keyed by the fact's type.

    A target that could not be asked (a stopped container, say) leaves its facts absent and its
    reason in `silent`.
    """

    values: Mapping[type, object] = field(default_factory=dict)
    silent: Mapping[Where, str] = field(default_factory=dict)

    def get(self, kind: type[T]) -> T | None:
        """The fact of this type, or None when its target was silent."""
        return cast("T | None", self.values.get(kind))

    def need(self, kind: type[T]) -> T:
        """The fact of this type; KeyError when its target was silent (check `silent` first)."""
        return cast("T", self.values[kind])


@dataclass(frozen=True)
class Shell:
    """Runs POSIX sh text on `where`; non-zero is a failure. `stdin` is for secrets and data."""

    where: Where
    script: str
    timeout_s: float = 60.0
    stdin: bytes = field(default=b"", repr=False)

    def describe(self) -> str:
        """What dry-run prints."""
        return self.script.strip()


@dataclass(frozen=True)
class WriteFile:
    """Replaces `path` on `where` by temp file and rename."""

    where: Where
    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644
    before: bytes | None = field(default=None, repr=False)
    """What `path` holds now, b"" for no file: dry-run then shows a diff, and apply writes only
    while that is still so. None: not known, or not to be shown."""

    def describe(self) -> str:
        """What dry-run prints: one line, and the diff when `before` is known."""
        head = f"write {self.path} ({len(self.content)} bytes, mode {self.mode:04o})"
        return "\n".join((head, *self.diff()))

    def diff(self) -> list[str]:
        """Unified, without line ends; empty when `before` is not known."""
        if self.before is None:
            return []
        old, new = (
            text.decode("utf-8", "replace").splitlines() for text in (self.before, self.content)
        )
        return list(difflib.unified_diff(old, new, f"a{self.path}", f"b{self.path}", lineterm=""))


@dataclass(frozen=True)
class RunJob:
    """Runs detached work on `where` to its end; a job of this name that is alive is joined.

    `files` are written into the job's folder first (name -> content); the script runs with that
    folder as its working directory. `stall_s`: no new log or progress byte for so long is a stall.
    """

    where: Where
    name: str
    script: str
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    timeout_s: float = 3600.0
    stall_s: float = 600.0

    def describe(self) -> str:
        """What dry-run prints."""
        return f"job {self.name}:\n{self.script.strip()}"


@dataclass(frozen=True)
class SendFile:
    """Brings a large file of the controller to `path` on `where`; a cut transfer goes on."""

    where: Where
    local: str
    path: str
    sha256: str

    def describe(self) -> str:
        """What dry-run prints."""
        return f"send {self.local} to {self.path} (sha256 {self.sha256})"


@dataclass(frozen=True)
class Procedure:
    """Work that the step's own `apply` does in code; `steps` tells a reader what it will run."""

    where: Where
    steps: str
    data: Any = None

    def describe(self) -> str:
        """What dry-run prints."""
        return self.steps.strip()


Action = Shell | WriteFile | RunJob | SendFile | Procedure


@dataclass(frozen=True)
class Change:
    """One thing a step would do. Dry-run prints it, apply executes the same `action`."""

    title: str
    reason: str
    action: Action
    undo: str = ""

    def to_dict(self) -> dict[str, str]:
        """The JSON form, as printed by `plan --json`."""
        return {
            "title": self.title,
            "reason": self.reason,
            "where": self.action.where.value,
            "runs": self.action.describe(),
            "undo": self.undo,
        }


class PlanState(Enum):
    """What a step found: nothing to do, changes, a refusal, or not knowable yet."""

    NOTHING = "nothing"
    CHANGES = "changes"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Plan:
    """The decision of a step. `reason` is one line; `fix` says the way out of a blocked plan."""

    state: PlanState
    reason: str
    fix: str = ""
    changes: tuple[Change, ...] = ()
    exit_code: int = 1
    stands: bool = False
    """A refusal that no earlier step can lift: it is told before any step acts."""
    notes: tuple[str, ...] = ()
    """Facts behind the decision, a line each; `plan` and `doctor` show them below the reason."""

    def noted(self, *lines: str) -> Plan:
        """The same decision with these facts below it."""
        return replace(self, notes=(*self.notes, *lines))

    @classmethod
    def nothing(cls, reason: str) -> Plan:
        """Nothing to do, because `reason`."""
        return cls(PlanState.NOTHING, reason)

    @classmethod
    def change(cls, reason: str, *changes: Change) -> Plan:
        """These changes, in this order."""
        return cls(PlanState.CHANGES, reason, changes=tuple(changes))

    @classmethod
    def blocked(cls, reason: str, fix: str, exit_code: int = 1, *, stands: bool = False) -> Plan:
        """The step refuses; `fix` is the next action of the user."""
        return cls(PlanState.BLOCKED, reason, fix=fix, exit_code=exit_code, stands=stands)

    @classmethod
    def unknown(cls, until: str, reason: str = "") -> Plan:
        """Not knowable before step `until` has run; planned again at its turn."""
        return cls(PlanState.UNKNOWN, reason or f"unknown until {until} has run")
