"""A project of `deploy` for this very machine: sshd on loopback, inventory, playbooks, two hubs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environment
import machine
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docker/hub"), str(ROOT / "tests/container")]

import hub as hub_module  # noqa: E402
import tiny_model  # noqa: E402
from sshd import Sshd, start_sshd  # noqa: E402

HOST = "box"
KEY_VARIABLE = "GPU_RUN_API_KEY"
JOBS = Path("/var/lib/deployer/jobs")
KINDS = ("random", "learned")
PORTS = {"random": 31500, "learned": 31501}
DRAFT = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}
VARIANTS: list[dict[str, Any]] = [
    {"name": "mtp", "args": {**DRAFT, "mamba-scheduler-strategy": "extra_buffer"}},
    {"name": "no-mtp"},
]
PLAIN_ENGINE = {
    # What a machine without the FlashAttention 3 and FlashInfer binaries can run.
    "attention-backend": "triton",
    "mm-attention-backend": "triton_attn",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-piecewise-cuda-graph": True,
}
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CC", "CXX", "NCCL_NVLS_ENABLE",
             "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")  # fmt: skip
"""What a login on this machine needs; sshd itself gives its sessions a bare environment."""


@dataclass
class Ran:
    """One command of `deploy`."""

    words: list[str]
    code: int
    seconds: float
    out: str
    err: str

    def record(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "command": "deploy " + " ".join(self.words),
            "exit": self.code,
            "seconds": round(self.seconds, 1),
        }

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of `--jsonl`."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    def gates(self) -> list[dict[str, Any]]:
        """The gates that ran."""
        return [
            {"gate": one["gate"], "passed": one["passed"], "detail": one["detail"]}
            for one in self.events
            if one["event"] == "gate_checked"
        ]

    def notes(self) -> list[str]:
        """Notes and warnings, in order."""
        return [one["text"] for one in self.events if one["event"] == "note"]

    def steps(self) -> dict[str, dict[str, Any]]:
        """Outcome and seconds of each step that came to an end."""
        return {
            one["step"]: {"outcome": one["outcome"], "seconds": round(one["seconds"], 1)}
            for one in self.events
            if one["event"] == "step_done"
        }

    def finished(self) -> dict[str, Any]:
        """The last event, {} when there is none."""
        ends = [one for one in self.events if one["event"] == "run_finished"]
        return ends[-1] if ends else {}


@dataclass
class Project:
    """The folder, and what runs for it."""

    folder: Path
    sshd: Sshd
    gpu: machine.Gpu
    key: str
    log: Path
    models: dict[str, Path]
    serve: Mapping[str, Any]
    hubs: dict[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    selection: tuple[str, ...] = ()
    """`--from STEP`, where the steps before cannot run."""

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory"

    def deploy(self, *words: str, limit_s: float = 420.0) -> Ran:
        """Runs `deploy` as a user would; its output is kept in the log. Never raises for a code."""
        environ = {**os.environ, KEY_VARIABLE: self.key, "PYTHONPATH": _path()}
        argv = [sys.executable, "-c", "from deployer.cli.main import main; main()"]
        argv += ["-i", str(self.inventory), *words]
        began = time.monotonic()
        with self.log.open("a") as log:
            log.write(f"\n=== {time.strftime('%H:%M:%S')} deploy {' '.join(words)}\n")
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, env=environ, timeout=limit_s, cwd=self.folder
            )
            ran = Ran(list(words), done.returncode, time.monotonic() - began, done.stdout,
                      done.stderr)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            told = [(part or b"").decode(errors="replace") for part in (error.stdout, error.stderr)]
            ran = Ran(list(words), 124, time.monotonic() - began, told[0], told[1])
        with self.log.open("a") as log:
            shown = "" if "--jsonl" in words else ran.out
            log.write(f"{shown}{ran.err}--- exit {ran.code} after {ran.seconds:.1f} s\n")
        return ran

    def up(self, kind: str, *words: str, limit_s: float = 420.0) -> Ran:
        """`deploy up` with its event stream."""
        return self.deploy("--jsonl", "--yes", "up", f"{HOST}/{kind}", *words, limit_s=limit_s)

    def launch_log(self, kind: str) -> str:
        """The log of the newest launch, '' before there is one."""
        path = JOBS / f"server-{kind}" / "current/log"
        return path.read_text(errors="replace") if path.exists() else ""

    def launch_session(self, kind: str) -> int:
        """The session id of the newest launch, 0 before there is one."""
        path = JOBS / f"server-{kind}" / "current/session"
        text = path.read_text().strip() if path.exists() else ""
        return int(text) if text.isdigit() else 0

    def launch_id(self, kind: str) -> str:
        """The id of the newest launch, '' before there is one."""
        link = JOBS / f"server-{kind}" / "current"
        return link.resolve().name if link.exists() else ""

    def write(self) -> None:
        """Inventory and playbooks."""
        (self.inventory).mkdir(parents=True, exist_ok=True)
        (self.folder / "playbooks/locks").mkdir(parents=True, exist_ok=True)
        lock = environment.make(self.folder / "wheels")
        (self.folder / "playbooks/locks/here.txt").write_text(lock)
        host = {
            **plain_host(self.sshd, self.gpu),
            "deployments": {
                **{kind: {"playbook": kind} for kind in KINDS},
                "default-strategy": {"playbook": "default-strategy", "port": 31502},
            },
        }
        self.put("inventory/box.yaml", {"hosts": {HOST: host}})
        for kind in KINDS:
            self.put(f"playbooks/{kind}.yaml", self.playbook(kind, VARIANTS))
        bare = self.playbook("learned", [{"name": "mtp-bare", "args": DRAFT}])
        self.put("playbooks/default-strategy.yaml", bare)

    def playbook(self, kind: str, variants: list[dict[str, Any]]) -> dict[str, Any]:
        """For a model of KINDS."""
        where = self.hubs[kind].url
        return {
            "model": {
                "repo": f"acme/tiny-{kind}",
                "path": f"/srv/models/tiny-{kind}",
                "served_name": f"tiny-{kind}",
            },
            "download": {"endpoint": where, "margin_bytes": 1_000_000_000},
            "driver": {"version": self.gpu.driver, "install": "never"},
            "gpus": {"rebind": "never", "persist": "report"},
            "engine": {
                "version": environment.version("sglang"),
                "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
                "lock": "locks/here.txt",
                "venv": "/opt/deployer/venvs/here",
                "index_url": "none",
                "find_links": [str(self.folder / "wheels")],
                **self.engine,
            },
            "serve": {
                "host": "127.0.0.1",
                "port": PORTS[kind],
                "args": dict(self.serve),
                "api_key_env": KEY_VARIABLE,
                "ready_timeout_s": 400,
                "silence_timeout_s": 240,
            },
            "variants": variants,
            "stop": {"grace_s": 30, "kill_s": 10, "gpu_floor_mib": 600},
            "gates": {"request_timeout_s": 150, "alive_after_s": 10,
                      "ab_on_failure": kind == "learned"},
        }  # fmt: skip

    def put(self, name: str, body: object) -> None:
        """Writes a file of the project's folder."""
        (self.folder / name).write_text(yaml.safe_dump(body, sort_keys=False))


