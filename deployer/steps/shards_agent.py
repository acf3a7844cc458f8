"""A short mode of the download agent as one exec (re-hash, clean); it answers in JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployer.agents.bundle import NAME
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.remote.transport import Transport
from deployer.shell import words
from deployer.state import Manifest
from deployer.steps.shards_download import LOCKED, NO_PYTHON, job_files
from deployer.steps.shards_facts import find_python

Row = Mapping[str, Any]

# stdin: the agent, its manifest, then what the mode reads. The folder is gone when it ends.
_RUN = r"""
import os, shutil, sys, tempfile
place = tempfile.mkdtemp(prefix="deployer-agent-")
code = 1
try:
    for name, size in (("fetch.pyz", int(sys.argv[1])), ("manifest.json", int(sys.argv[2]))):
        data = sys.stdin.buffer.read(size)
        if len(data) != size:
            sys.exit("%s: %d of %d bytes arrived" % (name, len(data), size))
        with open(os.path.join(place, name), "wb") as file:
            file.write(data)
    os.chdir(place)
    sys.path.insert(0, os.path.join(place, "fetch.pyz"))
    del sys.argv[1:3]
    from deployer.agents.fetch.main import main
    code = main()
finally:
    os.chdir("/")
    shutil.rmtree(place, ignore_errors=True)
sys.exit(code)
"""


@dataclass(frozen=True)
class Said:
    """The whole answer: the agent's exit code, its JSON lines, and all other lines."""

    exit: int
    rows: tuple[Row, ...]
    log: tuple[str, ...]

    @property
    def error(self) -> str:
        """The last word of a failure, '' when there is none."""
        errors = [line.partition("error: ")[2] for line in self.log if "error: " in line]
        return errors[-1] if errors else ""


class Lines:
    """Cuts what comes into lines, as it comes."""

    def __init__(self, on_row: Callable[[Row], None]) -> None:
        self.on_row = on_row
        self.rest = b""
        self.rows: list[Row] = []
        self.log: list[str] = []

    def __call__(self, data: bytes) -> None:
        *whole, self.rest = (self.rest + data).split(b"\n")
        for line in whole:
            text = line.decode("utf-8", "replace")
            row = _row(text)
            if row is None:
                self.log.append(text)
                continue
            if "progress" not in row:
                self.rows.append(row)
            self.on_row(row)


def _row(text: str) -> Row | None:
    try:
        row = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def run_agent(
    transport: Transport,
    want: Deployment,
    manifest: Manifest,
    mode: Sequence[str],
    *,
    more: bytes = b"",
    timeout_s: float,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Said:
    """Runs `mode` of the agent to its end; `on_row` sees each JSON line as it comes.

    Raises StepFailed when the target has no Python, or when another download holds the folder;
    Unreachable.
    """
    files = job_files(want, manifest)
    agent, job = files[NAME], files["manifest.json"]
    arguments = words([_RUN, str(len(agent)), str(len(job)), *mode])
    script = (
        find_python(want.playbook.engine.venv)
        + f'[ -n "$py" ] || exit {NO_PYTHON}\n'
        + f'exec "$py" -I -S -c {arguments}\n'
    )
    lines = Lines(on_row)
    answer = transport.run(script, stdin=agent + job + more, timeout_s=timeout_s, on_stdout=lines)
    lines(b"\n")
    other = [line for line in [*lines.log, *answer.error_text.splitlines()] if line.strip()]
    said = Said(answer.exit, tuple(lines.rows), tuple(other))
    if said.exit == NO_PYTHON:
        raise StepFailed(
            "there is no python3 (3.9 or newer) on the target, and the venv has none yet",
            where=want.id,
            fix=f"install python3 there, or run `deploy up {want.id} --only venv`",
        )
    if said.exit == LOCKED:
        raise StepFailed(said.error, where=want.id, fix="wait for it, or stop it yourself")
    return said


def failed(want: Deployment, what: str, said: Said) -> StepFailed:
    """The error of an exec that ended otherwise than it should."""
    return StepFailed(
        f"{what}: {said.error or f'exit {said.exit}'}",
        where=want.id,
        fix=f"check {want.playbook.model.path} on the target",
        evidence=said.log[-8:],
    )
