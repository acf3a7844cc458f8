"""The agent's streams, figures and look at the weights, against a small HTTP server and folders."""

from __future__ import annotations

import http.server
import json
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serverworld import deployment

from deployer.agents.serve import chat
from deployer.agents.serve.figures import longest_run
from deployer.steps.server_agent import ask
from tests.local_transport import LocalTransport, shell_path

METRICS = """\
# HELP sglang:spec_accept_length The average acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="a}b",tp_rank="0"} 2.5
sglang:spec_accept_length{model_name="a}b",tp_rank="1"} 0.0
sglang:spec_accept_rate{model_name="tiny"} 5.0e-01
sglang:other{model_name="tiny"} 7
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams, /metrics, /generate."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply((METRICS + "# padding\n" * 9999).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            meta = {"spec_accept_length": 2.5, "spec_accept_histogram": [1, 2]}
            ids = [5, 0, 0, 0, 7, 7]
            self.reply(json.dumps({"text": "x", "output_ids": ids, "meta_info": meta}).encode())
            return
        assert body["stream_options"] == {"include_usage": True}
        self.send_response(200)
        self.end_headers()
        kind = body["messages"][0]["content"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": "I think. "}, {"content": "Tides "}, {"content": "turn."}]
        for delta in deltas:
            self.event({"choices": [{"delta": delta, "finish_reason": None}], "usage": None})
            time.sleep(0.02)
        if kind == "broken":
            self.close_connection = True
            return
        if kind == "error":
            self.event({"error": {"message": "out of pages"}})
        else:
            self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            usage = {"completion_tokens": 7, "prompt_tokens": 11}
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body: object) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def run(tmp_path: Path, port: int, *commands: dict[str, Any]) -> list[Any]:
    transport = LocalTransport(shell_path("dash", tmp_path))
    return ask(transport, deployment(serve={"port": port}), commands, timeout_s=40)


def test_a_streamed_answer(tmp_path: Path, port: int) -> None:
    one = {"do": "completion", "model": "tiny", "max_tokens": 9, "timeout_s": 5, "stream": True}
    good, broken, error = run(
        tmp_path,
        port,
        {**one, "prompt": "good"},
        {**one, "prompt": "broken"},
        {**one, "prompt": "error"},
    )
    assert (good["content"], good["reasoning"]) == ("Tides turn.", "I think. ")
    assert (good["finish_reason"], good["tokens"], good["prompt_tokens"]) == ("stop", 7, 11)
    assert 0 < good["ttft_s"] < good["ttft_s"] + good["decode_s"] <= good["seconds"] + 0.1
    assert good["error"] == ""
    assert "broke off" in broken["error"]
    assert "out of pages" in error["error"]


def test_metrics_and_generate(tmp_path: Path, port: int) -> None:
    metrics, generated = run(
        tmp_path, port, {"do": "metrics"}, {"do": "generate", "prompt": "a", "max_tokens": 4}
    )
    assert metrics["gauges"] == {"spec_accept_length": 2.5, "spec_accept_rate": 0.5}
    assert generated["meta"] == {"spec_accept_length": 2.5}
    assert generated["run"] == {"id": 0, "begin": 1, "length": 3}


def test_runs_of_one_token() -> None:
    assert longest_run([]) == {"id": None, "begin": 0, "length": 0}
    assert longest_run([4]) == {"id": 4, "begin": 0, "length": 1}
    assert longest_run([1, 2, 2, 3, 3, 3]) == {"id": 3, "begin": 3, "length": 3}


def safetensors(path: Path, names: list[str], cut: int = 0) -> int:
    """A small file; returns its whole size."""
    header = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + b"\1" * 4 * len(names)
    path.write_bytes(data[: len(data) - cut] if cut else data)
    return len(data)


def test_weights(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    first = safetensors(root / "a.safetensors", ["model.layers.0.w", "mtp.fc.weight"])
    second = safetensors(root / "b.safetensors", ["lm_head.weight"], cut=3)
    table = {
        "model.layers.0.w": "a.safetensors",
        "mtp.fc.weight": "a.safetensors",
        "lm_head.weight": "b.safetensors",
        "gone.weight": "c.safetensors",
    }
    index = root / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}), encoding="utf-8")
    files = [["a.safetensors", first], ["b.safetensors", second], ["config.json", 5]]
    command = {"do": "weights", "path": str(root), "files": files}
    found = run(tmp_path, 1, command)[0]
    assert found["missing"] == ["config.json", "c.safetensors"]
    assert found["wrong"] == [f"b.safetensors has {second - 3} of {second} bytes"]
    assert "b.safetensors: its header tells of" in found["cut"][0]
    assert (found["indexed"], found["shards"], found["mtp"]) == (True, 3, True)
    index.unlink()
    (root / "b.safetensors").unlink()
    found = run(tmp_path, 1, {**command, "files": []})[0]
    assert (found["missing"], found["cut"], found["mtp"]) == ([], [], True)
    assert (found["indexed"], found["tensors"]) == (False, 2)
    (root / "a.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    found = run(tmp_path, 1, {**command, "files": []})[0]
    assert found["cut"] == ["a.safetensors: no safetensors header"]
    assert found["mtp"] is None


def test_what_a_request_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def request(method: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
        sent.append(body)
        return {"status": 200, "seconds": 0.1, "body": {"choices": []}, "text": ""}

    monkeypatch.setattr(chat, "request", request)
    one = {"model": "tiny", "prompt": "hi", "max_tokens": 5}
    # The model's own sampling: no parameter of it is sent.
    assert chat.completion(one)["error"]
    assert set(sent[0]) == {"model", "messages", "max_tokens"}
    more = {"temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False}}
    chat.completion({**one, **more, "separate_reasoning": False, "timeout_s": 3})
    assert sent[1]["separate_reasoning"] is False
    assert sent[1]["temperature"] == 0.0
    assert sent[1]["chat_template_kwargs"] == {"enable_thinking": False}
