"""`deploy migrate SRC DST`: the model comes up on DST while SRC serves, then the traffic moves.

preflight (touches nothing) -> prepare DST -> weights -> launch and prove -> cut over -> settle ->
drain and stop SRC -> retire. Each phase looks, decides, acts and looks again, so that the same
command goes on after any end; `--abort` takes everything back. Until the cut-over SRC is untouched;
after it SRC still runs until DST has served for the settle time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer import migrate_retire
from deployer.deployment import Deployment
from deployer.down import down_steps
from deployer.errors import (
    DeployError,
    GateFailed,
    StepBlocked,
    StepFailed,
    Unreachable,
    UsageError,
)
from deployer.events import Bus, Note, Progress, RunFinished, RunStarted, StepDone, StepStarted
from deployer.locallock import LocalLock
from deployer.migrate_cutover import Direction, Way, way_of
from deployer.migrate_journal import (
    PHASES,
    Nothing,
    Resume,
    TakeBack,
    after,
    decide,
    entered,
    newest,
)
from deployer.migrate_preflight import (
    Obstacle,
    destination_obstacles,
    differences,
    lock_obstacle,
    pair_obstacles,
    refused,
    source_obstacles,
)
from deployer.migrate_relay import relay
from deployer.migrate_side import Marked, Side, trouble, with_drain
from deployer.migrate_weights import Lending, Rate, choose, measure, with_source
from deployer.model import Facts, Plan, PlanState
from deployer.remote.lock_record import owner_here, this_controller
from deployer.session import HostSession
from deployer.state import Manifest, Migration
from deployer.state_file import StateFile
from deployer.steps.order import all_steps
from deployer.steps.shards import pinned
from deployer.up import RunRecord, address, new_run_id

STEPS = {
    "prepare": ("driver", "gpus", "container", "venv"),
    "weights": ("shards",),
    "launch": ("stop", "launch", "verify"),
}
LOOK_EVERY_S = 2.0
"""While the destination settles."""
JOBS = ("shards", "venv", "venv-python")
"""Detached work there that `--abort` ends; a driver is never cut off half installed."""


@dataclass(frozen=True)
class MigrateOptions:
    """What the user asked for. `confirm` sees the plan's lines; False changes nothing."""

    base: Path
    environ: Mapping[str, str]
    dry_run: bool = False
    abort: bool = False
    retire: bool = False
    keep_source: bool = False
    confirm: Callable[[list[str]], bool] | None = None
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def deploy_dir(self) -> Path:
        """State, locks and run records."""
        return self.base.resolve().parent / ".deploy"


@dataclass
class MigrateResult:
    """How it ended. `done`: one line; `lines`: what a dry run shows."""

    error: DeployError | None = None
    done: str = ""
    lines: list[str] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    record: Migration | None = None
    declined: bool = False

    @property
    def exit_code(self) -> int:
        """0, or the error's code."""
        return self.error.exit_code if self.error is not None else 0

    def document(self) -> dict[str, Any]:
        """The JSON form, less the error."""
        return {
            "done": self.done,
            "plan": self.lines,
            "obstacles": [one.__dict__ for one in self.obstacles],
            "migration": self.record.model_dump() if self.record is not None else None,
        }


def migrate(
    source: Deployment, destination: Deployment, options: MigrateOptions, bus: Bus
) -> MigrateResult:
    """Runs, resumes or takes back the migration. Errors of the procedure are in the result."""
    if source.host_name == destination.host_name:
        raise UsageError(
            "source and destination are on one host",
            where=f"{source.id} -> {destination.id}",
            fix="`deploy up` changes a deployment in its place",
        )
    result = MigrateResult()
    run_id = new_run_id()
    name = f"{source.id} -> {destination.id}"
    with ExitStack() as stack:
        if not options.dry_run:
            folder = options.deploy_dir / "runs"
            record = RunRecord(folder, run_id, f"{source.host_name}-{destination.host_name}")
            stack.callback(record.close)
            bus = Bus(record, bus.emit)
        bus.emit(RunStarted(destination.host_name, destination.id, run_id, f"migrate {name}"))
        try:
            locks = [] if options.dry_run else _locks(stack, source, destination, options, run_id)
            sides = [
                _side(stack, want, options, bus, run_id, locks) for want in (source, destination)
            ]
            _Run(sides[0], sides[1], options, bus, run_id, result).run()
            code, text, fix = 0, result.done, ""
        except DeployError as error:
            result.error, code, text, fix = error, error.exit_code, str(error), error.fix
        except KeyboardInterrupt:
            bus.emit(RunFinished(destination.host_name, destination.id, 130, "interrupted"))
            raise
        bus.emit(RunFinished(destination.host_name, destination.id, code, text, fix))
    return result


