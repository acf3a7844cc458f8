"""Where a target is: the inventory's `ssh` entry, completed from ssh_config.

Read from ~/.ssh/config and /etc/ssh/ssh_config: HostName, Port, User, IdentityFile,
IdentitiesOnly, ProxyJump, UserKnownHostsFile, GlobalKnownHostsFile, HostKeyAlias, and Include;
under Host and Match, save for conditions of Match that are newer (tagged, localnetwork...): those
never match.
The inventory wins over them.
"""

from __future__ import annotations

import functools
import getpass
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployer import errors
from deployer.inventory import Ssh
from deployer.remote.hostkeys import lookup_name
from deployer.remote.socket import import_paramiko

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
SYSTEM_KNOWN_HOSTS = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
CONFIGS = "~/.ssh/config or /etc/ssh/ssh_config"
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")

_MAX_INCLUDES = 16
_RELEVANT = re.compile(
    r"^\s*(hostname|port|user|identityfile|identitiesonly|proxyjump|proxycommand|userknownhostsfile"
    r"|globalknownhostsfile|hostkeyalias)\b",
    re.IGNORECASE | re.MULTILINE,
)
_MATCH_EXEC = re.compile(r"^\s*match\b.*\bexec\b", re.IGNORECASE | re.MULTILINE)
_MATCH = re.compile(r"^\s*match\b(?:\s*=)?(.*)$", re.IGNORECASE | re.MULTILINE)
_CONDITIONS = ("all", "canonical", "final", "exec", "host", "originalhost", "user", "localuser")
"""Of Match, what paramiko evaluates. It takes any other one for true."""
_NEVER = "Match originalhost !*"
_INCLUDE = re.compile(r"^\s*include(?:\s+|\s*=\s*)(.*)$", re.IGNORECASE)
_HEADER = re.compile(r"^\s*(host|match)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Endpoint:
    """A target with nothing left to look up."""

    name: str
    """The inventory name, for messages."""
    address: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    """Offered in this order."""
    use_agent: bool
    known_hosts: tuple[Path, ...]
    """All are read; a new key is recorded in the first."""
    key_name: str
    """The name to look up in known_hosts files."""
    gateway: Endpoint | None
    connect_timeout_s: float
    missing_identity_is_error: bool = False

    @property
    def place(self) -> str:
        """`address:port`, for messages."""
        return place_of(self.address, self.port)


def place_of(address: str, port: int) -> str:
    """`address:port` for messages; an IPv6 address stands in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def resolve(name: str, ssh: Ssh, base: Path) -> Endpoint:
    """The endpoint of an inventory entry; relative paths are relative to `base`.

    Raises DocumentError for an ssh_config that cannot be read or asks for ProxyCommand.
    """
    return _Resolver(ssh, base, _config_text()).endpoint(
        name,
        ssh.address,
        ssh.port,
        ssh.user if "user" in ssh.model_fields_set else None,
        ssh.user,
        ssh.gateway,
    )


class _Resolver:
    def __init__(self, ssh: Ssh, base: Path, config_text: str) -> None:
        self._ssh = ssh
        self._base = base
        self._config = _parse_config(config_text)

    def endpoint(
        self,
        name: str,
        address: str,
        port: int | None,
        user: str | None,
        default_user: str,
        gateway: str | None,
        depth: int = 0,
    ) -> Endpoint:
        """One machine, and the gateways in front of it."""
        if depth > 8:
            first, _, way = name.partition(" (gateway ")
            hops = way.removesuffix(")").split(") (gateway ")
            raise errors.DocumentError(
                f"the gateways lead in a circle: {', '.join(dict.fromkeys(hops))}",
                where=first,
                fix="correct ProxyJump in ssh_config, or write `gateway` in the inventory",
            )
        bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
        options = self._lookup(bare)
        real = str(options.get("hostname", bare))
        real_port = port or _port(options, bare, name)
        jump = gateway if gateway is not None else str(options.get("proxyjump", "none"))
        if gateway is None and "proxycommand" in options:
            raise errors.DocumentError(
                f"ssh_config has a ProxyCommand for {bare}, which is not supported",
                where=name,
                fix="use ProxyJump in ssh_config, or `gateway` in the inventory",
            )
        identities, use_agent = self._identities(options)
        return Endpoint(
            name=name,
            address=real,
            port=real_port,
            user=user or str(options.get("user", default_user)),
            identity_files=identities,
            use_agent=use_agent,
            known_hosts=self._known_hosts(options),
            key_name=str(options.get("hostkeyalias", lookup_name(real, real_port))),
            gateway=self._gateway(name, jump, depth),
            connect_timeout_s=self._ssh.connect_timeout_s,
            missing_identity_is_error=self._ssh.identity_file is not None,
        )

    def _gateway(self, name: str, jump: str, depth: int) -> Endpoint | None:
        if jump.lower() == "none":
            return None
        before, _, last = jump.rpartition(",")
        user, _, place = last.strip().rpartition("@")
        host, port = split_port(place)
        if not host:
            raise errors.DocumentError(f"not a gateway: {jump!r}", where=name)
        return self.endpoint(
            f"{name} (gateway {host})",
            host,
            port,
            user or None,
            user or _me(name),
            before or None,
            depth + 1,
        )

    def _lookup(self, host: str) -> dict[str, Any]:
        if self._config is None:
            return {}
        import paramiko

        try:
            return dict(self._config.lookup(host))
        except (paramiko.SSHException, ValueError, OSError) as error:
            raise errors.DocumentError(
                f"ssh_config cannot be applied to {host}: {error}", where=CONFIGS
            ) from error

    def _identities(self, options: dict[str, Any]) -> tuple[tuple[Path, ...], bool]:
        if self._ssh.identity_file is not None:
            return (absolute(self._ssh.identity_file, self._base),), False
        only = str(options.get("identitiesonly", "no")).lower() == "yes"
        home = Path("~/.ssh").expanduser()
        configured = [absolute(str(file), home) for file in options.get("identityfile", ())]
        return tuple(configured or [home / key for key in DEFAULT_KEYS]), not only

    def _known_hosts(self, options: dict[str, Any]) -> tuple[Path, ...]:
        if self._ssh.known_hosts is not None:
            return (absolute(self._ssh.known_hosts, self._base),)
        home = Path("~/.ssh").expanduser()
        user = [home / "known_hosts", home / "known_hosts2"]
        if "userknownhostsfile" in options:
            user = _paths(str(options["userknownhostsfile"]), home)
        system = list(SYSTEM_KNOWN_HOSTS)
        if "globalknownhostsfile" in options:
            system = _paths(str(options["globalknownhostsfile"]), home)
        return (*user, *system)


def split_port(place: str) -> tuple[str, int | None]:
    """`host`, `host:port`, `[v6]:port` or a bare IPv6 address as address and port."""
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.lstrip(":")
    elif place.count(":") == 1:
        host, _, port = place.partition(":")
    else:
        host, port = place, ""
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise errors.DocumentError(f"not a port of a gateway: {port!r}")
    return host, int(port) if port else None


def absolute(text: str, base: Path) -> Path:
    """`text` with ~ expanded, relative to `base`."""
    return base / Path(text).expanduser()


def _paths(value: str, home: Path) -> list[Path]:
    try:
        return [absolute(word, home) for word in shlex.split(value) if word.lower() != "none"]
    except (ValueError, RuntimeError) as error:
        raise errors.DocumentError(
            f"ssh_config names files that are none: {value}: {error}", where=CONFIGS
        ) from error


@functools.lru_cache(maxsize=4)
def _parse_config(text: str) -> Any:
    """A paramiko SSHConfig, or None when `text` has nothing for us (and nothing is imported).

    Parsed once for all hosts.
    """
    if not _RELEVANT.search(text):
        return None
    import_paramiko(with_invoke=bool(_MATCH_EXEC.search(text)))
    import paramiko

    try:
        return paramiko.SSHConfig.from_text(_MATCH.sub(_understood, text))
    except (paramiko.SSHException, ValueError) as error:
        raise errors.DocumentError(
            f"ssh_config cannot be parsed: {error}", where=CONFIGS
        ) from error


def _understood(line: re.Match[str]) -> str:
    """A Match line of conditions that are known here; any other one never matches."""
    plain: list[str] = []
    for word in shlex.split(line[1], comments=True):
        name, equals, value = word.partition("=")
        known = equals and name.lower().removeprefix("!") in _CONDITIONS
        plain += [name, value] if known else [word]
    words = list(plain)
    while words:
        condition = words.pop(0).lower().removeprefix("!")
        if condition not in _CONDITIONS:
            return _NEVER
        if condition not in ("all", "canonical", "final"):
            del words[:1]
    return f"Match {shlex.join(plain)}"


def _config_text() -> str:
    """User and system configuration as one text; the first value wins, as in ssh."""
    user = Path("~/.ssh/config").expanduser()
    texts = [_expanded(user, user.parent), _expanded(SYSTEM_CONFIG, SYSTEM_CONFIG.parent)]
    return "\nHost *\n".join(texts)


def _expanded(path: Path, folder: Path, depth: int = 0) -> str:
    """The text of `path` with its Include lines replaced by the files they name."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise errors.DocumentError(
            f"ssh_config cannot be read: {error.strerror}", where=str(path)
        ) from error
    header = "Host *"
    result = []
    for line in lines:
        include = _INCLUDE.match(line)
        if include is None:
            header = line if _HEADER.match(line) else header
            result.append(line)
            continue
        if depth >= _MAX_INCLUDES:
            raise errors.DocumentError("too many nested Include lines", where=str(path))
        for file in _included(include[1], folder, path):
            result += [_expanded(file, folder, depth + 1), header]
    return "\n".join(result)


def _included(words: str, folder: Path, path: Path) -> list[Path]:
    """The files that an Include line of `path` names."""
    found = []
    try:
        for word in shlex.split(words, comments=True):
            pattern = absolute(word, folder)
            root = Path(pattern.anchor)
            found += sorted(root.glob(str(pattern.relative_to(root))))
    except (ValueError, RuntimeError) as error:
        # A quote without its end; a ~user who does not exist.
        raise errors.DocumentError(f"not an Include line: {words}: {error}", where=str(path)) from (
            error
        )
    return found


def _port(options: Mapping[str, Any], host: str, name: str) -> int:
    text = str(options.get("port", 22))
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise errors.DocumentError(
            f"ssh_config gives {host} a port that is none: {text}",
            where=name,
            fix="correct it, or write `ssh.port` in the inventory",
        )
    return int(text)


def _me(name: str) -> str:
    """Who we are on this machine: the user at a gateway that names none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise errors.DocumentError(
            "this process has no user name for the gateway",
            where=name,
            fix="write USER@ before the gateway in the inventory",
        ) from error
