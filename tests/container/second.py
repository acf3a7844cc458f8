"""Runs of `deploy` on kpro6 from a copy of the lab's inventory, read event by event."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from lab import INVENTORY, Machine, Result, run

HOST = "kpro6"
LOCK = "/var/lib/deployer/lock"
PROGRAM = str(Path(sys.executable).parent / "deploy")
Event = dict[str, Any]


class Copy:
    """inventory/ and playbooks/ in a folder of its own; so are state and local lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(INVENTORY.parent / "playbooks", folder / "playbooks")
        document = yaml.safe_load((INVENTORY / f"{HOST}.yaml").read_text(encoding="utf-8"))
        ssh = document["hosts"][HOST]["ssh"]
        for key in ("identity_file", "known_hosts"):
            ssh[key] = str((INVENTORY / ssh[key]).resolve())
        (folder / "inventory").mkdir()
        text = yaml.safe_dump(document, sort_keys=False)
        (folder / "inventory" / f"{HOST}.yaml").write_text(text, encoding="utf-8")

    def deploy(self, *words: str, timeout_s: float = 300) -> Result:
        """Runs `deploy WORDS` to its end."""
        return run([PROGRAM, "-i", str(self.folder / "inventory"), *words], timeout_s=timeout_s)

    def up(self) -> Run:
        """Starts `deploy --jsonl up kpro6 --yes`."""
        return Run([PROGRAM, "--jsonl", "-i", str(self.folder / "inventory"), "up", HOST, "--yes"])

    def state(self) -> dict[str, Any]:
        """The recorded deployment."""
        text = (self.folder / ".deploy" / "state" / f"{HOST}.json").read_text(encoding="utf-8")
        deployment: dict[str, Any] = json.loads(text)["deployments"]["tiny"]
        return deployment


class Run:
    """A started `deploy`: its events as they come, and what it said to people."""

    DEADLINE_S = 240.0

    def __init__(self, argv: list[str]) -> None:
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "NO_COLOR": "1"},
        )
        self.events: list[Event] = []
        self.said = ""
        self._reader = threading.Thread(target=self._read_said, daemon=True)
        self._reader.start()
        # A run that says nothing must end too; then the reader of events sees the end.
        self._watchdog = threading.Timer(self.DEADLINE_S, self.process.kill)
        self._watchdog.start()

    def _read_said(self) -> None:
        assert self.process.stderr is not None
        self.said = self.process.stderr.read().decode("utf-8", "replace")

    def __iter__(self) -> Iterator[Event]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: Event = json.loads(line)
            self.events.append(event)
            yield event

    def until(self, wanted: Callable[[Event], bool]) -> Event | None:
        """Reads on to the first event that `wanted` accepts; None when the run ended before."""
        return next((event for event in self if wanted(event)), None)

    def signal(self, number: signal.Signals) -> None:
        """Sends it now."""
        self.process.send_signal(number)

    def end(self) -> int:
        """Reads the rest; the exit status (negative: the signal)."""
        for _ in self:
            pass
        code = self.process.wait(timeout=10)
        self._watchdog.cancel()
        self._reader.join(timeout=10)
        return code

    def planned(self) -> dict[str, str]:
        """State of each step in the first plan."""
        return {
            event["step"]: event["state"]
            for event in self.events
            if event["event"] == "step_planned"
        }

    def named(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event["event"] == kind]


def is_free(host: Machine) -> bool:
    """Is there no lock on the host, and no scrap of one?"""
    return host.sh('ls "$1"* 2>/dev/null', LOCK).out == ""
