"""What was proven here: the validated set of a model, engine and GPUs, and the last good launch."""

from __future__ import annotations

import hashlib
import json
import time

from deployer.deployment import Deployment
from deployer.state import DeploymentState, Launch, Manifest, ValidatedSet
from deployer.steps.server_wanted import Rung

KEPT = 20
"""Sets that the state file remembers."""
LEFT_OUT = "left-out"
"""The reason of a rung that was not launched because the rules speak against it."""


def remember(state: DeploymentState, want: Deployment, launch: Launch) -> None:
    """Records that `launch` has passed its gates as the newest validated set."""
    key = _key(want, state.manifest)
    if key is None:
        return
    state.validated = [one for one in state.validated if _key_of(one) != key]
    model, engine, lock, gpus, asked = key
    state.validated.append(
        ValidatedSet(
            model=model,
            engine=engine,
            lock=lock,
            gpus=list(gpus),
            asked=asked,
            variant=launch.variant,
            argv=list(launch.argv),
            changes=dict(launch.changes),
            instead_of=dict(launch.instead_of),
            figures=dict(launch.figures),
            launch=launch.id,
            proven=launch.verified or time.time(),
        )
    )
    del state.validated[:-KEPT]


def validated(state: DeploymentState, want: Deployment) -> ValidatedSet | None:
    """The set proven for exactly this model, engine, lock, GPUs and playbook arguments."""
    key = _key(want, state.manifest)
    return next((one for one in reversed(state.validated) if _key_of(one) == key), None)


def preferred(state: DeploymentState, want: Deployment) -> ValidatedSet | None:
    """The set to start with in place of the first variant, which failed here before it.

    None when a variant was asked for by name, or when the first one was not really launched.
    """
    found = validated(state, want)
    if found is None or want.variant is not None or found.variant == want.variant_name:
        return None
    if found.instead_of.get(want.variant_name, LEFT_OUT) == LEFT_OUT:
        return None
    known = {one.name for one in want.playbook.variants} or {want.variant_name}
    return found if rung_of(found).base in known else None


def rung_of(proven: ValidatedSet | Launch) -> Rung:
    """The rung that was launched."""
    return Rung(proven.variant, tuple(proven.changes.items()))


def why_preferred(want: Deployment, proven: ValidatedSet) -> str:
    """In words, with the way back."""
    chosen = want.variant_name
    when = time.strftime("%Y-%m-%d", time.gmtime(proven.proven))
    # A launch joined from a note of an older version: that it failed is known, and not for what.
    cause = f" ({proven.instead_of[chosen]})" if proven.instead_of[chosen] else ""
    return (
        f"starts with {proven.variant}, proven here on {when} after {chosen} had failed{cause}; "
        f"`--variant {chosen}` tries {chosen} again"
    )


Key = tuple[str, str, str, tuple[str, ...], str]


def _key(want: Deployment, manifest: Manifest | None) -> Key | None:
    if manifest is None:
        return None
    serve = want.playbook.serve
    asked = {
        "args": serve.args,
        "env": serve.env,
        "variants": [[one.name, one.args] for one in want.playbook.variants],
    }
    return (
        f"{manifest.repo}@{manifest.commit}",
        want.playbook.engine.version,
        hashlib.sha256(want.lock_text.encode()).hexdigest(),
        want.gpus,
        hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
    )


def _key_of(one: ValidatedSet) -> Key:
    return one.model, one.engine, one.lock, tuple(one.gpus), one.asked
