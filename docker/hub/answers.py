"""One request: its log entry, plain answers, and the faults that have no body."""

from __future__ import annotations

import json
import select
import ssl
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from faults import Fault, Request, Span
from shared import Entry, Shared

PORTAL = b"<!DOCTYPE html><html><title>Welcome</title><body>Log in to go on.</body></html>\n"
PORTS = {"hub": 0, "cdn": 1, "cas": 2}


class Answers(BaseHTTPRequestHandler):
    """`where` and `shared` are set on a subclass a hub and origin."""

    protocol_version = "HTTP/1.1"
    where = "hub"
    shared: Shared
    entry: Entry

    def log_message(self, format: str, *args: object) -> None:
        return  # the log is `shared.log`

    def setup(self) -> None:
        if isinstance(self.request, ssl.SSLSocket):
            # Here and not in accept: a client that never finishes its handshake blocks only itself.
            self.request.settimeout(10)
            self.request.do_handshake()
            self.request.settimeout(None)
        super().setup()

    def handle(self) -> None:
        with self.shared.connected(self.connection):
            super().handle()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        self.route_path = unquote(url.path).strip("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.entry = {
            "t": round(time.time(), 3),
            "client": self.client_address[0],
            "where": self.where,
            "method": self.command,
            "path": self.path,
            "file": None,
            "range": self.headers.get("Range"),
            "auth": "Authorization" in self.headers,
            "leak": False,
            "agent": (self.headers.get("User-Agent") or "")[:60],
            "status": None,
            "body": False,
            "sent": 0,
            "fault": None,
        }
        if self.where == "hub" and self.route_path.startswith("_"):
            return self.control()
        with self.shared.request(self.entry):
            try:
                self.route()
            except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
                self.close_connection = True
        return None

    do_HEAD = do_POST = do_GET

    def route(self) -> None:
        raise NotImplementedError

    # ---- answers
    def head(self, code: int, fields: dict[str, str]) -> None:
        """Status line and header."""
        self.entry["status"] = code
        self.send_response(code)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()

    def reply(self, code: int, body: object = b"", fields: dict[str, str] | None = None) -> None:
        """A whole answer; what is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        self.head(code, {**kind, **(fields or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code: int, error: str, message: str) -> None:
        """An error as the Hub words it. `error` may be ''."""
        fields = {"X-Error-Message": message}
        if error:
            fields["X-Error-Code"] = error
        self.reply(code, {"error": message}, fields)

    def origin(self, which: str) -> str:
        """The url of an origin, under the name by which the client reached this one."""
        host = urlsplit("//" + (self.headers.get("Host") or "localhost")).hostname or "localhost"
        host = f"[{host}]" if ":" in host else host
        address: Any = self.server.server_address
        port = address[1] - PORTS[self.where] + PORTS[which]
        return f"{'https' if self.shared.tls else 'http'}://{host}:{port}"

    # ---- faults
    def fault(self, name: str, span: Span | None = None, *, body: bool = False) -> Fault | None:
        """The fault of this request; None when it has already been answered by it."""
        ranged, body = self.entry["range"] is not None, body and self.command != "HEAD"
        asked = Request(self.where, self.command, name, ranged, body, span, self.client_address[0])
        found = self.shared.faults.pick(asked)
        self.entry["fault"] = do = found.get("do")
        if do == "status":
            wait = found.get("retry_after")
            fields = {} if wait is None else {"Retry-After": str(wait)}
            self.reply(found["code"], {"error": f"injected {found['code']}"}, fields)
        elif do == "hang":
            self.hold(found.get("secs", 86400))
        elif do == "redirect":
            where = self.path if found.get("to") == "self" else self.origin("cdn") + self.path
            self.reply(302, b"", {"Location": where})
        elif do == "drop":
            self.close_connection = True
        elif do == "portal":
            self.reply(200, PORTAL, {"Content-Type": "text/html"})
        else:
            return found
        return None

    def hold(self, seconds: float) -> None:
        """Silence until the client goes, the hub stops, or the time is over."""
        self.close_connection = True
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLRDHUP)
        end = time.monotonic() + seconds
        with self.shared.holding():
            while time.monotonic() < end and not self.shared.stopping.is_set():
                if poll.poll(min(100.0, seconds * 1000)):
                    return

    # ---- control
    def control(self) -> None:
        """/_faults, /_set, /_reset, /_stats, /_presets: see hub.py."""
        shared, name = self.shared, self.route_path
        answer: object = {"ok": True}
        try:
            data = json.loads(self.body or b"null")
            if name == "_faults":
                shared.faults.replace(data, self.query.get("client", ""))
            elif name == "_set":
                shared.change(data)
            elif name == "_reset":
                shared.reset()
            elif name == "_stats":
                answer = shared.stats(self.query.get("client"), self.query.get("log") != "0")
            else:
                return self.reply(404, {"error": "no such control"})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return self.reply(400, {"error": f"{type(error).__name__}: {error}"})
        return self.reply(200, answer)