def _locks(
    stack: ExitStack,
    source: Deployment,
    destination: Deployment,
    options: MigrateOptions,
    run_id: str,
) -> list[LocalLock]:
    """Both local locks, or LockHeld; in one order, whoever migrates whereto."""
    command = f"migrate {source.id} {destination.id}"
    locks = []
    for host in sorted((source.host_name, destination.host_name)):
        lock = LocalLock(options.deploy_dir, host, run_id=run_id, command=command)
        locks.append(stack.enter_context(lock))
    return locks


def _side(
    stack: ExitStack,
    want: Deployment,
    options: MigrateOptions,
    bus: Bus,
    run_id: str,
    locks: list[LocalLock],
) -> Side:
    host = want.host_name
    state_file = StateFile(options.deploy_dir / "state", host)

    def note(level: str, text: str) -> None:
        bus.emit(Note(host, "", "lock", level, text))

    session = HostSession(host, want.host, options.base, lambda text: note("info", text))
    stack.callback(session.close, lambda text: note("warning", text))

    def on_step(step: str) -> None:
        for lock in locks:
            lock.enter(step)
        session.entered(step)

    # A destination that failed is tried again for as long as somebody runs this.
    return Side(
        want,
        session,
        state_file,
        state_file.load(),
        bus,
        run_id,
        options.environ,
        on_step,
        all_steps(retry=True),
    )


