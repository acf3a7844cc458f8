"""The endpoints, with the status codes, bodies and access lines that were recorded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang.lookalike import faults, logs, process, render
from sglang.lookalike.engine import Request
from sglang.version import RELEASE, __version__

OPEN_PATHS = ("/health", "/metrics")
HEALTH_S, STUCK_S = 0.2, 20.0
GETS = {
    "/health": "health", "/health_generate": "health", "/v1/models": "models",
    "/model_info": "model_info", "/get_model_info": "model_info",
    "/server_info": "server_info", "/get_server_info": "server_info",
    "/get_load": "get_load", "/v1/loads": "loads", "/metrics": "metrics", "/ping": "health",
    "/flush_cache": "flush_cache",
}  # fmt: skip
POSTS = {
    "/generate": "generate", "/v1/chat/completions": "chat", "/v1/completions": "complete",
    "/flush_cache": "flush_cache", "/abort_request": "abort_request",
}  # fmt: skip
if RELEASE >= (0, 5, 20):
    GETS["/ready"] = "health"
    del GETS["/get_load"]
DEPRECATED = {
    "/get_load": "/v1/loads", "/get_server_info": "/server_info", "/get_model_info": "/model_info",
}  # fmt: skip


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        return  # a client that hung up


class BadRequest(Exception):
    """Answered with 400."""


class Handler(BaseHTTPRequestHandler):
    """One connection. `app` is set on a subclass: the HttpServer."""

    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    app: Any

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self.answer(GETS)

    def do_POST(self) -> None:
        self.answer(POSTS)

    def do_OPTIONS(self) -> None:
        self.reply(405, {"detail": "Method Not Allowed"})

    def answer(self, routes: dict[str, str]) -> None:
        path = self.path.partition("?")[0]
        if path != "/":
            path = path.rstrip("/")
        self.raw_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.app.args.api_key
        sent = self.headers.get("Authorization")
        if key and sent != f"Bearer {key}" and not path.startswith(OPEN_PATHS):
            return self.reply(401, {"error": "Unauthorized"})
        if path.startswith("/v1/models/"):
            return self.one_model(path.removeprefix("/v1/models/"))
        if path not in routes:
            other = path in GETS or path in POSTS
            detail = "Method Not Allowed" if other else "Not Found"
            return self.reply(405 if other else 404, {"detail": detail})
        if path in DEPRECATED:
            logs.say(
                f"Endpoint '{path}' is deprecated and will be removed in a future version. "
                f"Please use '{DEPRECATED[path]}' instead."
            )
        try:
            getattr(self, routes[path])()
        except BadRequest as e:
            self.bad_request(str(e), openai=path.startswith("/v1/"))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        return None

    # ---- replies
    def access(self, code: int) -> None:
        host, port = self.client_address[:2]
        logs.say(
            f'INFO:     {host}:{port} - "{self.command} {self.path} HTTP/1.1" {code} '
            f"{HTTPStatus(code).phrase}"
        )

    def reply(self, code: int, body: object = b"", kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.access(code)
        self.send_response_only(code)
        self.send_header("server", "uvicorn")
        self.send_header("content-length", str(len(data)))
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def bad_request(self, message: str, *, openai: bool) -> None:
        if not openai:
            return self.reply(400, {"error": {"message": message}})
        body = {"object": "error", "message": message, "type": "BadRequestError", "param": None}
        return self.reply(400, {**body, "code": 400})

    # ---- state
    def health(self) -> None:
        app = self.app
        if app.draining:
            logs.say("Health check request received during shutdown. Returning 503.")
            return self.reply(503)
        if app.status == "Starting":
            return self.reply(503)
        if app.status == "UnHealthy":
            logs.wait(STUCK_S)
            logs.say(
                "Health check failed. Server couldn't get a response from detokenizer for last 20 "
                "seconds."
            )
            return self.reply(503)
        logs.wait(HEALTH_S)  # the real one makes a token and needs a second or more
        return self.reply(200)

    def models(self) -> None:
        args = self.app.args
        card = {
            "id": args.served_model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": args.served_model_name,
            "parent": None,
            "max_model_len": args.model_config.context_len,
        }
        self.reply(200, {"object": "list", "data": [card]})

    def one_model(self, name: str) -> None:
        if name == self.app.args.served_model_name:
            return self.reply(200, {"id": name, "object": "model", "owned_by": "sglang"})
        error = {"message": f"The model '{name}' does not exist", "type": "invalid_request_error"}
        error |= {"param": "model", "code": "model_not_found"}
        return self.reply(404, {"error": error})

    def model_info(self) -> None:
        args = self.app.args
        self.reply(
            200,
            {
                "model_path": args.model_path,
                "tokenizer_path": args.tokenizer_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "model_type": args.model_config.model_type,
                "architectures": [args.model_config.architecture],
            },
        )

    def server_info(self) -> None:
        app, engine = self.app, self.app.engine
        info = {k: v for k, v in vars(app.args).items() if k != "model_config"}
        state = {
            "last_gen_throughput": round(engine.throughput, 2),
            "memory_usage": engine.info["memory_usage"],
            "effective_max_running_requests_per_dp": engine.info["max_running_requests"],
        }
        mean = engine.mean_accept()
        if mean is not None:
            state["avg_spec_accept_length"] = mean
        info |= {
            "status": "ready",
            "max_total_num_tokens": engine.info["max_total_num_tokens"],
            "max_req_input_len": app.args.model_config.context_len - 6,
            "internal_states": [state],
            "version": __version__,
        }
        self.reply(200, info)

    def get_load(self) -> None:
        engine = self.app.engine
        held = sum(r.prompt_tokens + r.made for r in list(engine.running.values()))
        load = {"dp_rank": 0, "num_reqs": len(engine.running), "num_waiting_reqs": engine.waiting}
        self.reply(200, [{**load, "num_tokens": held}])

    def loads(self) -> None:
        if self.app.args.enable_metrics and RELEASE >= (0, 5, 11):
            self.reply(500, b"Internal Server Error", "text/plain; charset=utf-8")
            logs.say("ERROR:    Exception in ASGI application")
            logs.raw("AttributeError: '_IncludedRouter' object has no attribute 'path'\n")
            return
        engine = self.app.engine
        load = {"dp_rank": 0, "num_running_reqs": len(engine.running)}
        load |= {"num_waiting_reqs": engine.waiting}
        self.reply(200, {"timestamp": time.time(), "version": __version__, "loads": [load]})

    def metrics(self) -> None:
        if not self.app.args.enable_metrics:
            return self.reply(404, {"detail": "Not Found"})
        text = render.metrics(self.app.args, self.app.engine)
        return self.reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def flush_cache(self) -> None:
        self.reply(
            200, b"Cache flushed.\nPlease check backend logs for more details.\n", "text/plain"
        )

    def abort_request(self) -> None:
        self.reply(200)

    # ---- generation
    def body(self) -> dict[str, Any]:
        try:
            found = json.loads(self.raw_body)
        except ValueError as e:
            raise BadRequest(
                "1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 0), 'msg': "
                f"'JSON decode error', 'input': {{}}, 'ctx': {{'error': '{e}'}}}}\n"
            ) from None
        if not isinstance(found, dict):
            raise BadRequest("1 validation error:\n  {'type': 'model_attributes_type'}\n")
        return found

    def plan(self, prompt: str, limit: Any, temperature: Any, think: bool) -> Request:
        temperature = 1.0 if temperature is None else temperature
        if temperature < 0:
            raise BadRequest(f"temperature must be non-negative, got {temperature}.")
        longest = self.app.args.model_config.context_len
        request: Request = self.app.engine.plan(
            prompt, 1 << 16 if limit is None else int(limit), temperature, think
        )
        if request.prompt_tokens > longest:
            raise BadRequest(
                f"The input ({request.prompt_tokens} tokens) is longer than the model's context "
                f"length ({longest} tokens)."
            )
        total = request.prompt_tokens + int(limit or 0)
        if total > longest:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {longest} "
                f"tokens. You requested a total of {total} tokens: {request.prompt_tokens} tokens "
                f"from the input messages and {limit} tokens for the completion. Please reduce "
                "the number of tokens in the input messages or the completion to fit within the "
                "limit."
            )
        if not self.headers.get("X-Lookalike-Warmup"):
            faults.spoil(request, longest, faults.active())
        return request

    def chat(self) -> None:
        body = self.body()
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest(
                "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages'), 'msg': "
                "'Field required'}\n"
            )
        model = self.model_of(body)
        wants = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        parser = self.app.args.reasoning_parser
        prompt = render.prompt_of(body["messages"])
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        think = bool(wants) and self.app.args.model_config.model_type.startswith("qwen3")
        request = self.plan(prompt, limit, body.get("temperature"), think)
        on = faults.active()
        if faults.NO_SWITCH in on and body.get("chat_template_kwargs"):
            raise BadRequest("chat_template_kwargs: this template takes no such argument")
        split = parser is not None and body.get("separate_reasoning", True)
        swallow = bool(split) and faults.SWALLOWS in on
        if faults.THINKS_ALOUD in on:
            split = False
        view = render.Chat(request, model, split=bool(split), swallow=swallow)
        self.send(view, request, body)

    def complete(self) -> None:
        body = self.body()
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            prompt = "".join(map(str, prompt))
        if not isinstance(prompt, str):
            raise BadRequest(
                "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'prompt')}"
            )
        model = self.model_of(body)
        limit = 16 if body.get("max_tokens") is None else body["max_tokens"]
        request = self.plan(prompt, limit, body.get("temperature"), False)
        self.send(render.Text(request, model), request, body)

    def generate(self) -> None:
        body = self.body()
        params = body.get("sampling_params") or {}
        text = body.get("text")
        if text is None and body.get("input_ids"):
            text = " ".join("x" for _ in body["input_ids"])
        if text is None:
            raise BadRequest("Either text, input_ids or input_embeds should be provided.")
        limit = params.get("max_new_tokens", 128)
        if isinstance(text, list):
            answers = []
            for one in text:
                request = self.plan(one, limit, params.get("temperature"), False)
                answers.append(self.whole(render.Native(request, self.app.engine), request))
            return self.completed(lambda: self.reply(200, answers))
        request = self.plan(text, limit, params.get("temperature"), False)
        return self.send(render.Native(request, self.app.engine), request, body)

    def model_of(self, body: dict[str, Any]) -> str:
        """A wrong name is answered all the same; only a colon (LoRA) is refused."""
        model = str(body.get("model") or "default")
        name, _, lora = model.partition(":")
        if lora:
            raise BadRequest(
                f"LoRA adapter '{lora}' was requested, but LoRA is not enabled. Please launch the "
                "server with --enable-lora flag and preload adapters using --lora-paths or "
                "/load_lora_adapter endpoint."
            )
        return name

    def whole(self, view: Any, request: Request) -> object:
        return view.whole("".join(self.app.engine.run(request)))

    def send(self, view: Any, request: Request, body: dict[str, Any]) -> None:
        if not body.get("stream"):
            answer = self.whole(view, request)
            return self.completed(lambda: self.reply(200, answer))
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return self.completed(lambda: self.stream(view.stream(self.app.engine.run(request), usage)))

    def stream(self, events: Iterator[object]) -> None:
        self.access(200)
        self.send_response_only(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for event in events:
            self.chunk(f"data: {json.dumps(event)}\n\n".encode())
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def completed(self, send: Any) -> None:
        """Send, and die if that was ordered (not for the warm-up)."""
        send()
        warm = self.headers.get("X-Lookalike-Warmup")
        if not warm and faults.DIES_AFTER_FIRST in faults.active():
            self.connection.shutdown(socket.SHUT_WR)
            logs.wait(0.1)
            process.kill_tree(include_self=True)
