"""The parent: starts the children, serves HTTP in uvicorn's manner, and dies as SGLang does."""

from __future__ import annotations

import errno
import http.client
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any
from urllib.parse import urlsplit

from sglang.lookalike import deaths, follower, logs, process, scheduler
from sglang.lookalike.engine import Engine
from sglang.lookalike.http import Handler, Server
from sglang.version import RELEASE

DRAIN_POLL_S, WATCHDOG_S = 5.0, 1.0


def launch_server(server_args: Any) -> None:
    """Blocks for the life of the server. The usual end is SIGKILL by itself."""
    signal.signal(signal.SIGQUIT, _launch_phase_sigquit_handler)
    server_args.check_server_args()
    logs.say(f"server_args={server_args!r}")
    logs.say("Using default HuggingFace chat template with detected content format: openai")
    if not os.path.exists(os.path.join(server_args.tokenizer_path, "tokenizer.json")):
        raise OSError(
            f"Can't load tokenizer for '{server_args.tokenizer_path}'. If you were trying to load "
            "it from 'https://huggingface.co/models', make sure you don't have a local directory "
            "with the same name."
        )
    children, info = _launch_subprocesses(server_args)
    if server_args.node_rank >= 1:
        follower.run(server_args, children)
    HttpServer(server_args, Engine(server_args, info), children).run()


def _launch_phase_sigquit_handler(signum: int, frame: object) -> None:
    logs.raw("\n")
    logs.say("Received sigquit from a child process. It usually means the child failed.")
    process.kill_tree(include_self=True)


