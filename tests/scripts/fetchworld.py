"""A supervisor in a process of its own, over workers that are a few lines of Python each."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployer.agents.bundle import fetch_agent

ROOT = Path(__file__).resolve().parents[2]

# Runs as `driver`, in the job's folder: the real supervisor, looking twenty times a second.
DRIVER = """
import json, os, sys
from deployer.agents.fetch import child, supervisor
from deployer.agents.fetch.common import Fatal, log
from deployer.agents.fetch.manifest import Job
from deployer.agents.fetch.methods import Method

sys.argv[0] = os.path.abspath("fetch.pyz")
supervisor.EVERY_S = 0.05
rows = json.load(open("ladder.json"))
real = supervisor.methods.ladder

def ladder(job, token, environ):
    return [
        Method(
            row["name"],
            [sys.executable, "-S", "-c", row["code"]],
            environ,
            lambda row=row: row["obstacle"],
            frozenset(row["passing"]),
        )
        for row in rows
    ]

supervisor.methods.ladder = ladder
if os.path.exists("settle.txt"):
    code = open("settle.txt").read()
    supervisor.methods.settle = lambda environ: Method(
        "settle", [sys.executable, "-S", "-c", code], environ
    )
try:
    sys.exit(supervisor.supervise(Job.load(os.path.abspath("manifest.json")), ""))
except Fatal as error:
    log(f"error: {error}")
    sys.exit(error.code)
"""

# What every worker's code begins with.
PRELUDE = """
import json, os, signal, sys, time
job = json.load(open("manifest.json"))
contents = json.load(open("contents.json"))
def say(**row):
    os.write(3, (json.dumps(row) + "\\n").encode())
def fail(code, text):
    say(error=text, code=code)
    sys.exit(code)
def put(name, count=None):
    "Writes the first `count` bytes of a file into NAME.part."
    with open(os.path.join(job["path"], name + ".part"), "wb") as stream:
        stream.write(contents[name].encode()[:count])
def put_all():
    for row in job["files"]:
        put(row["path"])
"""


@dataclass
class World:
    """One job's folder, its model's folder and its ladder."""

    folder: Path
    contents: dict[str, str] = field(default_factory=lambda: {"a.txt": "aaaa", "b.txt": "bbbbbbbb"})
    limits: dict[str, float] = field(default_factory=dict)
    ladder: list[dict[str, Any]] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """The model's folder."""
        return self.folder / "model"

    def method(
        self, name: str, code: str, *, obstacle: str = "", passing: tuple[int, ...] = ()
    ) -> None:
        """One more rung."""
        row = {"name": name, "code": PRELUDE + code, "obstacle": obstacle, "passing": passing}
        self.ladder.append(row)

    def settle(self, code: str) -> None:
        """Runs instead of the worker that hashes."""
        (self.folder / "settle.txt").write_text(PRELUDE + code)

    def start(self) -> subprocess.Popen[str]:
        """The supervisor, its log on a pipe."""
        files = [
            {"path": name, "size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
            for name, text in self.contents.items()
        ]
        limits = {"stall_s": 0.4, "phase_s": 0.6, "floor_bytes_per_s": 0, **self.limits}
        job = {"repo": "a/b", "commit": "c", "path": str(self.root), "files": files}
        self.root.mkdir(exist_ok=True)
        (self.folder / "fetch.pyz").write_bytes(fetch_agent())
        (self.folder / "manifest.json").write_text(json.dumps({**job, "limits": limits}))
        (self.folder / "contents.json").write_text(json.dumps(self.contents))
        (self.folder / "ladder.json").write_text(json.dumps(self.ladder))
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self) -> tuple[int, str]:
        """(exit code, log without times)."""
        process = self.start()
        text, _ = process.communicate(timeout=30)
        return process.returncode, "".join(line[9:] + "\n" for line in text.splitlines())

    def progress(self) -> dict[str, Any]:
        """The last progress line."""
        row: dict[str, Any] = json.loads((self.folder / "progress").read_text())
        return row

    def complete(self) -> bool:
        """Every file under its name, with its content, and nothing unfinished."""
        return all(
            (self.root / name).read_text() == text for name, text in self.contents.items()
        ) and not list(self.root.glob("*.part"))


def wait_for(path: Path, limit_s: float = 10.0) -> str:
    """The content of a file that a worker writes, once it is there."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.01)
    raise TimeoutError(f"{path} was not written within {limit_s} s")


def alive(pid: int) -> bool:
    """Is there such a process, and no zombie?"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def gone(pid: int, limit_s: float = 1.0) -> bool:
    """Does the process end within so long?"""
    ends = time.monotonic() + limit_s
    while alive(pid):
        if time.monotonic() > ends:
            os.kill(pid, signal.SIGKILL)  # no test leaves its workers behind
            return False
        time.sleep(0.01)
    return True
