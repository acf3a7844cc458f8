"""`deploy fit`, offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from deployer.cli.main import group
from deployer.cli.options import Options
from deployer.cli.status import Look
from deployer.deployment import Deployment
from deployer.errors import DocumentError, StepFailed, UsageError
from deployer.gpu import parse_smi
from deployer.model import Facts
from deployer.steps.driver_facts import HostSmi

ROOT = Path(__file__).parents[2]
HYBRID = ROOT / "tests" / "fixtures" / "sglang-plan" / "hybrid.json"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The 27B model's config.json."""
    data = json.loads(HYBRID.read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(next(iter(data["models"].values()))["config"]))
    return path


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """The sample inventory and playbook, as files of this test."""
    for folder in ("inventory", "playbooks"):
        (tmp_path / folder).mkdir()
        for file in (ROOT / folder).glob("*.yaml"):
            (tmp_path / folder / file.name).write_text(file.read_text())
    return tmp_path / "inventory"


def fit(inventory: Path, *words: str) -> Result:
    """Runs the command."""
    return CliRunner().invoke(group, ["-i", str(inventory), "fit", *words], standalone_mode=False)


def fit_json(inventory: Path, *words: str) -> dict[str, Any]:
    """The JSON document; its exit code is the command's."""
    result = fit(inventory, *words, "--json")
    assert result.exception is None, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["exit_code"] == result.return_value
    return document


def edit(inventory: Path, old: str, new: str) -> None:
    """Changes the playbook."""
    path = inventory.parent / "playbooks" / "qwen3.6-27b.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


MEASURED = ("--free-gib", "46.5", "--gpu-mib", "49140", "--weights-gib", "25.64")


def test_effective_figures(inventory: Path, config: Path) -> None:
    document = fit_json(inventory, "qwen3.6-27b", "--config", str(config), *MEASURED)
    have = document["effective"]
    assert (have["slots"], have["slots_per_request"], have["max_running_requests"]) == (49, 5, 9)
    assert have["max_total_num_tokens"] == pytest.approx(235_258, rel=0.01)
    assert document["exit_code"] == 0
    assert document["refusal"] is None
    assert any("draft weights" in line for line in document["assumed"])
    assert not any("free on each GPU" in line for line in document["assumed"])
    assert {one["title"] for one in document["alternatives"]} >= {"really run 16 requests"}
    sixteen = document["alternatives"][0]["effective"]
    assert sixteen["max_running_requests"] == 16


def test_text_for_people(inventory: Path, config: Path) -> None:
    result = fit(inventory, "qwen3.6-27b", "--config", str(config))
    assert result.return_value == 0
    assert "10 requests at once (asked for 16)" in result.stdout
    assert "draft states are kept for all 16 asked for: 1.72 GiB of them" in result.stdout
    assert result.stdout.count("GPU 0") == result.stdout.count("GPU 1") == 1
    assert "RTX A6000 of kpro5 in the inventory" in result.stdout
    assert "assumed   weights 25.5" in result.stdout
    assert all(len(line) < 200 for line in result.stdout.splitlines())


def test_a_server_that_would_not_start(inventory: Path, config: Path) -> None:
    edit(inventory, "      mamba-scheduler-strategy: extra_buffer", "      #")
    document = fit_json(inventory, "qwen3.6-27b", "--config", str(config), *MEASURED)
    assert document["exit_code"] == 1
    assert document["effective"] is None
    assert "is not compatible with radix cache" in document["refusal"]["error"]
    assert document["problems"][0]["rule"] == "speculative-radix-no-buffer"
    ideas = {one["title"]: one["effective"] for one in document["alternatives"]}
    assert ideas["keep the prefix cache"]["max_running_requests"] == 9
    assert ideas["more requests at once"]["max_running_requests"] == 16


