"""A node of rank 1 or more: schedulers, and a health server once they are ready; no API."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.lookalike import logs

PATHS = ("/health", "/health_generate", "/ping")


class Dummy(BaseHTTPRequestHandler):
    """`launch_dummy_health_check_server` of SGLang 0.5.11: an empty 200, or FastAPI's 404."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        good = self.path.partition("?")[0] in PATHS
        self.answer(200 if good else 404, b"" if good else b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(404, b'{"detail":"Not Found"}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Its log level is `warning`."""


def run(args: Any, children: list[Any]) -> None:
    """Blocks until the schedulers have ended."""
    server: ThreadingHTTPServer | None = None
    try:
        server = ThreadingHTTPServer((args.host, args.port), Dummy)
    except OSError as error:
        # In a thread of its own there: the schedulers stay.
        logs.say(f"Dummy health check server failed to start: {error}")
    if server is not None:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    for child in children:
        child.join()
        logs.say(
            f"Scheduler or DataParallelController {child.pid} terminated with {child.exitcode}"
        )
