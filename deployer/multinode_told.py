"""What a run on several nodes tells: each node's record, its error or its summary."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from deployer.deployment import Deployment
from deployer.errors import Defect, DeployError, NotStarted
from deployer.events import Bus, Event, RunFinished
from deployer.run_record import RunRecord
from deployer.up_options import UpOptions
from deployer.up_result import DeploymentResult


class Failed(Exception):
    """Nodes' errors by host; those of the others are `NotStarted`."""

    def __init__(self, errors: Mapping[str, DeployError]) -> None:
        super().__init__(", ".join(errors))
        self.errors = errors


def recorded(
    stack: contextlib.ExitStack,
    wants: Sequence[Deployment],
    options: UpOptions,
    run_id: str,
    bus: Bus,
) -> Bus:
    """Each node's record has the events of its host."""
    records: dict[str, RunRecord] = {}
    for want in wants:
        record = RunRecord(options.deploy_dir / "runs", run_id, want.host_name)
        stack.callback(record.close)
        records[want.host_name] = record

    def write(event: Event) -> None:
        if event.host in records:
            records[event.host](event)

    return Bus(write, bus.emit)


def tell(
    wants: Sequence[Deployment],
    results: Sequence[DeploymentResult],
    error: Exception,
    options: UpOptions,
    bus: Bus,
) -> None:
    """The cause is its node's; the others were held up by it."""
    if isinstance(error, Failed):
        errors = dict(error.errors)
    elif isinstance(error, DeployError):
        errors = {want.host_name: error for want in wants}
    else:
        errors = {wants[0].host_name: Defect.of(error, wants[0].id)}
    causes = [want.id for want in wants if want.host_name in errors]
    for want, result in zip(wants, results, strict=True):
        result.error = errors.get(want.host_name) or NotStarted(
            f"its nodes are one server, and {', '.join(causes)} failed",
            where=want.id,
            fix=f"see {causes[0] if causes else 'the others'}",
        )
        if options.cancel.asked:
            result.error = options.cancel.error(want.id)
        told = result.error
        bus.emit(RunFinished(want.host_name, want.id, told.exit_code, str(told), told.fix))


def summary(want: Deployment, result: DeploymentResult) -> str:
    """How a node ended, in one line."""
    if result.declined:
        return "declined; nothing was changed"
    changed = result.outcome.changed if result.outcome is not None else []
    did = f"changed: {', '.join(changed)}" if changed else "nothing to do"
    what: dict[str, Any] = result.result
    if what:
        return f"{want.id} serves {what['model']} at {what['endpoint']} with its nodes ({did})"
    if result.left:
        return f"{did}; left to do: {', '.join(result.left)}"
    return did
