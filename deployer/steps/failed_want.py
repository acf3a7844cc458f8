"""What was asked for and failed, so that the same wish does not end a good server again. Pure."""

from __future__ import annotations

import hashlib
import json
import time

from deployer.deployment import Deployment
from deployer.state import DeploymentState, FailedWant, Manifest
from deployer.steps.server_wanted import fingerprint

KEPT = 20
"""Failed wishes that the state file remembers."""


def want_key(want: Deployment, manifest: Manifest | None) -> str:
    """sha256 over command, lock, weights, variant, GPUs and the whole playbook, gates included.

    '' without a pinned list of weights: what would run is not settled then.
    """
    if manifest is None:
        return ""
    parts = {
        "launch": fingerprint(want, manifest, want.variant_name),
        "asked": want.variant or "",
        "gpus": list(want.gpus),
        "playbook": want.playbook.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def remember_failure(
    state: DeploymentState, want: Deployment, cause: str, exit_code: int, fix: str = ""
) -> None:
    """Records that this very wish was tried and failed. `cause` and `fix` hold no secret."""
    key = want_key(want, state.manifest)
    if not key:
        return
    forget_failure(state, want)
    state.failed.append(
        FailedWant(
            key=key,
            variant=want.variant_name,
            when=time.time(),
            cause=" ".join(cause.split())[:400],
            exit_code=exit_code,
            fix=" ".join(fix.split())[:400],
        )
    )
    del state.failed[:-KEPT]


def forget_failure(state: DeploymentState, want: Deployment) -> None:
    """It has passed, or is to be tried as if it never had failed."""
    key = want_key(want, state.manifest)
    state.failed = [one for one in state.failed if one.key != key]


def failed_before(state: DeploymentState, want: Deployment) -> FailedWant | None:
    """The record of exactly this wish; None when anything of it has changed."""
    key = want_key(want, state.manifest)
    return next((one for one in reversed(state.failed) if key and one.key == key), None)
