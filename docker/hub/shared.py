"""What the request threads share: settings, faults, the log and its sums."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from faults import Faults
from repo import Repo

Entry = dict[str, Any]
DEFAULTS: dict[str, Any] = {
    "token": None,  # needed for the bytes: a gated repository
    "denied": None,  # a token that the hub knows, without access
    "private": False,  # the token is needed for the listing too
    "url_ttl": 3600.0,  # life of a signed url, seconds
    "bps": 0.0,  # bytes a second a connection; 0: as fast as it goes
    "etag_salt": "",  # not empty: the hub names other hashes
    "xet": False,  # large files are in the CAS too
    "resolve_cache": True,  # small files come through a redirect on the hub, as in the real one
    "page": 1000,  # files a page of a listing
}
TOKEN_LIFE_S = 900
SETTLE_S = 0.1


class Shared:
    """One hub's state. `set` may be changed at any time; `reset` undoes everything."""

    def __init__(self, repo: Repo, settings: dict[str, Any]) -> None:
        self.repo = repo
        self.key = hashlib.sha256(repo.commit.encode()).digest()
        self.initial = {**DEFAULTS, **known(settings)}
        self.set = dict(self.initial)
        self.faults = Faults()
        self.log: list[Entry] = []
        self.live = self.held = self.peak = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.tls = False
        self._sockets: set[socket.socket] = set()

    def setting(self, name: str) -> Any:
        """The value in force: a fault's own settings come first."""
        return self.faults.settings.get(name, self.set[name])

    def change(self, settings: dict[str, Any]) -> None:
        """Changes settings. Raises KeyError for one that does not exist."""
        self.set.update(known(settings))

    def reset(self) -> None:
        """Forgets faults, changed settings, log and sums."""
        self.faults.replace([])
        with self.lock:
            self.log, self.peak = [], 0
        self.set = dict(self.initial)

    # ---- signatures
    def sign(self, name: str, expires: str) -> str:
        """The signature of an url for `name` that lives until `expires` (unix seconds)."""
        return hmac.new(self.key, f"{name}:{expires}".encode(), hashlib.sha256).hexdigest()[:32]

    def signed(self, name: str) -> str:
        """The query of a signed url."""
        expires = f"{time.time() + self.setting('url_ttl'):.3f}"
        return f"Expires={expires}&Signature={self.sign(name, expires)}"

    def refusal(self, name: str, query: dict[str, str]) -> str:
        """'' for a signed url that is valid now, else the CDN's word."""
        expires = query.get("Expires", "0")
        if not hmac.compare_digest(query.get("Signature", ""), self.sign(name, expires)):
            return "SignatureDoesNotMatch"
        return "Request has expired" if time.time() > float(expires) else ""

    def cas_token(self) -> tuple[str, int]:
        """A token for the CAS, and until when it holds (unix seconds)."""
        until = int(time.time()) + TOKEN_LIFE_S
        return f"xet-{until}-{self.sign('cas', str(until))}", until

    def cas_allows(self, authorization: str) -> bool:
        """True for a token that `cas_token` gave out and that still holds."""
        token = authorization.removeprefix("Bearer ")
        kind, _, rest = token.partition("-")
        until, _, sign = rest.partition("-")
        if kind != "xet" or not until.isdigit() or int(until) < time.time():
            return False
        return hmac.compare_digest(sign, self.sign("cas", until))

    # ---- requests
    @contextlib.contextmanager
    def request(self, entry: Entry) -> Iterator[None]:
        """Logs one request while it is served."""
        with self.lock:
            self.log.append(entry)
            self.live += 1
            self.peak = max(self.peak, self.live)
        try:
            yield
        finally:
            with self.lock:
                self.live -= 1

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """While a request is kept waiting on purpose."""
        with self.lock:
            self.held += 1
        try:
            yield
        finally:
            with self.lock:
                self.held -= 1

    def settle(self) -> None:
        """Gives requests that are at their end the moment they need to be counted: a client has its
        last byte before the thread that sent it knows. Returns soon while a body is on its way."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            with self.lock:
                if self.live <= self.held:
                    return
            time.sleep(0.002)

    @contextlib.contextmanager
    def connected(self, connection: socket.socket) -> Iterator[None]:
        """Knows the connection while it is served, so that `hang_up` can end it."""
        with self.lock:
            self._sockets.add(connection)
        try:
            yield
        finally:
            with self.lock:
                self._sockets.discard(connection)

    def hang_up(self) -> None:
        """Ends every connection, so that no request outlives the hub."""
        self.stopping.set()
        with self.lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    # ---- sums
    def stats(self, client: str | None = None, log: bool = True) -> dict[str, Any]:
        """Bytes handed to sockets and GETs a file and a client; `client` looks at one address."""
        self.settle()
        with self.lock:
            rows = [dict(row) for row in self.log]
            peak = self.peak
        rows = [row for row in rows if client in (None, row["client"])]
        sent: dict[str, int] = {}
        gets: dict[str, int] = {}
        clients: dict[str, int] = {}
        for row in rows:
            if row["method"] != "GET" or not row["file"] or not row["body"]:
                continue
            sent[row["file"]] = sent.get(row["file"], 0) + row["sent"]
            gets[row["file"]] = gets.get(row["file"], 0) + 1
            clients[row["client"]] = clients.get(row["client"], 0) + row["sent"]
        return {
            "sent_total": sum(sent.values()),
            "sent": sent,
            "gets": gets,
            "clients": clients,
            "peak_connections": peak,
            "auth_leaks": sum(row["leak"] for row in rows),
            "faults": self.faults.now(),
            "repo_size": self.repo.size,
            "commit": self.repo.commit,
            "log": rows if log else [],
        }


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings themselves. Raises KeyError for one that does not exist."""
    if unknown := set(settings) - set(DEFAULTS):
        raise KeyError(f"unknown setting {sorted(unknown)}")
    return settings
