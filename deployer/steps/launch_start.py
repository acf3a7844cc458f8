"""Starts one launch as a job, and writes it into the state file."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from deployer.errors import RemoteCommandFailed, StepFailed
from deployer.remote.jobs import JobIdentity
from deployer.sglang.argv import API_KEY_ENV, command, server_argv
from deployer.state import Launch
from deployer.steps.base import StepContext
from deployer.steps.launch_evidence import OOM_FILE, baseline
from deployer.steps.server_wanted import (
    FINGERPRINT_FILE,
    LAUNCH_FILE,
    WEIGHTS_FILE,
    LaunchNote,
    server_job_name,
    server_script,
)

KEPT_LAUNCHES = 50
"""Launches that the state file remembers."""


@dataclass(frozen=True)
class SeenBefore:
    """What was seen before a launch, and is kept with it."""

    weights: str = ""
    """WeightsFact.line."""
    venv: str = ""
    """The build behind engine.venv."""
    recipe: str | None = None
    """Of the launch that is started again; None for one of the playbook, which is kept now."""
    launch: str = ""
    """The id that all nodes of the launch share; '' gives it one of its own."""


def new_launch_id() -> str:
    """Sortable and unique: 20261130-065012-ab12."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def start_command(
    context: StepContext,
    argv: list[str],
    mark: str,
    note: LaunchNote,
    key: str,
    seen: SeenBefore,
) -> tuple[JobIdentity, Launch]:
    """Starts the job; the launch is in the state file before. Raises StepFailed."""
    want = context.want
    launch_id = seen.launch or new_launch_id()
    recipe, manifest = seen.recipe, context.state.manifest
    if recipe is None and context.keep is not None and manifest is not None:
        recipe = context.keep(want, manifest)
    launch = Launch(
        id=launch_id,
        variant=note.variant,
        started=time.time(),
        fingerprint=mark,
        argv=argv,
        env=dict(want.playbook.serve.env),
        venv=seen.venv,
        recipe=recipe or "",
        changes=dict(note.changes),
        instead_of=note.instead_of,
        back=note.back,
    )
    for earlier in context.state.launches:
        # One of ours at a time: what is not known to have ended has died meanwhile.
        if earlier.verdict in {"starting", "ready"}:
            earlier.verdict = "failed: died"
        elif earlier.verdict == "good":
            earlier.verdict = "stopped"
    context.state.launches.append(launch)
    oldest = context.state.launches[:-KEPT_LAUNCHES]
    # However many failed since.
    needed = context.state.needed()
    kept = [one for one in oldest if one.id in needed]
    context.state.launches[: len(oldest)] = kept
    context.save()
    try:
        job = context.jobs(want.guest).start(
            server_job_name(want),
            launch_id,
            server_script(want, argv),
            files={
                FINGERPRINT_FILE: f"{mark}\n".encode(),
                LAUNCH_FILE: note.line().encode(),
                OOM_FILE: baseline(context),
                **({WEIGHTS_FILE: f"{seen.weights}\n".encode()} if seen.weights else {}),
            },
            secrets={API_KEY_ENV: key} if key else None,
            log_max_bytes=want.playbook.serve.log_max_bytes,
        )
    except RemoteCommandFailed:
        launch.verdict = "failed: not started"
        context.save()
        raise
    if job.id != launch_id:
        launch.verdict = f"failed: launch {job.id} was alive"
        context.save()
        raise StepFailed(
            f"another launch, {job.id}, was started meanwhile",
            where=f"{want.id} launch",
            fix="run `deploy up` again",
        )
    identify(launch, job)
    context.save()
    context.job_started(job.name, job.pid, False)
    return job, launch


def recorded(context: StepContext, job: JobIdentity, note: LaunchNote) -> Launch:
    """The state's record of a launch that was found running; made when the state file lacks it."""
    for launch in context.state.launches:
        if launch.id == job.id:
            return launch
    want = note.rung.deployment(context.want)
    launch = Launch(
        id=job.id,
        variant=note.variant,
        started=time.time(),
        fingerprint=note.rung.fingerprint(context.want, context.state.manifest),
        argv=command(want, server_argv(want)),
        changes=dict(note.changes),
        instead_of=note.instead_of,
        back=note.back,
    )
    context.state.launches.append(launch)
    return launch


def identify(launch: Launch, job: JobIdentity) -> None:
    """Writes down which process it is."""
    launch.pid, launch.start, launch.boot = job.pid, job.start, job.boot