def plain_host(sshd: Sshd, gpu: machine.Gpu) -> dict[str, Any]:
    """The inventory's entry of a machine behind this sshd, without its deployments."""
    return {
        "kind": "plain",
        "ssh": {
            "address": "127.0.0.1",
            "port": sshd.port,
            "user": sshd.user,
            "identity_file": str(sshd.user_key),
            "known_hosts": str(sshd.known_hosts),
        },
        "gpus": [{"address": gpu.address, "name": gpu.name}],
    }


def _files(root: Path, shards: int, mb: float) -> list[str]:
    """In the place of the hub's own maker of checkpoints: the files are there already."""
    return sorted(path.name for path in root.iterdir() if path.is_file() and path.name[0] != ".")


@contextlib.contextmanager
def serving(models: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """A hub for each model's folder, which must be named acme--tiny-KIND."""
    made = tiny_model.build
    tiny_model.build = _files
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, tiny_model, "build", made)
        yield {
            kind: stack.enter_context(
                hub_module.Hub(folder.parent, repo=folder.name.replace("--", "/", 1))
            )
            for kind, folder in models.items()
        }


@contextlib.contextmanager
def door(folder: Path, within: tuple[str, ...] = ()) -> Iterator[Sshd]:
    """An sshd of our own on loopback, with throw-away keys; `within` as of start_sshd."""
    names = [*PASSED_ON, *(name for name in os.environ if name.startswith(("SGLANG_", "LAB_")))]
    pairs = " ".join(f'"{name}={os.environ[name]}"' for name in names if os.environ.get(name))
    server = start_sshd(folder, options=(f"SetEnv {pairs}", "MaxSessions 20"), within=within)
    try:
        yield server
    finally:
        server.stop()


def in_background(work: Any) -> tuple[threading.Thread, dict[str, Any]]:
    """Runs `work()` in a thread; its result comes under 'result'."""
    box: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: box.update(result=work()), daemon=True)
    thread.start()
    return thread, box


def _path() -> str:
    given = os.environ.get("PYTHONPATH", "")
    return f"{ROOT}{os.pathsep}{given}" if given else str(ROOT)
