"""Whether an sshd takes our key, when its host key is known from elsewhere. Nothing is recorded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deployer import errors
from deployer.inventory import Ssh
from deployer.remote import hostkeys
from deployer.remote.hostkeys import HostKey
from deployer.remote.ssh import SshTransport
from deployer.remote.sshauth import authenticate
from deployer.remote.sshconfig import Endpoint, resolve
from deployer.remote.sshlogin import Peer, dialled, handshake, hang_up


class Door(Enum):
    """open: its key is one of those expected and it takes ours. stranger: another machine answers.

    locked: the right machine refuses our keys. closed: nothing answers there.
    """

    OPEN = "open"
    LOCKED = "locked"
    STRANGER = "stranger"
    CLOSED = "closed"


@dataclass(frozen=True)
class Tried:
    """How it ended; `text` says why it is not open."""

    door: Door
    place: str
    text: str = ""


def try_login(name: str, ssh: Ssh, base: Path, expected: Collection[HostKey]) -> Tried:
    """Logs in and out again. `expected`: host keys of the machine, as a trusted one read them.

    Raises DocumentError for an ssh_config that cannot be read.
    """
    endpoint = resolve(name, ssh, base)
    try:
        return _try(endpoint, expected)
    except errors.AuthenticationRefused as error:
        return Tried(Door.LOCKED, endpoint.place, error.what)
    except errors.Unreachable as error:
        return Tried(Door.CLOSED, endpoint.place, error.what)


def _try(endpoint: Endpoint, expected: Collection[HostKey]) -> Tried:
    peer = Peer(endpoint.name, endpoint.place, endpoint.connect_timeout_s)
    gateway = endpoint.gateway
    if gateway is None:
        return _ask(endpoint, peer, None, expected)
    hop = SshTransport(gateway.name, lambda: gateway)
    try:
        return _ask(endpoint, peer, hop, expected)
    finally:
        hop.close()


def _ask(
    endpoint: Endpoint, peer: Peer, hop: SshTransport | None, expected: Collection[HostKey]
) -> Tried:
    place = endpoint.address, endpoint.port
    connection = dialled(*place, peer) if hop is None else hop.tunnel(*place, peer.timeout_s)
    # One type of key is offered at a time: asked for is one that is expected.
    types = hostkeys.preferred_types(
        hostkeys.Known(Path(), 0, "", endpoint.key_name, key) for key in expected
    )
    transport = handshake(connection, peer, types)
    try:
        key = hostkeys.of_transport(transport)
        if key not in expected:
            return Tried(Door.STRANGER, endpoint.place, f"another machine answers there: {key}")
        authenticate(transport, endpoint)
        return Tried(Door.OPEN, endpoint.place)
    finally:
        hang_up(transport)
