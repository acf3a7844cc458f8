"""What `deploy gc` frees on this machine: below `.deploy/`, beside the inventory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deployer.errors import DeployError
from deployer.kept import Kept
from deployer.names import shown
from deployer.state import HostState
from deployer.state_file import StateFile

KEPT_RUNS = 200
"""Records of runs, a host."""
YOUNG_S = 86400.0
"""A file younger than this may belong to a run that has not written its state yet."""
RETURN_S = 30 * 86400.0
"""So long after an upgrade the state of the older version is kept, for a return to it."""


@dataclass(frozen=True)
class Local:
    """A file that may go, or stays; `size` in bytes."""

    path: Path
    size: int
    why: str
    goes: bool = True


def look_here(deploy_dir: Path, now: float | None = None) -> list[Local]:
    """Run records beyond the newest, recipes that no launch of any host needs, and what is kept
    beside the state files.

    Raises DeployError: with a state file that cannot be read, nothing is known to be needless.
    """
    now = time.time() if now is None else now
    found = []
    runs: dict[str, list[Path]] = {}
    for path in sorted((deploy_dir / "runs").glob("*.jsonl")):
        runs.setdefault(_host_of(path), []).append(path)
    for host, paths in runs.items():
        why = f"older than the newest {KEPT_RUNS} runs of {host}"
        seen = [(path, _facts(path)) for path in paths[:-KEPT_RUNS]]
        found += [Local(path, facts.st_size, why) for path, facts in seen if facts is not None]
    keys = {
        launch.recipe
        for state in all_states(deploy_dir).values()
        for own in state.deployments.values()
        for launch in own.launches
        if launch.recipe
    }
    for path in Kept(deploy_dir / "kept").unused(keys):
        facts = _facts(path)
        if facts is not None and now - facts.st_mtime > YOUNG_S:
            found.append(Local(path, facts.st_size, "no launch that is remembered needs it"))
    return [*found, *_backups(deploy_dir / "state", now)]


def _facts(path: Path) -> os.stat_result | None:
    """None when a run that writes its state has renamed it, or another `gc` has removed it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _backups(folder: Path, now: float) -> list[Local]:
    """Copies of state files that StateFile makes, and what a killed run left of one."""
    found = []
    for path in sorted(folder.glob("*.json.*")):
        kind = path.name.rpartition(".json.")[2]
        if (facts := _facts(path)) is None:
            continue
        age = now - facts.st_mtime
        if kind == "prev":
            found.append(Local(path, facts.st_size, "the state before the last change", False))
        elif kind.startswith("schema"):
            old = age > RETURN_S
            why = f"of a version of deploy from before {'30 days ago' if old else 'an upgrade'}"
            found.append(Local(path, facts.st_size, why, old))
        elif kind in ("new", "prev.new") and age > YOUNG_S:
            found.append(Local(path, facts.st_size, "half of a file that a killed run wrote"))
    return found


def all_states(deploy_dir: Path) -> dict[str, HostState]:
    """Host -> its recorded state. Raises StateUnreadable."""
    folder = deploy_dir / "state"
    names = sorted(path.name.removesuffix(".json") for path in folder.glob("*.json"))
    return {name: StateFile(folder, name).load() for name in names}


def free_here(found: Sequence[Local]) -> None:
    """Removes those that may go. Raises DeployError for the first that cannot be."""
    for one in found:
        if not one.goes:
            continue
        try:
            one.path.unlink(missing_ok=True)
        except OSError as error:
            raise DeployError(
                f"it cannot be removed: {error.strerror or error}",
                where=shown(one.path),
                fix="correct the permissions, then run `deploy gc` again",
            ) from error


def _host_of(path: Path) -> str:
    """Of `20261130-065012-ab12-kpro5.jsonl`."""
    return path.stem.split("-", 3)[-1]
