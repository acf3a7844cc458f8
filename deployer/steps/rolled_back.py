"""A rollback stands until something else is asked for. Pure."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from deployer.deployment import Deployment
from deployer.model import Plan
from deployer.state import Back, DeploymentState, Manifest, RolledBack
from deployer.steps.server_facts import ServerJob
from deployer.steps.server_wanted import fingerprint


def wish_key(want: Deployment) -> str:
    """sha256 over the playbook, the lock, the variant asked for, GPUs and port; not the weights'
    commit, which a rollback pins.
    """
    parts = {
        "playbook": want.playbook.model_dump(mode="json"),
        "lock": hashlib.sha256(want.lock_text.encode()).hexdigest(),
        "variant": want.variant or "",
        "gpus": list(want.gpus),
        "port": want.port,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def unfinished_pin(state: DeploymentState) -> Manifest | None:
    """What the playbook's weights are pinned to, also while a rollback is not finished."""
    record = state.rollback
    if record is None or record.outcome or record.manifest is None:
        return state.manifest
    return record.manifest


def rolled_back(state: DeploymentState, want: Deployment) -> RolledBack | None:
    """The rollback from exactly this wish; None when anything was changed since, or it failed."""
    record = state.rollback
    if record is None or record.outcome == "failed" or record.wish != wish_key(want):
        return None
    if state.manifest is not None and state.manifest.commit not in record.commits:
        # Another commit of the weights was pinned since: that is another wish.
        return None
    if record.mark == fingerprint(want, state.manifest, want.variant_name):
        # Only the weights' commit was gone back, and it is pinned.
        return None
    return record


def stands(want: Deployment, job: ServerJob | None, record: RolledBack) -> Plan:
    """The refusal to launch what was rolled back from, before anything is touched for it."""
    when = time_text(record.when)
    done = record.outcome == "done"
    again = "finishes the rollback"
    seen = "no server runs"
    if job is not None and job.alive:
        seen = f"launch {job.identity.id} (variant {job.launch.variant}) was left alone"
    elif done:
        again = "launches that again"
    back = f"; `deploy rollback {want.id} {record.to}` {again}"
    return Plan.blocked(
        f"rolled back to launch {record.to} at {when}{'' if done else ' (not finished)'}, and the "
        f"playbook is the one it was rolled back from; {seen}",
        f"change the playbook; `deploy up {want.id} --retry` launches it as it is"
        + ("" if done and job is not None and job.alive else back),
        stands=True,
    )


def back_words(back: Back) -> str:
    """Why a launch repeats an earlier one, from which to which, and who did it."""
    by = back.by or "an older version"
    if back.asked:
        left = f", from launch {back.left}" if back.left else ", where nothing served"
        return f"rolled back to launch {back.to}{left}, asked for by {by}"
    after = f" after launch {back.left} had failed" if back.left else ""
    return f"launch {back.to} again, automatically{after} (run of {by})"


def record_words(record: RolledBack, here: str) -> str:
    """What became of the last rollback that was asked for. `here`: HOST/NAME."""
    left = f"from launch {record.left}" if record.left else "where nothing served"
    who = f"{left}, asked for by {record.by or 'an older version'} at {time_text(record.when)}"
    whole = f"to launch {record.to}, {who}"
    match record.outcome:
        case "done":
            return f"done: {whole}"
        case "failed":
            again = f"; launch {record.left} was brought back" if record.left else ""
            return f"failed: {whole}{again}"
        case _:
            return f"not finished: {whole}; `deploy rollback {here}` goes on"


def back_document(back: Back | None) -> dict[str, Any] | None:
    """As JSON data."""
    if back is None:
        return None
    return {
        "to": back.to,
        "from": back.left,
        "by": back.by,
        "automatic": not back.asked,
        "words": back_words(back),
    }


def record_document(record: RolledBack | None, here: str) -> dict[str, Any] | None:
    """As JSON data. `when` in Unix seconds; `outcome` '' while it is not finished."""
    if record is None:
        return None
    return {
        "to": record.to,
        "from": record.left,
        "by": record.by,
        "when": record.when,
        "outcome": record.outcome,
        "words": record_words(record, here),
    }


def time_text(seconds: float) -> str:
    """Unix seconds as a user reads them."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
