"""`deploy up` with one small step in place of the eight: it writes a mark on the target.

    fleet_up.py INVENTORY MARK [--hold] [--pairs N FOLDER...] OPTIONS OF `up`...

Everything else is the real thing: connections, locks, rollout, output, exit code. `--hold`: the
step does not end by itself. With `--pairs`, N times two runs start in the same moment, one with
each FOLDER as its inventory; what they said and their codes are printed as JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer.cli import main, up
from deployer.deployment import Deployment
from deployer.model import Change as ModelChange
from deployer.model import Facts, Plan, Probe, ProbeOutput, Where, WriteFile
from deployer.remote.socket import import_paramiko
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext

PATH = "/var/lib/deployer/mark"


@dataclass(frozen=True)
class Mark:
    """What stands in the file."""

    text: str


class MarkStep(Step):
    """The file holds the wanted text."""

    name = "mark"

    def __init__(self, wanted: str, hold: bool) -> None:
        self.wanted = wanted
        self.hold = hold

    def probes(self, want: Deployment) -> list[Probe]:
        """One."""
        return [Probe("mark", Where.HOST, f"cat {PATH} 2>/dev/null\nexit 0", _parse)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Write it, or nothing."""
        if facts.need(Mark).text == self.wanted:
            return Plan.nothing("the mark is there")
        action = WriteFile(Where.HOST, PATH, self.wanted.encode())
        return Plan.change("another mark", ModelChange("write the mark", "as wanted", action))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Writes it; held, it goes on for ever."""
        while self.hold:
            context.progress("held", 0, 0)
            time.sleep(0.02)
        super().apply(context, facts, plan)


def _parse(output: ProbeOutput) -> Mark:
    return Mark(output.text)


def run(inventory: str, mark: str, hold: bool, words: list[str]) -> int:
    """One `up`; its exit code."""
    up.all_steps = lambda retry=False: [MarkStep(mark, hold)]
    sys.argv = ["deploy", "-i", inventory, "up", *words]
    try:
        main.main()
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("main returned")


def pair(folders: tuple[str, str], mark: str, words: list[str]) -> dict[str, Any]:
    """Two runs at once; the one that is refused ends by itself, then the other is stopped."""
    at, children = time.monotonic() + 0.05, {}
    for folder in folders:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            os.dup2(writer, 2)
            time.sleep(max(0.0, at - time.monotonic()))
            os._exit(run(str(Path(folder) / "inventory"), mark, True, words))
        os.close(writer)
        children[pid] = reader
    first, status = os.wait()
    [other] = [pid for pid in children if pid != first]
    os.kill(other, signal.SIGTERM)
    _, rest = os.waitpid(other, 0)
    told = {pid: os.fdopen(reader).read() for pid, reader in children.items()}
    return {
        "refused": [first, os.waitstatus_to_exitcode(status), told[first]],
        "winner": [other, os.waitstatus_to_exitcode(rest), told[other]],
    }


def begin() -> int:
    """As the command line says."""
    inventory, mark, *words = sys.argv[1:]
    if words and words[0] == "--pairs":
        import_paramiko()
        count, one, two, *words = words[1:]
        for number in range(int(count)):
            print(json.dumps(pair((one, two), f"{mark}{number}", words)), flush=True)
        return 0
    hold = "--hold" in words
    return run(inventory, mark, hold, [word for word in words if word != "--hold"])


if __name__ == "__main__":
    sys.exit(begin())
