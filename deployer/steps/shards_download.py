"""The download as a job on the target: what it is given, that it runs, and what its end means."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from deployer.agents.bundle import NAME, fetch_agent
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.hub_manifest import check_names
from deployer.remote.jobs import JobIdentity, Jobs
from deployer.state import Manifest
from deployer.steps.base import StepContext
from deployer.steps.shards_facts import find_python
from deployer.steps.shards_figures import size_text as size_text
from deployer.steps.shards_follow import LOG_TAIL, Mute, Stream, Watch, follow, mute_after

STOP_GRACE_S = 5.0
KEEP_JOBS = 5
MISMATCH, DENIED, NOT_FOUND, DISK_FULL, GAVE_UP, LOCKED = 10, 11, 12, 13, 14, 15
UNTRUSTED, MALFORMED, DISK_ERROR = 16, 17, 18
BAD_MANIFEST, NO_PYTHON = 2, 127


def job_files(want: Deployment, manifest: Manifest) -> dict[str, bytes]:
    """The agent and the manifest, as they are written into the job's folder.

    The manifest holds what changes the download, and nothing else: it is the job's identity.
    Raises HubError for a name that must not be written.
    """
    check_names(file.path for file in manifest.files)
    rules = want.playbook.download
    methods = rules.methods
    job: dict[str, Any] = {
        "repo": manifest.repo,
        "commit": manifest.commit,
        "path": want.playbook.model.path,
        "files": [file.model_dump() for file in manifest.files],
        "endpoint": (rules.target_endpoint or rules.endpoint).rstrip("/"),
        "mirrors": [mirror.rstrip("/") for mirror in rules.mirrors] if "mirror" in methods else [],
        "methods": list(methods),
        "peer": rules.peer.model_dump() if rules.peer and "peer" in methods else None,
        "venv": want.playbook.engine.venv if "hf-xet" in methods else "",
        "connections": rules.connections,
        "ca_bundle": rules.ca_bundle,
        "proxy": rules.proxy,
        "limits": {
            "stall_s": rules.stall_s,
            "floor_bytes_per_s": rules.floor_bytes_per_s,
            "floor_window_s": rules.floor_window_s,
            "phase_s": rules.phase_s,
            "stalls_per_method": rules.stalls_per_method,
            "bwlimit_bytes_per_s": rules.bwlimit_bytes_per_s,
        },
    }
    return {
        NAME: fetch_agent(),
        "manifest.json": json.dumps(job, indent=1, sort_keys=True).encode(),
    }


def job_script(want: Deployment) -> str:
    """What the job runs, in its own folder."""
    return (
        find_python(want.playbook.engine.venv)
        + '[ -n "$py" ] || { echo "error: no python3 (3.9 or newer) on this machine"; '
        + f"exit {NO_PYTHON}; }}\n"
        + f'exec "$py" -I -S {NAME}\n'
    )


def job_name(want: Deployment) -> str:
    """The job's name; unique a deployment."""
    return f"shards-{want.name}"


