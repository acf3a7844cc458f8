"""Faults of the hub: which request one strikes, and where in the body.

A fault is a JSON object. It selects requests by `where` (hub, cdn, cas), `method`, `match` (regex
on the file's name, or on the path where no file is meant), `ranged` (has a Range header), `struck`
(an earlier request for the same file met a fault), `client` (a machine's name or address), `skip` n
and `times` n (default: for ever).
The first fault of the list that fits is the request's only one. What it does:

    {"do": "stall"}     up to the cut, then silence (for `secs`, then FIN)
    {"do": "drip", "bps": 1}        up to the cut at full speed, then so many bytes a second
    {"do": "reset"}     up to the cut, then RST        {"do": "truncate"}   up to the cut, then FIN
    {"do": "corrupt"}   flip one byte at the cut       {"do": "norange"}    200 with the whole file
    {"do": "wrongrange", "start": n | "total": n | "omit": true}    a 206 for something else
    {"do": "gzip"}      a compressed body              {"do": "slowhead", "bps": 1}  a slow header
    {"do": "status", "code": 503, "retry_after": 2}    {"do": "hang"}       accept, never answer
    {"do": "redirect", "to": "self" | "cdn"}           {"do": "drop"}       FIN before any answer
    {"do": "shrink"}    as if the file ended at the cut     {"do": "chunked"}   no Content-Length
    {"do": "portal"}    200 with a login page, as in a guest network

The cut is `after` (bytes of this body) or `at` (offset in the file); a float below 1 is a fraction.
With `at`, requests that do not reach the cut are neither hit nor counted. `{"set": {...}}` is no
fault but a setting that holds as long as the list does.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Fault = dict[str, Any]
CUTS = frozenset({"stall", "drip", "reset", "truncate"})
IN_BODY = CUTS | {"corrupt", "norange", "wrongrange", "gzip", "slowhead", "shrink", "chunked"}
"""These strike only requests that a body answers; a redirect or a listing has none."""
ACTIONS = IN_BODY | {"status", "hang", "redirect", "drop", "portal"}
KEYS = frozenset(
    "where method match ranged struck client skip times do at after bps secs code retry_after "
    "start total omit to".split()
)


@dataclass(frozen=True)
class Preset:
    """A fault with a name; `parts` are faults and settings."""

    name: str
    text: str
    parts: tuple[Fault, ...]


def read_presets(path: Path) -> dict[str, Preset]:
    """The named faults of a table (its form: the first lines of faults.txt)."""
    rows: list[tuple[str, str, list[Fault]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            rows[-1][2].append(checked(json.loads(line)))
        elif line and not line.startswith("#"):
            name, text = line.split(maxsplit=1)
            rows.append((name, text, []))
    return {name: Preset(name, text, tuple(parts)) for name, text, parts in rows}


def checked(fault: Fault) -> Fault:
    """The fault itself. Raises ValueError for what the hub would not understand."""
    if set(fault) == {"set"}:
        return fault
    if unknown := set(fault) - KEYS:
        raise ValueError(f"a fault has no {sorted(unknown)}")
    if fault.get("do") not in ACTIONS:
        raise ValueError(f"no such fault: {fault.get('do')!r}")
    try:
        re.compile(fault.get("match", ""))
    except re.error as error:
        raise ValueError(f"match {fault['match']!r}: {error}") from error
    return fault


@dataclass(frozen=True)
class Span:
    """Bytes first..last (inclusive) of a file of `size` bytes."""

    first: int
    last: int
    size: int


@dataclass(frozen=True)
class Request:
    """What a fault looks at. `name`: the file, or the path where no file is meant; `span`: the
    bytes of the file that were asked for; `body`: whether a body will answer; `client`: address."""

    where: str
    method: str
    name: str
    ranged: bool
    body: bool
    span: Span | None
    client: str = ""


def offset(fault: Fault, span: Span) -> int:
    """The file offset at which a fault cuts or flips."""
    if "at" in fault:
        return _part(fault["at"], span.size)
    return span.first + _part(fault.get("after", 0), span.last - span.first + 1)


def _part(value: float, whole: int) -> int:
    return int(value * whole) if isinstance(value, float) and value < 1 else int(value)


def _is(address: str, client: str) -> bool:
    """Whether this address is the client's; a name is asked for each time: it may move."""
    if address == client:
        return True
    try:
        return socket.gethostbyname(client) == address
    except OSError:
        return False


PRESETS = read_presets(Path(__file__).with_name("faults.txt"))


def preset(name: str, **changes: Any) -> list[Fault]:
    """The parts of a preset, its faults with these keys changed: `match=` for another shard."""
    return [part if "set" in part else checked({**part, **changes}) for part in PRESETS[name].parts]


class Faults:
    """The faults that are on, and how often each has struck."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._list: list[Fault] = []
        self._struck: set[str] = set()
        self._settings: dict[str, dict[str, Any]] = {}
        self.settings: dict[str, Any] = {}

    def replace(self, wanted: Iterable[str | Fault], client: str = "") -> None:
        """Only these are on now. A name stands for its preset; raises KeyError or ValueError.

        With `client` they strike only its requests, and those of other clients stay on; settings
        hold for all.
        """
        faults: list[Fault] = []
        settings: dict[str, Any] = {}
        for one in wanted:
            for part in PRESETS[one].parts if isinstance(one, str) else (checked(one),):
                if "set" in part:
                    settings.update(part["set"])
                else:
                    faults.append({**part, "client": client} if client else dict(part))
        with self._lock:
            if not client:
                self._list, self._settings = faults, {"": settings}
            else:
                others = [fault for fault in self._list if fault.get("client", client) != client]
                self._list = [*others, *faults]
                self._settings = {
                    key: value for key, value in self._settings.items() if key not in ("", client)
                } | {client: settings}
            self._struck = set()
            self.settings = {k: v for each in self._settings.values() for k, v in each.items()}

    def now(self) -> list[Fault]:
        """The list, with `seen` (requests that fitted) and `hits` (requests that were struck)."""
        with self._lock:
            return [dict(fault) for fault in self._list]

    def pick(self, request: Request) -> Fault:
        """The fault that strikes this request, counted; {} if none."""
        with self._lock:
            for fault in self._list:
                if not self._fits(fault, request):
                    continue
                fault["seen"] = fault.get("seen", 0) + 1
                first = fault.get("skip", 0)
                if first < fault["seen"] <= first + fault.get("times", 1 << 60):
                    fault["hits"] = fault.get("hits", 0) + 1
                    self._struck.add(request.name)
                    return dict(fault)
        return {}

    def _fits(self, fault: Fault, request: Request) -> bool:
        for key in ("where", "method", "ranged"):
            if fault.get(key, getattr(request, key)) != getattr(request, key):
                return False
        if fault["do"] in IN_BODY and not request.body:
            return False
        if fault.get("struck", False) and request.name not in self._struck:
            return False
        if not re.search(fault.get("match", ""), request.name):
            return False
        if "client" in fault and not _is(request.client, fault["client"]):
            return False
        span = request.span
        if span is None or "at" not in fault:
            return True
        return span.first <= offset(fault, span) <= span.last
