"""A YAML file as plain data that still knows where each value stands."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer.errors import DocumentError
from deployer.names import shown
from deployer.yamltree import At, Key, Node, Position, place, position_after, tree

MAX_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Document:
    """`data` is the file's top mapping; `keys` and `values` say where a path's key, value begin."""

    path: Path
    data: dict[Key, Any]
    keys: Mapping[At, Position]
    values: Mapping[At, Position]

    def position(self, at: At, *, key: bool = False) -> Position:
        """Of the value (or key) at `at`; of the nearest parent when `at` is not in the file."""
        first, second = (self.keys, self.values) if key else (self.values, self.keys)
        while at:
            found = first.get(at) or second.get(at)
            if found:
                return found
            at, first, second = at[:-1], self.keys, self.values
        return Position(1, 1)

    def where(self, at: At = (), *, key: bool = False) -> str:
        """`inventory/kpro5.yaml:12:7`."""
        return place(self.path, self.position(at, key=key))

    def name(self, at: At) -> str:
        """`hosts.kpro5.gpus[0].address`; an empty string for the top."""
        text = ""
        value: Any = self.data
        for part in at:
            text += f"[{part}]" if isinstance(value, list) else f".{part}" if text else str(part)
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                value = None
        return text

    def error(self, at: At, what: str, *, fix: str = "", key: bool = False) -> DocumentError:
        """An error at the place of `at`, ready to be raised."""
        return DocumentError(what, where=self.where(at, key=key), fix=fix)


def load(path: Path) -> Document:
    """Reads and parses one YAML file whose top is a mapping. Raises DocumentError."""
    return parse(path, read_text(path))


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The UTF-8 text of a regular file of at most `limit` bytes. Raises DocumentError."""
    name = shown(path)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise DocumentError("is a folder, not a file", where=name, fix="name a file")
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError("is not a regular file", where=name, fix="name a regular file")
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except FileNotFoundError:
        raise DocumentError(
            "file not found", where=name, fix="create it, or correct the name"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(
            f"cannot be read: {reason}", where=name, fix="check the path and its permissions"
        ) from error
    if len(raw) > limit:
        raise DocumentError(
            f"the file is too large: {max(status.st_size, len(raw))} bytes, at most {limit}",
            where=name,
            fix="is it the right file? split an inventory into several files",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        raise DocumentError(
            f"not UTF-8 text: byte 0x{raw[error.start]:02x}",
            where=place(path, position_after(before)),
            fix="save the file as UTF-8",
        ) from None


def parse(path: Path, text: str) -> Document:
    """Parses `text`; `path` is only named in errors. Raises DocumentError."""
    keys: dict[At, Position] = {}
    values: dict[At, Position] = {}
    data = _expand(tree(path, text), (), keys, values)
    return Document(path, data, keys, values)


def _expand(node: Node, at: At, keys: dict[At, Position], values: dict[At, Position]) -> Any:
    """Plain data of `node`; fills the position maps."""
    values[at] = node.position
    if isinstance(node.value, list):
        return [_expand(child, (*at, i), keys, values) for i, child in enumerate(node.value)]
    if isinstance(node.value, dict):
        for key, position in node.keys.items():
            keys[(*at, key)] = position
        return {k: _expand(child, (*at, k), keys, values) for k, child in node.value.items()}
    return node.value
