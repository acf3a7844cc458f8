"""Host keys: known_hosts files, fingerprints, and the verdict on a key that a host offers.

Files are parsed once per process and shared; no key is parsed, only compared as bytes.
"""

from __future__ import annotations

import base64
import binascii
import errno
import fnmatch
import hashlib
import hmac
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deployer import errors

if TYPE_CHECKING:
    import socket

    import paramiko

RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")


@dataclass(frozen=True)
class HostKey:
    """A public host key: its type and the wire blob."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """`SHA256:...`, as ssh-keygen -l prints it."""
        digest = base64.b64encode(hashlib.sha256(self.blob).digest())
        return "SHA256:" + digest.decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.type} {self.fingerprint}"


@dataclass(frozen=True)
class Known:
    """One line of a known_hosts file. `marker` is '', `@revoked` or `@cert-authority`."""

    path: Path
    line: int
    marker: str
    hosts: str
    key: HostKey

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.path}:{self.line}"

    def matches(self, name: str) -> bool:
        """Is this line about `name` (a host, or `[host]:port`)?"""
        if self.hosts.startswith("|1|"):
            return _hashed_matches(self.hosts, name)
        found = False
        for pattern in self.hosts.lower().split(","):
            if pattern.startswith("!") and _like(name.lower(), pattern[1:]):
                return False
            found = found or _like(name.lower(), pattern)
        return found


def _like(name: str, pattern: str) -> bool:
    # Only * and ? are special in known_hosts; brackets are literal.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _hashed_matches(hosts: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in hosts[3:].split("|"))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def lookup_name(address: str, port: int) -> str:
    """The name under which known_hosts files list a host."""
    return address if port == 22 else f"[{address}]:{port}"


def parse(text: str, path: Path) -> tuple[Known, ...]:
    """The lines of a known_hosts file; lines that are none are skipped, as ssh does."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) < 3:
            continue
        try:
            blob = base64.b64decode(fields[2], validate=True)
        except binascii.Error:
            continue
        found.append(Known(path, number, marker, fields[0], HostKey(fields[1], blob)))
    return tuple(found)


@dataclass(frozen=True)
class _File:
    """The lines of one file, with an index: many hosts are looked up in many lines."""

    lines: tuple[Known, ...] = ()
    named: Mapping[str, Sequence[Known]] = field(default_factory=dict)
    """By each name that is no pattern and not hashed, in lower case."""
    others: Sequence[Known] = ()

    def about(self, name: str) -> list[Known]:
        """The lines that match `name`, in order."""
        found = [*self.named.get(name.lower(), ()), *(k for k in self.others if k.matches(name))]
        return sorted(found, key=lambda known: known.line)


def _indexed(lines: tuple[Known, ...]) -> _File:
    named: dict[str, list[Known]] = {}
    others = []
    for known in lines:
        if any(mark in known.hosts for mark in "*?!|"):
            others.append(known)
            continue
        for name in dict.fromkeys(known.hosts.lower().split(",")):
            named.setdefault(name, []).append(known)
    return _File(lines, named, others)


_cache: dict[Path, tuple[tuple[int, int, int], _File]] = {}
_cache_lock = threading.Lock()


def load(path: Path) -> tuple[Known, ...]:
    """The lines of `path`, parsed again only when it changed; none when there is no such file.

    Raises DocumentError when it exists and cannot be read.
    """
    return _file(path).lines


def _file(path: Path) -> _File:
    try:
        with _cache_lock:
            status = path.stat()
            if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            cached = _cache.get(path)
            if cached is None or cached[0] != stamp:
                text = path.read_text(encoding="utf-8", errors="replace")
                cached = _cache[path] = (stamp, _indexed(parse(text, path)))
            return cached[1]
    except (FileNotFoundError, NotADirectoryError):
        return _File()
    except OSError as error:
        raise errors.DocumentError(
            f"the known_hosts file cannot be read: {error.strerror}", where=str(path)
        ) from error


def find(paths: Iterable[Path], name: str) -> list[Known]:
    """All lines about `name`, certificate authorities left out."""
    return [
        known
        for path in paths
        for known in _file(path).about(name)
        if known.marker != "@cert-authority"
    ]


