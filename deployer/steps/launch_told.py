"""How a failed launch is told to the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.state import Launch

if TYPE_CHECKING:
    from deployer.steps.launch_wait import LaunchFailed


def redacted(text: str, key: str) -> str:
    """`text` without the API key."""
    return text.replace(key, "***") if key else text


def as_step_failed(
    want: Deployment,
    launch: Launch,
    error: LaunchFailed,
    known: str,
    key: str,
    *,
    step: str = "launch",
    stopped: bool = True,
) -> StepFailed:
    """One cause, its evidence, one action; `known`: what became of the last good launch."""
    failure = error.failure
    code = error.exit_code
    if code is None:
        ended = "stopped by this tool" if stopped else "it was left as it is"
    else:
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    cause = f": {failure.cause_line[:240]}" if failure.cause_line else ""
    what = (
        f"launch {launch.id} (variant {launch.variant}) failed, {failure.cls}{cause} "
        f"[phase {error.phase}, {ended}]"
    )
    return StepFailed(
        redacted(f"{what}; {known}" if known else what, key),
        where=f"{want.id} {step}",
        fix=failure.action,
        evidence=tuple(redacted(line, key) for line in error.evidence),
    )
