"""Follows the download job: progress, the stall watchdog, and what its exit code means."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from deployer.agents.bundle import NAME, fetch_agent
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.remote.jobs import JobIdentity, Jobs, JobStatus
from deployer.state import Manifest
from deployer.steps.base import StepContext
from deployer.steps.shards_facts import find_python

LONGEST_S = 7 * 86400.0
STOP_GRACE_S = 5.0
KEEP_JOBS = 5
LOG_TAIL = 8192

_FIXES = {
    10: "run again to fetch it anew; wrong twice more: suspect a proxy, the RAM or the disk",
    11: "accept the model's terms on the Hub and set {token} to a token with read access",
    12: "the pinned commit is gone and its pin was dropped: run again to pin the revision anew",
    13: "free space at {path}; what is there is kept and resumed",
    14: "check the target's network and download.target_endpoint; the bytes so far are resumed",
    15: "wait for the other download of {path}, or stop it",
    16: "set download.ca_bundle to the PEM file of your proxy on the target",
    17: "choose another revision: this one is incomplete or malformed at the Hub",
    18: "check the file system of {path}",
}


class Stalled(Exception):
    """No byte was received or hashed for `stall_s`."""


def size_text(count: float) -> str:
    """`52.1 GB`, `24.1 MB`, `512 bytes` (decimal units)."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def job_files(want: Deployment, manifest: Manifest) -> dict[str, bytes]:
    """The agent and the manifest, as they are written into the job's folder."""
    download = want.playbook.download
    job = {
        "endpoint": download.target_endpoint or download.endpoint,
        "repo": manifest.repo,
        "commit": manifest.commit,
        "path": want.playbook.model.path,
        "connections": download.connections,
        "ca_bundle": download.ca_bundle,
        "files": [file.model_dump() for file in manifest.files],
    }
    return {
        NAME: fetch_agent(),
        "manifest.json": json.dumps(job, indent=1, sort_keys=True).encode(),
    }


def job_script(want: Deployment) -> str:
    """What the job runs, in its own folder."""
    return (
        find_python(want.playbook.engine.venv)
        + '[ -n "$py" ] || { echo "error: no python3 on this machine"; exit 2; }\n'
        + f'exec "$py" -I -S {NAME}\n'
    )


def job_name(want: Deployment) -> str:
    """The job's name; unique a deployment."""
    return f"shards-{want.name}"


