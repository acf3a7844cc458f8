"""USER@HOST and the options that say how to reach it: a machine that no inventory names."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from deployer import errors, names
from deployer.errors import DocumentError, UsageError
from deployer.inventory import Ssh
from deployer.remote.sshconfig import split_port
from deployer.shell import words

F = TypeVar("F", bound=Callable[..., Any])

_IN_INVENTORY = (
    ("`ssh.address` in the inventory", "the address"),
    ("`ssh.port` in the inventory", "--port"),
    ("set `ssh.identity_file` (and `ssh.user`) in the inventory", "name another with -I FILE"),
    ("`gateway` in the inventory", "--gateway"),
)


@dataclass(frozen=True)
class Way:
    """How the machine is reached, as typed."""

    port: int | None = None
    identity_file: str | None = None
    known_hosts: str | None = None
    gateway: str | None = None

    @property
    def given(self) -> bool:
        """Whether any of the options was used."""
        return self != Way()

    def command(self, verb: str, word: str) -> str:
        """`deploy trust root@192.0.2.5 --port 22105`."""
        argv = ["deploy", verb, word]
        for option, value in (
            ("--port", self.port),
            ("--identity-file", self.identity_file),
            ("--known-hosts", self.known_hosts),
            ("--gateway", self.gateway),
        ):
            if value is not None:
                argv += [option, str(value)]
        return words(argv)


def direct(command: F) -> F:
    """Adds --port, --identity-file, --known-hosts, --gateway; hands them over as `way`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        keys = ("port", "identity_file", "known_hosts", "gateway")
        return command(way=Way(**{key: given.pop(key) for key in keys}), **given)

    for option in reversed(
        (
            click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Of its sshd."),
            click.option(
                "-I", "--identity-file", metavar="FILE", help="The private key to log in with."
            ),
            click.option(
                "--known-hosts", metavar="FILE", help="Used instead of ~/.ssh/known_hosts."
            ),
            click.option("--gateway", metavar="[USER@]HOST[:PORT]", help="ProxyJump."),
        )
    ):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def ssh_of(word: str, way: Way) -> Ssh:
    """`[USER@]HOST[:PORT]` and the options as an entry with absolute paths. Raises UsageError."""
    user, at, place = word.rpartition("@")
    try:
        address, port = split_port(place)
    except DocumentError:
        raise UsageError(f"not a port: {place}", fix="write USER@HOST --port N") from None
    if port is not None and way.port not in (None, port):
        raise UsageError(f"two ports: {port} and --port {way.port}", fix="give one of them")
    if not re.fullmatch(names.ADDRESS, address) or len(address) > 253:
        raise UsageError(
            f"not a host name or an address: {word!r}", fix="write USER@HOST, like root@192.0.2.5"
        )
    if at and not re.fullmatch(names.USER, user):
        raise UsageError(f"not a user name: {user!r}", fix="write USER@HOST, like root@192.0.2.5")
    if way.gateway is not None and not re.fullmatch(names.GATEWAY, way.gateway):
        raise UsageError(f"not a gateway: {way.gateway!r}", fix="write [USER@]HOST[:PORT]")
    values: dict[str, Any] = {"address": address}
    if (port or way.port) is not None:
        values["port"] = port or way.port
    if at:
        values["user"] = user
    for key in ("identity_file", "known_hosts"):
        if (path := getattr(way, key)) is not None:
            values[key] = str(_absolute(key, path))
    if way.gateway is not None:
        values["gateway"] = way.gateway
    return Ssh.model_validate(values)


def _absolute(key: str, text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not re.fullmatch(names.LINE, str(path)):
        raise UsageError(f"not a path of one line: {text!r}")
    if key == "identity_file" and not path.is_file():
        raise UsageError("there is no such key file", where=text, fix="name a private key")
    return path


def written(ssh: Ssh, inventory: Path) -> Ssh:
    """`ssh` with paths as an inventory in that folder has them: ~/..., ../... or absolute."""
    update = {}
    for key in ("identity_file", "known_hosts"):
        if (value := getattr(ssh, key)) is not None:
            update[key] = _shown(Path(value), inventory.resolve())
    return ssh.model_copy(update=update)


def _shown(path: Path, inventory: Path) -> str:
    home = Path.home()
    if path.is_relative_to(inventory.parent) and not path.is_relative_to(home / ".ssh"):
        return os.path.relpath(path, inventory)
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def retold(error: errors.DeployError, word: str, way: Way) -> errors.DeployError:
    """`error` with a way out that needs no inventory."""
    trust = way.command("trust", word)
    error.fix = re.sub(r"`deploy trust [^`]*`", lambda _: f"`{trust}`", error.fix)
    for old, new in _IN_INVENTORY:
        error.fix = error.fix.replace(old, new)
    return error
