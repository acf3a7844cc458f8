"""Runs the changes of a plan as they were shown (DESIGN section 3)."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import assert_never

from deployer import errors
from deployer.events import ChangeDone, ChangeStarted
from deployer.model import Change, Plan, Procedure, RunJob, SendFile, Shell, WriteFile
from deployer.remote.files import read_file, write_atomic
from deployer.remote.jobs import JobIdentity, JobOverdue, Jobs, JobStatus, new_job_id
from deployer.remote.send import send_file
from deployer.steps.base import StepContext

EVIDENCE_LINES = 20
KEEP_JOBS = 5
"""Folders of ended jobs of one name that stay on the target."""

TELL_EVERY_S = 5.0
"""A wait is told also when nothing moves: who reads sees it, and an interrupt ends it there."""

_TAIL_BYTES = 16 * 1024
_STOP_GRACE_S = 20.0


def run_changes(context: StepContext, plan: Plan) -> None:
    """Executes each change of `plan` in order; stops at the first that fails.

    Raises StepFailed (RemoteCommandFailed for a command) with the last lines as evidence, and
    Unreachable when the target does not answer; a job then goes on and the next run joins it.
    """
    for change in plan.changes:
        ids = (context.want.host_name, context.want.id)
        context.bus.emit(ChangeStarted(*ids, context.step, change.title))
        began = time.monotonic()
        run_change(context, change)
        seconds = time.monotonic() - began
        context.bus.emit(ChangeDone(*ids, context.step, change.title, seconds))


def run_change(context: StepContext, change: Change) -> None:
    """Executes one change; for a step that overrides `apply` for some of its changes only."""
    action = change.action
    match action:
        case Shell():
            _run_shell(context, change.title, action)
        case WriteFile():
            _write_file(context, change.title, action)
        case RunJob():
            _run_job(context, change.title, action)
        case SendFile():
            _send_file(context, change.title, action)
        case Procedure():
            raise errors.StepFailed(
                f"{change.title}: step {context.step or '?'} must override apply",
                where=context.want.id,
                fix="this is a bug of the tool; please report it",
            )
        case _:
            assert_never(action)


def _write_file(context: StepContext, title: str, action: WriteFile) -> None:
    transport = context.on(action.where)
    if action.before is not None:
        now = read_file(transport, action.path) or b""
        if now != action.before:
            raise errors.StepFailed(
                f"{title}: {action.path} is no longer what the plan was made from",
                where=transport.name,
                fix="somebody else changed it; run again to plan with what it holds now",
            )
    write_atomic(transport, action.path, action.content, action.mode)


def _send_file(context: StepContext, title: str, action: SendFile) -> None:
    def told(done: int, size: int) -> None:
        context.progress(title, done, size, "B")

    transport = context.on(action.where)
    send_file(transport, Path(action.local), action.path, action.sha256, told)


def _run_shell(context: StepContext, title: str, action: Shell) -> None:
    transport = context.on(action.where)
    answer = transport.run(action.script, stdin=action.stdin, timeout_s=action.timeout_s)
    if answer.exit != 0:
        raise errors.RemoteCommandFailed(
            f"{title}: the command ended with status {answer.exit}",
            where=transport.name,
            evidence=_last_lines(answer.stderr.strip() or answer.stdout),
        )


def _run_job(context: StepContext, title: str, action: RunJob) -> None:
    jobs = context.jobs(action.where)
    job_id = new_job_id()
    job = jobs.start(action.name, job_id, action.script, files=action.files)
    context.job_started(f"{job.name}/{job.id}", job.pid, attached=job.id != job_id)
    watcher = _Watcher(context, title)
    place = jobs.transport.name
    try:
        status = jobs.follow(
            job, timeout_s=action.timeout_s, stall_s=action.stall_s, on_status=watcher
        )
    except JobOverdue as error:
        raise _overdue(jobs, job, title, watcher, error) from error
    if status.exit != 0:
        raise errors.StepFailed(
            f"{title}: job {job.name}/{job.id} {_how_it_ended(status)}",
            where=place,
            fix=f"{_room(context, watcher.tail)}the whole log: "
            f"{jobs.root}/{job.name}/{job.id}/log on {place}",
            evidence=_last_lines(watcher.tail),
        )
    jobs.prune(action.name, KEEP_JOBS)


def _room(context: StepContext, log: bytes) -> str:
    """What to do about a full disk, when the end of the job's log tells of one."""
    if b"No space left on device" not in log and b"Disk quota exceeded" not in log:
        return ""
    return f"free space there (`deploy gc {context.want.id}` shows what of ours may go); "


def _overdue(
    jobs: Jobs, job: JobIdentity, title: str, watcher: _Watcher, error: JobOverdue
) -> errors.StepFailed:
    """A job over its deadline is ended, else the next run would join it and wait again."""
    proof = jobs.stop(job, grace_s=_STOP_GRACE_S)
    after = "it was stopped" if proof.stopped else f"it cannot be stopped ({proof.how})"
    return errors.StepFailed(
        f"{title}: {error.what}; {after}",
        where=jobs.transport.name,
        fix="run again; work that was done is used"
        if proof.stopped
        else "reboot the host: " + ", ".join(proof.survivors),
        evidence=_last_lines(watcher.tail),
    )


def _how_it_ended(status: JobStatus) -> str:
    if status.exit is None:
        return "vanished without writing its end (killed, or the machine was restarted)"
    if status.exit < 0:
        return f"was ended by signal {-status.exit}"
    return f"ended with status {status.exit}"


class _Watcher:
    """Keeps the end of a job's log and turns its progress lines into events."""

    def __init__(self, context: StepContext, title: str) -> None:
        self._context = context
        self._title = title
        self._progress = ""
        self._told = time.monotonic()
        self.tail = b""

    def __call__(self, status: JobStatus) -> None:
        self.tail = (self.tail + status.log)[-_TAIL_BYTES:]
        now = time.monotonic()
        moved = bool(status.progress) and status.progress != self._progress
        if moved or now - self._told >= TELL_EVERY_S:
            self._progress, self._told = status.progress, now
            self._emit(status.progress)

    def _emit(self, line: str) -> None:
        try:
            values = json.loads(line)
        except ValueError:
            # Half a line, or a job that writes plain words: both are worth showing.
            values = {"detail": line}
        if not isinstance(values, dict):
            values = {"detail": line}
        self._context.progress(
            str(values.get("what") or self._title),
            _number(values.get("done")),
            _number(values.get("total")),
            str(values.get("unit") or ""),
            str(values.get("detail") or ""),
        )


def _number(value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return 0.0


def _last_lines(raw: bytes) -> tuple[str, ...]:
    return tuple(raw.decode("utf-8", "replace").splitlines()[-EVIDENCE_LINES:])
