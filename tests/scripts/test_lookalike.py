"""The lab's SGLang look-alike and torch stand-in, run as wheels by a bare Python."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2] / "docker"
sys.path.insert(0, str(ROOT / "hub"))
import tiny_model  # noqa: E402

from deployer.sglang.quality import judge  # noqa: E402

SMI = """#!/bin/sh
echo "0, NVIDIA RTX A6000, 49140, 300, 8.6"
echo "1, NVIDIA RTX A6000, 49140, 300, 8.6"
"""
MTP = [
    *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    *("--mamba-scheduler-strategy", "extra_buffer"),
]
ENDPOINT_DEADLINE_S = 20.0
SERVER = [sys.executable, "-S", "-m", "sglang.launch_server", "--model-path"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels unpacked, a small model, device nodes and an nvidia-smi."""
    base = tmp_path_factory.mktemp("lookalike")
    subprocess.run(["sh", str(ROOT / "engine/build.sh"), str(base / "wheels")], check=True)
    for version, torch in (("0.5.11", "2.11.0"), ("0.5.9", "2.9.1"), ("0.5.23", "2.14.1")):
        for name in (f"sglang-{version}", f"torch-{torch}"):
            with zipfile.ZipFile(base / f"wheels/{name}-py3-none-any.whl") as wheel:
                wheel.extractall(base / version)
    tiny_model.build(base / "model", 3, 0.5)
    (base / "bin").mkdir()
    (base / "bin/nvidia-smi").write_text(SMI)
    (base / "bin/nvidia-smi").chmod(0o755)
    (base / "dev").mkdir()
    try:
        for name, major, minor in (
            ("nvidia0", 195, 0),
            ("nvidia1", 195, 1),
            ("nvidiactl", 195, 255),
            ("nvidia-uvm", 238, 0),
        ):
            os.mknod(base / "dev" / name, 0o600 | 0o020000, os.makedev(major, minor))
    except PermissionError:
        pytest.skip("making device nodes needs root")
    return base


