"""Our client of routers against a real smg with two workers and a request every 50 ms."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployer.errors import StepFailed
from deployer.router import Router
from deployer.router_door import HereDoor

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(SMG is None, reason="smg is not installed (pip install smg)")
LONG_S = 2.0


class Worker(ThreadingHTTPServer):
    """What a router asks of a server; a completion takes the seconds that `user` names."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = name
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Worker
    told: dict[str, Any] = {  # noqa: RUF012
        "/health": {},
        "/server_info": {"model_path": "/m/tiny", "served_model_name": "tiny", "version": "0.5.11"},
        "/model_info": {"model_path": "/m/tiny", "is_generation": True},
        "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model"}]},
    }

    def say(self, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200 if body is not None else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        self.say(self.told.get(self.path))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(float(asked["user"]))
        message = {"role": "assistant", "content": self.server.name}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.say({"id": "1", "object": "chat.completion", "model": "tiny", "choices": [choice]})

    def log_message(self, *words: Any) -> None:
        pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """A running smg without workers."""
    port = free_port()
    argv = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    argv += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    with (tmp_path / "smg.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    ends = time.monotonic() + 30
    try:
        while True:
            assert process.poll() is None, (tmp_path / "smg.log").read_text()
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < ends, "smg does not listen"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


class Client:
    """A request every 50 ms, each twentieth a long one; which worker answered when."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.ended = threading.Event()
        self.problems: list[str] = []
        self.answers: list[tuple[float, str]] = []
        self.threads: list[threading.Thread] = []
        self.main = threading.Thread(target=self.work)

    def one(self, seconds: float) -> None:
        body = {"model": "tiny", "user": str(seconds)}
        body |= {"messages": [{"role": "user", "content": "hi"}]}  # type: ignore[dict-item]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        began = time.monotonic()
        try:
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 200:
                name = json.loads(text)["choices"][0]["message"]["content"]
                self.answers.append((began, name))
            else:
                self.problems.append(f"{answer.status} {text[:200]!r}")
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    def work(self) -> None:
        number = 0
        while not self.ended.wait(0.05):
            seconds = LONG_S if number % 20 == 0 else 0.0
            self.threads.append(threading.Thread(target=self.one, args=(seconds,)))
            self.threads[-1].start()
            number += 1

    def __enter__(self) -> Client:
        self.main.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.main.join()
        for thread in self.threads:
            thread.join()

    def by(self, after: float) -> set[str]:
        """Who answered what began after this moment; waited for until it is something."""
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            if names := {name for began, name in list(self.answers) if began > after}:
                return names
            time.sleep(0.02)
        return set()


def quiet(what: str, spent: float, limit: float) -> None:
    pass


def test_there_and_back_again_while_it_still_drains(port: int) -> None:
    """No request fails, and no one goes to who was taken out."""
    a, b = Worker("a"), Worker("b")
    router = Router(HereDoor(f"http://127.0.0.1:{port}"), "smg")
    taken = router.take_in(f"{a.url}/", 30, quiet)
    assert (taken.url, taken.models, taken.kind) == (a.url, ("tiny",), "regular")
    with Client(port) as client:
        assert client.by(0.0) == {"a"}
        router.take_in(b.url, 30, quiet)
        assert router.take_out(a.url, 30, quiet)
        assert client.by(time.monotonic()) == {"b"}
        listed = router.find(a.url)
        assert listed is not None and listed.draining, "and so it cannot be added yet"
        router.take_in(a.url, 30, quiet)
        assert router.take_out(b.url, 30, quiet)
        assert client.by(time.monotonic()) == {"a"}
    assert client.problems == [] and len(client.answers) > 50
    assert not router.take_out("http://127.0.0.1:1", 5, quiet)


def test_one_that_is_dead_is_told_with_the_reason(port: int) -> None:
    router = Router(HereDoor(f"http://127.0.0.1:{port}"), "smg")
    with pytest.raises(StepFailed, match="did not become healthy in 1 s: processing"):
        router.take_in(f"http://127.0.0.1:{free_port()}", 1, quiet)
    with pytest.raises(StepFailed, match="status 400"):
        router.take_in("gopher://127.0.0.1:1", 1, quiet)
