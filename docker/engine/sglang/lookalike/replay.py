"""Plays a recorded log as this server's own: its lines, then what it did to its endpoints and end.

Chosen by environment variables, whatever the arguments are:

    LOOKALIKE_REPLAY=PATH[:SPEED]   the log; SPEED times as fast as its stamps tell, default `max`
    LOOKALIKE_REPLAY_EXIT=N         how it ends after the last byte: exit code N, or signal -N.
                                    Unset: it lives on (and serves, if it had got that far)
    LOOKALIKE_REPLAY_CUT=BYTES      plays no more than that of it
    LOOKALIKE_REPLAY_HOLD=WORDS     `warmup`, `ready`: stays at that line until /health was asked
                                    there (answered 503, 200), at most HOLD_S
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.lookalike import logs, process
from sglang.lookalike.engine import Engine
from sglang.lookalike.http import Handler, Server

PATH, EXIT = "LOOKALIKE_REPLAY", "LOOKALIKE_REPLAY_EXIT"
CUT, HOLD = "LOOKALIKE_REPLAY_CUT", "LOOKALIKE_REPLAY_HOLD"
HOLD_S, DRAIN_S = 60.0, 0.5
STAMP = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
RANK = re.compile(rb"^\[[^\]]* TP(\d+)\]", re.M)
FIGURES = re.compile(rb"max_total_num_tokens=(\d+),.*?max_running_requests=(\d+),.*?len=(\d+)")
BEGINS = re.compile(rb"^\[[^\]]*\] Init torch distributed begin\.")
OPENS = re.compile(rb"^(?:\[[^\]]*\] )?INFO: +Uvicorn running on ")
READY = re.compile(rb"^\[[^\]]*\] The server is fired up and ready to roll!")
PROBED = re.compile(rb'"GET /health HTTP/1\.1" (200|503)')
DRAINS = re.compile(rb"SIGTERM received\.")


class ReplayHandler(Handler):
    """The usual endpoints; what is asked is remembered, and nothing is logged."""

    app: Replay

    def health(self) -> None:
        before = self.app.status
        if before == "Up" and self.app.refusals > 0:
            self.app.refusals -= 1
            self.reply(503)
            return
        super().health()
        self.app.asked[before].set()


class Replay:
    """One recorded launch."""

    def __init__(self, argv: list[str]) -> None:
        path, _, speed = os.environ[PATH].rpartition(":")
        if not path or not re.fullmatch(r"max|\d+(?:\.\d+)?", speed):
            path, speed = os.environ[PATH], "max"
        self.speed = 0.0 if speed == "max" else float(speed)
        data = Path(path).read_bytes()
        self.data = data[: int(os.environ.get(CUT) or len(data))]
        self.hold = set(filter(None, os.environ.get(HOLD, "").split(",")))
        self.refusals = refused_first(self.data)
        self.listens = False
        self.asked = {name: threading.Event() for name in ("Starting", "Up", "UnHealthy")}
        self.status, self.draining, self.drained = "Starting", False, threading.Event()
        self.args = arguments(argv, data)
        found = FIGURES.search(data)
        tokens, running, context = map(int, found.groups()) if found else (4096, 1, 4096)
        self.args.model_config.context_len = context
        memory = {"weight": 0.0, "kvcache": 0.0, "token_capacity": tokens, "graph": 0.0}
        self.engine = Engine(
            self.args,
            {
                "max_total_num_tokens": tokens,
                "max_running_requests": running,
                "missing_shards": [],
                "memory_usage": memory,
            },
        )

    def play(self) -> None:
        """Blocks for the life of the process."""
        logs.mute()
        last = None
        for line in pieces(self.data):
            last = self.pause(line, last)
            if BEGINS.match(line):
                self.start_children()
            if OPENS.match(line):
                self.listen()
            write(line)
            if READY.match(line) and line.endswith(b"\n"):
                self.status = "Up"
            elif not OPENS.match(line):
                self.draining = self.draining or bool(DRAINS.search(line))
                continue
            # With --skip-server-warmup the ready line stands before the port opens.
            if self.listens:
                self.wait("ready" if self.status == "Up" else "warmup", self.status)
        self.end()

    def pause(self, line: bytes, last: float | None) -> float | None:
        """As long as the stamps say; returns the newest stamp."""
        stamp = STAMP.match(line)
        if stamp is None:
            return last
        now = datetime.strptime(stamp[1].decode(), "%Y-%m-%d %H:%M:%S").timestamp()
        if last is not None and self.speed and now > last:
            time.sleep((now - last) / self.speed)
        return now

    def wait(self, word: str, status: str) -> None:
        """Until /health was asked in this state, SIGTERM came, or HOLD_S passed."""
        ends = time.monotonic() + HOLD_S
        while word in self.hold and not self.drained.is_set() and time.monotonic() < ends:
            if self.asked[status].wait(0.05):
                return

    def start_children(self) -> None:
        """Schedulers and a detokenizer under their titles; once, and before any thread."""
        if self.args.children:
            return
        ranks = sorted({int(rank) for rank in RANK.findall(self.data)})
        titles = [f"sglang::scheduler_TP{rank}" for rank in ranks] or ["sglang::scheduler"]
        parent = os.getpid()
        for title in [*titles, "sglang::detokenizer"]:
            pid = os.fork()
            if pid == 0:
                process.die_with_parent(parent)
                process.set_title(title)
                while True:
                    signal.pause()
            self.args.children.append(pid)

    def listen(self) -> None:
        """The port opens; nobody else may hold it, or the recording does not fit the machine."""
        signal.signal(signal.SIGTERM, self.on_sigterm)
        handler = type("BoundHandler", (ReplayHandler,), {"app": self})
        server = Server((self.args.host, self.args.port), handler)
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        self.listens = True

    def on_sigterm(self, signum: int, frame: object) -> None:
        self.draining = True
        self.drained.set()

    def end(self) -> None:
        """The recorded end, or none: then SIGTERM ends it, as it would the real one."""
        code = os.environ.get(EXIT, "")
        if code:
            process.kill_tree(include_self=False)
            if int(code) >= 0:
                os._exit(int(code))
            if int(code) != -signal.SIGKILL:
                signal.signal(-int(code), signal.SIG_DFL)
            os.kill(os.getpid(), -int(code))
        self.drained.wait()
        time.sleep(DRAIN_S)
        process.kill_tree(include_self=True)


def arguments(argv: list[str], data: bytes) -> SimpleNamespace:
    """What the endpoints need: this command line first, else what the recording's says."""

    def given(flag: str, default: str) -> str:
        for i, word in enumerate(argv):
            if word == flag and i + 1 < len(argv):
                return argv[i + 1]
            if word.startswith(flag + "="):
                return word.partition("=")[2]
        return default

    line = re.search(rb"server_args=ServerArgs\((.*)\)", data)
    recorded = line[1].decode("utf-8", "replace") if line else ""

    def was(name: str) -> str:
        m = re.search(rf"\b{name}='?([^,')]*)", recorded)
        return "" if m is None or m[1] == "None" else m[1]

    hybrid = b"Mamba Cache is allocated" in data
    kind = "qwen3_5" if hybrid else "qwen3"
    name = "Qwen3_5ForConditionalGeneration" if hybrid else "Qwen3ForCausalLM"
    model = SimpleNamespace(hybrid=hybrid, model_type=kind, architecture=name, context_len=4096)
    path = given("--model-path", was("model_path") or "/srv/models/recorded")
    return SimpleNamespace(
        host=given("--host", "127.0.0.1"),
        port=int(given("--port", "30000")),
        api_key=given("--api-key", "") or None,
        served_model_name=given("--served-model-name", path),
        model_path=path,
        tokenizer_path=path,
        model_config=model,
        reasoning_parser=given("--reasoning-parser", was("reasoning_parser")) or None,
        speculative_algorithm=was("speculative_algorithm") or None,
        speculative_num_draft_tokens=int(was("speculative_num_draft_tokens") or 0) or None,
        tp_size=int(was("tp_size") or 1),
        decode_log_interval=40,
        disable_cuda_graph=False,
        enable_metrics=True,
        children=[],
    )


def refused_first(data: bytes) -> int:
    """How often /health was 503 after the ready line before it was 200 for the first time."""
    ready = re.search(READY.pattern, data, re.M)
    codes = PROBED.findall(data, ready.end()) if ready else []
    return codes.index(b"200") if b"200" in codes else 0


def pieces(data: bytes) -> Iterator[bytes]:
    """The recorded bytes, cut after each end of a line or of a bar's state."""
    return (piece for piece in re.split(rb"(?<=[\r\n])", data) if piece)


def write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(2, view) :]


def wanted() -> bool:
    return PATH in os.environ


def play(argv: list[str]) -> Any:
    """Never returns."""
    Replay(argv).play()
    sys.exit(0)
