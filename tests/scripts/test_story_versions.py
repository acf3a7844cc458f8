"""The story's command line on each version: what the plan says, and what the look-alike then does.

Qwen3.6-27B on two A6000: its real config.json, and files of its real size that are holes.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_lookalike import ROOT, Running, base

from deployer.deployment import Deployment
from deployer.gpu import SmiGpu
from deployer.inventory import Host
from deployer.model import Facts, Plan, PlanState
from deployer.playbook import ArgValue, Playbook
from deployer.remote.batch import gather
from deployer.sglang.argv import server_argv
from deployer.sglang.quality import judge
from deployer.state import DeploymentState, Manifest, ManifestFile
from deployer.steps.driver_facts import HostSmi
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_fit import outlook
from deployer.steps.server_facts import server_probe
from deployer.steps.stop_argv import ask_parser
from tests.local_transport import LocalTransport, shell_path

sys.path.insert(0, str(ROOT / "hub"))
import tiny_model

__all__ = ["base"]

PLANS = Path(__file__).resolve().parents[1] / "fixtures" / "sglang-plan" / "hybrid.json"
CONFIG = json.loads(PLANS.read_text(encoding="utf-8"))["models"]["Qwen--Qwen3.5-27B"]["config"]
SIZE = 55_560_000_000
"""Bytes of the checkpoint in bf16: text, vision and MTP head."""
USED_MIB = 300
"""What test_lookalike's nvidia-smi says of an idle GPU."""
VERSIONS = ("0.5.9", "0.5.11", "0.5.23")
STORY: dict[str, ArgValue] = {
    "tp-size": 2,
    "mem-fraction-static": 0.88,
    "mamba-full-memory-ratio": 0.5,
    "max-running-requests": 16,
    "context-length": 32768,
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
    "reasoning-parser": "qwen3",
}
ONE_CHANGE: dict[str, ArgValue] = {"mamba-scheduler-strategy": "extra_buffer"}


