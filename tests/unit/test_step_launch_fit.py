"""What launch says that the server will run, and how it is compared with what it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serverworld import deployment, fact, facts, server_job, state

from deployer.gpu import SmiGpu
from deployer.model import Facts
from deployer.sglang.modelconfig import shape_of
from deployer.sglang.weights import OtherCheckpoint, estimate, measured
from deployer.state import Manifest, ManifestFile
from deployer.steps.driver_facts import HostSmi
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_fit import difference, outlook

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sglang-plan" / "hybrid.json"
CONFIG = next(iter(json.loads(FIXTURE.read_text())["models"].values()))["config"]
STORY = {
    "tp-size": 2,
    "context-length": 32768,
    "mem-fraction-static": 0.88,
    "max-running-requests": 16,
    "mamba-full-memory-ratio": 0.5,
}
SIZE = 55_560_000_000
"""Bytes of the 27B checkpoint in bf16 (text, vision and MTP head)."""


def cards(used: int = 4, total: int = 49140) -> HostSmi:
    rows = [
        SmiGpu(
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA RTX A6000",
            driver="580.126.09",
            memory_total_mib=total,
            memory_used_mib=used,
            compute_cap="8.6",
            address=address,
        )
        for index, address in enumerate(("0000:21:00.0", "0000:41:00.0"))
    ]
    return HostSmi(0, "", tuple(rows))


def manifest(size: int = SIZE) -> Manifest:
    files = [
        ManifestFile(path="model-00001-of-00002.safetensors", size=size - 5),
        ManifestFile(path="model-00002-of-00002.safetensors", size=5),
        ManifestFile(path="tokenizer.json", size=10**12),
    ]
    return Manifest(repo="acme/tiny", asked="main", commit="c0ffee", files=files)


def world(**values: Any) -> Facts:
    return facts(fact(config=json.dumps(CONFIG), **values), cards())


WANT = deployment(serve={"args": STORY})


def test_the_story_runs_ten_requests_of_the_sixteen() -> None:
    view = outlook(WANT, world(), manifest(), "mtp")
    assert view.words.startswith("will run 10 of 16 asked requests at once, ")
    assert view.figures["planned_requests"] == 10
    assert view.figures["planned_tokens"] == pytest.approx(239_785, rel=0.01)
    assert any("55.56 GB of safetensors" in line for line in view.assumed)


def test_the_plan_and_its_change_say_it() -> None:
    own = state(manifest())
    plan = LaunchStep().plan(WANT, world(), own)
    assert "will run 10 of 16 asked requests" in plan.reason
    assert "will run 10 of 16 asked requests" in plan.changes[0].reason


def test_the_memory_of_a_server_that_will_be_stopped_counts_as_free() -> None:
    full = facts(
        fact(config=json.dumps(CONFIG), job=server_job(WANT, mark="other"), listening=True),
        cards(used=45_000),
    )
    assert outlook(WANT, full, manifest(), "mtp").figures["planned_requests"] == 10
    stranger = facts(fact(config=json.dumps(CONFIG)), cards(used=45_000))
    assert "it will not start" in outlook(WANT, stranger, manifest(), "mtp").words


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (facts(cards()), "no config.json"),
        (facts(fact(), cards()), "no config.json"),
        (facts(fact(config="{"), cards()), "JSON"),
        (facts(fact(config=json.dumps(CONFIG))), "nvidia-smi"),
        (facts(fact(config=json.dumps(CONFIG)), HostSmi(9, "")), "nvidia-smi"),
    ],
)
def test_what_cannot_be_computed_is_said(seen: Facts, why: str) -> None:
    view = outlook(WANT, seen, manifest(), "mtp")
    assert view.fit is None
    assert why in view.words
    assert view.figures == {}


def test_the_checkpoints_size_replaces_the_estimate() -> None:
    shape = shape_of(CONFIG)
    guess, real = estimate(shape, 2), measured(shape, 2, SIZE)
    assert real.target == pytest.approx(guess.target, rel=0.01)
    more = measured(shape, 2, int(SIZE * 1.05))
    assert more.target == pytest.approx(1.05 * real.target, rel=0.01)
    assert more.draft > real.draft


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_checkpoint_of_another_size_is_not_believed(share: float) -> None:
    with pytest.raises(OtherCheckpoint, match="GB"):
        measured(shape_of(CONFIG), 2, int(SIZE * share))
    view = outlook(WANT, world(), manifest(int(SIZE * share)), "mtp")
    assert any("the weights are those of the config" in line for line in view.assumed)


def test_the_servers_own_pools_against_the_plan() -> None:
    planned = {"planned_tokens": 240_354.0, "planned_requests": 10.0}
    close = difference(planned, {"max_total_num_tokens": 239_785, "max_running_requests": 10})
    assert close == (
        "the server has 239785 KV tokens (0.2% fewer than planned), "
        "10 requests at once (as planned)"
    )
    far = difference(planned, {"max_total_num_tokens": 120_000, "max_running_requests": 5})
    assert "other processes on the GPUs" in far
    more = difference(planned, {"max_total_num_tokens": 244_921, "max_running_requests": 10})
    assert more.endswith("(1.9% more than planned), 10 requests at once (as planned)")
    assert difference({}, {"max_total_num_tokens": 1.0}) == ""
    assert difference(planned, {}) == ""