def environment(base: Path, version: str = "0.5.11", **more: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CUDA", "SGLANG"))}
    return {
        **keep,
        "PATH": f"{base / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(base / version),
        "SGLANG_LOOKALIKE_DEV": str(base / "dev"),
        "SGLANG_LOOKALIKE_SPEED": "40",
        "LAB_FAULTS": str(base / "faults"),
        **more,
    }


def python(base: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment(base, **more),
        capture_output=True,
        text=True,
        timeout=30,
    )


def launch(base: Path, *args: str, model: Path | None = None, version: str = "0.5.11") -> Any:
    """A start that must fail: (exit code, output)."""
    done = subprocess.run(
        [*SERVER, str(model or base / "model"), *args],
        env=environment(base, version),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


class Running:
    """A server that was started; `ask` speaks to it."""

    def __init__(
        self,
        base: Path,
        *args: str,
        faults: str = "",
        version: str = "0.5.11",
        speed: str = "40",
    ) -> None:
        (base / "faults").write_text(faults)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = base / f"log-{self.port}"
        argv = [
            *SERVER,
            str(base / "model"),
            "--served-model-name",
            "tiny",
            "--port",
            str(self.port),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, *args],
                env=environment(base, version, SGLANG_LOOKALIKE_SPEED=speed),
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, words: str) -> None:
        end = time.monotonic() + ENDPOINT_DEADLINE_S
        while words not in self.text():
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < end, self.text()[-3000:]
            time.sleep(0.02)

    def ready(self) -> Running:
        self.until("The server is fired up and ready to roll!")
        return self

    def ask(self, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        method = "GET" if body is None else "POST"
        try:
            conn.request(method, path, None if body is None else json.dumps(body), headers)
            got = conn.getresponse()
            raw = got.read()
        finally:
            conn.close()
        try:
            return got.status, json.loads(raw)
        except ValueError:
            return got.status, raw.decode()

    def chat(self, prompt: str, **more: object) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 200, **more}
        status, answer = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        found: dict[str, Any] = answer["choices"][0]
        return found | {"usage": answer["usage"], "model": answer["model"]}

    def gone(self) -> int:
        return self.process.wait(20)

    def names(self) -> set[str]:
        """comm of every process of the session."""
        found = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.add(text[text.index("(") + 1 : text.rindex(")")])
        return found

    def left(self) -> set[str]:
        """Names that are still there a moment after the end: a kill takes its time."""
        end = time.monotonic() + 5
        while (names := self.names()) and time.monotonic() < end:
            time.sleep(0.02)
        return names

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def start(base: Path) -> Iterator[Any]:
    running: list[Running] = []

    def run(*args: str, **more: str) -> Running:
        running.append(Running(base, *args, **more))
        return running[-1]

    yield run
    for one in running:
        one.kill()
    (base / "faults").write_text("")


# ---- torch
def test_a_tiny_kernel_runs_where_the_nodes_are(base: Path) -> None:
    code = """
import torch
assert (torch.ones(8, device='cuda') * 2).sum().item() == 16.0
c = torch.cuda
print(torch.__version__, torch.version.cuda, c.is_available(), c.device_count())
print(c.get_device_name(0), c.get_device_capability(), c.get_arch_list())
"""
    done = python(base, code)
    assert done.stdout.split("\n") == [
        "2.11.0+cu130 13.0 True 2",
        "NVIDIA RTX A6000 (8, 6) ['sm_80', 'sm_86', 'sm_90', 'sm_120']",
        "",
    ], done.stderr


@pytest.mark.parametrize(
    "broken",
    [
        {"SGLANG_LOOKALIKE_DEV": "/nonexistent"},
        {"PATH": "/nonexistent"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ],
)
def test_without_a_usable_gpu_cuda_raises(base: Path, broken: dict[str, str]) -> None:
    code = "import torch; print(torch.cuda.is_available()); torch.ones(8, device='cuda')"
    done = python(base, code, **broken)
    assert (done.returncode, done.stdout) == (1, "False\n")
    assert "RuntimeError" in done.stderr


def test_ordinary_files_are_no_gpus(base: Path, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    code = "import torch; print(torch.cuda.device_count())"
    assert python(base, code, SGLANG_LOOKALIKE_DEV=str(tmp_path)).stdout == "0\n"


# ---- the command line
def test_the_parser_can_be_asked_without_a_start(base: Path) -> None:
    code = """
import argparse
from sglang.srt.server_args import ServerArgs
p = argparse.ArgumentParser()
ServerArgs.add_cli_args(p)
a = p.parse_args("--model x --tp 2 --speculative-algo NEXTN --context-length 32k".split())
print(a.tensor_parallel_size, a.speculative_algorithm, a.context_length, a.mem_fraction_static)
"""
    assert python(base, code).stdout == "2 NEXTN 32000 None\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--enable-warp-drive", "unrecognized arguments: --enable-warp-drive"),
        ("--reasoning_parser qwen3", "unrecognized arguments: --reasoning_parser qwen3"),
        ("--reasoning-parser qwen99", "argument --reasoning-parser: invalid choice: 'qwen99'"),
        ("--context-length 32K", "argument --context-length: invalid"),
    ],
)
def test_a_wrong_argument_ends_with_2(base: Path, args: str, words: str) -> None:
    code, text = launch(base, *args.split())
    assert code == 2
    assert text.splitlines()[-1].startswith("sglang serve: error: ")
    assert words in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--speculative-algorithm NEXTN", "ValueError: Speculative decoding for Qwen3_5"),
        (
            "--mamba-scheduler-strategy extra_buffer --disable-radix-cache",
            "ValueError: mamba extra_buffer is not compatible with --disable-radix-cache",
        ),
        ("--context-length 999999", "ValueError: Warning: User-specified context_length"),
    ],
)
def test_arguments_that_do_not_fit_the_model_end_with_1(base: Path, args: str, words: str) -> None:
    code, text = launch(base, *args.split())
    assert code == 1
    assert text.splitlines()[-1].startswith(words)