@pytest.fixture(scope="module")
def model(base: Path) -> Path:
    """The folder that the playbook's model.path names."""
    folder = base / "qwen3.6-27b"
    folder.mkdir()
    for name, body in tiny_model.side_files(tiny_model.text_config(1 << 20)).items():
        (folder / name).write_bytes(body)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    names = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    tensors = {"model.language_model.embed_tokens.weight": names[0], "mtp.fc.weight": names[1]}
    for tensor, name in tensors.items():
        data = SIZE // 2
        header = {tensor: {"dtype": "BF16", "shape": [data // 2], "data_offsets": [0, data]}}
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + data)
    index = {"metadata": {"total_size": SIZE}, "weight_map": tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


class Box:
    """One version installed, the model there, no server."""

    def __init__(self, base: Path, model: Path, version: str) -> None:
        self.base, self.model, self.version = base, model, version
        self.venv = base / f"venv-{version}"
        site = self.venv / "lib/python3.12/site-packages"
        site.parent.mkdir(parents=True, exist_ok=True)
        if not site.exists():
            site.symlink_to(base / version)
        (self.venv / "bin").mkdir(exist_ok=True)
        python = self.venv / "bin/python"
        python.write_text(
            f'#!/bin/sh\nexport PYTHONPATH={base / version} PATH="{base / "bin"}:$PATH"\n'
            f"export SGLANG_LOOKALIKE_DEV={base / 'dev'} SGLANG_LOOKALIKE_SPEED=40\n"
            f'exec {sys.executable} -S "$@"\n'
        )
        python.chmod(0o755)
        self.transport = LocalTransport(shell_path("dash", base))

    def wanted(self, **more: ArgValue) -> Deployment:
        document = {
            "model": {
                "repo": "Qwen/Qwen3.6-27B",
                "path": str(self.model),
                "served_name": "qwen3.6-27b",
            },
            "driver": {"version": "580.126.09"},
            "engine": {"version": self.version, "lock": "x.txt", "venv": str(self.venv)},
            "serve": {"host": "127.0.0.1", "port": 31999, "args": {**STORY, **more}},
        }
        host = Host.model_validate(
            {
                "ssh": {"address": "192.0.2.5"},
                "gpus": [{"address": "0000:21:00.0"}, {"address": "0000:41:00.0"}],
                "containers": {129: {}},
                "deployments": {"qwen": {"container": 129, "playbook": "x"}},
            }
        )
        entry, playbook = host.deployments["qwen"], Playbook.model_validate(document)
        return Deployment("kpro5", "qwen", host, entry, playbook, "x", "", None)

    def facts(self, want: Deployment) -> Facts:
        """The guest by its real probe; the host's cards as an idle pair of A6000."""
        seen = gather(self.transport, [server_probe(want)])
        rows = tuple(
            SmiGpu(i, f"GPU-{i}", "NVIDIA RTX A6000", "580.126.09", 49140, USED_MIB, "8.6", address)
            for i, address in enumerate(want.gpus)
        )
        return Facts({**seen, HostSmi: HostSmi(0, "", rows)})

    def state(self) -> DeploymentState:
        files = [
            ManifestFile(path=path.name, size=path.stat().st_size)
            for path in sorted(self.model.glob("*.safetensors"))
        ]
        manifest = Manifest(repo="Qwen/Qwen3.6-27B", asked="main", commit="c0ffee", files=files)
        return DeploymentState(manifest=manifest)

    def plan(self, want: Deployment) -> Plan:
        return LaunchStep().plan(want, self.facts(want), self.state())

    def words(self, want: Deployment) -> list[str]:
        """The arguments that `up` would start, without those that Running gives itself."""
        argv = server_argv(want)
        return argv[argv.index("--port") + 2 :]


@pytest.fixture
def box(base: Path, model: Path, request: pytest.FixtureRequest) -> Box:
    return Box(base, model, request.param)


@pytest.fixture
def start(base: Path, model: Path) -> Iterator[Any]:
    """The look-alike on this model."""
    running: list[Running] = []

    def run(version: str, words: list[str]) -> Running:
        running.append(Running(base, "--model-path", str(model), *words, version=version))
        return running[-1]

    yield run
    for one in running:
        one.kill()


def on(*versions: str) -> pytest.MarkDecorator:
    """A test of these versions."""
    return pytest.mark.parametrize("box", versions, indirect=True)


@on(*VERSIONS)
def test_the_installed_parser_accepts_the_story(box: Box) -> None:
    verdict = ask_parser(box.transport, box.wanted())
    assert (verdict.asked, verdict.refused) == (True, "")


@on("0.5.23")
def test_the_installed_parser_refuses_the_old_name(box: Box) -> None:
    verdict = ask_parser(box.transport, box.wanted(**ONE_CHANGE))
    assert verdict.asked
    assert "--mamba-scheduler-strategy" in verdict.refused


@on("0.5.9")
def test_0_5_9_is_refused_for_its_text(box: Box, start: Any) -> None:
    plan = box.plan(box.wanted())
    assert plan.state is PlanState.BLOCKED
    assert "all-reduce" in plan.reason
    assert "0.5.10 or newer" in plan.fix
    # What the refusal spares: it starts, is healthy, keeps 16 requests, and says nothing of use.
    server = start("0.5.9", box.words(box.wanted())).ready()
    text = server.text()
    assert "Disabling radix cache since speculative decoding" in text
    assert "max_running_requests=16," in text
    answer = server.chat("Write about the sea.", max_tokens=300)
    assert not judge("Write about the sea.", answer["message"]["content"]).good


@on("0.5.11")
def test_0_5_11_is_refused_with_the_one_change(box: Box, start: Any) -> None:
    plan = box.plan(box.wanted())
    assert plan.state is PlanState.BLOCKED
    assert "radix cache" in plan.reason
    assert "mamba-scheduler-strategy: extra_buffer" in plan.fix
    server = start("0.5.11", box.words(box.wanted()))
    assert server.gone() == 1
    assert server.text().splitlines()[-1].startswith("ValueError: Speculative decoding for Qwen3_5")


@pytest.mark.parametrize(
    ("box", "change", "requests"),
    [("0.5.11", ONE_CHANGE, 9), ("0.5.11", {"disable-radix-cache": True}, 16), ("0.5.23", {}, 5)],
    indirect=["box"],
)
def test_it_is_launched_and_runs_what_the_plan_says(
    box: Box, change: dict[str, ArgValue], requests: int, start: Any
) -> None:
    want = box.wanted(**change)
    plan = box.plan(want)
    assert plan.state is PlanState.CHANGES, plan.reason
    view = outlook(want, box.facts(want), box.state().manifest, want.variant_name)
    assert view.words in plan.reason
    assert f"will run {requests}{' of 16 asked' if requests < 16 else ''} requests" in view.words
    server = start(box.version, box.words(want)).ready()
    info = server.ask("/server_info")[1]
    state = info["internal_states"][0]
    assert state["effective_max_running_requests_per_dp"] == requests
    assert info["max_total_num_tokens"] == pytest.approx(view.figures["planned_tokens"], rel=0.02)
    answer = server.chat("Write about the sea.", max_tokens=300)
    assert judge("Write about the sea.", answer["message"]["content"]).good


def test_the_files_are_holes(model: Path) -> None:
    assert sum(path.stat().st_blocks for path in model.iterdir()) * 512 < 10**7
