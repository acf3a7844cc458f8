"""Shared memory and sockets that a stopped launch has left: noticed before, removed after."""

from __future__ import annotations

from typing import Any

from deployer.errors import REFUSALS, StepFailed, Unreachable
from deployer.remote.jobs import ROOT, JobIdentity
from deployer.steps.base import StepContext
from deployer.steps.server_agent import ask

LOOK_S = 60.0


def held(context: StepContext, job: JobIdentity) -> list[dict[str, Any]]:
    """What the launch's processes use now; to be asked before they end."""
    answer = _ask(context, {"do": "held", **_who(job)})
    return list(answer.get("files", []))


def clear(context: StepContext, job: JobIdentity, files: list[dict[str, Any]]) -> None:
    """Removes what is proven to be left of the launch, and says so. Never stops a stop."""
    folder = f"{ROOT}/{job.name}/{job.id}"
    answer = _ask(context, {"do": "clear", **_who(job), "folder": folder, "files": files})
    removed, kept = answer.get("removed", []), answer.get("kept", [])
    if removed:
        size = sum(one["bytes"] for one in removed)
        names = ", ".join(one["path"] for one in removed[:6])
        more = f" and {len(removed) - 6} more" if len(removed) > 6 else ""
        context.note(
            f"removed what launch {job.id} had left, {size / 1e6:.1f} MB of it in /dev/shm: "
            f"{names}{more}"
        )
    # A dead socket below /tmp takes nothing from anybody; shared memory does.
    heavy = [one for one in kept if one.get("bytes") or not one["path"]]
    if heavy:
        why = "; ".join(dict.fromkeys(str(one["why"]) for one in heavy))
        paths = [one["path"] or "/dev/shm, /tmp" for one in heavy]
        rest = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        size = sum(one.get("bytes", 0) for one in heavy)
        context.note(f"not removed, {size / 1e6:.1f} MB: {', '.join(paths[:3])}{rest} ({why})")


def _who(job: JobIdentity) -> dict[str, Any]:
    return {"pid": job.pid, "start": job.start, "boot": job.boot, "session": job.session}


def _ask(context: StepContext, command: dict[str, Any]) -> dict[str, Any]:
    want = context.want
    try:
        return ask(context.on(want.guest), want, [command], timeout_s=LOOK_S)[0]
    except REFUSALS:
        raise
    except (StepFailed, Unreachable) as error:
        context.note(
            f"what the launch leaves in /dev/shm and /tmp is not known: {error.what}", "warning"
        )
        return {}
