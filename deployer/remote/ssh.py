"""Runs scripts over SSH: connects, through a gateway where asked, and again after a loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from deployer import errors
from deployer.remote import framing
from deployer.remote.exchange import Exchange, bounded
from deployer.remote.gateways import Pool
from deployer.remote.refusals import Refusals, placed
from deployer.remote.socket import import_paramiko
from deployer.remote.sshconfig import Endpoint, place_of
from deployer.remote.sshlogin import hang_up, login
from deployer.remote.transport import Answer

if TYPE_CHECKING:
    import paramiko

STUCK_S = 5.0
"""How much longer than its own deadline the opening of a tunnel may take."""


class SshTransport:
    """A target reached by SSH. Connects at the first `run`, and again after a lost connection.

    One thread uses it; `close` may come from any other.
    """

    def __init__(self, name: str, resolve: Callable[[], Endpoint]) -> None:
        self._name = name
        self._resolve = resolve
        self._lock = threading.Lock()
        self._transport: paramiko.Transport | None = None
        self._gateway: Endpoint | None = None
        self._closes = 0
        self._failure: errors.DeployError | None = None
        self._failures = 0

    @property
    def name(self) -> str:
        """The inventory name."""
        return self._name

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """See Transport.run. After DeadlineExceeded the connection is a new one."""
        framed = framing.frame(script, args, stdin)
        transport = self._connected()
        exchange = Exchange(self._name, transport, framed, timeout_s, on_stdout)
        try:
            return exchange.run()
        except BaseException:
            # Frozen, dead or interrupted: nothing may be left waiting on this connection.
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection; a `run` in another thread raises ConnectionLost. Idempotent."""
        self._closes += 1
        transport, self._transport = self._transport, None
        if transport is not None:
            hang_up(transport)
        self._give_back()

    def _give_back(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            _gateways.give_back(gateway)

    def connect(self) -> None:
        """Connects now instead of at the first `run`."""
        self._connected()

    def tunnel(self, address: str, port: int, timeout_s: float) -> paramiko.Channel:
        """A direct-tcpip channel from this machine to `address`:`port`, for ProxyJump.

        Others use this connection too: it stays, whatever becomes of one channel.
        """
        transport = self._connected()
        import_paramiko()
        import paramiko

        place = place_of(address, port)
        try:
            # paramiko ends the wait for an answer by itself; the wait for the socket it does not.
            with bounded(transport, timeout_s + STUCK_S):
                return transport.open_channel(
                    "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout_s
                )
        except paramiko.ChannelException as error:
            forbidden = error.code == 1
            raise errors.Unreachable(
                f"the gateway {'does not allow' if forbidden else 'cannot open'} "
                f"a connection to {place}: {error.text}",
                where=self._name,
                fix="set AllowTcpForwarding on the gateway"
                if forbidden
                else "is the target up, and is address and port right as seen from the gateway?",
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not transport.is_active():
                self.close()
            raise errors.Unreachable(
                f"the gateway gave no connection to {place} within {timeout_s:g} s: {error}",
                where=self._name,
                fix="is the target on, and is no firewall between it and the gateway?",
            ) from error

    def _connected(self) -> paramiko.Transport:
        failures = self._failures
        with self._lock:
            if self._failure is not None and self._failures != failures:
                # Another thread tried while this one waited for its turn.
                raise self._failure.again()
            transport = self._transport
            if transport is not None and transport.is_active():
                return transport
            self.close()
            try:
                self._transport = self._login()
            except errors.DeployError as error:
                self._failure, self._failures = error, failures + 1
                raise
            self._failure = None
            return self._transport

    def _login(self) -> paramiko.Transport:
        closes = self._closes

        def still() -> bool:
            return self._closes == closes

        endpoint = self._resolve()
        with _refusals.kept(endpoint):
            if endpoint.gateway is None:
                transport = login(endpoint, still=still)
            else:
                transport = self._login_through(endpoint, endpoint.gateway, still)
        if not still():
            hang_up(transport)
            self._give_back()
            raise errors.ConnectionLost("closed while connecting", where=self._name)
        return transport

    def _login_through(
        self, endpoint: Endpoint, gateway: Endpoint, still: Callable[[], bool]
    ) -> paramiko.Transport:
        hop = _gateways.borrow(gateway)
        try:
            # Before the turn at the target: who waits for one then waits for the target alone.
            _reach(hop, gateway.name)
            transport = login(
                endpoint,
                lambda limit: hop.tunnel(endpoint.address, endpoint.port, limit),
                still,
                via=gateway.place,
            )
        except BaseException:
            _gateways.give_back(gateway)
            raise
        self._gateway = gateway
        return transport


def _reach(hop: SshTransport, name: str) -> None:
    """Connects to a gateway that others may share. Its error is told of `name`."""
    try:
        hop.connect()
    except errors.DeployError as error:
        if hop.name == name:
            raise
        raise placed(error, hop.name, name) from error


_refusals = Refusals()
_gateways = Pool(lambda endpoint: SshTransport(endpoint.name, lambda: endpoint))
