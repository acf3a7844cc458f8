"""`deploy migrate SRC DST`: the model comes up on DST while SRC serves, then the traffic moves.

preflight (touches nothing) -> prepare DST -> weights -> launch and prove -> cut over -> settle ->
drain and stop SRC -> retire. Each phase looks, decides, acts and looks again, so that the same
command goes on after any end; `--abort` takes everything back. Until the cut-over SRC is untouched;
after it SRC still runs until DST has served for the settle time.
"""

from __future__ import annotations

from contextlib import ExitStack

from deployer.as_running import as_running
from deployer.deployment import Deployment
from deployer.errors import Defect, DeployError, StateUnreadable, UsageError
from deployer.events import Bus, Note, RunFinished, RunStarted
from deployer.kept import Kept
from deployer.locallock import LocalLock
from deployer.migrate_back import Back
from deployer.migrate_forward import Forward
from deployer.migrate_journal import Nothing, Resume, TakeBack
from deployer.migrate_outset import Outset
from deployer.migrate_pair import Pair
from deployer.migrate_result import MigrateOptions, MigrateResult
from deployer.migrate_side import Side
from deployer.run_record import RunRecord, new_run_id
from deployer.session import HostSession
from deployer.state import DeploymentState
from deployer.state_file import StateFile
from deployer.steps.order import all_steps


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
            _readable(options, source, destination)
            sides = [
                _side(stack, want, options, bus, run_id, locks, serves=want is source)
                for want in (source, destination)
            ]
            _run(Pair(sides[0], sides[1], options, bus, run_id, result))
            code, text, fix = 0, result.done, ""
        except KeyboardInterrupt:
            bus.emit(RunFinished(destination.host_name, destination.id, 130, "interrupted"))
            raise
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - told with its migration
            told = error if isinstance(error, DeployError) else Defect.of(error, name)
            result.error, code, fix = told, told.exit_code, told.fix
            text = "; ".join([str(told), *(one.line() for one in result.obstacles)])
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


def _readable(options: MigrateOptions, *wants: Deployment) -> None:
    """Raises StateUnreadable; of two that are, the other one is its evidence."""
    errors: list[StateUnreadable] = []
    for want in wants:
        try:
            StateFile(options.deploy_dir / "state", want.host_name).load()
        except StateUnreadable as error:
            errors.append(error)
    if errors:
        errors[0].evidence += tuple(f"{other} -> {other.fix}" for other in errors[1:])
        raise errors[0]


def _side(
    stack: ExitStack,
    want: Deployment,
    options: MigrateOptions,
    bus: Bus,
    run_id: str,
    locks: list[LocalLock],
    *,
    serves: bool,
) -> Side:
    host = want.host_name
    state_file = StateFile(options.deploy_dir / "state", host)
    state = state_file.load()
    own = state.deployments.setdefault(want.name, DeploymentState())
    if serves or (own.migration is not None and own.migration.cut and not own.migration.outcome):
        # What has the traffic is looked at as it was made; an edited playbook is for `up`.
        want = as_running(want, own, Kept(options.deploy_dir / "kept"))

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
        state,
        bus,
        run_id,
        options.environ,
        on_step,
        all_steps(retry=True),
    )


def _run(pair: Pair) -> None:
    """Looks, decides, and goes where the journal says."""
    outset, options = Outset(pair), pair.options
    outset.look()
    decision = outset.decide()
    match decision:
        case Nothing():
            outset.still_true(decision)
            pair.record_everywhere(decision.record)
            pair.result.record, pair.result.done = decision.record, decision.why
            return
        case TakeBack():
            pair.record = decision.record.model_copy(deep=True)
            Back(pair, outset.dark).take()
            return
        case Resume():
            pair.goes_on(decision.record)
    resumed = isinstance(decision, Resume)
    pair.result.record = pair.record
    outset.preflight(resumed=resumed)
    if options.dry_run or not pair.agreed():
        return
    forward = Forward(pair)
    forward.begin(resumed=resumed)
    forward.go()


__all__ = ["MigrateOptions", "MigrateResult", "migrate"]
