from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serverworld import MTP, deployment, fact, facts, state

from deployer.agents.serve.weights import HEAD_TENSOR
from deployer.model import PlanState, ProbeOutput
from deployer.sglang.mtphead import drafts_itself, has_head, headless
from deployer.steps.launch import LaunchStep
from deployer.steps.server_facts import parse_server, problems_of
from deployer.steps.server_script import server_script_text
from tests.local_transport import SHELLS, LocalTransport, shell_path

QWEN: dict[str, Any] = {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}
DENSE = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (QWEN, True),
        ({**QWEN, "text_config": {"mtp_num_hidden_layers": 0}}, False),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, True),
        ({"model_type": "mimo", "num_nextn_predict_layers": 0}, False),
        (DENSE, False),
        ({**QWEN, "text_config": {"mtp_use_dedicated_embeddings": False}}, None),
        ({"model_type": "qwen3_next"}, None),
        ({}, None),
        ([], None),
    ],
)
def test_what_a_config_tells(config: Any, head: bool | None) -> None:
    assert has_head(json.dumps(config), None) is head


def test_the_tensors_decide() -> None:
    assert has_head(json.dumps(QWEN), False) is False
    assert has_head(json.dumps(DENSE), True) is True
    assert has_head("", None) is None


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("mtp.layers.0.self_attn.q_proj.weight", True),
        ("mtp.fc.weight", True),
        ("model.mtp_block.0.mlp.up_proj.weight", True),
        ("model.layers.61.eh_proj.weight", True),
        ("model.layers.3.mlp.up_proj.weight", False),
        ("model.language_model.layers.0.linear_attn.conv1d.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_names_of_tensors(name: str, head: bool) -> None:
    assert bool(HEAD_TENSOR.search(name)) is head


def test_the_rule() -> None:
    assert headless(MTP, None) == []
    assert headless(MTP, True) == []
    assert headless({}, False) == []
    assert [one.rule for one in headless(MTP, False)] == ["no-mtp-head"]
    assert not drafts_itself({**MTP, "speculative-draft-model-path": "/srv/draft"})
    assert not drafts_itself({"speculative-algorithm": "NGRAM"})
    assert not drafts_itself({**MTP, "load-format": "dummy"})
    want = deployment()
    lost = fact(config=json.dumps(QWEN), head=False)
    assert [one.rule for one in problems_of(want, lost, "mtp")] == ["no-mtp-head"]
    assert problems_of(want, lost, "no-mtp") == []
    plan = LaunchStep().plan(want, facts(lost), state())
    assert plan.state is PlanState.BLOCKED
    assert "no MTP head" in plan.reason


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("names", "head"),
    [
        (["model.layers.0.mlp.up_proj.weight", "mtp.fc.weight"], True),
        (["model.layers.46.eh_proj.weight"], True),
        (["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], False),
        (None, None),
    ],
)
def test_the_probe_looks_at_the_index(
    shell: str, names: list[str] | None, head: bool | None, tmp_path: Path
) -> None:
    want = deployment(model={"path": str(tmp_path)})
    if names is not None:
        table = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table, indent=2))
    answer = LocalTransport(shell_path(shell, tmp_path)).run(server_script_text(want))
    seen = parse_server(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
    assert seen.head is head