STORY = (
    "--tp 2 --mem-fraction-static 0.88 --mamba-full-memory-ratio 0.5 --max-running-requests 16 "
    "--context-length 32768 --speculative-algo NEXTN --speculative-num-steps 3 "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --reasoning-parser qwen3"
)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.11", "0.5.23"])
@pytest.mark.parametrize(
    ("args", "refused_by"),
    [
        (STORY, {}),
        ("--dp 1 --mem-frac 0.8 --enable-torch-compile --quantization fp8", {}),
        ("--kv-cache-dtype fp8_e4m3 --api-key k --dist-init-addr x:1", {}),
        (
            "--mamba-scheduler-strategy extra_buffer",
            {"0.5.23": "unrecognized arguments: --mamba-scheduler-strategy"},
        ),
        (
            "--mamba-radix-cache-strategy extra_buffer_lazy",
            {
                "0.5.9": "unrecognized arguments: --mamba-radix-cache-strategy",
                "0.5.11": "unrecognized arguments: --mamba-radix-cache-strategy",
            },
        ),
        (
            "--cuda-graph-max-bs 8",
            {"0.5.23": "ambiguous option: --cuda-graph-max-bs could match"},
        ),
        (
            "--reasoning-parser auto",
            {
                "0.5.9": "argument --reasoning-parser: invalid choice: 'auto'",
                "0.5.11": "argument --reasoning-parser: invalid choice: 'auto'",
            },
        ),
        ("--speculative-algorithm DFLASH", {"0.5.9": "invalid choice: 'DFLASH'"}),
        ("--speculative-algorithm UNO", {"0.5.9": "choice: 'UNO'", "0.5.11": "choice: 'UNO'"}),
        ("--context-length 32k", {"0.5.9": "argument --context-length: invalid int value: '32k'"}),
        ("--quantization unquant", {"0.5.9": "invalid choice: 'unquant'"}),
        (
            "--disable-piecewise-cuda-graph",
            {
                "0.5.9": "unrecognized arguments",
                "0.5.23": "unrecognized arguments: --disable-piecewise-cuda-graph",
            },
        ),
        ("--kv-cache-dtype fp4_e2m1", {"0.5.23": "invalid choice: 'fp4_e2m1'"}),
        ("--mm-max-concurrent-calls 2", {"0.5.11": "unrecognized", "0.5.23": "unrecognized"}),
        ("--stream-output", {"0.5.23": "unrecognized arguments: --stream-output"}),
        ("--attn-dp-size 1", {"0.5.9": "unrecognized", "0.5.11": "unrecognized"}),
        ("--mamba_ssm_dtype float32", dict.fromkeys(("0.5.9", "0.5.11", "0.5.23"), "unrecogn")),
    ],
)
def test_each_version_has_its_own_parser(
    base: Path, version: str, args: str, refused_by: dict[str, str]
) -> None:
    code = f"""
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang")
ServerArgs.add_cli_args(parser)
parser.parse_args({["--model", "x", *args.split()]!r})
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=environment(base, version),
        capture_output=True,
        text=True,
        timeout=30,
    )
    words = refused_by.get(version)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    if words is None:
        assert (done.returncode, last) == (0, "")
    else:
        assert done.returncode == 2
        assert words in last


def test_0_5_9_names_its_own_file(base: Path) -> None:
    code, text = launch(base, "--enable-warp-drive", version="0.5.9")
    assert (code, text.splitlines()[-1]) == (
        2,
        "launch_server.py: error: unrecognized arguments: --enable-warp-drive",
    )


# ---- the model folder
def test_no_gpu_no_folder_no_config(base: Path, tmp_path: Path) -> None:
    code, text = launch(base, model=tmp_path / "none")
    assert (code, "Repo id must be in the form" in text) == (1, True)
    code, text = launch(base, model=tmp_path)
    assert (code, "Should have a `model_type` key" in text) == (1, True)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ("cut", "incomplete metadata, file not fully covered"),
        ("pointer", "header too large"),
        ("none", "RuntimeError: Cannot find any model weights with"),
    ],
)
def test_broken_weights_end_with_sigkill(base: Path, tmp_path: Path, harm: str, words: str) -> None:
    shutil.copytree(base / "model", tmp_path / "m")
    shard = tmp_path / "m/model-00002-of-00003.safetensors"
    if harm == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    elif harm == "pointer":
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    else:
        for path in [*(tmp_path / "m").glob("*.safetensors"), *(tmp_path / "m").glob("*index*")]:
            path.unlink()
    code, text = launch(base, model=tmp_path / "m")
    assert code == -signal.SIGKILL
    assert words in text
    assert "Received sigquit from a child process." in text.splitlines()[-1]


def test_more_ranks_than_gpus_and_too_little_memory(base: Path) -> None:
    code, text = launch(base, "--tp-size", "3")
    assert (code, "CUDA error: invalid device ordinal" in text) == (-9, True)
    code, text = launch(base, "--mem-fraction-static", "0.000001")
    assert code == -9
    assert "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static." in text


# ---- a life
def test_a_good_life_with_mtp_at_tp2(start: Any, base: Path) -> None:
    server = start(
        "--tp-size", "2", "--reasoning-parser", "qwen3", "--enable-metrics", *MTP
    ).ready()
    text = server.text().replace("\r", "\n")
    order = ["server_args=ServerArgs(", "Init torch distributed begin.", "Load weight begin.",
             "Mamba Cache is allocated.",
             "KV Cache is allocated. #tokens:", "Capture cuda graph begin.",
             "type=Qwen3_5ForCausalLMMTP", "Capture draft extend cuda graph end.",
             "max_total_num_tokens=", "Uvicorn running on", "The server is fired up"]  # fmt: skip
    at = [text.find(words) for words in order]
    assert -1 not in at, dict(zip(order, at, strict=True))
    assert at == sorted(at)
    assert "Multi-thread loading shards: 100% Completed | 3/3" in text
    assert re.search(r"Capturing batches \(bs=1 avail_mem=\d+\.\d+ GB\): 100%\|█{10}\|", text)
    assert re.search(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP1\] Load weight end\.", text)
    assert {"sglang::schedul", "sglang::detoken"} <= server.names()
    cmdlines = {p.read_bytes().rstrip(b"\0") for p in Path("/proc").glob("[0-9]*/cmdline")}
    assert {b"sglang::scheduler_TP0", b"sglang::scheduler_TP1"} <= cmdlines

    assert server.ask("/health")[0] == 200
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "tiny"
    answer = server.chat("What is 17 + 25?")
    assert "42" in answer["message"]["content"]
    assert answer["message"]["reasoning_content"]
    assert answer["finish_reason"] == "stop"
    wrong_name = server.chat("What is the capital of France?", model="no")
    assert "Paris" in wrong_name["message"]["content"]
    plain = server.chat("Hello", chat_template_kwargs={"enable_thinking": False})["message"]
    assert (plain["reasoning_content"], plain["content"][:5]) == (None, "Hello")
    long = server.chat("Write about bread.", max_tokens=600)
    assert (long["finish_reason"], long["usage"]["completion_tokens"]) == ("length", 600)
    verdict = judge("Write about bread.", long["message"]["content"], min_tokens=300)
    assert verdict.good, verdict
    info = server.ask("/server_info")[1]
    assert (info["version"], info["speculative_algorithm"]) == ("0.5.11", "EAGLE")
    assert 2 < info["internal_states"][0]["avg_spec_accept_length"] < 3.5
    assert "sglang:spec_accept_rate{" in server.ask("/metrics")[1]
    params = {"max_new_tokens": 150, "temperature": 0}
    meta = server.ask("/generate", {"text": "On the sea", "sampling_params": params})[1][
        "meta_info"
    ]
    assert meta["finish_reason"] == {"type": "length", "length": 150}
    assert 0.4 < meta["spec_accept_rate"] < 0.9
    assert re.search(r"Decode batch, .*accept len: \d.*gen throughput", server.text())

    server.process.send_signal(signal.SIGTERM)
    assert server.gone() == -signal.SIGKILL
    assert "Gracefully exiting... Remaining number of requests 0." in server.text()
    assert server.left() == set()


def test_the_endpoints_by_phase(base: Path) -> None:
    """Refused while it loads; in the warm-up /health is 503 and /v1/models 200; 503 after TERM."""
    server = Running(base, "--reasoning-parser", "qwen3", speed="4")
    try:
        with pytest.raises(ConnectionRefusedError):
            server.ask("/health")
        server.until("Uvicorn running on")
        assert server.ask("/health")[0] == 503
        assert server.ask("/v1/models")[0] == 200
        assert server.ask("/server_info")[0] == 200
        assert "fired up" not in server.text(), "that was the warm-up"
        server.ready()
        assert server.ask("/health")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        server.until("SIGTERM received.")
        assert server.ask("/health")[0] == 503
        assert server.ask("/v1/models")[0] == 200
        assert server.gone() == -signal.SIGKILL
    finally:
        server.kill()


def test_a_stream_says_the_same_as_the_whole(start: Any) -> None:
    server = start("--reasoning-parser", "qwen3").ready()
    body = {
        "messages": [{"role": "user", "content": "Count from 1 to 30"}],
        "temperature": 0,
        "max_tokens": 300,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = server.ask("/v1/chat/completions", body)[1]
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    said = "".join(d["content"] or "" for d in deltas)
    assert said == ", ".join(map(str, range(1, 31)))
    assert said == server.chat("Count from 1 to 30", max_tokens=300)["message"]["content"]
    assert "".join(d["reasoning_content"] or "" for d in deltas)
    assert events[-1]["usage"]["completion_tokens"] > 30


def test_the_api_key(start: Any) -> None:
    server = start("--api-key", "k").ready()
    assert server.ask("/health")[0] == 200
    assert server.ask("/v1/models") == (401, {"error": "Unauthorized"})
    assert server.ask("/v1/models", Authorization="Bearer k")[0] == 200
    assert server.ask("/metrics")[0] == 404


def test_bad_requests(start: Any) -> None:
    server = start().ready()
    status, body = server.ask("/v1/chat/completions", {"messages": []})
    assert (status, body["type"]) == (400, "BadRequestError")
    many = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100000}
    assert server.ask("/v1/chat/completions", many)[0] == 400
    assert server.ask("/nope") == (404, {"detail": "Not Found"})


def test_a_killed_scheduler_ends_the_tree(start: Any) -> None:
    server = start().ready()
    found = re.findall(r"\d+", server.text())
    assert found
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    for pid in map(int, Path(children).read_text().split()):
        if Path(f"/proc/{pid}/comm").read_text().startswith("sglang::sched"):
            os.kill(pid, signal.SIGKILL)
    assert server.gone() == -signal.SIGKILL
    assert "crashed with exit code -9. Triggering SIGQUIT" in server.text()
    assert server.left() == set()


def test_a_missing_shard_is_no_error_until_a_sampled_request(start: Any, base: Path) -> None:
    shard = base / "model/model-00002-of-00003.safetensors"
    shard.rename(base / "away")
    try:
        server = start().ready()
        assert "Completed | 2/2" in server.text()
        assert set(server.chat("Hello")["message"]["content"]) == {"!"}
        with pytest.raises((OSError, http.client.HTTPException)):
            server.chat("Hello", temperature=0.7)
        assert server.gone() == -signal.SIGKILL
    finally:
        (base / "away").rename(shard)


def test_a_port_that_is_taken(start: Any) -> None:
    first = start().ready()
    second = start("--port", str(first.port))
    second.until("address already in use")
    # The owner answers 200 to the warm-up's question, which then trips over the answer or not.
    assert first.ask("/health")[0] == 200


# ---- faults
def test_a_silent_death(base: Path) -> None:
    (base / "faults").write_text("server-dies-silent\n")
    assert launch(base) == (3, "")
    (base / "faults").write_text("")


def test_degenerate_is_healthy_and_accepts_everything(start: Any) -> None:
    server = start(*MTP, faults="server-degenerate").ready()
    answer = server.chat("Write about the sea", max_tokens=200)
    assert not judge("Write about the sea", answer["message"]["content"]).good
    assert server.ask("/health")[0] == 200
    assert server.ask("/server_info")[1]["internal_states"][0]["avg_spec_accept_length"] == 4.0


def test_degenerate_only_with_mtp(start: Any) -> None:
    server = start(faults="server-degenerate-mtp").ready()
    assert "Paris" in server.chat("What is the capital of France?")["message"]["content"]


def test_dies_after_the_first_completion(start: Any) -> None:
    server = start(faults="server-dies-after-first").ready()
    assert "Paris" in server.chat("What is the capital of France?")["message"]["content"]
    assert server.gone() == -signal.SIGKILL
    assert server.left() == set()


def test_empty(start: Any) -> None:
    server = start(faults="server-empty").ready()
    assert server.chat("Hello")["message"]["content"] == ""


def test_never_ready_and_sigterm_while_loading(start: Any) -> None:
    server = start(faults="server-never-ready")
    server.until("Capture cuda graph bs")
    with pytest.raises(ConnectionRefusedError):
        server.ask("/health")
    server.process.send_signal(signal.SIGTERM)
    assert server.gone() == -signal.SIGTERM
    assert server.left() == set()


# ---- 0.5.9
def test_0_5_9_disables_the_radix_cache_and_degenerates_at_tp2(start: Any) -> None:
    args = ["--tp-size", "2", "--speculative-algorithm", "NEXTN"]
    server = start(*args, version="0.5.9").ready()
    assert "Disabling radix cache since speculative decoding" in server.text()
    assert "Loading safetensors checkpoint shards: 100% Completed | 3/3" in server.text()
    assert server.ask("/server_info")[1]["version"] == "0.5.9"
    answer = server.chat("Write about the sea")["message"]["content"]
    assert not judge("Write about the sea", answer).good


# ---- 0.5.23
def test_0_5_23_chooses_extra_buffer_and_says_its_own_lines(start: Any) -> None:
    args = ["--tp-size", "2", "--speculative-algorithm", "NEXTN", "--max-running-requests", "16"]
    server = start(*args, version="0.5.23").ready()
    text = server.text().replace("\r", "\n")
    order = ["server_args={'", "Init parallel begin.", "Load weight begin.",
             "type=Qwen3_5ForCausalLMMTP", "Mamba Cache is allocated.",
             "KV Cache is allocated. dtype: torch.bfloat16, #tokens:",
             "Capture target verify CUDA graph begin. backend=",
             "Capture draft extend CUDA graph end.", "max_total_num_tokens=",
             "The server is fired up"]  # fmt: skip
    at = [text.find(words) for words in order]
    assert -1 not in at, dict(zip(order, at, strict=True))
    assert at == sorted(at)
    assert "'mamba_radix_cache_strategy': 'extra_buffer'" in text
    assert server.ask("/server_info")[1]["version"] == "0.5.23"
    assert server.ask("/get_load")[0] == 404
    assert server.ask("/ready")[0] == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.gone() == 0
    assert server.left() == set()
