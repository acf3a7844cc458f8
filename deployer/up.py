"""`deploy up`: the story of one host, from a look to a proven endpoint.

Take the local lock, read the state, look at host and guest, decide. With nothing to do, that was
all: no lock was taken and nothing written there. Else ask, take the host lock and look again in one
exec, then act step by step. Whatever happens, the locks are released and the event stream of the
run stays in .deploy/runs/.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome
from deployer.errors import CommandOverdue, Defect, DeployError, Interrupted, Unreachable
from deployer.events import Bus, Note, Progress, RunFinished, RunStarted
from deployer.inventory import Host
from deployer.kept import Kept
from deployer.locallock import LocalLock
from deployer.model import Facts, PlanState, Where
from deployer.recipe import recipe_of
from deployer.remote.machine import Machine
from deployer.remote.transport import Transport
from deployer.repin import repin
from deployer.rollout import Rollout
from deployer.run_record import RunRecord, new_run_id
from deployer.session import HostSession
from deployer.state import DeploymentState, HostState, Manifest
from deployer.state_file import StateFile
from deployer.steps.base import Step
from deployer.steps.rolled_back import unfinished_pin
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import is_wanted
from deployer.steps.stop_drain import empty
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult, proven, summary

if TYPE_CHECKING:
    from deployer.replicas import Membership

REST_S = 30.0
"""A canary can take hours: who waits for it longer than this ends its connections meanwhile."""


def up_host(
    host_name: str, deployments: Sequence[Deployment], options: UpOptions, bus: Bus
) -> list[DeploymentResult]:
    """Brings the deployments of one host up, one after the other.

    Every error is in the results, so that one host never hides another's. One deployment's error
    does not keep the next one waiting, but an interrupt or the command's deadline ends them all.
    """
    run_id = new_run_id()
    record: RunRecord | None = None
    try:
        if options.dry_run:
            return _in_session(host_name, deployments, options, bus, run_id, None)
        record = RunRecord(options.deploy_dir / "runs", run_id, host_name)
        # The record comes first: it has the event also when a renderer fails on it.
        bus = Bus(record, bus.emit)
        lock = LocalLock(options.deploy_dir, host_name, run_id=run_id, command=options.command)
        with lock:
            return _in_session(host_name, deployments, options, bus, run_id, lock)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - told with its host; other hosts go on
        told = error if isinstance(error, DeployError) else Defect.of(error, host_name)
        bus.emit(RunFinished(host_name, "", told.exit_code, str(told), told.fix))
        results = [DeploymentResult(want.id, error=told) for want in deployments]
        for result in results:
            _over(result, options)
        return results
    finally:
        if record is not None:
            record.close()


def _in_session(
    host_name: str,
    deployments: Sequence[Deployment],
    options: UpOptions,
    bus: Bus,
    run_id: str,
    local: LocalLock | None,
) -> list[DeploymentResult]:
    state_file = StateFile(options.deploy_dir / "state", host_name)
    state = state_file.load()
    results: list[DeploymentResult] = []

    def on_step(step: str) -> None:
        results[-1].acted = True
        if local is not None:
            local.enter(step)
            session.entered(step)

    with _session(host_name, deployments[0].host, options, bus) as session:
        for want in deployments:
            bus.emit(RunStarted(host_name, want.id, run_id, options.command))
            result = DeploymentResult(want.id)
            results.append(result)
            try:
                _one(want, session, state_file, state, options, bus, run_id, on_step, result)
                bus.emit(
                    RunFinished(host_name, want.id, 0, summary(want, result), "", result.result)
                )
            except KeyboardInterrupt:
                bus.emit(RunFinished(host_name, want.id, Interrupted.exit_code, "interrupted"))
                raise
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 - told with its deployment
                told = error if isinstance(error, DeployError) else Defect.of(error, want.id)
                if isinstance(told, Unreachable) and options.cancel.asked:
                    # The interrupt closed the connection that this one waited on.
                    told = options.cancel.error(want.id)
                result.error = told
                bus.emit(RunFinished(host_name, want.id, told.exit_code, str(told), told.fix))
                if isinstance(told, Interrupted | CommandOverdue):
                    rest = deployments[len(results) :]
                    results += [DeploymentResult(later.id, error=told) for later in rest]
                    break
            finally:
                _over(result, options)
    return results


@contextmanager
def _session(host_name: str, host: Host, options: UpOptions, bus: Bus) -> Iterator[HostSession]:
    """The host's connections; an interrupt wakes what waits on them."""
    session = HostSession(
        host_name,
        host,
        options.base,
        lambda text: bus.emit(Note(host_name, "", "lock", "info", text)),
    )
    session.recognise = options.twins is not None
    try:
        with options.cancel.waking(session.wake):
            yield session
    finally:
        session.close(lambda text: bus.emit(Note(host_name, "", "", "warning", text)))


def _over(result: DeploymentResult, options: UpOptions) -> None:
    """Tells the other hosts how a deployment ended."""
    if options.rollout is not None:
        passed = result.error is None and not result.declined
        options.rollout.ended(result.id, result.error, acted=result.acted, passed=passed)


