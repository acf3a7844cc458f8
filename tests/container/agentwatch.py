"""Looks at a target's processes many times a second: how many download agents are alive at once."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from target import Target

EVERY_S = 0.05
WATCH = r"""
import json, os, select, sys
def read(name):
    try:
        with open(name, "rb") as stream:
            return stream.read()
    except OSError:
        return b""
def seen():
    found = {}
    for name in os.listdir("/proc"):
        words = read("/proc/%s/cmdline" % name).split(b"\0")[:-1] if name.isdigit() else []
        at = [i for i, word in enumerate(words) if os.path.basename(word) == b"fetch.pyz"]
        row = read("/proc/%s/stat" % name).rpartition(b")")[2].split()
        if not at or len(row) < 20 or row[0] in b"ZX" or b"attach" in words:
            continue
        environ = read("/proc/%s/environ" % name).split(b"\0")
        job = [word[13:].decode() for word in environ if word.startswith(b"DEPLOYER_JOB=")]
        mode = (words[at[0] + 1:] or [b"supervise"])[0].decode()
        found[int(name), int(row[19])] = [int(row[1]), mode, *(job or ["?"])]
    return found
said, looks = None, 0
while not select.select([0], [], [], float(sys.argv[1]))[0]:
    first = seen()
    # Who is in both looks was alive all the time between them: these lived at once.
    again = seen() if first else {}
    now = [[*key, *first[key]] for key in sorted(first) if key in again]
    looks += 1
    if now != said:
        print("agents", json.dumps([looks, now]), flush=True)
        said = now
print("agents", json.dumps([looks, []]), flush=True)
"""


@dataclass(frozen=True)
class Agent:
    """A process of a download: `mode` is the word after fetch.pyz, `job` its DEPLOYER_JOB."""

    pid: int
    start: int
    parent: int
    mode: str
    job: str


@dataclass
class AgentWatch:
    """Runs on a target until `stop`, also across its reboots. `seen`: what was alive at once."""

    target: Target
    seen: list[list[Agent]] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._since = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            words = self.target.exec("python3", "-I", "-S", "-c", WATCH, str(EVERY_S))
            pipe = subprocess.PIPE
            with subprocess.Popen(
                words, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
            ) as process:
                self._process = process
                assert process.stdout is not None
                looks = 0
                for line in process.stdout:
                    # A reboot may cut a line; and docker tells its own errors on stdout.
                    if line.startswith(b"agents ") and line.endswith(b"\n"):
                        looks, rows = self._row(line.removeprefix(b"agents "))
                        self._see([Agent(*row) for row in rows])
                self.looks += looks
            self._see([])
            self._end.wait(0.05)

    def _see(self, agents: list[Agent]) -> None:
        top = min(agents, key=lambda agent: agent.start, default=None)
        if top is None or not self.alive or top.pid not in [agent.pid for agent in self.alive]:
            self._since = time.monotonic()
        self.seen.append(agents)

    @staticmethod
    def _row(line: bytes) -> tuple[int, list[list[Any]]]:
        looks, rows = json.loads(line)
        return looks, rows

    def settled_s(self) -> float:
        """How long the agent that is alive has been there; 0 when none is."""
        return time.monotonic() - self._since if self.alive else 0.0

    @property
    def alive(self) -> list[Agent]:
        """The agents of the latest look."""
        return self.seen[-1] if self.seen else []

    def stop(self) -> None:
        """Ends it."""
        self._end.set()
        deadline = time.monotonic() + 20
        while self._thread.is_alive():
            assert time.monotonic() < deadline, "the watch on the agents does not end"
            process = self._process
            if process is not None and process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            self._thread.join(0.1)

    def faults(self) -> list[str]:
        """Moments at which more was alive than one supervisor and one child of it."""
        return [why for agents in self.seen if (why := too_many(agents))]


def too_many(agents: list[Agent]) -> str:
    """Why these may not live at once; '' when they may."""
    pids = {agent.pid for agent in agents}
    # A child between fork and exec still has its parent's command line.
    tops = [agent for agent in agents if agent.parent not in pids]
    children = [agent for agent in agents if agent.parent in pids and agent.mode != "supervise"]
    jobs = {agent.job for agent in agents}
    if len(tops) > 1 or len(children) > 1 or len(jobs) > 1:
        return " and ".join(f"{a.mode} {a.pid} of {a.job} (parent {a.parent})" for a in agents)
    return ""
