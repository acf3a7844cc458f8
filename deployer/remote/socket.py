"""The TCP connection under SSH: no Nagle or delayed-ACK stalls, and a dead peer is noticed.

It is dialled before paramiko is imported, so that the import hides the TCP round trip.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

DEAD_PEER_S = 15
"""Seconds after which a peer that answers no packet at all is given up."""

_OPTIONS: tuple[tuple[str, str, int], ...] = (
    ("IPPROTO_TCP", "TCP_NODELAY", 1),
    ("SOL_SOCKET", "SO_KEEPALIVE", 1),
    ("IPPROTO_TCP", "TCP_KEEPIDLE", 5),
    ("IPPROTO_TCP", "TCP_KEEPINTVL", 5),
    ("IPPROTO_TCP", "TCP_KEEPCNT", 3),
    ("IPPROTO_TCP", "TCP_USER_TIMEOUT", DEAD_PEER_S * 1000),
)
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_HEARD = 200
_LOOK_S = 0.2
_import_lock = threading.Lock()


class QuickSocket(socket.socket):
    """A TCP socket that acknowledges at once: the kernel forgets TCP_QUICKACK after each read."""

    heard = b""
    """The first bytes that came: sshd may say why it hangs up, in place of its banner."""

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Like socket.recv."""
        data = super().recv(bufsize, flags)
        if not self.heard:
            self.heard = data[:_HEARD]
        if _QUICKACK is not None and data:
            self.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)
        return data

    def tune(self) -> None:
        """Sets what this kernel knows of the options."""
        for level, option, value in _OPTIONS:
            number = getattr(socket, option, None)
            if number is not None:
                self.setsockopt(getattr(socket, level), number, value)


class Dial:
    """A TCP connect under way. Starts at once; `finish` waits for it.

    Name resolution and all addresses of the name together have `timeout_s` seconds; an address that
    is dark leaves those behind it their share.
    """

    def __init__(self, address: str, port: int, timeout_s: float) -> None:
        self._deadline = self._until = time.monotonic() + timeout_s
        self._addresses = _resolve(address, port, timeout_s)
        self._error: OSError | None = None
        self._socket: QuickSocket | None = None
        self._next()

    def finish(self, still: Callable[[], bool] = lambda: True) -> QuickSocket:
        """The connected socket. Raises OSError (TimeoutError, ConnectionRefusedError, ...).

        InterruptedError when `still` says that nobody waits for it any more.
        """
        while self._socket is not None:
            ready = select.poll()
            ready.register(self._socket, select.POLLOUT)
            left = self._until - time.monotonic()
            if not ready.poll(max(min(left, _LOOK_S), 0.0) * 1000):
                if left > 0 and still():
                    continue
                if left > 0:
                    self.abort()
                    raise InterruptedError(errno.EINTR, "given up")
                self._failed(errno.ETIMEDOUT)
                continue
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                connected, self._socket = self._socket, None
                connected.setblocking(True)
                return connected
            self._failed(code)
        raise self._error or OSError(errno.EADDRNOTAVAIL, "the name has no address")

    def abort(self) -> None:
        """Gives the attempt up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _failed(self, code: int) -> None:
        # OSError picks the class that belongs to the code: TimeoutError, ConnectionRefusedError.
        self._error = OSError(code, os.strerror(code))
        self.abort()
        self._next()

    def _next(self) -> None:
        while self._addresses:
            family, kind, protocol, _, where = self._addresses.pop(0)
            now = time.monotonic()
            self._until = now + (self._deadline - now) / (len(self._addresses) + 1)
            try:
                self._socket = QuickSocket(family, kind, protocol)
                self._socket.tune()
                self._socket.setblocking(False)
                code = self._socket.connect_ex(where)
            except OSError as error:
                code = error.errno or errno.EIO
            if code in (0, errno.EINPROGRESS):
                return
            self._error = OSError(code, os.strerror(code))
            self.abort()


_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


def _resolve(address: str, port: int, timeout_s: float) -> list[_Address]:
    """getaddrinfo with a deadline; the resolver has none of its own."""
    host = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if _is_ip(host):
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    result: list[_Address] = []
    failure: list[OSError] = []

    def ask() -> None:
        try:
            result.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            failure.append(
                error if isinstance(error, OSError) else socket.gaierror(0, "not a host name")
            )

    thread = threading.Thread(target=ask, daemon=True, name=f"resolve {host}")
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer of the resolver in {timeout_s:g} s")
    if failure:
        raise failure[0]
    return result


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def import_paramiko(*, with_invoke: bool = False) -> ModuleType:
    """paramiko; without `invoke` (60 ms) unless ssh_config has a `Match exec`.

    paramiko itself copes with a missing `invoke`; whoever imports it later gets the real one.
    """
    with _import_lock:
        loaded = sys.modules.get("paramiko")
        if loaded is not None:
            return loaded
        block = not with_invoke and "invoke" not in sys.modules
        if block:
            sys.modules["invoke"] = None  # type: ignore[assignment]
        try:
            import logging

            import paramiko

            # Its threads log errors that are raised to the caller as well.
            logging.getLogger("paramiko").addHandler(logging.NullHandler())
        finally:
            if block:
                del sys.modules["invoke"]
        return paramiko