def _one(
    want: Deployment,
    session: HostSession,
    state_file: StateFile,
    state: HostState,
    options: UpOptions,
    bus: Bus,
    run_id: str,
    on_step: Callable[[str], None],
    result: DeploymentResult,
) -> None:
    steps = options.steps()
    own = state.deployments.setdefault(want.name, DeploymentState())
    transports = session.transports(want)
    member = _membership(want, transports, options, bus)

    def entering(step: str) -> None:
        on_step(step)
        if member is not None:
            member.before(step, lambda: empty(engine.context(step), engine.gather()))

    kept, aim = Kept(options.deploy_dir / "kept"), options.aim

    def engine_of(want: Deployment, steps: Sequence[Step]) -> Engine:
        return Engine(
            want,
            steps,
            lambda: session.look(want, steps),
            transports,
            state=own,
            save=lambda: state_file.save(state),
            bus=bus,
            run_id=run_id,
            environ=options.environ,
            on_step=entering,
            keep=lambda want, manifest: kept.add(recipe_of(want, manifest), want.lock_text),
        )

    engine = engine_of(want, steps)
    pin = own.manifest
    if aim is not None:
        aim.begin(want, own)
    elif any(step.name == "launch" for step in steps):
        own.manifest = unfinished_pin(own)
    if options.repin:
        repin(want, own, options, bus)
    outcome, facts = engine.plan()
    result.outcome = outcome
    if options.twins is not None:
        options.twins.meet(
            want.host_name,
            want.host,
            facts.get(Machine),
            lambda text: bus.emit(Note(want.host_name, want.id, "look", "warning", text)),
        )
    if options.dry_run:
        return
    selection = options.selection
    plans = outcome.plans.items()
    acting = Outcome({name: plan for name, plan in plans if selection.acts(engine.names, name)})
    if acting.pending:
        if options.confirm is not None and not options.confirm(want, acting):
            result.declined = True
            own.manifest = pin
            return
        try:
            if options.rollout is not None:
                server = facts.get(ServerFact)
                idle = server is None or not server.serving
                # A killed run may have left it proven and without requests: it goes first.
                idle = idle or (member is not None and not member.serves())
                _wait_for_turn(want, session, options.rollout, bus, idle, member)
            session.want_lock(run_id)
            facts = engine.look("under the host lock")
        except BaseException:
            # The next deployment of the host saves the state of all.
            own.manifest = pin
            raise
    if aim is not None:
        aim.seen(want, own, facts)
    if aim is not None or own.manifest != pin:
        state_file.save(state)
    try:
        facts = engine.apply(outcome, facts, selection)
    except DeployError as error:
        told = error
        if aim is not None and not options.cancel.asked:
            told = aim.failed(want, own, error, engine_of)
            state_file.save(state)
        ended = options.cancel.asked or isinstance(error, CommandOverdue)
        if member is not None and not ended:
            member.settle(
                lambda: engine.look("what serves after the failure"), own.known_good or ""
            )
        if told is error:
            raise
        raise told from error
    if aim is not None:
        aim.done(want, own)
        state_file.save(state)
    elif own.rollback is not None and "launch" in outcome.changed:
        own.rollback = None
        state_file.save(state)
    result.left = [
        step.name
        for step in steps
        if not selection.acts(engine.names, step.name)
        and step.plan(want, facts, own).state is not PlanState.NOTHING
    ]
    if options.serves and not options.aim and keep_seen(want, own, facts, engine.keep):
        state_file.save(state)
    if options.serves:
        result.result = proven(want, steps, facts, own)
        if member is not None and result.result:
            member.join()


def keep_seen(
    want: Deployment,
    own: DeploymentState,
    facts: Facts,
    keep: Callable[[Deployment, Manifest], str] | None,
) -> bool:
    """What the wanted launch was made from is kept, also when an older version launched it."""
    server = facts.get(ServerFact)
    job, manifest = (server.job if server is not None else None), own.manifest
    if job is None or not job.alive or manifest is None or keep is None:
        return False
    launch = next((one for one in own.launches if one.id == job.identity.id), None)
    if launch is None or launch.recipe:
        return False
    if not is_wanted(want, manifest, job.fingerprint, job.launch):
        return False
    launch.recipe = keep(want, manifest)
    return True


def _membership(
    want: Deployment, transports: Mapping[Where, Transport], options: UpOptions, bus: Bus
) -> Membership | None:
    """Its place behind the router, when it is a replica and anything may be changed."""
    if want.entry.replica is None or options.dry_run:
        return None
    # Only now: its HTTP client would cost every start.
    from deployer.replicas import Membership

    return Membership(
        want,
        want.entry.replica,
        transports[Where.HOST],
        options.environ,
        bus,
        leaves_for_good=not options.serves,
    )


def _wait_for_turn(
    want: Deployment,
    session: HostSession,
    rollout: Rollout,
    bus: Bus,
    idle: bool,
    member: Membership | None,
) -> None:
    """Returns when this deployment may act; its facts are old then. Raises NotStarted."""

    began = time.monotonic()

    def waits(text: str) -> None:
        if time.monotonic() - began > REST_S:
            session.rest()
        bus.emit(Progress(want.host_name, want.id, "canary", text))

    lacking = member.lacking if member is not None else list[str]
    rollout.admit(want, waits, idle=idle, lacking=lacking)
