"""From nothing to an authenticated SSH transport: dial, handshake, host key, keys.

Every failure becomes one typed error that names the place and the cause. Tried again, with jitter
and within the connect deadline, is only what passes by itself: a connection that sshd drops because
too many log in at once, or that is refused or dropped for a moment. A login that is refused and a
host key that changed are final.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deployer import errors
from deployer.remote import hostkeys
from deployer.remote.ramp import LOOK_S, Ramp, wanted
from deployer.remote.socket import Dial, import_paramiko
from deployer.remote.sshauth import authenticate
from deployer.remote.sshconfig import Endpoint

if TYPE_CHECKING:
    import paramiko
    from tenacity import RetryCallState

ATTEMPTS = 6
"""Tries of a connection that is dropped without a word before its banner."""

REFUSED_S = 1.0
"""How long a refused connection is tried again: sshd restarts, a firewall limits the rate."""

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


class Refused(DroppedEarly):
    """Nothing listens there, or not now."""


class Busy(DroppedEarly):
    """sshd says that too many log in at once (MaxStartups)."""


_ramp = Ramp()


def login(
    endpoint: Endpoint,
    opener: Opener | None = None,
    still: Callable[[], bool] = wanted,
    via: str = "",
) -> paramiko.Transport:
    """An authenticated transport whose host key is known. Raises Unreachable and subclasses.

    `still` is asked while it waits: False gives up. `via`: the gateway that `opener` goes through.
    """
    known = hostkeys.find(endpoint.known_hosts, endpoint.key_name)
    peer = Peer(endpoint.name, endpoint.place, endpoint.connect_timeout_s)

    def attempt(limit: Peer) -> paramiko.Transport:
        try:
            with _ramp.turn((via, endpoint.place), limit.timeout_s, still):
                return _once(endpoint, limit, known, opener, still)
        except TimeoutError as error:
            raise errors.Unreachable(
                f"{error} after {limit.timeout_s:g} s",
                where=endpoint.name,
                fix="find out why logins to it take so long, or raise `ssh.connect_timeout_s`",
            ) from error

    return _with_retry(attempt, peer)


def _once(
    endpoint: Endpoint,
    peer: Peer,
    known: Sequence[hostkeys.Known],
    opener: Opener | None,
    still: Callable[[], bool],
) -> paramiko.Transport:
    if opener is None:
        connection = dialled(endpoint.address, endpoint.port, peer, still)
    else:
        connection = opener(peer.timeout_s)
    transport = handshake(connection, peer, hostkeys.preferred_types(known), still)
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


def _with_retry(attempt: Callable[[Peer], paramiko.Transport], peer: Peer) -> paramiko.Transport:
    """All tries together have `peer.timeout_s`; none begins later."""
    until = time.monotonic() + peer.timeout_s
    try:
        return attempt(peer)
    except DroppedEarly as error:
        # Only now: its import would cost every start.
        from tenacity import Retrying, retry_if_exception_type, wait_random_exponential

        busy = [error] if isinstance(error, Busy) else []

    def again() -> paramiko.Transport:
        try:
            return attempt(replace(peer, timeout_s=max(1.0, round(until - time.monotonic(), 1))))
        except Busy as error:
            busy.append(error)
            raise
        except DroppedEarly as error:
            # A reset can overtake the words that say why.
            if busy and not isinstance(error, Refused):
                raise busy[-1] from error
            raise

    def enough(state: RetryCallState) -> bool:
        error = state.outcome.exception() if state.outcome else None
        if time.monotonic() + state.upcoming_sleep >= until:
            return True
        if isinstance(error, Busy):
            return False
        if isinstance(error, Refused):
            return state.seconds_since_start is None or state.seconds_since_start >= REFUSED_S
        # The first one is not counted here.
        return state.attempt_number >= ATTEMPTS - 1

    retrying = Retrying(
        retry=retry_if_exception_type(DroppedEarly),
        # A wait past the end is not begun: short ones leave little of the time unused.
        wait=wait_random_exponential(multiplier=0.2, max=min(2.0, peer.timeout_s / 4)),
        stop=enough,
        reraise=True,
    )
    return retrying(again)


def dialled(
    address: str, port: int, peer: Peer, still: Callable[[], bool] = wanted
) -> socket.socket:
    """A connected socket; paramiko is imported while the packets travel."""
    try:
        attempt = Dial(address, port, peer.timeout_s)
        try:
            import_paramiko()
            return attempt.finish(still)
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
    if isinstance(error, InterruptedError):
        return errors.ConnectionLost("closed while connecting", where=peer.name)
    if error.errno == errno.ECONNREFUSED:
        return Refused(
            f"{peer.place} refuses the connection: nothing listens on this port",
            where=peer.name,
            fix="start sshd there, or correct `ssh.port` in the inventory",
        )
    if error.errno in (errno.ECONNRESET, errno.ECONNABORTED):
        return DroppedEarly(
            f"{peer.place} reset the connection",
            where=peer.name,
            fix="look at sshd's log there, and at firewalls in between",
        )
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


def handshake(
    connection: Any,
    peer: Peer,
    key_types: Sequence[str],
    still: Callable[[], bool] = wanted,
) -> paramiko.Transport:
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
        in_time = _wait(done, peer.timeout_s, still)
        if in_time and transport.is_active():
            return transport
        failure = transport.get_exception()
        banner = transport.remote_version
    except BaseException:
        hang_up(transport)
        raise
    hang_up(transport)
    if not in_time and not still():
        raise errors.ConnectionLost("closed while connecting", where=peer.name)
    said = bytes(getattr(connection, "heard", b""))
    raise _handshake_error(failure, banner, in_time, peer, said) from failure


def _wait(done: threading.Event, seconds: float, still: Callable[[], bool]) -> bool:
    """Whether it was done in time, and still wanted."""
    until = time.monotonic() + seconds
    while not done.wait(max(0.0, min(LOOK_S, until - time.monotonic()))):
        if time.monotonic() >= until or not still():
            return False
    return True


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
    failure: Exception | None, banner: str, in_time: bool, peer: Peer, said: bytes = b""
) -> errors.Unreachable:
    """`said`: the first bytes of the other side (OpenSSH 8.5 and later say why they hang up)."""
    if said.startswith(b"Exceeded MaxStartups"):
        return Busy(
            f"{peer.place} drops connections: too many log in at once (MaxStartups)",
            where=peer.name,
            fix="run again when fewer others do, or raise MaxStartups in its sshd_config",
        )
    if said.startswith(b"Not allowed at this time"):
        return errors.AuthenticationRefused(
            f"{peer.place} refuses this machine for a while, for logins that failed before",
            where=peer.name,
            fix="wait, then log in with the right key; see PerSourcePenalties in its sshd_config",
        )
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