def preferred_types(known: Iterable[Known]) -> list[str]:
    """Signature algorithms of the recorded keys: a host must be asked for a key that we know."""
    types: dict[str, None] = {}
    for line in known:
        if not line.marker:
            kinds = RSA_SIGNATURES if line.key.type == "ssh-rsa" else (line.key.type,)
            types.update(dict.fromkeys(kinds))
    return list(types)


def check(paths: Sequence[Path], name: str, key: HostKey, *, host: str, place: str) -> None:
    """Accepts `key` only when a line about `name` has it and none revokes it.

    `host` is the inventory name and `place` is host:port, for messages. Raises HostKeyUnknown, or
    HostKeyChanged with both fingerprints and the line that disagrees.
    """
    known = find(paths, name)
    for line in known:
        if line.marker == "@revoked" and line.key == key:
            raise errors.HostKeyChanged(
                f"{place} offers a host key that {line.place} revokes: {key}",
                where=host,
                fix="do not connect; give the host a new key, then run `deploy trust` again",
            )
    # A gateway's key is recorded for the host behind it.
    named = host.partition(" (gateway ")[0]
    recorded = [line for line in known if not line.marker]
    if any(line.key == key for line in recorded):
        return
    if not recorded:
        # ssh, too, accepts a key that is recorded for the host without its port.
        plain = name[1:].partition("]")[0] if name.startswith("[") else ""
        if plain and any(line.key == key for line in find(paths, plain) if not line.marker):
            return
        raise errors.HostKeyUnknown(
            f"the host key of {place} is not known: {key}",
            where=host,
            fix=f"compare the fingerprint with the host's own, then run `deploy trust {named}`",
        )
    old = next((line for line in recorded if line.key.type == key.type), recorded[0])
    raise errors.HostKeyChanged(
        f"the host key of {place} has CHANGED: it offers {key}, but {old.place} records {old.key}",
        where=host,
        fix="if the host was reinstalled, remove the old key with "
        f"`ssh-keygen -R '{name}' -f {old.path}` and run `deploy trust {named}`; "
        "if not, do not connect: something else answers at its address",
        evidence=(f"offered:  {key}", f"recorded: {old.key} ({old.place})"),
    )


def of_transport(transport: paramiko.Transport) -> HostKey:
    """The key that the other side has just proven to hold."""
    key = transport.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


def fetch_key(
    address: str,
    port: int,
    timeout_s: float,
    sock: socket.socket | paramiko.Channel | None = None,
    *,
    name: str = "",
) -> HostKey:
    """The host key that `address`:`port` offers, through `sock` when given; believes nothing.

    Raises Unreachable, told of `name`.
    """
    from deployer.remote.sshconfig import place_of
    from deployer.remote.sshlogin import Peer, dialled, handshake

    peer = Peer(name or address, place_of(address, port), timeout_s)
    connection = sock or dialled(address, port, peer)
    transport = handshake(connection, peer, [])
    try:
        return of_transport(transport)
    finally:
        transport.close()


def parse_public(text: str) -> HostKey | None:
    """The key of a `.pub` file; None when it is none."""
    fields = text.split()
    if len(fields) < 2:
        return None
    try:
        blob = base64.b64decode(fields[1], validate=True)
    except binascii.Error:
        return None
    name = fields[0].encode()
    # A blob begins with its own type, so a line that was cut or mixed up does not pass.
    return HostKey(fields[0], blob) if blob[4 : 4 + len(name)] == name else None


def append_key(path: Path, name: str, key: HostKey) -> None:
    """Adds a line for `name` to `path` (temp file, fsync, rename); nothing if it is there already.

    Raises HostKeyChanged when another key of this type is recorded for `name`, and OSError.
    """
    for line in load(path):
        if line.marker or not line.matches(name):
            continue
        if line.key == key:
            return
        if line.key.type == key.type:
            check([path], name, key, host=name, place=name)
    target = path.resolve()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text, mode = "", 0o600
    with suppress(FileNotFoundError):
        text, mode = target.read_text(encoding="utf-8", errors="surrogateescape"), 0
        mode = target.stat().st_mode & 0o777
    if text and not text.endswith("\n"):
        text += "\n"
    text += f"{name} {key.type} {base64.b64encode(key.blob).decode()}\n"
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fchmod(handle, mode)
            os.fsync(handle)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