def _launch_subprocesses(args: Any) -> tuple[list[Any], dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    children, pipes = [], []
    parent = os.getpid()
    works: list[tuple[Any, tuple[Any, ...]]] = [
        (scheduler.run_scheduler_process, (args, rank, parent)) for rank in scheduler.ranks(args)
    ]
    if args.node_rank == 0:
        works.append((scheduler.run_detokenizer_process, (parent,)))
    for work, given in works:
        mine, theirs = spawn.Pipe()
        child = spawn.Process(target=work, args=(*given, theirs))
        child.start()
        theirs.close()
        children.append(child)
        pipes.append(mine)
    infos = []
    for pipe in pipes:
        try:
            infos.append(pipe.recv()[1])
        except EOFError:
            time.sleep(2)  # a child that failed sends SIGQUIT, which ends this process here
            raise died_error(pipes.index(pipe), children) from None
    for child, pipe in zip(children, pipes, strict=True):
        child.pipe = pipe  # kept open: its end would end the child
    return children, infos[0]


def died_error(index: int, children: list[Any]) -> Exception:
    """A scheduler that was killed while it loaded."""
    children[index].join(10)
    code = children[index].exitcode
    if RELEASE < (0, 5, 10):
        logs.say(f"Rank {index} scheduler is dead. Please check if there are relevant logs.")
        logs.say(f"Exit code: {code}")
        return EOFError()
    return RuntimeError(
        f"Rank {index} scheduler died during initialization (exit code: {code}). If exit code is "
        "-9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."
    )


class HttpServer:
    """Status, drain and warm-up around the listening socket."""

    def __init__(self, args: Any, engine: Engine, children: list[Any]) -> None:
        self.args, self.engine, self.children = args, engine, children
        self.status = "Starting"
        self.draining = False

    def run(self) -> None:
        logs.say(f"INFO:     Started server process [{os.getpid()}]")
        logs.say("INFO:     Waiting for application startup.")
        logs.say("INFO:     Application startup complete.")
        signal.signal(signal.SIGTERM, self.on_sigterm)
        signal.signal(signal.SIGQUIT, self.on_sigquit)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # uvicorn takes it, ignored or not
        handler = type("BoundHandler", (Handler,), {"app": self})
        if (death := deaths.ordered(deaths.BIND)) is not None:
            logs.say(deaths.fill(death.text, self.args))
            logs.say("INFO:     Waiting for application shutdown.")
            while True:
                time.sleep(3600)
        try:
            server = Server((self.args.host, self.args.port), handler)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            self.port_is_taken()
            return
        # Before the warm-up's first line, as uvicorn does.
        logs.say(
            f"INFO:     Uvicorn running on http://{self.args.host}:{self.args.port} "
            "(Press CTRL+C to quit)"
        )
        for work in (self.watch_children, self.drain, self.warm_up):
            threading.Thread(target=work, daemon=True).start()
        try:
            server.serve_forever(0.1)
        except KeyboardInterrupt:
            logs.say("INFO:     Shutting down")
            logs.say(f"INFO:     Finished server process [{os.getpid()}]")

    def port_is_taken(self) -> None:
        """The real one neither exits nor answers to SIGTERM, unless the owner says 200 to all."""
        where = (self.args.host, self.args.port)
        logs.say(
            f"ERROR:    [Errno 98] error while attempting to bind on address {where!r}: address "
            "already in use"
        )
        logs.say("INFO:     Waiting for application shutdown.")
        try:
            if self.ask("GET", "/model_info")[0] == 200:
                logs.wait(1)
                raise KeyError("is_generation")
        except KeyError:
            logs.raw(traceback.format_exc())
            process.kill_tree(include_self=False)
            os._exit(3)
        except (OSError, http.client.HTTPException):
            pass  # a silent owner: the same hang
        while True:
            time.sleep(3600)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """A request to this very port, as the warm-up does."""
        at = urlsplit(self.args.url())
        conn = http.client.HTTPConnection(at.hostname or "", at.port, timeout=10)
        headers = {"X-Lookalike-Warmup": "1"}
        if self.args.api_key:
            headers["Authorization"] = f"Bearer {self.args.api_key}"
        try:
            conn.request(method, path, None if body is None else json.dumps(body), headers)
            got = conn.getresponse()
            return got.status, got.read()
        finally:
            conn.close()

    def warm_up(self) -> None:
        if not self.args.skip_server_warmup:
            logs.wait(0.5)
            self.ask("GET", "/model_info")
            logs.wait(1.0)
            if (death := deaths.ordered(deaths.WARMUP)) is not None:
                logs.say(f"Scheduler hit an exception: {deaths.fill(death.text, self.args)}")
                os.kill(os.getpid(), signal.SIGQUIT)
                return
            if self.args.model_config.architecture.endswith("ConditionalGeneration"):
                said = [{"role": "user", "content": "The capital city of France is"}]
                path = "/v1/chat/completions"
                body: dict[str, Any] = {"model": "x", "messages": said, "max_tokens": 8}
            else:
                path = "/generate"
                body = {"text": "The capital city of France is",
                        "sampling_params": {"max_new_tokens": 8, "temperature": 0}}  # fmt: skip
            status, answer = self.ask("POST", path, {**body, "temperature": 0})
            if status != 200:
                logs.say(f"Initialization failed. warmup error: {answer.decode()}")
                process.kill_tree(include_self=True)
        self.status = "Up"
        logs.say("The server is fired up and ready to roll!")
        for child in self.children:
            child.pipe.send("ready")

    def watch_children(self) -> None:
        """Since 0.5.10; before, a killed scheduler left a server that no longer answers."""
        names = [f"scheduler_{i}" for i in range(len(self.children) - 1)] + ["detokenizer"]
        while True:
            time.sleep(WATCHDOG_S)
            for name, child in zip(names, self.children, strict=True):
                if child.exitcode is None:
                    continue
                if RELEASE < (0, 5, 10):
                    self.status = "UnHealthy"
                    continue
                logs.say(
                    f"Subprocess {name} (pid={child.pid}) crashed with exit code "
                    f"{child.exitcode}. Triggering SIGQUIT for cleanup..."
                )
                os.kill(os.getpid(), signal.SIGQUIT)
                return

    def on_sigterm(self, signum: int, frame: object) -> None:
        if not self.draining:
            logs.say(
                "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
            )
        self.draining = True

    def on_sigquit(self, signum: int, frame: object) -> None:
        logs.say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        process.kill_tree(include_self=True)

    def drain(self) -> None:
        """Every five seconds: has SIGTERM come, and is nothing left to do?"""
        while True:
            logs.wait(DRAIN_POLL_S)
            if not self.draining:
                continue
            rids = list(self.engine.running)
            logs.say(
                f"Gracefully exiting... Remaining number of requests {len(rids)}. Remaining "
                f"requests remaining_rids={rids}."
            )
            if not rids:
                sys.stderr.flush()
                # 0.5.23 lets its schedulers end by themselves, and returns.
                process.kill_tree(include_self=RELEASE < (0, 5, 20))
                os._exit(0)
