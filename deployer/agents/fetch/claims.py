"""Which partial file becomes which file of the list, and what is left over. Pure.

Used on both sides: the controller's plan says what the agent will take over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from deployer.agents.fetch.holders import Holder
from deployer.agents.fetch.partials import HF_PLACE, Partial


class Wanted(Protocol):
    """A file of the list, as either side knows it; sizes in bytes, '' for an unknown hash."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def blob_id(self) -> str: ...


W = TypeVar("W", bound=Wanted)
_RSYNC = re.compile(r"(.+/)?\.(.+)\.[A-Za-z0-9]{6}")
"""rsync's name of a file that it receives."""


def plain(name: str) -> str:
    """A file name as text of one line: names of other people's files may hold anything."""
    return name if name.isprintable() else ascii(name)


def claim(
    found: Iterable[Partial], files: Sequence[W], there: Callable[[W], int]
) -> tuple[dict[str, Partial], list[tuple[Partial, str]]]:
    """(path of a file -> the partial to take over, [(partial that is left over, why)]).

    `there`: valid bytes that the file has without any of them; its size when it is verified.
    """
    by_name = {file.path: file for file in files}
    by_hash: dict[str, list[W]] = {}
    for file in files:
        for etag in {file.sha256, file.blob_id} - {""}:
            by_hash.setdefault(etag, []).append(file)
    chosen: dict[str, Partial] = {}
    left: list[tuple[Partial, str]] = []
    for one in sorted(found, key=lambda one: (-one.prefix, one.path)):
        if one.name:
            meant = [by_name[one.name]] if one.name in by_name else []
        else:
            meant = by_hash.get(one.etag, [])
        # Files of the same content have the same hash: the first that still lacks bytes gets it.
        reasons = [_useless(one, file, there(file), chosen) for file in meant]
        if "" in reasons:
            chosen[meant[reasons.index("")].path] = one
        else:
            stray = "no file of the list is this one" if one.name else "no file has its hash"
            left.append((one, reasons[0] if reasons else stray))
    return chosen, left


def _useless(one: Partial, file: Wanted, there: int, chosen: dict[str, Partial]) -> str:
    """Why the file cannot go on from this partial; '' when it can."""
    if there >= file.size:
        return f"{file.path} is complete"
    if one.prefix > file.size or one.total not in (0, file.size):
        return f"it belongs to another version of {file.path}"
    if not one.prefix:
        return "none of its bytes can be trusted"
    if one.prefix <= there:
        return f"{file.path} has more bytes already"
    return f"a longer one of {file.path} is taken over" if file.path in chosen else ""


def foreign(holder: Holder, names: Iterable[str], ours: bool) -> bool:
    """True for a process of somebody else that downloads a file of the list into this folder.

    `ours`: a download of our own runs; then NAME.part is its work.
    """
    path = holder.path
    if path.startswith(HF_PLACE + "/"):
        return True
    if ours and (path.startswith(".deployer/") or path.endswith((".part", ".part.map"))):
        return False
    temp = _RSYNC.fullmatch(path)
    base = (temp.group(1) or "") + temp.group(2) if temp else path
    return any(base in (name, name + ".part", name + ".aria2") for name in names)
