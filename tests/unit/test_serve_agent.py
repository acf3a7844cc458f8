"""The agent run as the target runs it: its text fed to a Python, against a small HTTP server."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serverworld import deployment

from deployer.errors import StepFailed
from deployer.remote.transport import Answer
from deployer.steps.server_agent import ask, parse_answers
from tests.local_transport import LocalTransport, shell_path

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


class Handler(http.server.BaseHTTPRequestHandler):
    """Enough of an OpenAI-compatible server. The key is `k`; `hang` never answers."""

    protocol_version = "HTTP/1.1"
    hang = threading.Event()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, {})
        elif self.headers.get("Authorization") != "Bearer k":
            self.reply(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "tiny"}]})
        elif self.path == "/get_server_info":
            state = {"avg_spec_accept_length": 2.5}
            body = {"speculative_num_draft_tokens": 4, "internal_states": [state]}
            self.reply(200, body)
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        if prompt == "hang":
            self.hang.wait(20)
            return
        if prompt == "bad":
            self.reply(400, {"object": "error", "message": "too long"})
            return
        message = {"content": f"you said {prompt}", "reasoning_content": None}
        choice = {"message": message, "finish_reason": "stop"}
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": 3}})


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is what the test wants."""


@pytest.fixture
def port() -> Iterator[int]:
    Handler.hang = threading.Event()
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_address[1]
    Handler.hang.set()
    server.shutdown()
    thread.join()
    server.server_close()


def me() -> dict[str, Any]:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return {"pid": os.getpid(), "start": int(fields[19]), "session": int(fields[3]), "boot": BOOT}


def run(tmp_path: Path, port: int, *commands: dict[str, Any], key: str = "k") -> list[Any]:
    transport = LocalTransport(shell_path("dash", tmp_path))
    want = deployment(serve={"port": port})
    return ask(transport, want, commands, timeout_s=40, api_key=key)


def test_identity_names_the_owner_of_the_port(tmp_path: Path, port: int) -> None:
    seen = run(tmp_path, port, {"do": "identity", **me()})[0]
    assert seen["alive"]
    assert seen["listening"]
    assert [one["pid"] for one in seen["owners"]] == [os.getpid()]
    assert seen["owned"]
    # Session 0: the session's leader is outside our PID namespace (a container's exec).
    nowhere = run(tmp_path, port, {"do": "identity", **me(), "session": 0})[0]
    assert nowhere["owned"]
    other = run(tmp_path, port, {"do": "identity", **me(), "start": 1})[0]
    assert not other["alive"]
    assert not other["owned"]


def test_ready_light_and_info(tmp_path: Path, port: int) -> None:
    ready, light, info = run(
        tmp_path,
        port,
        {"do": "ready", **me()},
        {"do": "light", **me(), "model": "tiny", "timeout_s": 5},
        {"do": "server_info"},
    )
    assert ready["models"]["ids"] == ["tiny"]
    assert ready["health"] == 200
    assert light["completion"]["content"] == "you said Say hello."
    assert info["info"]["avg_spec_accept_length"] == 2.5
    assert info["info"]["speculative_num_draft_tokens"] == 4


def test_a_wrong_key(tmp_path: Path, port: int) -> None:
    assert run(tmp_path, port, {"do": "models"}, key="wrong")[0]["status"] == 401


def test_completions(tmp_path: Path, port: int) -> None:
    ask_for = {"do": "completion", "model": "tiny", "max_tokens": 8, "timeout_s": 1}
    good, bad, hung = run(
        tmp_path,
        port,
        {**ask_for, "prompt": "hi"},
        {**ask_for, "prompt": "bad"},
        {**ask_for, "prompt": "hang"},
    )
    assert (good["content"], good["tokens"], good["finish_reason"]) == ("you said hi", 3, "stop")
    assert bad["status"] == 400
    assert "too long" in bad["error"]
    assert hung["status"] == 0
    assert "no answer within 1 s" in hung["error"]


def test_many_requests(tmp_path: Path, port: int) -> None:
    one = {"model": "tiny", "max_tokens": 8, "timeout_s": 5}
    requests = [{**one, "prompt": "ab"[number % 2]} for number in range(10)]
    command = {"do": "many", "requests": requests, "parallel": 4, "deadline_s": 20}
    result = run(tmp_path, port, command)[0]
    assert [one["number"] for one in result["results"]] == list(range(10))
    assert result["results"][3]["content"] == "you said b"


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    health = run(tmp_path, port, {"do": "health"})[0]
    assert health["status"] == 0
    assert "Refused" in health["error"]


def test_an_unknown_command_is_an_error(tmp_path: Path, port: int) -> None:
    with pytest.raises(StepFailed, match="unknown command"):
        run(tmp_path, port, {"do": "dance"})


def test_no_python_at_all() -> None:
    class Bare:
        name = "kpro5/129"

        def run(self, script: str, **more: Any) -> Answer:
            return Answer(127, b"", b"no python3 and no venv at /opt/venvs/qwen\n")

        def close(self) -> None:
            """Nothing."""

    with pytest.raises(StepFailed) as caught:
        ask(Bare(), deployment(), [{"do": "health"}], timeout_s=5)
    assert "no python3" in caught.value.evidence[0]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(child.pid, flush=True)
time.sleep(60)
"""


def start_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return int(text.rpartition(") ")[2].split()[19])


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] == "Z"
    except OSError:
        return True


def test_stop_ends_a_stubborn_process_and_its_child_only(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", STUBBORN]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        command = {"do": "stop", "pid": process.pid, "boot": BOOT, "grace_s": 0.3, "kill_s": 5}
        wrong = run(tmp_path, 1, {**command, "start": 1})[0]
        assert wrong["how"] == "already gone"
        assert not gone(process.pid)
        answer = run(tmp_path, 1, {**command, "start": start_of(process.pid)})[0]
        assert (answer["stopped"], answer["how"]) == (True, "KILL")
        assert process.wait(5) == -9
        ends = time.monotonic() + 5
        while not gone(child) and time.monotonic() < ends:
            time.sleep(0.02)
        assert gone(child)
        assert bystander.poll() is None
    finally:
        for one in (process, bystander):
            one.kill()
            one.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_answers_among_noise() -> None:
    text = b'motd\n{"do": "x", "ok": true}\n{broken\n{"other": 1}\n'
    assert parse_answers(text) == [{"do": "x", "ok": True}]
