"""What the controller asks for: the job, its files and its limits."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH123

from __future__ import annotations

import dataclasses
import json
import os
import re
import urllib.parse
from dataclasses import dataclass
from typing import Any

from deployer.agents.fetch.common import safe_name

METHODS = ("range", "hf-xet", "mirror", "peer")
ENDPOINT = "https://huggingface.co"
PEER = "http://peer"
"""The endpoint under which the pool knows a peer that lends; no name that is looked up."""
OWN_FOLDER = ".deployer"
OWN_SUFFIXES = (".part", ".part.map", ".part.map.tmp", ".bad")


@dataclass(frozen=True)
class File:
    """One file of the manifest: size in bytes, and the hash that it must have."""

    path: str
    size: int
    sha256: str = ""
    blob_id: str = ""

    @classmethod
    def parse(cls, row: Any) -> File:
        """Raises ValueError, naming the row."""
        if not isinstance(row, dict):
            raise ValueError(f"a file must be an object, not {row!r}")
        path, size = row.get("path"), row.get("size")
        sha256, blob_id = row.get("sha256") or "", row.get("blob_id") or ""
        if not isinstance(path, str) or not safe_name(path) or path.split("/")[0] == OWN_FOLDER:
            raise ValueError(f"unsafe file name {path!r}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"{path}: size {size!r} is no number of bytes")
        if not (sha256 or blob_id):
            raise ValueError(f"{path}: no hash")
        for hash_, digits in ((sha256, 64), (blob_id, 40)):
            if hash_ and not re.fullmatch(f"[0-9a-f]{{{digits}}}", str(hash_)):
                raise ValueError(f"{path}: {hash_!r} is no hash of {digits} hex digits")
        return cls(path, size, str(sha256), str(blob_id))


@dataclass(frozen=True)
class Limits:
    """When to lose patience. Seconds, bytes, and counts of tries."""

    stall_s: float = 45.0
    floor_bytes_per_s: float = 100_000.0
    floor_window_s: float = 120.0
    phase_s: float = 60.0
    stalls_per_method: int = 2
    bwlimit_bytes_per_s: float = 0.0  # 0: no limit
    recv_timeout_s: float = 20.0
    slow_bytes_per_s: float = 32 * 1024
    slow_window_s: float = 30.0
    idle_tries: int = 6  # tries in a row that bring nothing
    tries: int = 200  # of one connection on one file, that bring less than a block
    backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    max_pause_s: float = 300.0

    @classmethod
    def parse(cls, row: Any) -> Limits:
        """Unknown names and values that are no non-negative number raise ValueError."""
        given = dict(_object(row, "limits"))
        names = {field.name: field.type for field in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in names:
                raise ValueError(f"limits: unknown name {name!r}")
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"limits: {name} is {value!r}, not a number from 0 up")
            given[name] = int(value) if names[name] == "int" else float(value)
        stall_s = given.get("stall_s", cls.stall_s)
        given.setdefault("recv_timeout_s", min(20.0, stall_s / 2))
        for name in ("stall_s", "phase_s", "floor_window_s", "recv_timeout_s", "slow_window_s"):
            if not given.get(name, 1) > 0:
                raise ValueError(f"limits: {name} must be above 0")
        return cls(**given)


@dataclass(frozen=True)
class Peer:
    """Another machine that has the files, reached by ssh."""

    address: str
    user: str
    port: int
    path: str
    identity_file: str | None = None
    known_hosts: str | None = None
    """A file that is read instead of the user's own and the machine's."""
    lends: bool = False
    """It answers range requests (mode `lend`); else rsync is spoken."""

    @classmethod
    def parse(cls, row: Any) -> Peer:
        """Raises ValueError."""
        given = _object(row, "peer")
        port = given.get("port", 22)
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ValueError(f"peer: port {port!r}")
        key = given.get("identity_file") or None
        words = [_text(given, name, "peer: ") for name in ("address", "user", "path")]
        if key is not None and not isinstance(key, str):
            raise ValueError(f"peer: identity_file {key!r}")
        known = given.get("known_hosts") or None
        if known is not None and not isinstance(known, str):
            raise ValueError(f"peer: known_hosts {known!r}")
        return cls(words[0], words[1], port, words[2], key, known, given.get("lends") is True)


@dataclass(frozen=True)
class Job:
    """The manifest: what to fetch, whereto, how, and when to lose patience."""

    repo: str
    commit: str
    path: str
    files: tuple[File, ...]
    endpoint: str = ENDPOINT
    mirrors: tuple[str, ...] = ()
    methods: tuple[str, ...] = METHODS
    peer: Peer | None = None
    venv: str = ""
    connections: int = 4
    ca_bundle: str | None = None
    proxy: str | None = None
    limits: Limits = Limits()

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @classmethod
    def load(cls, path: str) -> Job:
        """Reads `manifest.json`. Raises ValueError that says what is wrong with it."""
        try:
            with open(path, encoding="utf-8") as stream:
                return cls.parse(json.load(stream))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def parse(cls, row: Any) -> Job:
        """Raises ValueError that says what is wrong."""
        given = _object(row, "the manifest")
        root = _text(given, "path")
        if not root.startswith("/"):
            raise ValueError(f"path {root!r} is not absolute")
        if os.path.normpath(root).strip("/") == "":
            raise ValueError("path is the root of the file system, not a model's folder")
        rows = given.get("files")
        if not isinstance(rows, list):
            raise ValueError("files: not a list")
        files = tuple(File.parse(one) for one in rows)
        _check_names([file.path for file in files])
        methods = _texts(given, "methods", METHODS)
        for method in methods:
            if method not in METHODS:
                raise ValueError(f"methods: {method!r} is none of {', '.join(METHODS)}")
        connections = given.get("connections", cls.connections)
        if not isinstance(connections, int) or not 1 <= connections <= 64:
            raise ValueError(f"connections: {connections!r} is not from 1 to 64")
        peer = given.get("peer")
        return cls(
            repo=_text(given, "repo"),
            commit=_text(given, "commit"),
            path=root,
            files=files,
            endpoint=_url(given.get("endpoint") or ENDPOINT, "endpoint"),
            mirrors=tuple(_url(one, "mirrors") for one in _texts(given, "mirrors", ())),
            methods=methods,
            peer=None if peer is None else Peer.parse(peer),
            venv=str(given.get("venv") or ""),
            connections=connections,
            ca_bundle=str(given["ca_bundle"]) if given.get("ca_bundle") else None,
            proxy=_proxy(given.get("proxy")),
            limits=Limits.parse(given.get("limits") or {}),
        )


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: not an object")
    return value


def _text(row: dict[str, Any], name: str, where: str = "") -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{where}{name}: {value!r} is no text of one line")
    return value


def _texts(row: dict[str, Any], name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = row.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{name}: {value!r} is no list of texts")
    return tuple(value)


def _url(value: Any, name: str) -> str:
    """An http(s) address without a slash at its end."""
    parts = urllib.parse.urlsplit(str(value))
    if not str(value).isprintable() or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name}: {value!r} is no http(s) address")
    _ = parts.port  # raises ValueError for a port that is none
    return str(value).rstrip("/")


def _proxy(value: Any) -> str | None:
    """An http:// proxy; its text may hold a password, so errors do not repeat it."""
    if not value:
        return None
    try:
        parts = urllib.parse.urlsplit(str(value))
        known = parts.scheme == "http" and parts.hostname and (parts.port or 80)
    except ValueError:
        known = None
    if not known:
        raise ValueError("proxy: not of the form http://[user:password@]host:port")
    return str(value)


def _check_names(paths: list[str]) -> None:
    """No path twice, none the folder of another, none a name that we make beside another."""
    names = set(paths)
    if len(names) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"files: {twice!r} is listed twice")
    for path in paths:
        parents = path.split("/")
        for depth in range(1, len(parents)):
            if "/".join(parents[:depth]) in names:
                raise ValueError(f"files: {'/'.join(parents[:depth])!r} is also a folder")
        for suffix in OWN_SUFFIXES:
            if path + suffix in names:
                raise ValueError(f"files: {path + suffix!r} is the name of our own partial file")
