"""What is refused before anything is installed or downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serverworld import deployment, fact, facts, server_job, state

from deployer.gpu import SmiGpu
from deployer.hub_manifest import short_config
from deployer.model import Facts, PlanState
from deployer.state import Manifest
from deployer.steps.driver_facts import HostSmi
from deployer.steps.launch import LaunchStep
from deployer.steps.server_compat import settled_problems

FIXTURE = Path(__file__).parents[1] / "fixtures" / "sglang-plan" / "hybrid.json"
CONFIG = next(iter(json.loads(FIXTURE.read_text())["models"].values()))["config"]
PINNED = Manifest(repo="acme/tiny", asked="main", commit="c0ffee", files=[])


def cards(capability: str = "8.6", driver: str = "580.126.09") -> HostSmi:
    rows = [
        SmiGpu(0, "GPU-0", "card", driver, 49140, 4, capability, address)
        for address in ("0000:21:00.0", "0000:41:00.0")
    ]
    return HostSmi(0, "", tuple(rows))


def names(known: Facts, manifest: Manifest | None = None, **changes: Any) -> list[str]:
    want = deployment(**changes)
    return [one.rule for one in settled_problems(want, known, manifest, want.variant_name)]


def with_config(**more: Any) -> Manifest:
    text = short_config(json.dumps({**CONFIG, **more}))
    return PINNED.model_copy(update={"config": text})


def test_nothing_is_known_of_an_empty_machine() -> None:
    assert names(Facts()) == []


def test_the_playbook_alone_may_be_enough() -> None:
    assert names(Facts(), driver={"version": "570.86.15"}) == ["cuda13-driver"]
    assert names(Facts(), engine={"version": "0.5.23", "python": "3.10"}) != []


def test_a_driver_that_will_not_be_installed_counts_as_it_is() -> None:
    old = facts(cards(driver="570.86.15"))
    assert names(old) == ["cuda13-driver"]
    installed = {"version": "580.126.09", "install": "guest"}
    assert names(old, driver=installed) == []


def test_the_gpu_by_the_hosts_own_words() -> None:
    assert names(facts(cards("7.5"))) == ["kernel-gpu"]
    assert names(facts(cards("8.6"))) == []


def test_the_guests_libc() -> None:
    assert names(facts(fact(libc="2.31"))) == ["glibc"]
    assert names(facts(fact(libc="2.39"))) == []


def test_the_model_of_the_pinned_list_before_its_files_are_there() -> None:
    old = {"version": "0.5.9"}
    assert "dense-qwen3_5-tp" in names(Facts(), with_config(), engine=old)
    three = {"args": {"tp-size": 3}}
    assert names(Facts(), with_config(), serve=three) == ["tp-split"]
    assert names(Facts(), None, serve=three) == []
    other = with_config().model_copy(update={"repo": "acme/other"})
    assert names(Facts(), other, serve=three) == []


def test_launch_refuses_before_the_container_runs() -> None:
    want = deployment(driver={"version": "570.86.15"})
    plan = LaunchStep().plan(want, Facts(), state())
    assert (plan.state, plan.stands) == (PlanState.BLOCKED, True)
    assert "570.86.15" in plan.reason


def test_a_server_that_serves_is_not_judged() -> None:
    want = deployment()
    job = server_job(want)
    seen = facts(fact(job=job, libc="2.31", listening=True))
    plan = LaunchStep().plan(want, seen, state())
    assert plan.state is not PlanState.BLOCKED


def test_long_lists_of_a_config_are_cut_but_its_shape_stays() -> None:
    long = {"ignore": [f"model.layers.{n}.mlp" for n in range(5000)], "quant_method": "fp8"}
    text = short_config(
        json.dumps({**CONFIG, "quantization_config": long, "id2label": {"0": "LABEL_0"}})
    )
    assert len(text) < 20_000
    cut = json.loads(text)
    assert cut["text_config"] == CONFIG["text_config"]
    assert "id2label" not in cut
    assert short_config("[1]") == short_config("{") == ""
