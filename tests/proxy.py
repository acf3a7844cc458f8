"""A small HTTP proxy on loopback: CONNECT and absolute urls, a password if wanted, and counts."""

from __future__ import annotations

import base64
import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

BLOCK = 1 << 16
TIMEOUT_S = 30.0


class Proxy:
    """A running proxy. `opened` and `refused` list targets (`host:port`), one a connection;
    `passed` counts bytes from servers to clients. With `user`, only they may pass."""

    def __init__(self, user: str = "", password: str = "") -> None:
        self.opened: list[str] = []
        self.refused: list[str] = []
        self.passed = 0
        self._user, self._password = user, password
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stopping = threading.Event()
        who = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user else ""
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"http://{who}{self.address}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Ends every connection that goes through the proxy now."""
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(TIMEOUT_S)
        with client, contextlib.suppress(OSError), self._known(client):
            head, rest = _read_head(client)
            method, target, fields = _parse(head)
            connect = method == "CONNECT"
            where = target if connect else urlsplit(target).netloc
            host, port = _split(where, 443 if connect else 80)
            if not self._allowed(fields):
                with self._lock:
                    self.refused.append(f"{host}:{port}")
                client.sendall(_answer("407 Proxy Authentication Required", _CHALLENGE))
                return
            try:
                server = socket.create_connection((host, port), TIMEOUT_S)
            except OSError as error:
                client.sendall(_answer(f"502 {type(error).__name__}"))
                return
            with self._lock:
                self.opened.append(f"{host}:{port}")
            with server, self._known(server):
                if connect:
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    server.sendall(rest)
                else:
                    server.sendall(_forwarded(method, target, fields) + rest)
                self._relay(client, server)

    @contextlib.contextmanager
    def _known(self, one: socket.socket) -> Iterator[None]:
        with self._lock:
            self._sockets.add(one)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(one)

    def _allowed(self, fields: list[tuple[str, str]]) -> bool:
        if not self._user:
            return True
        wanted = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        return ("proxy-authorization", f"Basic {wanted}") in [(k.lower(), v) for k, v in fields]

    def _relay(self, client: socket.socket, server: socket.socket) -> None:
        """Both ways until either end closes."""
        with selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while events := ready.select(TIMEOUT_S):
                for key, _ in events:
                    data = key.fileobj.recv(BLOCK)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
                    if key.fileobj is server:
                        with self._lock:
                            self.passed += len(data)


_CHALLENGE = b'Proxy-Authenticate: Basic realm="proxy"\r\n'


def _answer(status: str, fields: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n".encode() + fields + b"\r\n"


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        block = client.recv(BLOCK)
        if not block or len(data) > BLOCK:
            raise OSError("no request")
        data += block
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _parse(head: bytes) -> tuple[str, str, list[tuple[str, str]]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    return method, target, [(k, v.strip()) for k, _, v in (line.partition(":") for line in lines)]


def _split(where: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{where}")
    return parts.hostname or "", parts.port or port


def _forwarded(method: str, target: str, fields: list[tuple[str, str]]) -> bytes:
    """The request as the server gets it: one to a connection, without what is the proxy's."""
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    kept = [(k, v) for k, v in fields if k.lower() not in ("proxy-authorization", "connection")]
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in kept), "Connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
