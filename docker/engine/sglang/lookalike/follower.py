"""A node of rank 1 or more: schedulers, and a health server once they are ready; no API."""

from __future__ import annotations

import os
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


END = """\
  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/entrypoints/http_server.py", line 317, \
in lifespan
    fast_api_app.state.openai_serving_completion = OpenAIServingCompletion(
                                                   ^^^^^^^^^^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/entrypoints/openai/serving_base.py", \
line 35, in __init__
    if isinstance(self.tokenizer_manager.server_args, ServerArgs)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AttributeError: 'NoneType' object has no attribute 'server_args'

"""


def run(args: Any, children: list[Any]) -> None:
    """Never returns. As a real run of 0.5.11 did: when its schedulers have ended it goes on as if
    it were rank 0, has no tokenizer manager, and exits with 3."""
    server: ThreadingHTTPServer | None = None
    try:
        server = ThreadingHTTPServer((args.host, args.port), Dummy)
    except OSError as error:
        # In a thread of its own there: the schedulers stay, and it says `started` all the same.
        where, place = (args.host, args.port), f"{args.host}:{args.port}"
        logs.say(f"Dummy health check server started in background thread at {place}")
        logs.say(
            f"[Errno {error.errno}] error while attempting to bind on address {where!r}: address "
            "already in use"
        )
        logs.say(f"Dummy health check server stopped at {place}")
    if server is not None:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        logs.say(
            f"Dummy health check server started in background thread at {args.host}:{args.port}"
        )
    for child in children:
        child.join()
        logs.say(
            f"Scheduler or DataParallelController {child.pid} terminated with {child.exitcode}"
        )
    logs.say(f"INFO:     Started server process [{os.getpid()}]")
    logs.say("INFO:     Waiting for application startup.")
    logs.say(f"ERROR:    Traceback (most recent call last):\n{END}")
    logs.say("ERROR:    Application startup failed. Exiting.")
    os._exit(3)
