"""A way to move the traffic: it looks, decides, acts, looks again, and knows the way back.

All of them may be run twice: what is done already is seen and left. Before `forward` the
destination has passed its gates; before `back` the source serves.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.inventory import Cutover
from deployer.migrate_gap import Gap, ask
from deployer.migrate_side import Side, trouble
from deployer.model import Facts
from deployer.state import Migration
from deployer.up_result import address

PHASE = "cutover"
OUT_S = 30.0
BACK_S = 30.0
"""How long clients may be without an answer after a move before that is said."""
ASK_AGAIN = 3
"""So often clients' address must fail in a row to count as bad."""
Direction = Literal["forward", "back"]


def cutover_of(source: Deployment, destination: Deployment) -> Cutover:
    """The first that names a way: the destination's cutover, the source's, a replica's router.

    Times come from the first entry that tells them, whether it names a way or not.
    """
    entries = [destination.entry, source.entry]
    replicas = [entry.replica for entry in entries if entry.replica is not None]
    rules = [entry.cutover for entry in entries if entry.cutover is not None]
    rules += [Cutover(router=one.router, drain_s=one.drain_s) for one in replicas]
    named = next((one for one in rules if one.kind != "none"), Cutover())
    times: dict[str, Any] = {
        name: getattr(one, name)
        for one in reversed(rules)
        for name in ("settle_s", "drain_s")
        if name in one.model_fields_set
    }
    return named.model_copy(update=times)


@dataclass
class Way(ABC):
    """One way to move the traffic from `source` to `destination`, and back."""

    source: Side
    destination: Side
    rules: Cutover
    record: Migration
    save: Callable[[], None] = field(default=lambda: None)
    """Writes the journal; called when the record has learnt something."""

    @abstractmethod
    def words(self) -> str:
        """What it will do, for a dry run."""

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """(what speaks against it, what to do). Read-only."""
        return []

    def remember(self) -> None:
        """Notes in the record what `back` must know of before; asked once, before any move."""
        return

    def hold_back(self) -> None:
        """Asked before and while the destination comes up: no traffic before it has passed."""
        return

    @abstractmethod
    def move(self, direction: Direction) -> Gap | None:
        """Moves the traffic; the gap where it is measured. Raises DeployError."""

    def problem(self, direction: Direction) -> str:
        """Why the traffic is not where it should be, as seen now; '' when it is, or not seen."""
        return ""

    def lost(self, direction: Direction) -> bool:
        """Has the traffic left its place though nobody finds the server bad? Then it moves again.

        Raises DeployError.
        """
        return False

    def seen_by_clients(self, direction: Direction) -> str:
        """What clients find bad of the new server; '' when nothing, or when that is not measured.

        Asks only what does not need its host, which may be dark to us.
        """
        return ""

    def sides(self, direction: Direction) -> tuple[Side, Side]:
        """(who loses the traffic, who gets it)."""
        pair = (self.source, self.destination)
        return pair if direction == "forward" else (pair[1], pair[0])

    def tick(self, side: Side | None) -> Callable[[str, float, float], None]:
        """Shows a wait, and ends it when the server that is waited for is gone. None: no server."""
        looked = time.monotonic()

        def tick(what: str, spent: float, limit: float) -> None:
            nonlocal looked
            (side or self.destination).progress(PHASE, what, spent, limit)
            if side is not None and time.monotonic() - looked >= 5.0:
                looked = time.monotonic()
                if why := trouble(side.want, side.gather()):
                    raise StepFailed(
                        f"it does not serve any more: {why}",
                        where=side.want.id,
                        fix=f"`deploy logs {side.want.id}`",
                    )

        return tick


class NoWay(Way):
    """Clients are told the new endpoint by somebody else."""

    def words(self) -> str:
        """See Way."""
        return f"print the new endpoint, {address(self.destination.want)}; nobody moves the traffic"

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        _, gets = self.sides(direction)
        gets.note(PHASE, f"clients: use {address(gets.want)} from now on")
        return None


def answered_at(url: str | None) -> str:
    """Why clients get no answer at `url`, asked several times; '' when they do, or for None."""
    problem = ""
    for _ in range(ASK_AGAIN if url else 0):
        problem = ask(url or "")
        if not problem:
            return ""
    return f"clients get no answer at {url}: {problem}" if problem else ""


def unmeasured(url: str | None) -> list[tuple[str, str]]:
    """The obstacle that clients' address does not even answer before anything is moved."""
    why = answered_at(url)
    return [(why, "correct probe_url, or leave it out: then no gap is measured")] if why else []