class _Run:
    """One run of the command."""

    def __init__(
        self,
        source: Side,
        destination: Side,
        options: MigrateOptions,
        bus: Bus,
        run_id: str,
        result: MigrateResult,
    ) -> None:
        self.source, self.destination = source, destination
        self.options, self.bus, self.run_id, self.result = options, bus, run_id, result
        self.record = Migration(
            id=run_id,
            source=source.want.id,
            destination=destination.want.id,
            phase=PHASES[0],
            retire=options.retire,
            keep_source=options.keep_source,
        )
        self.controller = owner_here()

    # ---- the story
    def run(self) -> None:
        """Looks, decides, and goes where the journal says."""
        looks, problems = self.look_at_both()
        decision = self.decide(looks)
        match decision:
            case Nothing():
                self.record_everywhere(decision.record, looks)
                self.result.record, self.result.done = decision.record, decision.why
                return
            case TakeBack():
                self.record = decision.record
                self.take_back(looks)
                return
            case Resume():
                self.record = decision.record.model_copy(
                    update={
                        "retire": decision.record.retire or self.options.retire,
                        "keep_source": self.options.keep_source or decision.record.keep_source,
                    }
                )
        resumed = isinstance(decision, Resume)
        self.result.record = self.record
        facts = self.preflight(looks, problems, resumed=resumed)
        if self.options.dry_run or not self.agreed():
            return
        self.lock()
        self.begin(facts, resumed=resumed)
        self.forward()

    def forward(self) -> None:
        """The phases, from the journal's on; the ones before the cut-over look again anyway."""
        actions: dict[str, Callable[[], object]] = {
            "prepare": lambda: self.bring("prepare"),
            "weights": self.weights,
            "launch": self.launch,
            "cutover": self.cut_over,
            "settle": self.settle,
            "stop": self.stop_source,
            "retire": self.retire,
        }
        phase = self.record.phase
        if PHASES.index(phase) <= PHASES.index("cutover"):
            # Something may have happened to the destination since: nothing is taken on trust.
            phase = PHASES[0] if not self.record.cut else "launch"
        while phase:
            if PHASES.index(phase) > PHASES.index(self.record.phase):
                self.enter(phase)
            with self.told(phase):
                actions[phase]()
            phase = after(phase)
        self.finish("done")
        where = address(self.destination.want)
        kept = "still runs" if self.record.keep_source else "is stopped"
        self.result.done = (
            f"{self.destination.want.id} serves {self.destination.want.playbook.model.served_name} "
            f"at {where}; {self.source.want.id} {kept}"
        )

    # ---- looking and deciding
    def look_at_both(self) -> tuple[dict[str, Facts], list[Obstacle]]:
        """What each side shows; one that does not answer is an obstacle, not the end."""
        looks: dict[str, Facts] = {}
        problems = []
        for side in (self.source, self.destination):
            try:
                looks[side.want.id] = side.gather()
            except Unreachable as error:
                where = error.where or side.want.host_name
                problems.append(Obstacle(where, error.what, error.fix, error.exit_code))
        return looks, problems

    def decide(self, looks: Mapping[str, Facts]) -> Any:
        """By all copies of the journal."""
        records = [side.own.migration for side in (self.source, self.destination)]
        for side in (self.source, self.destination):
            marked = looks[side.want.id].get(Marked) if side.want.id in looks else None
            if marked is not None and marked.problem:
                raise StepBlocked(
                    f"the record of a migration cannot be read: {marked.problem}",
                    where=side.want.host_name,
                    fix="was it written by a newer deploy? use that one",
                )
            if marked is not None:
                records.append(marked.record)
        facts = looks.get(self.source.want.id)
        decision = decide(
            records,
            self.source.want.id,
            self.destination.want.id,
            abort=self.options.abort,
            retire=self.options.retire,
            source_serves=None if facts is None else not trouble(self.source.want, facts),
        )
        seen = newest(records)
        if isinstance(decision, Resume | TakeBack) and seen is not None:
            by = f", begun by {seen.controller}" if seen.controller != self.controller else ""
            self.destination.note("journal", f"migration {seen.id}, in phase {seen.phase}{by}")
        return decision

    def preflight(
        self, looks: Mapping[str, Facts], problems: list[Obstacle], *, resumed: bool
    ) -> Mapping[str, Facts]:
        """Raises StepBlocked with every obstacle; shows the plan in a dry run."""
        source, destination = self.source, self.destination
        found = [*pair_obstacles(source.want, destination.want), *problems]
        self.take_pin()
        me = this_controller()
        old, new = looks.get(source.want.id), looks.get(destination.want.id)
        if old is not None:
            found += lock_obstacle(source.want.host_name, old, me)
            if not self.record.cut:
                found += source_obstacles(source.want, old, retire=self.record.retire)
        if new is not None:
            found += lock_obstacle(destination.want.host_name, new, me)
            plans = self.plans(new)
            record = self.record if resumed else None
            found += destination_obstacles(destination.want, new, destination.own, plans, record)
        if old is not None and new is not None:
            for line in differences(source.want, old, destination.want, new):
                destination.note("preflight", line)
        found += self.way_obstacles(old, new)
        self.result.obstacles = found
        for one in found:
            where = one.where.partition(" ")[0]
            self.bus.emit(Note(where.partition("/")[0], where, "preflight", "warning", one.line()))
        if found:
            raise refused(found, source.want.id, destination.want.id)
        self.result.lines = self.lines()
        return looks

    def way_obstacles(self, old: Facts | None, new: Facts | None) -> list[Obstacle]:
        """Of the cut-over."""
        if self.record.phase in ("stop", "retire"):
            return []
        try:
            rows = self.way().obstacles(old, new)
        except DeployError as error:
            return [Obstacle(error.where, error.what, error.fix, error.exit_code)]
        return [Obstacle(f"{self.destination.want.id} cutover", what, fix) for what, fix in rows]

    def plans(self, facts: Facts) -> Mapping[str, Plan]:
        """Of all steps on the destination; shown as `deploy plan` does."""
        engine = self.destination.engine(self.destination.steps)
        if self.options.dry_run:
            return engine.plan(facts)[0].plans
        return {
            step.name: step.plan(self.destination.want, facts, self.destination.own)
            for step in engine.steps
        }

    def take_pin(self) -> None:
        """The destination gets the source's list of files: a branch may have moved meanwhile."""
        pin = pinned(self.source.want, self.source.own)
        if pin is not None and self.destination.own.manifest != pin:
            model = self.destination.want.playbook.model
            if (pin.repo, pin.asked) == (model.repo, model.revision):
                self.destination.own.manifest = pin

    def lines(self) -> list[str]:
        """What follows the destination's steps, for a dry run and the question."""
        way, old = self.way(), self.source.want.id
        drain = f"drains {old} (at most {way.rules.drain_s:g} s) and stops it"
        lines = [
            f"weights: from {old} by ssh or from the Hub, whichever a short probe shows faster",
            f"cut over: {way.words()}",
            f"settle: {self.destination.want.id} serves {way.rules.settle_s:g} s before {old} ends",
        ]
        lines.append(f"stop: {old} is kept (--keep-source)" if self.record.keep_source else drain)
        if self.record.retire:
            lines += [f"retire: {text}" for text in migrate_retire.words(self.source)]
        return lines

    def agreed(self) -> bool:
        """Asks, where somebody can be asked."""
        if self.options.confirm is None or self.options.confirm(self.result.lines):
            return True
        self.result.declined = True
        self.result.done = "declined; nothing was changed"
        return False

    # ---- the journal
    def lock(self) -> None:
        """Both host locks; what is acted upon is seen under them."""
        for side in (self.source, self.destination):
            side.session.want_lock(self.run_id)
            side.gather()

    def begin(self, looks: Mapping[str, Facts], *, resumed: bool) -> None:
        """Writes the first record, unless one goes on."""
        if resumed:
            self.enter(self.record.phase)
            return
        now = time.time()
        launch = next(
            (one for one in reversed(self.source.own.launches) if one.verdict == "good"), None
        )
        self.record.started = now
        self.record.source_variant = launch.variant if launch is not None else ""
        self.record.served_before = not trouble(
            self.destination.want, looks[self.destination.want.id]
        )
        self.enter(PHASES[0])

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self.record = entered(self.record, phase, self.controller, time.time())
        self.save()
        for side in (self.source, self.destination):
            side.on_step(f"migrate {phase}")

    def save(self) -> None:
        """All copies, the controller's first: none on a host is newer. Raises Unreachable."""
        self.record.seq += 1
        self.result.record = self.record
        for side in (self.destination, self.source):
            side.own.migration = self.record.model_copy()
            side.save()
        for side in (self.destination, self.source):
            side.write_mark(self.record)

    def record_everywhere(self, record: Migration, looks: Mapping[str, Facts]) -> None:
        """A run that was killed at its very end may have left an older copy on a host."""
        for side in (self.destination, self.source):
            marked = looks[side.want.id].get(Marked) if side.want.id in looks else None
            if marked is not None and marked.record != record and not self.options.dry_run:
                side.write_mark(record)

    def finish(self, outcome: str) -> None:
        """The end, one way or the other. An aborted one leaves no record on the hosts."""
        self.record.outcome, self.record.entered = outcome, time.time()
        if outcome == "aborted":
            for side in (self.destination, self.source):
                side.remove_mark()
            self.record.seq += 1
            for side in (self.destination, self.source):
                side.own.migration = self.record.model_copy()
                side.save()
            self.result.record = self.record
        else:
            self.save()

    def way(self) -> Way:
        """The cut-over that the inventory names, with the journal as it is now."""
        return way_of(self.source, self.destination, self.record, self.save)

    @contextmanager
    def told(self, phase: str) -> Iterator[None]:
        """The phase as a step of the destination's run, and how long it took."""
        want, began = self.destination.want, time.monotonic()
        self.bus.emit(StepStarted(want.host_name, want.id, f"migrate:{phase}"))
        try:
            yield
        except DeployError as error:
            spent = round(time.monotonic() - began, 3)
            step = f"migrate:{phase}"
            self.bus.emit(StepDone(want.host_name, want.id, step, "failed", str(error), spent))
            raise
        spent = round(time.monotonic() - began, 3)
        self.record.figures[f"{phase}_s"] = spent
        self.bus.emit(StepDone(want.host_name, want.id, f"migrate:{phase}", "done", phase, spent))

    # ---- the phases
    def bring(self, phase: str, want: Deployment | None = None) -> Facts:
        """The steps of `up` that belong to the phase."""
        side = self.destination
        try:
            return side.bring(side.only(*STEPS[phase]), want=want)
        except DeployError as error:
            if not self.record.cut:
                self.source.note(phase, f"{self.source.want.id} was not touched and serves")
            if not error.fix:
                error.fix = "run the same command again, or --abort"
            raise

    def weights(self) -> None:
        """From the faster source; the key for the copy is gone when it is over, well or not."""
        side = self.destination
        facts = side.gather()
        [shards] = side.only("shards")
        manifest = side.own.manifest
        lending = Lending(self.source, side, self.record.id)
        plan = shards.plan(side.want, facts, side.own)
        if plan.state is PlanState.NOTHING or manifest is None:
            self.end_lending(lending)
            self.bring("weights")
            return
        want = side.want
        if self.record.weights_from not in ("hub", "relay"):
            self.record.lending = True
            self.save()
            try:
                peer = lending.open(manifest)
                want = with_source(side.want, peer, "peer")
            except Unreachable:
                raise
            except DeployError as error:
                side.note("weights", f"no copy from {self.source.want.id}: {error.what}", "warning")
                rate = measure(side, side.want, manifest, "hub")
                self.record.weights_from = "hub" if rate.bytes_per_s > 0 else "relay"
            else:
                if not self.record.weights_from:
                    self.record.weights_from = self.faster(want)
                want = with_source(side.want, peer, self.record.weights_from)
            self.save()
        if self.record.weights_from == "relay":
            self.relay(manifest)
        self.bring("weights", want)
        self.end_lending(lending)

    def faster(self, want: Deployment) -> str:
        """Measures both sources."""
        side, manifest = self.destination, self.destination.own.manifest
        if manifest is None:
            return "hub"
        rates: dict[str, Rate] = {}
        for source in ("peer", "hub"):
            rates[source] = measure(side, want, manifest, source)
            self.record.figures[f"{source}_bytes_per_s"] = rates[source].bytes_per_s
        chosen = choose(rates["peer"], rates["hub"])
        first = {
            "peer": "the copy comes first",
            "hub": "the Hub comes first",
            "relay": "so it goes through this machine",
        }[chosen]
        told = f"from {self.source.want.id}: {rates['peer']}; from the Hub: {rates['hub']}; {first}"
        side.note("weights", told)
        return chosen

    def relay(self, manifest: Manifest) -> None:
        """Through this machine, where nothing else goes; the shards step then judges it."""
        side, source = self.destination, self.source
        began = time.monotonic()

        def progress(done: int, total: int) -> None:
            where = (side.want.host_name, side.want.id, "weights")
            self.bus.emit(Progress(*where, "relay", float(done), float(total), "B"))

        sent = relay(
            (source.guest, source.want.playbook.model.path),
            (side.guest, side.want.playbook.model.path),
            list(manifest.files),
            progress,
        )
        self.record.figures["relay_bytes_per_s"] = sent / max(time.monotonic() - began, 1e-3)

    def end_lending(self, lending: Lending) -> None:
        """No key, no agent and no authorization are left."""
        if self.record.lending:
            lending.close()
            self.record.lending = False
            self.save()

    def launch(self) -> None:
        """Started and proven while the source serves. Raises GateFailed (exit code 5)."""
        facts = self.bring("launch")
        if why := trouble(self.destination.want, facts):
            raise GateFailed(
                f"it does not serve as proven: {why}",
                where=self.destination.want.id,
                fix="`deploy logs`; then run the same command again, or --abort",
            )

    def cut_over(self) -> None:
        """The traffic moves; from the first act on, `--abort` moves it back."""
        if not self.record.cut:
            self.record.cut = True
            self.save()
        self.moved("forward")

    def moved(self, direction: Direction) -> None:
        """Moves the traffic and tells the gap."""
        way = self.way()
        gap = way.move(direction)
        if gap is not None:
            level = "warning" if gap.open else "info"
            self.destination.note("cutover", str(gap), level)
            self.record.figures["gap_s"] = round(gap.longest_s, 3)
            if gap.open:
                raise StepFailed(
                    "clients still get no answer",
                    where=self.record.destination,
                    fix="correct the cut-over, then run the same command again; or --abort",
                    evidence=(str(gap),),
                )

    def settle(self) -> None:
        """The destination serves through the cut-over for the settle time, else it goes back."""
        way, side = self.way(), self.destination
        began = self.options.now()
        while True:
            why = trouble(side.want, side.gather()) or way.problem("forward")
            if why:
                self.fall_back(why)
            spent = self.options.now() - began
            if spent >= way.rules.settle_s:
                return
            side.progress("settle", "serves through the cut-over", spent, way.rules.settle_s)
            self.options.sleep(min(LOOK_EVERY_S, way.rules.settle_s - spent))

    def fall_back(self, why: str) -> None:
        """The traffic goes back to the source, which still runs. Always raises GateFailed."""
        if because := trouble(self.source.want, self.source.gather()):
            raise GateFailed(
                f"it failed while it settled ({why}), and the source cannot take over: {because}",
                where=self.destination.want.id,
                fix="`deploy logs` on both; --abort starts the source again",
            )
        self.moved("back")
        self.record.cut = False
        self.record.phase = "launch"
        self.save()
        raise GateFailed(
            f"it failed while it settled: {why}; the traffic is back at {self.source.want.id}",
            where=self.destination.want.id,
            fix="correct it, then run the same command again; or --abort",
        )

    def stop_source(self) -> None:
        """Drained and stopped, after a last look at the destination."""
        if self.record.keep_source:
            self.source.note("stop", f"{self.source.want.id} is kept (--keep-source)")
            return
        if why := trouble(self.destination.want, self.destination.gather()):
            raise GateFailed(
                f"it does not serve as proven: {why}; {self.source.want.id} was not stopped",
                where=self.destination.want.id,
                fix="run the same command again, or --abort",
            )
        self.drain_and_stop(self.source, "forward")

    def drain_and_stop(self, side: Side, direction: Direction) -> None:
        """Ends a server that gets no traffic any more."""
        way = self.way()
        if told := way.drained(direction, way.rules.drain_s):
            side.note("stop", told)
        want = with_drain(side.want, way.rules.drain_s)
        side.bring(down_steps(), want=want)

    def retire(self) -> None:
        """Only with --retire, and never of a source that is kept."""
        if self.record.retire and not self.record.keep_source:
            migrate_retire.retire(self.source)

    # ---- the way back
    def take_back(self, looks: Mapping[str, Facts]) -> None:
        """The source serves as before, the destination is stopped, nothing half-done is left."""
        source, destination = self.source, self.destination
        self.result.record = self.record
        self.result.lines = self.back_lines()
        if self.options.dry_run or not self.agreed():
            return
        for side in (source, destination):
            side.session.want_lock(self.run_id)
        facts = source.gather()
        self.record.back, self.record.outcome = True, ""
        self.record.seq += 1
        for side in (destination, source):
            side.own.migration = self.record.model_copy()
            side.save()
        source.write_mark(self.record)
        if self.record.cut:
            with self.told("back"):
                self.source_serves(facts)
                # Traffic first: what the destination has to say can wait.
                self.moved("back")
        destination.gather()
        with self.told("undo"):
            self.undo()
        self.finish("aborted")
        why = trouble(source.want, source.gather())
        self.result.done = f"taken back; {source.want.id} serves" + (
            f" not as proven, though: {why}" if why else " as before"
        )

    def back_lines(self) -> list[str]:
        """What `--abort` does, in words."""
        lines = []
        if self.record.cut:
            lines.append(f"start {self.source.want.id} if it is stopped, and prove it")
            lines.append("move the traffic back to it")
        if self.record.served_before:
            lines.append(f"leave {self.destination.want.id}: it served before the migration")
        else:
            lines.append(f"stop {self.destination.want.id} and its unfinished jobs")
        return lines

    def source_serves(self, facts: Facts) -> None:
        """Brings it up again if it does not."""
        side = self.source
        if not trouble(side.want, facts):
            return
        side.note("back", f"{side.want.id} is started again")
        side.bring(side.steps, facts)
        if why := trouble(side.want, side.gather()):
            raise GateFailed(
                f"it does not serve as proven: {why}; the traffic stays where it is",
                where=side.want.id,
                fix="`deploy up` it, then --abort again",
            )

    def undo(self) -> None:
        """The destination's server, jobs and the key for the copy."""
        side = self.destination
        jobs = side.context("undo").jobs(side.want.guest)
        for name in JOBS:
            job = f"{name}-{side.want.name}"
            status = jobs.find(job)
            if status is not None and status.alive:
                proof = jobs.stop(status.identity, grace_s=20.0)
                if not proof.stopped:
                    raise StepFailed(
                        f"job {job} cannot be stopped: {', '.join(proof.survivors)}",
                        where=side.want.id,
                        fix="a process in D state needs a reboot of the host",
                    )
                side.note("undo", f"job {job} is stopped; what it has brought is kept")
        if not self.record.served_before:
            if self.record.cut:
                self.drain_and_stop(side, "back")
            else:
                side.bring(down_steps())
        if self.record.lending:
            Lending(self.source, side, self.record.id).close()
            self.record.lending = False


__all__ = ["MigrateOptions", "MigrateResult", "migrate"]
