"""A model hub that speaks the Hugging Face Hub protocol and misbehaves on command. Stdlib only.

    python hub.py --port 8900 --data DIR --shards 6 --mb 4 --host 0.0.0.0
    with Hub(data) as hub: hub.url, hub.faults([...]), hub.stats()

Three origins, as in the real thing: the hub (port), the CDN (port + 1), Xet's CAS (port + 2).
Control, on the hub port:

    POST /_faults   a list of faults (faults.py) or of names (faults.txt); replaces the list;
                    with ?client=NAME: that machine's, of its requests only
    POST /_set      {"token": "...", "url_ttl": 5, "bps": 1e6, "xet": true} (shared.py has them all)
    POST /_reset    forget faults, settings of /_set, log and sums
    GET  /_stats    bytes sent and GETs a file and a client, peak connections, tokens that leaked,
                    the log; ?client=ADDRESS looks at one client only, ?log=0 leaves the log out
"""

from __future__ import annotations

import argparse
import json
import selectors
import signal
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from answers import PORTS, Answers
from bodies import byte_range
from cas import Cas
from cdn import Cdn
from faults import PRESETS, Fault, preset
from model_api import ModelApi
from repo import Repo
from shared import Shared

__all__ = ["PRESETS", "Hub", "byte_range", "preset"]
ORIGINS: tuple[type[Answers], ...] = (ModelApi, Cdn, Cas)


class Server(ThreadingHTTPServer):
    """One origin."""

    daemon_threads = True
    request_queue_size = 128
    timeout = 0.0  # `handle_request` is called when there is one
    tls: ssl.SSLContext | None = None

    def handle_error(self, request: object, client_address: object) -> None:
        return  # a client that hangs up is part of the game

    def get_request(self) -> tuple[socket.socket, Any]:
        conn, address = super().get_request()
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is not None:
            conn = self.tls.wrap_socket(conn, server_side=True, do_handshake_on_connect=False)
        return conn, address


class Hub:
    """A running hub. port 0: three adjacent free ports are chosen. `tls`: certificate and key.

    `settings` are those of shared.py; they hold from the start and survive /_reset.
    """

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        repo: str = "acme/tiny-hybrid",
        shards: int = 6,
        mb: float = 1,
        tls: tuple[str | Path, str | Path] | None = None,
        **settings: Any,
    ) -> None:
        self._temp = None if data else tempfile.TemporaryDirectory(prefix="hub-")
        root = Path(data or (self._temp.name if self._temp else ""))
        self.repo = Repo(repo, root / repo.replace("/", "--"), shards, mb)
        self.shared = Shared(self.repo, settings)
        self.servers = self._listen(host, port)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.shared.tls = True
            for server in self.servers:
                server.tls = context
        self._waker = socket.socketpair()
        self._run = threading.Thread(target=self._serve, daemon=True)
        shown = "127.0.0.1" if host == "0.0.0.0" else host
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://{shown}:{self.servers[0].server_address[1]}"

    def _listen(self, host: str, port: int) -> list[Server]:
        kinds: list[type[Answers]] = [
            type(kind.__name__, (kind,), {"shared": self.shared}) for kind in ORIGINS
        ]
        for _ in range(100):
            servers: list[Server] = []
            try:
                for kind in kinds:
                    first = int(servers[0].server_address[1]) if servers else port
                    at = first + PORTS[kind.where] if first else 0
                    servers.append(Server((host, at), kind))
                return servers
            except (OSError, OverflowError):
                for server in servers:
                    server.server_close()
                if port:
                    raise
        raise OSError("no three adjacent free ports")

    def __enter__(self) -> Hub:
        self._run.start()
        return self

    def _serve(self) -> None:
        """Accepts for all origins, until a byte comes through the waker."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._waker[0], selectors.EVENT_READ)
            for server in self.servers:
                ready.register(server, selectors.EVENT_READ, server)
            while True:
                for key, _ in ready.select():
                    if key.data is None:
                        return
                    key.data.handle_request()

    def __exit__(self, *exc: object) -> None:
        self._waker[1].send(b"x")
        self._run.join()
        self.shared.hang_up()
        for end in self._waker:
            end.close()
        for server in self.servers:
            server.server_close()
        if self._temp:
            self._temp.cleanup()

    def faults(self, faults: Iterable[str | Fault]) -> None:
        """Only these faults are on now; a name stands for its preset."""
        self.shared.faults.replace(faults)

    def stats(self, client: str | None = None, log: bool = True) -> dict[str, Any]:
        """The sums of GET /_stats."""
        return self.shared.stats(client, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900, help="hub; CDN and CAS on the next two")
    parser.add_argument("--data", default="./hubdata")
    parser.add_argument("--repo", default="acme/tiny-hybrid")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--mb", type=float, default=4, help="MiB a shard, about")
    parser.add_argument("--token", help="require this token for the bytes (a gated repository)")
    parser.add_argument("--url-ttl", type=float, default=3600.0, help="life of a CDN url, seconds")
    parser.add_argument("--bps", type=float, default=0.0, help="bytes a second a connection")
    parser.add_argument("--xet", action="store_true", help="offer Xet")
    parser.add_argument("--cert", help="speak TLS: certificate (PEM)")
    parser.add_argument("--key", help="the certificate's key (PEM)")
    parser.add_argument("--faults", default="[]", help="JSON list of faults or names")
    a = parser.parse_args()
    stop = threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.set())
    hub = Hub(
        a.data, port=a.port, host=a.host, repo=a.repo, shards=a.shards, mb=a.mb,
        tls=(a.cert, a.key) if a.cert else None,
        token=a.token, url_ttl=a.url_ttl, bps=a.bps, xet=a.xet,
    )  # fmt: skip
    with hub:
        hub.faults(json.loads(a.faults))
        print(f"{hub.url} {hub.repo.name}@{hub.repo.commit}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
