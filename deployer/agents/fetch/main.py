"""The modes of the agent."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH100

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from deployer.agents.fetch.common import BAD_MANIFEST, Fatal, log, only_one
from deployer.agents.fetch.manifest import Job


def supervise(job: Job, token: str, words: list[str]) -> int:
    """The whole job: method after method, watched."""
    from deployer.agents.fetch import supervisor

    return supervisor.supervise(job, token)


def fetch_ranges(job: Job, token: str, words: list[str]) -> int:
    """Worker child: range requests to the endpoint in `words`, or to the job's own."""
    from deployer.agents.fetch.gauge import Reporter
    from deployer.agents.fetch.pool import Download

    Download(job, token, Reporter.here(), words[0] if words else job.endpoint).run()
    return 0


def copy_from_peer(job: Job, token: str, words: list[str]) -> int:
    """Worker child: rsync from another machine."""
    from deployer.agents.fetch import peer

    return peer.child(job)


def measure(job: Job, token: str, words: list[str]) -> int:
    """How fast bytes come from a source; a JSON line."""
    from deployer.agents.fetch import measure as measuring

    return measuring.mode(job, token, words)


def hf_child(job: Job, token: str, words: list[str]) -> int:
    """Worker child in the venv's own Python: huggingface_hub with hf_xet."""
    from deployer.agents.fetch import xet

    return xet.child(job, token)


def settle(job: Job, token: str, words: list[str]) -> int:
    """Worker child without network: judges what is there and gives right files their names."""
    from deployer.agents.fetch.gauge import Reporter
    from deployer.agents.fetch.settle import Settle

    return Settle(job, Reporter.here()).run()


def rehash(job: Job, token: str, words: list[str]) -> int:
    """Hashes every file again, whatever the record says."""
    from deployer.agents.fetch.gauge import Reporter, Spoken
    from deployer.agents.fetch.rehash import Rehash

    reporter = Spoken() if "--stream" in words else Reporter.here()
    with only_one(job.path):
        return Rehash(job, reporter, quarantine="--quarantine" in words).run()


def clean(job: Job, token: str, words: list[str]) -> int:
    """Removes those useless partials that the JSON list on stdin names; a JSON line for each."""
    from deployer.agents.fetch import orphans

    agreed = json.load(sys.stdin)
    for path, used, why in orphans.clean(job.path, job.files, {str(one) for one in agreed}):
        print(json.dumps({"path": path, "bytes": used, "why": why}))
    return 0


MODES: dict[str, Callable[[Job, str, list[str]], int]] = {
    "supervise": supervise,
    "range": fetch_ranges,
    "settle": settle,
    "rehash": rehash,
    "clean": clean,
    "peer": copy_from_peer,
    "hf-child": hf_child,
    "measure": measure,
}


def main() -> int:
    """Runs the mode that the first argument names; see `common` for the exit codes."""
    words = sys.argv[1:]
    mode = words[0] if words else "supervise"
    token = os.environ.pop("HF_TOKEN", "")
    try:
        if mode == "attach":
            from deployer.agents.fetch.attach import attach

            return attach(words[1:])
        if mode not in MODES:
            raise Fatal(BAD_MANIFEST, f"unknown mode {mode!r}")
        try:
            job = Job.load(os.path.abspath("manifest.json"))
        except ValueError as error:
            raise Fatal(BAD_MANIFEST, str(error)) from error
        return MODES[mode](job, token, words[1:])
    except Fatal as error:
        from deployer.agents.fetch.gauge import Reporter

        # Of a worker's end only the supervisor says what it means for the job.
        if mode == "supervise" or not Reporter.here().fail(error):
            log(f"error: {error}")
        return error.code
