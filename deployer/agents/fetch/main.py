"""The modes of the agent."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH100, PTH123

from __future__ import annotations

import json
import os

from deployer.agents.fetch.common import Fatal, log, only_one
from deployer.agents.fetch.pool import Download


def main() -> int:
    """Runs the job of this folder; see the module for the exit codes."""
    token = os.environ.pop("HF_TOKEN", "")
    try:
        with open("manifest.json", encoding="utf-8") as stream:
            job = json.load(stream)
        root = str(job["path"])
        with only_one(root):
            download = Download(job, token, os.path.abspath("progress"))
            log(f"{len(download.files)} files, {download.gauge.total} bytes, to {root}")
            download.run()
    except Fatal as error:
        log(f"error: {error}")
        return error.code
    except (OSError, ValueError, KeyError, TypeError) as error:
        log(f"error: manifest.json: {type(error).__name__}: {error}")
        return 2
    log("complete: every file is verified")
    return 0
