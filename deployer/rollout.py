"""Which hosts of one run may act, and when: a canary first, and no further ones after failures.

Every host is looked at right away; what is asked here is only whether it may change something. So a
run with nothing to do waits for nobody. Deployments of one playbook and variant are a line: the
first of them that has something to do is the canary, and the others act once it has passed its
gates. A deployment of the line that is already as wanted has passed them: then there is nothing to
wait for. One that ends before it changed anything (unreachable, locked, blocked) proves nothing
about the change, and the next one is the canary; unless it is blocked because an earlier run has
seen it fail its gates.

Replicas behind one router are a line too, of which one at a time acts, those first that do not
serve: one that does waits as long as another one without requests may still be brought up by this
run. The line ends with the first that fails, so that no second one goes missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.errors import DeployError, GateFailed, Interrupted, NotStarted
from deployer.fleet import Slots
from deployer.names import listed, plain_url

ELECTION_S = 5.0
"""How long the first to be ready waits for those before it: one of them may hang."""

SAY_EVERY_S = 1.0

_Key = tuple[str, object]
"""Playbook, and its variant or the router that it is behind."""


@dataclass
class _Line:
    """Deployments that one canary speaks for; with `one_by_one` each for those behind it."""

    ids: list[str] = field(default_factory=list)
    one_by_one: bool = False
    ready: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    """Serve nothing now."""
    lacking: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of one that serves: the replicas that did not when it was looked at."""
    over: set[str] = field(default_factory=set)
    """Ended, well or not."""
    first_ready: float = 0.0
    canary: str = ""
    passed: bool = False
    failed: bool = False

    def elect(self, now: float) -> None:
        """The first that is ready, once nobody before it can still become so."""
        if self.canary:
            return
        known = now - self.first_ready >= ELECTION_S or self.ready | self.over >= set(self.ids)
        waiting = [one for one in self.ids if one in self.ready - self.over]
        if self.one_by_one:
            # Without the others, the one that still serves may be the last to do so.
            ripe = [one for one in waiting if not self.awaited(one)]
            # Each that waits may wait for another one that does: nobody else can end that.
            if not ripe and self.ready | self.over >= set(self.ids):
                ripe = waiting
            waiting = ripe if known else []
            waiting.sort(key=lambda one: one not in self.idle)
        elif not known and waiting:
            before = self.ids[: self.ids.index(waiting[0])]
            waiting = waiting if self.over >= set(before) else []
        if waiting:
            self.canary = waiting[0]

    def awaited(self, one: str) -> list[str]:
        """Of those that do not serve, the ones that this run may still bring up before `one`."""
        away = self.lacking.get(one, frozenset()) - self.over - {one}
        return [other for other in self.ids if other in away and one not in self.idle]


class Rollout:
    """Asked by every host's thread.

    `canary`: None leaves it to the playbooks. `max_failures`: hosts; None: any number. `serves`:
    what is changed shall serve afterwards; else replicas need not wait for each other.
    """

    def __init__(
        self,
        deployments: Sequence[Deployment],
        *,
        canary: bool | None = None,
        max_failures: int | None = None,
        serves: bool = True,
        slots: Slots | None = None,
        cancel: Cancel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = threading.Condition()
        self._clock = clock
        self._slots = slots
        self._cancel = cancel or Cancel()
        self._max_failures = max_failures
        self._failed: dict[str, None] = {}
        """Host names, in the order of their failures."""
        self._lines: dict[_Key, _Line] = {}
        self._line_of: dict[str, _Line] = {}
        hosts: dict[_Key, set[str]] = {}
        for want in deployments:
            replica = want.entry.replica
            behind = plain_url(replica.router.url) if replica else want.variant_name
            key = (want.playbook_name, behind)
            line = self._lines.setdefault(key, _Line())
            line.ids.append(want.id)
            self._line_of[want.id] = line
            hosts.setdefault(key, set()).add(want.host_name)
            line.one_by_one = serves and replica is not None
            wanted = want.playbook.rollout.canary if canary is None else canary
            # One host alone has nobody to be careful for.
            line.passed = len(hosts[key]) < 2 or not (wanted or line.one_by_one)

    def refusal(self, host: str) -> NotStarted | None:
        """Why `host` is not to be begun at all."""
        with self._changed:
            return self._too_many(host)

    def admit(
        self,
        want: Deployment,
        on_wait: Callable[[str], None],
        *,
        idle: bool = False,
        lacking: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Returns when `want` may act. Raises NotStarted, or the cause of an interrupt.

        `on_wait` is told every second what it waits for. `idle`: it does not serve now. `lacking`:
        ids of the replicas that do not serve, asked about every second; what it raises is raised.
        """
        line = self._line_of[want.id]
        away = self._lacking(line, idle, lacking)
        with self._changed:
            line.lacking[want.id] = away
            if not line.ready:
                line.first_ready = self._clock()
            line.ready.add(want.id)
            if idle:
                line.idle.add(want.id)
            self._changed.notify_all()
            if self._may_act(want, line):
                return
        with self._slots.lent() if self._slots else nullcontext():
            while True:
                with self._changed:
                    if self._may_act(want, line):
                        break
                    text = self._waits(want, line)
                on_wait(text)
                away = self._lacking(line, idle, lacking)
                with self._changed:
                    line.lacking[want.id] = away
                    if not self._may_act(want, line):
                        self._changed.wait(SAY_EVERY_S)

    def ended(
        self, id_: str, error: DeployError | None, *, acted: bool = False, passed: bool = False
    ) -> None:
        """How a deployment ended; the first word counts.

        `acted`: one of its steps has begun. `passed`: it is as wanted, gates included.
        """
        line = self._line_of[id_]
        with self._changed:
            if id_ in line.over:
                return
            line.over.add(id_)
            if passed and not line.one_by_one:
                line.passed = True
            if error is not None and not isinstance(error, NotStarted | Interrupted):
                self._failed[id_.partition("/")[0]] = None
            if line.canary == id_ and not line.passed:
                # That it has failed its gates with the same wish before proves as much.
                before = error is not None and error.exit_code == GateFailed.exit_code
                line.failed = (acted or before) and not passed
                if not line.failed:
                    line.canary = ""
            self._changed.notify_all()

    @staticmethod
    def _lacking(line: _Line, idle: bool, lacking: Callable[[], Collection[str]]) -> frozenset[str]:
        return frozenset(lacking()) if line.one_by_one and not idle else frozenset()

    @staticmethod
    def _waits(want: Deployment, line: _Line) -> str:
        kind = "replica" if line.one_by_one else "canary"
        if line.canary:
            return f"waits for the {kind} {line.canary}"
        if awaited := line.awaited(want.id):
            return f"waits for {listed(awaited)}: without requests"
        return f"before the first {kind}"

    def _may_act(self, want: Deployment, line: _Line) -> bool:
        self._cancel.check(want.id)
        refused = self._too_many(want.id)
        if refused is not None:
            raise refused
        if line.passed:
            return True
        if line.failed:
            raise NotStarted(
                f"not started: the {'replica' if line.one_by_one else 'canary'} {line.canary} "
                "failed",
                where=want.id,
                fix=f"see what {line.canary} says; then run the same command again",
            )
        line.elect(self._clock())
        return line.canary == want.id

    def _too_many(self, where: str) -> NotStarted | None:
        if self._max_failures is None or len(self._failed) < self._max_failures:
            return None
        return NotStarted(
            f"not started: {listed(self._failed)} failed, and --max-failures is "
            f"{self._max_failures}",
            where=where,
            fix="see what they say; then run the same command again",
        )