def test_other_versions_and_variants(inventory: Path, config: Path) -> None:
    edit(inventory, "version: 0.5.11", "version: 0.5.23")
    edit(inventory, "      mamba-scheduler-strategy: extra_buffer", "      #")
    words = ("qwen3.6-27b", "--config", str(config), *MEASURED, "--draft-gib", "2.82")
    newest = fit_json(inventory, *words)
    assert newest["effective"]["max_running_requests"] == 5
    assert newest["effective"]["slots"] == 29
    plain = fit_json(inventory, *words, "--variant", "no-mtp")
    # 5 slots a request there also without speculation.
    assert plain["effective"]["max_running_requests"] == plain["effective"]["slots"] // 5 == 13
    edit(inventory, "version: 0.5.23", "version: 0.5.9")
    oldest = fit_json(inventory, *words)
    assert oldest["effective"]["max_running_requests"] == 16
    assert oldest["problems"][0]["rule"] == "dense-qwen3_5-tp"
    assert oldest["exit_code"] == 1


def test_a_checkpoint_without_a_head_is_not_to_draft_with_it(inventory: Path, config: Path) -> None:
    data = json.loads(config.read_text())
    data["text_config"]["mtp_num_hidden_layers"] = 0
    config.write_text(json.dumps(data))
    done = fit(inventory, "qwen3.6-27b", "--config", str(config), *MEASURED)
    assert done.return_value == 1
    assert "no MTP head" in done.stdout


def test_not_enough_memory(inventory: Path, config: Path) -> None:
    words = ("--gpu-mib", "49140", "--free-gib", "28")
    document = fit_json(inventory, "qwen3.6-27b", "--config", str(config), *words)
    assert "Not enough memory" in document["refusal"]["error"]
    assert document["most_full_context_requests"] == 0


def test_flags_that_are_not_covered_are_told(inventory: Path, config: Path) -> None:
    edit(inventory, "    tp-size: 2\n", "    tp-size: 2\n    enable-dp-attention: true\n")
    document = fit_json(inventory, "qwen3.6-27b", "--config", str(config), *MEASURED)
    assert "--enable-dp-attention is not covered by the arithmetic" in document["assumed"]


def test_usage_errors(inventory: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployer.cli.fit._cached", lambda playbook: None)
    missing = fit(inventory, "qwen3.6-27b").exception
    assert isinstance(missing, UsageError)
    assert "curl -fLo config.json https://huggingface.co/Qwen/Qwen3.6-27B/resolve" in missing.fix
    unknown = fit(inventory, "qwen3.6-27").exception
    assert isinstance(unknown, UsageError)
    assert "qwen3.6-27b" in unknown.what
    variant = fit(inventory, "qwen3.6-27b", "--variant", "mpt").exception
    assert isinstance(variant, UsageError)
    edit(inventory, "tp-size: 2", "tp-size: two")
    wrong = fit(inventory, "qwen3.6-27b", "--config", str(config)).exception
    assert isinstance(wrong, DocumentError)


def test_the_memory_in_use_on_a_host(
    inventory: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_at(options: Options, deployments: Sequence[Deployment]) -> list[Look]:
        rows = parse_smi(smi)
        facts = Facts({HostSmi: HostSmi(0, smi, rows)})
        want = deployments[0]
        return [Look(want.host_name, want.host, seen=[(want, facts)])]

    locks = inventory.parent / "playbooks" / "locks"
    shutil.copytree(ROOT / "playbooks" / "locks", locks)
    monkeypatch.setattr("deployer.cli.fit_host.look_at", look_at)
    row = "{n}, GPU-{n}, NVIDIA RTX A6000, 580.126.09, 49140, {used}, 8.6, 00000000:{n}1:00.0\n"
    smi = row.format(n=2, used=4) + row.format(n=4, used=2052)
    words = ("qwen3.6-27b", "kpro5", "--config", str(config), "--weights-gib", "25.64")
    document = fit_json(inventory, *words)
    assert document["gpu"]["total_mib"] == 49140
    assert document["gpu"]["free_gib"] == pytest.approx(46.63 - 2, abs=0.02)
    assert any("2052 of 49140 MiB" in note for note in document["notes"])
    smi = row.format(n=2, used=4)
    error = fit(inventory, *words).exception
    assert isinstance(error, StepFailed)
    assert "0000:41:00.0" in error.what


def test_unknown_card_must_be_given(inventory: Path, config: Path) -> None:
    host = inventory / "kpro5.yaml"
    host.write_text(host.read_text().replace("RTX A6000", "Some Card"))
    error = fit(inventory, "qwen3.6-27b", "--config", str(config)).exception
    assert isinstance(error, UsageError)
    assert "--gpu-mib" in error.fix