class Watch:
    """Sees every status of the job: emits progress, keeps the log's tail, notices a stall.

    A stall is time without a byte received or hashed; pauses that the Hub asked for do not count.
    """

    def __init__(
        self,
        context: StepContext,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context, self.stall_s, self.clock = context, stall_s, clock
        self.moved = -1
        self.since = clock()
        self.done = self.total = 0
        self.tail = b""

    def see(self, status: JobStatus) -> None:
        """Raises Stalled."""
        self.tail = (self.tail + status.log)[-LOG_TAIL:]
        row = read_progress(status.progress)
        now = self.clock()
        if row:
            self.done, self.total = int(row.get("bytes", 0)), int(row.get("total", 0))
            moved = int(row.get("moved", self.done))
            if moved > self.moved or int(row.get("pause", 0)) > 0:
                self.moved, self.since = max(moved, self.moved), now
            self.context.progress("download", self.done, self.total, "bytes", detail(row))
        if status.alive and now - self.since > self.stall_s:
            raise Stalled

    def lines(self, count: int) -> tuple[str, ...]:
        """The last lines of the job's log."""
        return tuple(self.tail.decode("utf-8", "replace").splitlines()[-count:])


def read_progress(line: str) -> dict[str, Any]:
    """The agent's progress line; {} when there is none yet."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def detail(row: dict[str, Any]) -> str:
    """Speed, files, retries, and the pause that the Hub asked for, in words."""
    parts = [
        f"{size_text(float(row.get('speed', 0)))}/s",
        f"{row.get('files_done', 0)} of {row.get('files', 0)} files",
    ]
    if row.get("retries"):
        parts.append(f"{row['retries']} retries")
    if row.get("pause"):
        parts.append(f"waiting {row['pause']} s as the Hub asked")
    return ", ".join(parts)


def download(context: StepContext, manifest: Manifest) -> None:
    """Starts or joins the download and follows it to its verified end.

    A stalled, killed or vanished job is started again, at most `max_restarts` times.
    Raises StepFailed.
    """
    rules = context.want.playbook.download
    jobs = context.jobs(context.want.guest)
    interruptions = 0
    while True:
        job = _start(context, jobs, manifest, interruptions)
        watch = Watch(context, rules.stall_s)
        try:
            status = jobs.follow(job, timeout_s=LONGEST_S, stall_s=LONGEST_S, on_status=watch.see)
        except Stalled:
            proof = jobs.stop(job, grace_s=STOP_GRACE_S)
            if not proof.stopped:
                raise StepFailed(
                    f"the stalled download cannot be killed: {', '.join(proof.survivors)}",
                    where=context.want.id,
                    fix="a process in D state needs a reboot of the host",
                ) from None
            what = f"stalled at {size_text(watch.done)} of {size_text(watch.total)} for "
            what += f"{rules.stall_s:.0f} s; killed"
        else:
            if status.exit is not None and status.exit >= 0:
                judge(context, status.exit, watch)
                jobs.prune(job_name(context.want), KEEP_JOBS)
                return
            how = "vanished" if status.exit is None else f"was killed by signal {-status.exit}"
            what = f"{how} at {size_text(watch.done)} of {size_text(watch.total)}"
        interruptions += 1
        if interruptions > rules.max_restarts:
            raise StepFailed(
                f"download {what}; {rules.max_restarts} resumptions did not help",
                where=context.want.id,
                fix=_FIXES[14],
                evidence=watch.lines(5),
            )
        context.note(
            f"download {what}, resuming ({interruptions} of {rules.max_restarts})", "warning"
        )


def _start(context: StepContext, jobs: Jobs, manifest: Manifest, attempt: int) -> JobIdentity:
    """Our job: the one that is alive when it does exactly this, else a new one."""
    want = context.want
    files = job_files(want, manifest)
    digest = hashlib.sha256(files["manifest.json"]).hexdigest()[:8]
    name, job_id = job_name(want), f"{context.run_id}-{attempt}-{digest}"
    token = context.environ.get(want.playbook.download.token_env, "")

    def start() -> JobIdentity:
        return jobs.start(
            name,
            job_id,
            job_script(want),
            files=files,
            secrets={"HF_TOKEN": token} if token else None,
        )

    job = start()
    if job.id != job_id and not job.id.endswith(f"-{digest}"):
        context.note(f"a download of another file list runs (pid {job.pid}); stopping it")
        proof = jobs.stop(job, grace_s=STOP_GRACE_S)
        if not proof.stopped:
            raise StepFailed(
                f"the earlier download cannot be stopped: {', '.join(proof.survivors)}",
                where=want.id,
                fix="a process in D state needs a reboot of the host",
            )
        job = start()
    context.job_started(name, job.pid, attached=job.id != job_id)
    return job


def judge(context: StepContext, code: int, watch: Watch) -> None:
    """Turns the agent's exit into nothing (0) or a StepFailed with its own last word."""
    if code == 0:
        return
    want = context.want
    if code == 12:
        context.state.manifest = None
        context.save()
    lines = watch.lines(8)
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    fix = _FIXES.get(code, f"look at the job's log: job {job_name(want)} on the target")
    raise StepFailed(
        said[-1] if said else f"the download ended with exit {code}",
        where=want.id,
        fix=fix.format(token=want.playbook.download.token_env, path=want.playbook.model.path),
        evidence=lines,
    )
