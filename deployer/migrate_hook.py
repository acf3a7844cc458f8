"""The cut-over by a command of the user on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from deployer.hook_run import run_hook, unrunnable
from deployer.inventory import HookCutover
from deployer.migrate_gap import Gap, Meter
from deployer.migrate_way import BACK_S, PHASE, Direction, Way, answered_at, unmeasured
from deployer.model import Facts
from deployer.shell import words


class HookWay(Way):
    """A command of the user on this machine."""

    @property
    def hook(self) -> HookCutover:
        """Its part of the inventory."""
        if self.rules.hook is None:
            raise TypeError("no hook is configured")
        return self.rules.hook

    def words(self) -> str:
        """See Way."""
        rules = self.hook
        names = " ".join(f"{k}={v}" for k, v in self.variables("forward").items())
        probe = f"; the gap is measured at {rules.probe_url}" if rules.probe_url else ""
        return (
            f"run here: {words(rules.command)} (at most {rules.timeout_s:g} s) with {names}{probe}"
        )

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """The program is there and may be run, and clients get answers now."""
        found = [] if self.record.cut else unmeasured(self.hook.probe_url)
        program = self.hook.command[0]
        path = self.destination.environ.get("PATH", os.defpath)
        there = shutil.which(program, path=path)
        why = unrunnable(Path(there)) if there is not None else ""
        if why:
            what = f"cutover.hook.command: {there} cannot be run here: {why}"
            return [*found, (what, "correct that file")]
        if there is not None:
            return found
        where = f" (in {Path.cwd()})" if "/" in program and not program.startswith("/") else ""
        what = f"cutover.hook.command: {program} cannot be run here{where}"
        return [*found, (what, "correct the path, or make it executable (chmod +x)")]

    def variables(self, direction: Direction) -> dict[str, str]:
        """What the command finds in its environment besides ours."""
        loses, gets = self.sides(direction)
        return {
            "DEPLOY_DIRECTION": direction,
            "DEPLOY_FROM": loses.want.id,
            "DEPLOY_TO": gets.want.id,
            "DEPLOY_FROM_URL": loses.want.worker_url,
            "DEPLOY_TO_URL": gets.want.worker_url,
            "DEPLOY_MODEL": gets.want.playbook.model.served_name,
            "DEPLOY_MIGRATION": self.record.id,
        }

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        _, gets = self.sides(direction)
        mark = gets.file.path.parent.parent / "hooks" / f"{self.record.id}.json"
        with Meter(self.hook.probe_url or "") as meter:
            variables, tick = self.variables(direction), self.tick(None)
            for line in run_hook(self.hook, variables, gets.environ, mark=mark, tick=tick):
                gets.note(PHASE, f"hook: {line}")
            gap = meter.settled(BACK_S)
        return gap if self.hook.probe_url else None

    def seen_by_clients(self, direction: Direction) -> str:
        """See Way."""
        return answered_at(self.hook.probe_url)
