"""Which rung of the ladder is launched next. Decides only; the launch step acts.

The first is the chosen variant, or what was proven here after the chosen one had failed. Below it
come the later variants, and between them at most one derived step up and one down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployer.deployment import Deployment
from deployer.model import Facts
from deployer.sglang.derive import Derived, derive
from deployer.state import DeploymentState, Manifest
from deployer.steps.known_good import preferred, rung_of, why_preferred
from deployer.steps.launch_fit import machine_of
from deployer.steps.server_wanted import DERIVED, LaunchNote, Rung, ladder

if TYPE_CHECKING:
    from deployer.steps.launch_wait import LaunchFailed


def first_rung(want: Deployment, state: DeploymentState) -> tuple[Rung, str]:
    """What a launch begins with, and why when it is not the chosen variant."""
    proven = preferred(state, want)
    if proven is None:
        return Rung(want.variant_name), ""
    return rung_of(proven), why_preferred(want, proven)


@dataclass
class Fall:
    """One way down the ladder. `reasons`: failed rungs of it -> class of the failure."""

    want: Deployment
    manifest: Manifest | None
    left: list[Rung]
    reasons: dict[str, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    why: str = ""
    """Why it does not begin with the chosen variant."""
    ways: set[str] = field(default_factory=set)
    """Directions in which a step was derived already."""

    @classmethod
    def begin(cls, want: Deployment, state: DeploymentState) -> Fall:
        """From the first rung on."""
        proven = preferred(state, want)
        names = [Rung(name) for name in ladder(want)]
        fall = cls(want, state.manifest, names)
        if proven is None:
            return fall
        first = rung_of(proven)
        fall.left = [first, *_below(names, first)]
        fall.why = why_preferred(want, proven)
        for name, cls_ in proven.instead_of.items():
            fall.reasons[name] = cls_
            if DERIVED not in name:
                fall.marks[name] = Rung(name).fingerprint(want, state.manifest)
        return fall

    def join(self, note: LaunchNote) -> None:
        """Goes on with a launch that was found starting, and with what failed before it."""
        names = [Rung(name) for name in ladder(self.want)]
        self.left = [note.rung, *_below(names, note.rung)]
        self.reasons = note.instead_of
        self.marks = dict(zip(note.fell_from, note.marks, strict=False))
        self.why = ""
        tried = [note.variant, *note.fell_from]
        self.ways = {_way(name) for name in tried if DERIVED in name}

    def next(self) -> Rung | None:
        """The rung to launch now; None at the end of the ladder."""
        return self.left.pop(0) if self.left else None

    def failed(self, rung: Rung, cls: str) -> None:
        """Remembers it for the note of the next."""
        self.reasons[rung.variant] = cls
        self.marks[rung.variant] = rung.fingerprint(self.want, self.manifest)

    def note(self, rung: Rung) -> LaunchNote:
        """What the job's folder is told of a launch of `rung`."""
        names = tuple(self.reasons)
        return LaunchNote(
            rung.variant,
            names,
            tuple(self.reasons.values()),
            tuple(self.marks.get(name, "") for name in names),
            rung.changes,
            bool(self.why),
        )

    def derive(
        self, facts: Facts, manifest: Manifest | None, rung: Rung, error: LaunchFailed
    ) -> Derived | None:
        """Puts the one derived step next, where the playbook and the arithmetic allow one."""
        if self.want.playbook.serve.memory_step == "never" or rung.changes:
            return None
        machine = machine_of(self.want, facts, manifest, rung.variant)
        if isinstance(machine, str):
            return None
        args = self.want.serve_args(rung.variant)
        failure = error.failure
        found = derive(machine[0], args, failure.cls, failure.cause_line, error.phase, error.seen)
        if found is None or found.way in self.ways:
            return None
        self.ways.add(found.way)
        name = f"{rung.variant}{DERIVED}{found.label}"
        self.left.insert(0, Rung(name, tuple(found.changes.items())))
        return found


def _below(names: list[Rung], rung: Rung) -> list[Rung]:
    known = [one.variant for one in names]
    return names[known.index(rung.base) + 1 :] if rung.base in known else []


def _way(name: str) -> str:
    return "down" if DERIVED + "mem-" in name else "up"
