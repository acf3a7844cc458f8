"""`.deploy/kept/`: recipes and locks of the launches that can be made again, each by its sha256."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from pydantic import ValidationError

from deployer.errors import DeployError
from deployer.names import shown
from deployer.recipe import Recipe
from deployer.state_file import make_folder, sync_folder, write_synced


class Kept:
    """The folder. A file has its name only when it is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, recipe: Recipe, lock_text: str) -> str:
        """Keeps both, and returns the recipe's key. Raises DeployError."""
        self._write(f"{recipe.lock}.lock", lock_text.encode())
        self._write(f"{recipe.key}.json", recipe.text().encode())
        return recipe.key

    def load(self, key: str) -> tuple[Recipe, str]:
        """The recipe and its lock's text. Raises DeployError: not there, changed, not readable."""
        raw = self._read(f"{key}.json", key)
        try:
            recipe = Recipe.model_validate_json(raw)
        except ValidationError as error:
            raise DeployError(
                f"a kept recipe is of another version of deploy ({error.error_count()} problems)",
                where=shown(self.folder / f"{key}.json"),
                fix="use the version of deploy that wrote it",
            ) from None
        return recipe, self._read(f"{recipe.lock}.lock", recipe.lock).decode()

    def load_or_none(self, key: str) -> tuple[Recipe, str] | None:
        """As `load`; None for '' and for what cannot be had."""
        try:
            return self.load(key) if key else None
        except DeployError:
            return None

    def has(self, key: str) -> bool:
        """Is the recipe there?"""
        return bool(key) and (self.folder / f"{key}.json").is_file()

    def unused(self, keys: Collection[str]) -> list[Path]:
        """Files that none of the recipes `keys` needs; no lock while one cannot be read."""
        needed, ends = {f"{key}.json" for key in keys}, {".json", ".lock", ".new"}
        for key in keys:
            try:
                if self.has(key):
                    needed.add(f"{self.load(key)[0].lock}.lock")
            except DeployError:
                # Which lock it needs is not known.
                ends.discard(".lock")
        if not self.folder.is_dir():
            return []
        return sorted(
            path
            for path in self.folder.iterdir()
            if path.suffix in ends and path.name not in needed
        )

    def _write(self, name: str, raw: bytes) -> None:
        path = self.folder / name
        try:
            if path.exists() and path.read_bytes() == raw:
                return
            make_folder(self.folder)
            temporary = path.with_name(f"{name}.new")
            write_synced(temporary, raw)
            temporary.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            raise DeployError(
                f"what a launch is made from cannot be kept: {error.strerror or error}",
                where=shown(path),
                fix="free space or correct the permissions, then run the same command again",
            ) from error

    def _read(self, name: str, digest: str) -> bytes:
        path = self.folder / name
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DeployError(
                f"what that launch was made from cannot be read: {error.strerror or error}",
                where=shown(path),
                fix="name another launch (`deploy rollback` lists them)",
            ) from error
        if hashlib.sha256(raw).hexdigest() != digest:
            raise DeployError(
                "what that launch was made from has been changed since",
                where=shown(path),
                fix="name another launch (`deploy rollback` lists them)",
            )
        return raw
