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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from deployer.deployment import Deployment
from deployer.engine import Engine, Outcome, Selection
from deployer.errors import DeployError, Interrupted
from deployer.events import Bus, Event, Note, RunFinished, RunStarted
from deployer.locallock import LocalLock
from deployer.session import HostSession
from deployer.state import DeploymentState, HostState
from deployer.state_file import StateFile
from deployer.steps.base import Step
from deployer.steps.order import all_steps

Confirm = Callable[[Deployment, Outcome], bool]


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
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

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
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{run_id}-{host}.jsonl"
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def __call__(self, event: Event) -> None:
        """Appends one event."""
        self._file.write(json.dumps(event.to_dict(), ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def up_host(
    host_name: str, deployments: Sequence[Deployment], options: UpOptions, bus: Bus
) -> list[DeploymentResult]:
    """Brings the deployments of one host up, one after the other; an error ends the host's run."""
    if options.dry_run:
        return _in_session(host_name, deployments, options, bus, new_run_id(), None)
    run_id = new_run_id()
    record = RunRecord(options.deploy_dir / "runs", run_id, host_name)
    bus = Bus(bus.emit, record)
    try:
        with LocalLock(
            options.deploy_dir, host_name, run_id=run_id, command=options.command
        ) as lock:
            return _in_session(host_name, deployments, options, bus, run_id, lock)
    except DeployError as error:
        bus.emit(RunFinished(host_name, "", error.exit_code, str(error), error.fix))
        return [DeploymentResult(want.id, error=error) for want in deployments]
    finally:
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
    session = HostSession(
        host_name,
        deployments[0].host,
        options.base,
        lambda text: bus.emit(Note(host_name, "", "lock", "info", text)),
    )
    results: list[DeploymentResult] = []

    def on_step(step: str) -> None:
        if local is not None:
            local.enter(step)
            session.entered(step)

    try:
        for want in deployments:
            bus.emit(RunStarted(host_name, want.id, run_id, options.command))
            result = DeploymentResult(want.id)
            results.append(result)
            try:
                _one(want, session, state_file, state, options, bus, run_id, on_step, result)
                bus.emit(
                    RunFinished(host_name, want.id, 0, _summary(want, result), "", result.result)
                )
            except DeployError as error:
                result.error = error
                bus.emit(RunFinished(host_name, want.id, error.exit_code, str(error), error.fix))
            except KeyboardInterrupt:
                bus.emit(RunFinished(host_name, want.id, Interrupted.exit_code, "interrupted"))
                raise
    finally:
        session.close(lambda text: bus.emit(Note(host_name, "", "", "warning", text)))
    return results


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
    engine = Engine(
        want,
        steps,
        lambda: session.look(want, steps),
        session.transports(want),
        state=own,
        save=lambda: state_file.save(state),
        bus=bus,
        run_id=run_id,
        environ=options.environ,
        on_step=on_step,
    )
    outcome, facts = engine.plan()
    result.outcome = outcome
    if options.dry_run:
        return
    if outcome.pending:
        if options.confirm is not None and not options.confirm(want, outcome):
            result.declined = True
            return
        session.want_lock(run_id)
        facts = engine.look("under the host lock")
    engine.apply(outcome, facts, options.selection)
    if options.serves:
        result.result = endpoint(want, own)


def endpoint(want: Deployment, own: DeploymentState) -> dict[str, Any]:
    """Where the model answers, and what was proven of it."""
    address = want.host.ssh.address
    if want.container is not None and want.container.ssh is not None:
        address = want.container.ssh.address
    base = f"http://{address}:{want.port}"
    known = next((launch for launch in own.launches if launch.id == own.known_good), None)
    return {
        "endpoint": f"{(want.entry.url or base).rstrip('/')}/v1",
        "model": want.playbook.model.served_name,
        "launch": known.id if known else "",
        "variant": known.variant if known else "",
        "verdict": known.verdict if known else "",
        "figures": dict(known.figures) if known else {},
    }


def _summary(want: Deployment, result: DeploymentResult) -> str:
    if result.declined:
        return "declined; nothing was changed"
    if result.result:
        changed = result.outcome.changed if result.outcome else []
        did = f"changed: {', '.join(changed)}" if changed else "nothing to do"
        return f"{want.id} serves {result.result['model']} at {result.result['endpoint']} ({did})"
    if result.outcome is not None and result.outcome.changed:
        return f"changed: {', '.join(result.outcome.changed)}"
    return "nothing was changed"
