"""The state file of a host: a crash at any moment leaves one whole version of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pydantic import ValidationError

from deployer.errors import DeployError, StateUnreadable
from deployer.names import shown
from deployer.state import SCHEMA, HostState

MAX_BYTES = 64 * 1024 * 1024


class StateFile:
    """`<dir>/<host>.json`; `dir` is `.deploy/state`. One writer at a time: the lock's holder."""

    def __init__(self, dir: Path, host: str) -> None:
        self.path = dir / f"{host}.json"
        self.previous = dir / f"{host}.json.prev"
        self._host = host
        self._older = 0
        """The older schema of the file that was read; 0 when it was of this one."""

    def load(self) -> HostState:
        """The recorded state, a fresh one when there is no file. Raises StateUnreadable."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return HostState(host=self._host)
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
        if len(raw) > MAX_BYTES:
            raise self._unreadable(f"it has more than {MAX_BYTES} bytes")
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self._unreadable(f"it is not JSON: {error}") from None
        self._readable(data)
        try:
            state = HostState.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise self._unreadable(f"{key}: {first['msg']}") from None
        if state.host != self._host:
            raise self._unreadable(f"it belongs to host {state.host!r:.80}")
        return state

    def _readable(self, data: object) -> None:
        """Raises what to do about a version that is not ours; an older one is made ours."""
        version = data.get("schema_version") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(version, int) or version < 1:
            raise self._unreadable(f"expected schema_version 1 to {SCHEMA}, found {version!r:.40}")
        if version > SCHEMA:
            older = self._of_schema(SCHEMA)
            back = (
                f", or go back to what this one wrote last: `cp {shown(older)} {shown(self.path)}` "
                "(later launches are found again on the host)"
                if older.exists()
                else ""
            )
            raise StateUnreadable(
                f"the state file has schema {version}; this deployer reads up to {SCHEMA}",
                where=shown(self.path),
                fix=f"use the newer deployer that wrote it{back}",
            )
        if version < SCHEMA:
            self._older = version
            data["schema_version"] = SCHEMA

    def _of_schema(self, version: int) -> Path:
        """Where the last file of an older schema is kept, for a return to an older deployer."""
        return self.path.with_name(f"{self.path.name}.schema{version}")

    def save(self, state: HostState) -> None:
        """Replaces the file; the version before it becomes `.prev`. Raises DeployError."""
        raw = state.model_dump_json(indent=1).encode() + b"\n"
        temporary = self.path.with_name(f"{self.path.name}.new")
        try:
            make_folder(self.path.parent)
            write_synced(temporary, raw)
            self._keep_previous()
            if self._older and self.previous.exists():
                write_synced(self._of_schema(self._older), self.previous.read_bytes())
            self._older = 0
            temporary.replace(self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise DeployError(
                f"the state file cannot be written: {error.strerror or error}",
                where=shown(self.path),
                fix="free space or correct the permissions, then run the same command again",
            ) from error

    def _keep_previous(self) -> None:
        """A second name for the current version, so that the first can be replaced at once."""
        link = self.previous.with_name(f"{self.previous.name}.new")
        link.unlink(missing_ok=True)
        try:
            link.hardlink_to(self.path)
        except FileNotFoundError:
            return
        except OSError:  # a filesystem without hard links
            write_synced(link, self.path.read_bytes())
        link.replace(self.previous)
        # When both names were links of one file already, rename leaves the source in place.
        link.unlink(missing_ok=True)

    def _unreadable(self, reason: str) -> StateUnreadable:
        restore = (
            f"`cp {shown(self.previous)} {shown(self.path)}` restores the previous version, or "
            if self.previous.exists()
            else ""
        )
        return StateUnreadable(
            f"the state file cannot be used: {reason}",
            where=shown(self.path),
            fix=f"{restore}move it away and run `deploy doctor {self._host}`: the state is rebuilt "
            "from the host",
        )


def make_folder(folder: Path) -> None:
    """Makes `folder`, readable by its owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_synced(path: Path, raw: bytes) -> None:
    """Writes a new file (mode 0600) and waits until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
