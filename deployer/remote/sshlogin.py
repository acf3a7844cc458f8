"""From nothing to an authenticated SSH transport: dial, handshake, host key, keys.

Every failure becomes one typed error that names the place and the cause.
Only a connection that is dropped before its SSH banner (sshd's MaxStartups) is tried again.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployer import errors
from deployer.remote import hostkeys
from deployer.remote.socket import Dial, import_paramiko
from deployer.remote.sshauth import authenticate
from deployer.remote.sshconfig import Endpoint

if TYPE_CHECKING:
    import paramiko

ATTEMPTS = 6
"""Tries of a connection that is dropped before its banner."""

WINDOW_BYTES = 4 * 1024 * 1024
"""Flow-control window of a channel: what may be under way unread."""

Opener = Callable[[float], Any]
"""Opens a fresh socket (or a gateway's channel) to the target, within so many seconds."""


@dataclass(frozen=True)
class Peer:
    """Who is spoken to, for messages: inventory name and host:port; `timeout_s` for each wait."""

    name: str
    place: str
    timeout_s: float


class DroppedEarly(errors.Unreachable):
    """The connection ended before the SSH handshake; worth another try."""


def login(endpoint: Endpoint, opener: Opener | None = None) -> paramiko.Transport:
    """An authenticated transport whose host key is known. Raises Unreachable and subclasses."""
    known = hostkeys.find(endpoint.known_hosts, endpoint.key_name)
    peer = Peer(endpoint.name, endpoint.place, endpoint.connect_timeout_s)

    def attempt() -> paramiko.Transport:
        if opener is None:
            connection = dialled(endpoint.address, endpoint.port, peer)
        else:
            connection = opener(peer.timeout_s)
        return handshake(connection, peer, hostkeys.preferred_types(known))

    transport = _with_retry(attempt)
    try:
        hostkeys.check(
            endpoint.known_hosts,
            endpoint.key_name,
            hostkeys.of_transport(transport),
            host=endpoint.name,
            place=endpoint.place,
        )
        authenticate(transport, endpoint)
    except BaseException:
        hang_up(transport)
        raise
    return transport


def _with_retry(attempt: Callable[[], paramiko.Transport]) -> paramiko.Transport:
    try:
        return attempt()
    except DroppedEarly:
        # Only now: its import would cost every start.
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            stop_after_attempt,
            wait_random_exponential,
        )
    retrying = Retrying(
        retry=retry_if_exception_type(DroppedEarly),
        wait=wait_random_exponential(multiplier=0.2, max=2.0),
        stop=stop_after_attempt(ATTEMPTS - 1),
        reraise=True,
    )
    return retrying(attempt)


def dialled(address: str, port: int, peer: Peer) -> socket.socket:
    """A connected socket; paramiko is imported while the packets travel."""
    try:
        attempt = Dial(address, port, peer.timeout_s)
        try:
            import_paramiko()
            return attempt.finish()
        except BaseException:
            attempt.abort()
            raise
    except OSError as error:
        raise _dial_error(error, peer) from error


def _dial_error(error: OSError, peer: Peer) -> errors.Unreachable:
    address = peer.place.rpartition(":")[0]
    if isinstance(error, socket.gaierror):
        return errors.Unreachable(
            f"the name {address} cannot be resolved: {error.strerror or error}",
            where=peer.name,
            fix="check `ssh.address` in the inventory, and DNS",
        )
    if error.errno == errno.ECONNREFUSED:
        return errors.Unreachable(
            f"{peer.place} refuses the connection: nothing listens on this port",
            where=peer.name,
            fix="start sshd there, or correct `ssh.port` in the inventory",
        )
    if error.errno in (errno.ECONNRESET, errno.ECONNABORTED):
        return DroppedEarly(f"{peer.place} reset the connection", where=peer.name)
    if isinstance(error, TimeoutError):
        return errors.Unreachable(
            f"no answer from {peer.place} within {peer.timeout_s:g} s",
            where=peer.name,
            fix="is it powered on, and is no firewall in between?",
        )
    return errors.Unreachable(
        f"{peer.place} cannot be reached: {error.strerror or error}",
        where=peer.name,
        fix="check `ssh.address` in the inventory, and the network",
    )


def handshake(connection: Any, peer: Peer, key_types: Sequence[str]) -> paramiko.Transport:
    """The SSH handshake on a connected socket; the host key is proven but not yet judged.

    `key_types` are signature algorithms to ask for first. Raises Unreachable and DroppedEarly.
    """
    import_paramiko()
    import paramiko

    try:
        transport = paramiko.Transport(connection, default_window_size=WINDOW_BYTES)
    except OSError as error:
        connection.close()
        raise _dial_error(error, peer) from error
    # Our own deadline ends first, so that its cause is known.
    transport.banner_timeout = peer.timeout_s + 5
    transport.handshake_timeout = peer.timeout_s + 5
    transport.auth_timeout = peer.timeout_s
    options = transport.get_security_options()
    options.key_types = tuple(_first(key_types, options.key_types))
    options.ciphers = tuple(_first(["aes128-gcm@openssh.com"], options.ciphers))
    done = threading.Event()
    try:
        transport.start_client(event=done)
        in_time = done.wait(peer.timeout_s)
        if in_time and transport.is_active():
            return transport
        failure = transport.get_exception()
        banner = transport.remote_version
    except BaseException:
        hang_up(transport)
        raise
    hang_up(transport)
    raise _handshake_error(failure, banner, in_time, peer) from failure


def hang_up(transport: paramiko.Transport) -> None:
    """Ends a connection, whatever state it is in.

    A connection through a gateway says goodbye over the gateway's own connection, and paramiko
    raises EOFError from `close` when that is already gone: the connection is then over as asked.
    """
    import_paramiko()
    import paramiko

    with suppress(EOFError, OSError, paramiko.SSHException):
        transport.close()


def _handshake_error(
    failure: Exception | None, banner: str, in_time: bool, peer: Peer
) -> errors.Unreachable:
    if not in_time:
        missing = "the key exchange never ends" if banner else "no SSH banner comes"
        return errors.Unreachable(
            f"{peer.place} accepts connections, but {missing} within {peer.timeout_s:g} s",
            where=peer.name,
            fix="is it sshd that listens there, and is the machine alive (load, memory, disk)?",
        )
    text = str(failure or "")
    if "Indecipherable" in text or "Incompatible version" in text:
        return errors.Unreachable(
            f"{peer.place} is no SSH server: {text}",
            where=peer.name,
            fix="correct `ssh.port` in the inventory",
        )
    dropped = isinstance(failure, EOFError | OSError) or failure is None
    if dropped or "banner" in text:
        return DroppedEarly(
            f"{peer.place} closed the connection before the SSH handshake was done",
            where=peer.name,
            fix="look at sshd's log there (MaxStartups, sshd crashing, or not sshd at all)",
            evidence=(text,) if text else (),
        )
    return errors.Unreachable(
        f"the SSH handshake with {peer.place} failed: {text}",
        where=peer.name,
        fix="compare the algorithms of this sshd with what paramiko offers",
    )


def _first(wanted: Sequence[str], available: Sequence[str]) -> list[str]:
    """`available`, the `wanted` of them in front."""
    front = [name for name in wanted if name in available]
    return front + [name for name in available if name not in front]
