"""The cut-over by a command of the user on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deployer.errors import StepFailed
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
        if shutil.which(program, path=path) is not None:
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
        with Meter(self.hook.probe_url or "") as meter:
            lines = run_hook(self.hook, self.variables(direction), gets.environ)
            for line in lines:
                gets.note(PHASE, f"hook: {line}")
            gap = meter.settled(BACK_S)
        return gap if self.hook.probe_url else None

    def seen_by_clients(self, direction: Direction) -> str:
        """See Way."""
        return answered_at(self.hook.probe_url)


def run_hook(
    rules: HookCutover, variables: Mapping[str, str], environ: Mapping[str, str]
) -> list[str]:
    """Runs the command to its end and returns its output. Raises StepFailed with it as evidence.

    At the deadline its whole process group is killed.
    """
    shown = words(rules.command)
    try:
        process = subprocess.Popen(
            rules.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, **variables},
            start_new_session=True,
        )
    except OSError as error:
        raise StepFailed(
            f"the hook cannot be run: {error.strerror or error}",
            where=shown,
            fix="correct cutover.hook.command",
        ) from error
    try:
        raw, _ = process.communicate(timeout=rules.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raw, _ = process.communicate()
        raise StepFailed(
            f"the hook still ran after {rules.timeout_s:g} s and was killed",
            where=shown,
            fix="correct it, or raise cutover.hook.timeout_s; it will be run again",
            evidence=_lines(raw),
        ) from None
    except BaseException:
        os.killpg(process.pid, 15)
        process.wait()
        raise
    if process.returncode != 0:
        raise StepFailed(
            f"the hook ended with status {process.returncode}",
            where=shown,
            fix="correct it, then run the same command again; or --abort",
            evidence=_lines(raw),
        )
    return list(_lines(raw))


def _lines(raw: bytes) -> tuple[str, ...]:
    return tuple(raw.decode("utf-8", "replace").splitlines()[-40:])
