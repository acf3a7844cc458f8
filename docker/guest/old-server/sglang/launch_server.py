"""An old server on port 30000: answers health and model list, ends on SIGTERM."""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS: dict[str, object] = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "tiny-old", "object": "model"}]},
}


class Handler(BaseHTTPRequestHandler):
    """GET only."""

    def do_GET(self) -> None:
        """Answers the known paths."""
        answer = ANSWERS.get(self.path)
        body = json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ThreadingHTTPServer(("0.0.0.0", 30000), Handler).serve_forever()
