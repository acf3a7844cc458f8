"""`deploy up`: the story of one host, from a look to a proven endpoint.

Take the local lock, read the state, look at host and guest, decide. With nothing to do, that was
all: no lock was taken and nothing written there. Else ask, take the host lock and look again in one
exec, then act step by step. Whatever happens, the locks are released and the event stream of the
run stays in .deploy/runs/.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deployer import hub
from deployer.cancel import Cancel
from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.errors import CommandOverdue, Defect, DeployError, Interrupted, Unreachable
from deployer.events import Bus, Event, Note, Progress, RunFinished, RunStarted
from deployer.inventory import Host
from deployer.kept import Kept
from deployer.locallock import LocalLock
from deployer.model import Facts, PlanState, Where
from deployer.names import shown
from deployer.recipe import recipe_of
from deployer.remote.transport import Transport
from deployer.rollout import Rollout
from deployer.session import HostSession
from deployer.state import DeploymentState, HostState, Manifest
from deployer.state_file import StateFile, make_folder
from deployer.steps.base import Step
from deployer.steps.order import all_steps
from deployer.steps.server_facts import ServerFact
from deployer.steps.server_wanted import is_wanted
from deployer.steps.serving_fact import ServingFact
from deployer.steps.verify import VerifyStep

if TYPE_CHECKING:
    from deployer.replicas import Membership

MakeEngine = Callable[[Deployment, Sequence[Step]], Engine]

Confirm = Callable[[Deployment, Outcome], bool]
"""Shown the plans of the steps that may act; False changes nothing."""


class Aim(Protocol):
    """A run that goes somewhere else than the playbook says (`rollback`)."""

    def begin(self, want: Deployment, own: DeploymentState) -> None:
        """Before the first look: the state as this run needs it. In memory only."""

    def seen(self, want: Deployment, own: DeploymentState, facts: Facts) -> None:
        """It will act; `facts` are of under the lock. The state is saved afterwards."""

    def failed(
        self, want: Deployment, own: DeploymentState, error: DeployError, engine: MakeEngine
    ) -> DeployError:
        """Something was acted upon and failed: goes back, and returns the error to tell."""

    def done(self, want: Deployment, own: DeploymentState) -> None:
        """It has passed. The state is saved afterwards."""


REST_S = 30.0
"""A canary can take hours: who waits for it longer than this ends its connections meanwhile."""


@dataclass(frozen=True)
class UpOptions:
    """What the user asked for."""

    base: Path
    """The inventory folder; `.deploy/` lies beside it."""
    command: str = "up"
    dry_run: bool = False
    selection: Selection = field(default_factory=Selection)
    confirm: Confirm | None = None
    steps: Callable[[], list[Step]] = all_steps
    serves: bool = True
    """Whether the run ends with a server: `down` does not."""
    repin: bool = False
    """Ask the Hub what the model's revision is now; else a branch stays at its pinned commit."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    aim: Aim | None = None
    rollout: Rollout | None = None
    """Asked before anything is changed, when other hosts are in the same run."""
    cancel: Cancel = field(default_factory=Cancel)

    @property
    def deploy_dir(self) -> Path:
        """State, locks and run records."""
        return self.base.resolve().parent / ".deploy"


@dataclass
class DeploymentResult:
    """How one deployment ended."""

    id: str
    outcome: Outcome | None = None
    error: DeployError | None = None
    declined: bool = False
    acted: bool = False
    """One of its steps has begun to change something."""
    left: list[str] = field(default_factory=list)
    """Steps outside of `--from`/`--only` that still have something to do."""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, or the error's code."""
        return self.error.exit_code if self.error is not None else 0


