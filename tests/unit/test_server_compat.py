"""What is refused before anything is installed or downloaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from serverworld import deployment, fact, facts, server_job, state

from deployer import hub
from deployer.deployment import Deployment
from deployer.engine import Engine, Selection
from deployer.errors import DeployError, StepBlocked
from deployer.events import Bus
from deployer.gpu import SmiGpu
from deployer.hub_manifest import short_config
from deployer.model import Change, Facts, Plan, PlanState, Probe, Shell, Where
from deployer.state import DeploymentState, Manifest
from deployer.steps import shards
from deployer.steps.base import Step, StepContext
from deployer.steps.driver_facts import HostSmi
from deployer.steps.launch import LaunchStep
from deployer.steps.server_compat import settled_problems
from deployer.steps.shards_facts import ShardsFact
from deployer.steps.stop import StopStep

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


class Builds(Step):
    """A step before shards that would change the target."""

    name = "venv"
    built = 0

    def probes(self, want: Deployment) -> list[Probe]:
        return []

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        if self.built:
            return Plan.nothing("built")
        return Plan.change("no engine", Change("build", "none", Shell(Where.HOST, "true")))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        self.built += 1


def first_up(
    monkeypatch: pytest.MonkeyPatch, answer: Manifest | hub.HubError, version: str
) -> tuple[Builds, StepBlocked | DeployError, list[str]]:
    """The first `up` of a bare target: nothing is pinned, no venv, no file of the model."""

    def ask(playbook: object, token: str | None) -> Manifest:
        asked.append("hub")
        if isinstance(answer, Manifest):
            return answer
        raise answer

    asked: list[str] = []
    monkeypatch.setattr(hub, "fetch_manifest", ask)
    monkeypatch.setattr(shards, "download", lambda *words: asked.append("download"))
    known = facts(fact(venv=False, engine="", weights=False, model_type=None), ShardsFact())
    builds = Builds()
    steps: list[Step] = [builds, shards.ShardsStep(), StopStep(), LaunchStep()]
    own = DeploymentState()
    torch = {"0.5.9": "2.9.1", "0.5.11": "2.11.0"}[version]
    engine = Engine(
        dataclasses.replace(deployment(engine={"version": version}), lock_text=f"torch=={torch}"),
        steps,
        lambda: known,
        {},
        state=own,
        save=lambda: None,
        bus=Bus(),
        run_id="r",
        environ={},
    )
    outcome, seen = engine.plan()
    with pytest.raises(DeployError) as caught:
        engine.apply(outcome, seen, Selection())
    return builds, caught.value, asked


def test_0_5_9_is_refused_on_the_first_up_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds, error, asked = first_up(monkeypatch, with_config(), "0.5.9")
    assert isinstance(error, StepBlocked)
    assert "skips the MLP all-reduce of dense qwen3_5" in error.what
    assert (builds.built, asked) == (0, ["hub"])


def test_what_the_hub_refuses_for_good_is_told_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds, error, asked = first_up(monkeypatch, hub.AccessGated("gated", fix="ask"), "0.5.11")
    assert isinstance(error, hub.AccessGated)
    assert (builds.built, asked) == (0, ["hub"])


def test_a_hub_that_is_away_is_asked_again_at_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    builds, error, asked = first_up(monkeypatch, hub.HubSilent("away", fix="wait"), "0.5.11")
    assert isinstance(error, hub.HubSilent)
    assert (builds.built, asked) == (1, ["hub", "hub"])