def download(
    context: StepContext,
    manifest: Manifest,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Starts or joins the download and follows it to its verified end.

    A killed, vanished or mute job is started again, at most `max_restarts` times: what it has
    brought is kept. `clock` and `sleep` are the controller's, in seconds.
    Raises StepFailed, HubError, Unreachable.
    """
    want = context.want
    rules = want.playbook.download
    jobs = context.jobs(want.guest)
    interruptions = 0
    while True:
        job, joined = _start(context, jobs, manifest, interruptions)
        earlier = jobs.find(job.name, tail_bytes=LOG_TAIL, job_id=job.id) if joined else None
        mute_s = mute_after(rules.stall_s)
        # Of a joined job the end of its log is evidence; its warnings were told before.
        watch = Watch(context, mute_s, clock, earlier.log if earlier else b"")
        stream = Stream(job, earlier.inode, earlier.offset) if earlier else Stream(job)
        try:
            status = follow(context, jobs, watch, stream, clock=clock, sleep=sleep)
        except Mute:
            _stop(context, jobs, job, "the mute download")
            how = f"gave no sign of life for {mute_s:.0f} s and was killed"
        else:
            if status.exit is not None and status.exit >= 0:
                judge(context, status.exit, watch)
                jobs.prune(job_name(want), KEEP_JOBS)
                return
            how = "vanished" if status.exit is None else f"was killed by signal {-status.exit}"
        at = f" at {size_text(watch.done)} of {size_text(watch.total)}" if watch.total else ""
        interruptions += 1
        if interruptions > rules.max_restarts:
            times = f"{rules.max_restarts} restart{'' if rules.max_restarts == 1 else 's'}"
            raise StepFailed(
                f"the download {how}{at}; {times} did not help",
                where=want.id,
                fix="look for what kills it (`dmesg`: out of memory?); the bytes so far are kept",
                evidence=watch.lines(5),
            )
        context.note(
            f"the download {how}{at}; resuming ({interruptions} of {rules.max_restarts})", "warning"
        )


def _start(
    context: StepContext, jobs: Jobs, manifest: Manifest, attempt: int
) -> tuple[JobIdentity, bool]:
    """Our job, and whether it ran already: one that is alive and does exactly this is joined."""
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
        context.note(
            f"a download of other files, or under other settings, runs (pid {job.pid}); stopping it"
        )
        _stop(context, jobs, job, "the earlier download")
        job = start()
    joined = job.id != job_id
    context.job_started(name, job.pid, attached=joined)
    return job, joined


def _stop(context: StepContext, jobs: Jobs, job: JobIdentity, what: str) -> None:
    """Ends the job, with proof. Raises StepFailed when something of it stays."""
    proof = jobs.stop(job, grace_s=STOP_GRACE_S)
    if not proof.stopped:
        raise StepFailed(
            f"{what} cannot be stopped: {', '.join(proof.survivors)}",
            where=context.want.id,
            fix="a process in D state needs a reboot of the host",
        )


PROXY_REFUSES = "wants a user and password (407)"
"""The agent's words for a proxy's refusal, which has the exit code of the Hub's."""
OTHER_VERSION = "the hub now has another version"
"""The agent's words for other hashes at the pinned commit, which no other fetch will cure."""
_OTHER_PROXY = (
    "set download.proxy to a proxy that needs no password for the target, or to none; "
    "a password cannot be given: it would be seen in plans and on the target"
)


def judge(context: StepContext, code: int, watch: Watch) -> None:
    """Turns the agent's exit into nothing (0) or a StepFailed with its own last word."""
    if code == 0:
        return
    want = context.want
    if code == NOT_FOUND:
        context.state.manifest = None
        context.save()
    lines = watch.lines(8)
    said = [line.partition("error: ")[2] for line in lines if "error: " in line]
    has_token = bool(context.environ.get(want.playbook.download.token_env))
    word = said[-1] if said else f"the download ended with exit {code}"
    fix = fix_of(want, code, has_token=has_token)
    if code == DENIED and PROXY_REFUSES in word:
        fix = _OTHER_PROXY
    elif code == MISMATCH and OTHER_VERSION in word:
        fix = (
            f"`deploy up {want.id} --repin` takes what the Hub has now; if it should not have "
            "changed, check download.endpoint and download.proxy"
        )
    raise StepFailed(word, where=want.id, fix=fix, evidence=lines)


def fix_of(want: Deployment, code: int, *, has_token: bool) -> str:
    """The way out of an exit code of the agent, as this playbook has it."""
    rules, path = want.playbook.download, want.playbook.model.path
    endpoint, token = rules.target_endpoint or rules.endpoint, rules.token_env
    if code == DENIED:
        terms = f"accept the terms of {want.playbook.model.repo} at {rules.endpoint}"
        if has_token:
            return f"{terms} as the user of the token in {token}; it needs read access"
        return f"{terms} and set {token} to a token with read access"
    if code == UNTRUSTED:
        if rules.ca_bundle:
            return f"does {rules.ca_bundle} on the target hold the CA that signs for {endpoint}?"
        return "set download.ca_bundle to the PEM file of your proxy's CA on the target"
    if code == GAVE_UP:
        return _other_ways(want)
    fixes = {
        BAD_MANIFEST: f"check model.path ({path}) and the settings below `download:`",
        MISMATCH: "run again to fetch it anew; wrong once more: suspect a proxy, the RAM or "
        "the disk of the target",
        NOT_FOUND: "the pinned commit or a file of it is gone and the pin was dropped: run again "
        "to pin the revision anew",
        DISK_FULL: f"free space at {path}; what is there is kept and resumed",
        LOCKED: f"wait for the other download of {path}, or stop it",
        MALFORMED: "choose another revision: this one is incomplete or malformed at the Hub",
        DISK_ERROR: f"check the file system of {path}",
        NO_PYTHON: "let the venv step run first: leave out --from/--only",
    }
    return fixes.get(code, f"look at the job's log: job {job_name(want)} on the target")


def _other_ways(want: Deployment) -> str:
    """After every method gave up: what to check, and which methods are not in use yet."""
    rules = want.playbook.download
    check = f"check the target's network and {rules.target_endpoint or rules.endpoint}"
    if rules.proxy:
        check += f" through {rules.proxy}"
    more = [
        words
        for unused, words in (
            ("mirror" not in rules.methods or not rules.mirrors, "download.mirrors"),
            ("peer" not in rules.methods or rules.peer is None, "download.peer"),
        )
        if unused
    ]
    other = f", or set {' or '.join(more)}" if more else ""
    return f"{check}{other}; the bytes so far are kept and resumed"