def new_run_id() -> str:
    """Sortable and unique: 20261130-065012-ab12."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


class RunRecord:
    """The event stream of a run as a file: .deploy/runs/<time>-<host>.jsonl."""

    def __init__(self, folder: Path, run_id: str, host: str) -> None:
        """Makes the file. Raises DeployError when it cannot be written."""
        self.path = folder / f"{run_id}-{host}.jsonl"
        self._lost = False
        try:
            make_folder(folder)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error

    def __call__(self, event: Event) -> None:
        """Appends one event. Raises DeployError, once: the events of that error come here too."""
        if self._lost:
            return
        line = json.dumps(event.to_dict(), ensure_ascii=False, default=str) + "\n"
        try:
            self._file.write(line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._lost = True
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _unwritable(self, error: OSError) -> DeployError:
        return DeployError(
            f"the record of the run cannot be written: {error.strerror or error}",
            where=shown(self.path),
            fix="free space or correct the permissions, then run the same command again",
        )


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
                    RunFinished(host_name, want.id, 0, _summary(want, result), "", result.result)
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
            member.before(step)

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
    if options.repin:
        repin(want, own, options, bus)
    outcome, facts = engine.plan()
    result.outcome = outcome
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
        if options.rollout is not None:
            server = facts.get(ServerFact)
            idle = server is None or not server.serving
            # A killed run may have left it proven and without requests: it goes first.
            idle = idle or (member is not None and not member.serves())
            _wait_for_turn(want, session, options.rollout, bus, idle=idle)
        session.want_lock(run_id)
        facts = engine.look("under the host lock")
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
        if member is not None and not options.cancel.asked:
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
    if options.serves and not options.aim and _keep_seen(want, own, facts, engine.keep):
        state_file.save(state)
    if options.serves:
        result.result = proven(want, steps, facts, own)
        if member is not None and result.result:
            member.join()


def _keep_seen(
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
    want: Deployment, session: HostSession, rollout: Rollout, bus: Bus, *, idle: bool
) -> None:
    """Returns when this deployment may act; its facts are old then. Raises NotStarted."""

    began = time.monotonic()

    def waits(text: str) -> None:
        if time.monotonic() - began > REST_S:
            session.rest()
        bus.emit(Progress(want.host_name, want.id, "canary", text))

    rollout.admit(want, waits, idle=idle)


def repin(want: Deployment, own: DeploymentState, options: UpOptions, bus: Bus) -> None:
    """The newest file list of the revision in place of the pinned one; not saved here.

    Raises HubError, and then the pin is as it was.
    """
    token = options.environ.get(want.playbook.download.token_env) or None
    before, after = own.manifest, hub.fetch_manifest(want.playbook, token)
    what = f"{after.repo} {after.asked}"
    if before is None or (before.repo, before.asked) != (after.repo, after.asked):
        text = f"{what} is {after.commit[:12]}"
    elif before.commit == after.commit:
        text = f"{what} is {after.commit[:12]}, as pinned"
    else:
        known = {file.path: file for file in before.files}
        new = sum(known.get(file.path) != file for file in after.files)
        text = f"{what} moved from {before.commit[:12]} to {after.commit[:12]}: {new} files differ"
    own.manifest = after
    bus.emit(Note(want.host_name, want.id, "shards", "info", text))


def address(want: Deployment) -> str:
    """The URL at which the model answers when it is served."""
    ssh = want.host.ssh
    if want.container is not None and want.container.ssh is not None:
        ssh = want.container.ssh
    return f"{(want.entry.url or f'http://{ssh.address}:{want.port}').rstrip('/')}/v1"


def proven(
    want: Deployment, steps: Sequence[Step], facts: Facts, own: DeploymentState
) -> dict[str, Any]:
    """Where the model answers, and what was proven of the launch that is alive now.

    Empty unless the verify step, asked with these facts, has nothing left to do.
    """
    verify = next((step for step in steps if isinstance(step, VerifyStep)), None)
    server, serving = facts.get(ServerFact), facts.get(ServingFact)
    if verify is None or server is None or server.job is None or serving is None:
        return {}
    if verify.plan(want, facts, own).state is not PlanState.NOTHING:
        return {}
    return {
        "endpoint": address(want),
        "model": want.playbook.model.served_name,
        "launch": serving.launch,
        "variant": server.job.launch.variant,
        "degraded": server.job.launch.degraded,
        "verdict": serving.verdict,
        "figures": dict(serving.figures),
    }


def _summary(want: Deployment, result: DeploymentResult) -> str:
    if result.declined:
        return "declined; nothing was changed"
    if result.result:
        changed = result.outcome.changed if result.outcome else []
        did = f"changed: {', '.join(changed)}" if changed else "nothing to do"
        less = result.result.get("degraded")
        return (
            f"{want.id} serves {result.result['model']} at {result.result['endpoint']} "
            f"({f'{less}; {did}' if less else did})"
        )
    done = "nothing was changed"
    if result.outcome is not None and result.outcome.changed:
        done = f"changed: {', '.join(result.outcome.changed)}"
    return f"{done}; left to do: {', '.join(result.left)}" if result.left else done
