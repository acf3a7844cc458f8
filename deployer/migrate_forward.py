"""The phases of a migration that bring the model to the destination, in order."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployer import migrate_adopted, migrate_retire
from deployer.deployment import Deployment
from deployer.errors import DeployError, GateFailed, StepFailed, Unreachable
from deployer.migrate_adopted import strangers
from deployer.migrate_fetch import Fetch
from deployer.migrate_journal import PHASES, after
from deployer.migrate_pair import Pair, route
from deployer.migrate_side import is_stopped, trouble
from deployer.migrate_way import Way
from deployer.model import Facts
from deployer.steps.server_facts import ServerFact
from deployer.up_result import address

STEPS = {
    "prepare": ("driver", "gpus", "container", "venv"),
    "weights": ("shards",),
    "launch": ("stop", "launch", "verify"),
}
LOOK_EVERY_S = 2.0
"""While the destination settles."""
MOVES = 3
"""So often the traffic is moved again while it settles, when it has got lost."""
DARK_S = 30.0
"""How long it may be dark meanwhile, when the way of the traffic has nothing against it."""


class Forward:
    """From the phase of the journal to the end."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.source, self.destination = pair.source, pair.destination

    def begin(self, *, resumed: bool) -> None:
        """Locks both hosts and writes the first record, unless one goes on."""
        pair, source, destination = self.pair, self.source, self.destination
        # In one order, so that of two that cross one goes on.
        sides = sorted(pair.sides, key=lambda side: side.want.host_name)
        seen = {one.want.id: pair.lock(one) for one in sides if one.want.id not in pair.absent}
        facts, record = seen[destination.want.id], pair.record
        if not resumed:
            record.started = time.time()
            record.served_before = not trouble(destination.want, facts)
        if not record.cut:
            # Since an earlier run it may serve another launch, and the inventory name another way.
            self.remember_source(seen[source.want.id])
            routed = record.routed_before
            pair.way().remember()
            # An earlier run may have taken it out until it has passed.
            record.routed_before = record.routed_before or routed
        found = strangers(facts)
        keeps = bool(found) and not record.cut and not record.adopted
        if keeps:
            record.adopted = found[0].command[:500]
        pair.enter(record.phase if resumed else PHASES[0])
        if keeps:
            # After the journal: --abort takes away what is written down there.
            pair.record.adopted = migrate_adopted.keep(destination, facts)

    def remember_source(self, facts: Facts) -> bool:
        """What serves there: `--abort` may have to start it again. Is it another than before?"""
        record, server = self.pair.record, facts.get(ServerFact)
        job = server.job if server is not None else None
        if job is None or not job.alive or record.source_launch == job.identity.id:
            return False
        record.source_variant, record.source_launch = job.launch.variant, job.identity.id
        return True

    def go(self) -> None:
        """The phases, from the journal's on; the ones before the cut-over look again anyway."""
        actions: dict[str, Callable[[], object]] = {
            "prepare": lambda: self.bring("prepare"),
            "weights": Fetch(self.pair, lambda want: self.bring("weights", want)).fetch,
            "launch": self.launch,
            "cutover": self.cut_over,
            "settle": self.settle,
            "stop": self.stop_source,
            "retire": self.retire,
        }
        phase = self.pair.record.phase
        if PHASES.index(phase) <= PHASES.index("cutover"):
            # Something may have happened to the destination since: nothing is taken on trust.
            phase = PHASES[0] if not self.pair.record.cut else "cutover"
        while phase:
            if PHASES.index(phase) > PHASES.index(self.pair.record.phase):
                self.pair.enter(phase)
            with self.pair.told(phase):
                actions[phase]()
            phase = after(phase)
        self.pair.finish("done")
        where = address(self.destination.want)
        self.pair.result.done = (
            f"{self.destination.want.id} serves {self.destination.want.playbook.model.served_name} "
            f"at {where}; {self.source.want.id} {self.what_is_left()}"
        )

    def what_is_left(self) -> str:
        """Of the source. One that is kept may have been stopped before that was asked."""
        side = self.source
        if side.want.id in self.pair.absent:
            return "is left as it is: it cannot be reached"
        if not self.pair.record.keep_source:
            return "is stopped"
        server = side.gather().get(ServerFact)
        runs = server is not None and server.job is not None and server.job.alive
        return "still runs" if runs else "does not run"

    def bring(self, phase: str, want: Deployment | None = None) -> Facts:
        """The steps of `up` that belong to the phase."""
        side = self.destination
        try:
            return side.bring(side.only(*STEPS[phase]), want=want)
        except DeployError as error:
            if not self.pair.record.cut:
                self.source.note(phase, self.of_source())
            if not error.fix:
                error.fix = "run the same command again, or --abort"
            raise

    def of_source(self) -> str:
        """What may be said of the source after a failure before the cut-over, as seen now."""
        name = self.source.want.id
        try:
            why = trouble(self.source.want, self.source.gather())
        except DeployError as error:
            return f"{name} was not touched; it cannot be looked at now: {error.what}"
        return f"{name} was not touched" + (f", and yet: {why}" if why else " and serves")

    def launch(self) -> None:
        """Started and proven while the source serves. Raises GateFailed (exit code 5)."""
        way, entered = self.pair.way(), self.destination.on_step

        def entering(step: str) -> None:
            entered(step)
            way.hold_back()

        self.destination.on_step = entering
        try:
            facts = self.bring("launch")
        finally:
            self.destination.on_step = entered
        if why := trouble(self.destination.want, facts):
            raise GateFailed(
                f"it does not serve as proven: {why}",
                where=self.destination.want.id,
                fix="`deploy logs`; then run the same command again, or --abort",
            )

    def cut_over(self) -> None:
        """The traffic moves; from the first act on, `--abort` moves it back.

        What gets requests already is not started anew by a run that goes on: it serves as proven,
        or the traffic goes back. Raises GateFailed.
        """
        record = self.pair.record
        if not record.cut:
            rules = self.pair.way().rules
            record.cut, record.way, record.route = True, rules.kind, route(rules)
            self.pair.save()
        elif why := self.seen():
            self.fall_back(why)
        try:
            gap = self.pair.moved("forward")
        except StepFailed as error:
            # It may have died when the old one was out already.
            if why := self.seen():
                self.fall_back(f"{error.what}; {why}")
            raise
        if gap is not None and gap.open:
            self.fall_back(f"clients get no answer: {gap}")

    def seen(self) -> str:
        """Why the destination does not serve as proven, '' when it does. Raises Unreachable."""
        side = self.destination
        facts = side.gather()
        silent = facts.silent.get(side.want.guest)
        if silent is not None and not is_stopped(side.want, facts):
            raise Unreachable(silent, where=side.want.id)
        return trouble(side.want, facts)

    def settle(self) -> None:
        """The destination serves through the cut-over for the settle time, else it goes back.

        While it cannot be looked at, the way of the traffic is asked in its place. Raises
        GateFailed when the traffic went back, Unreachable when it stayed dark and nobody finds it
        bad.
        """
        way, side, options = self.pair.way(), self.destination, self.pair.options
        began = options.now()
        dark: float | None = None
        again = 0
        while True:
            try:
                why = self.seen()
                if not why and again < MOVES and self.moved_again(way):
                    again, began = again + 1, options.now()
                why = why or self.problem(way) or way.seen_by_clients("forward")
                dark = None
            except Unreachable as error:
                now = options.now()
                dark = now if dark is None else dark
                why = way.seen_by_clients("forward")
                if not why and now - dark >= DARK_S:
                    error.add("the traffic is there, and nobody finds it bad")
                    raise
                why = why and f"{error.what}; {why}"
                began = now
            if why:
                self.fall_back(why)
            spent = options.now() - began
            if dark is None and spent >= way.rules.settle_s:
                return
            what = "serves through the cut-over" if dark is None else "does not answer us"
            side.progress("settle", what, spent, way.rules.settle_s)
            left = way.rules.settle_s - spent if dark is None else LOOK_EVERY_S
            options.sleep(min(LOOK_EVERY_S, left))

    def problem(self, way: Way) -> str:
        """Of the traffic; a source that is gone for good is not asked."""
        try:
            return way.problem("forward")
        except Unreachable:
            if self.source.want.id in self.pair.absent:
                return ""
            raise

    def moved_again(self, way: Way) -> bool:
        """Was the traffic where it was before, with nobody to blame (a router started again)?"""
        why = self.problem(way)
        if not why or not way.lost("forward"):
            return False
        self.destination.note("settle", f"{why}: the traffic is moved again", "warning")
        try:
            self.pair.moved("forward")
        except StepFailed as error:
            # Perhaps nobody gets requests now, and the source still serves.
            self.fall_back(f"{why}; {error.what}")
        return True

    def fall_back(self, why: str) -> None:
        """The traffic goes back to the source, which still runs. Always raises GateFailed."""
        try:
            because = trouble(self.source.want, self.source.gather())
        except DeployError as error:
            because = error.what
        if because:
            raise GateFailed(
                f"it failed after the cut-over ({why}), and the source cannot take over: {because}",
                where=self.destination.want.id,
                fix="`deploy logs` on both; --abort starts the source again",
            )
        # Whoever goes on moves it forward anew: it may be back already when this run ends here.
        self.pair.record.phase = "cutover"
        self.pair.save_here()
        self.pair.moved("back")
        self.pair.record.cut = False
        self.pair.record.phase = "launch"
        self.pair.save(may_be_dark=self.destination)
        raise GateFailed(
            f"it failed after the cut-over: {why}; the traffic is back at {self.source.want.id}",
            where=self.destination.want.id,
            fix="correct it, then run the same command again; or --abort",
        )

    def stop_source(self) -> None:
        """Drained and stopped, after a last look at the destination."""
        side = self.source
        if self.pair.record.keep_source:
            side.note("stop", f"{side.want.id} is kept (--keep-source)")
            return
        if why := self.seen():
            self.fall_back(why)
        facts = side.gather()
        if self.remember_source(facts):
            self.pair.save()
        if is_stopped(side.want, facts):
            side.note("stop", f"container {side.want.vmid} is stopped: nothing of it runs")
            return
        # It may be long since it settled, and a router forgets.
        way = self.pair.way()
        self.moved_again(way)
        if why := self.problem(way):
            self.fall_back(why)
        self.pair.drain_and_stop(side, "forward")

    def retire(self) -> None:
        """Only with --retire, and never of a source that is kept."""
        if self.pair.record.retire and not self.pair.record.keep_source:
            migrate_retire.retire(self.source)
