from __future__ import annotations

from typing import Any

import pytest

from deployer.playbook import ArgValue
from deployer.sglang.compat import RULES, check, parse_version
from deployer.sglang.flagtable import READ, RENAMED, flags_of
from deployer.sglang.modelconfig import shape_of
from deployer.sglang.modelshape import ModelShape

SPEC: dict[str, ArgValue] = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}


def rules(version: str, args: dict[str, ArgValue], kind: str | None = "qwen3_5") -> list[str]:
    return [problem.rule for problem in check(version, args, kind, "580.126.09")]


def test_dense_qwen3_5_on_two_gpus_of_0_5_9() -> None:
    assert rules("0.5.9", {"tp-size": 2}) == ["dense-qwen3_5-tp"]
    assert rules("0.5.9.post1", {"tensor-parallel-size": 4}) == ["dense-qwen3_5-tp"]
    assert rules("0.5.9", {"tp-size": 1}) == []
    assert rules("0.5.9", {"tp-size": 2}, "qwen3_5_moe") == []
    assert rules("0.5.10", {"tp-size": 2}) == []
    assert rules("0.5.9", {"tp-size": 2}, None) == []


@pytest.mark.parametrize("version", ["0.5.10", "0.5.10.post1", "0.5.11"])
def test_speculation_needs_extra_buffer(version: str) -> None:
    problems = check(version, SPEC, "qwen3_5", "580.1")
    assert [problem.rule for problem in problems] == ["speculative-radix-no-buffer"]
    assert "extra_buffer" in problems[0].change
    assert rules(version, {**SPEC, "mamba-scheduler-strategy": "extra_buffer"}) == []
    assert rules(version, {**SPEC, "disable-radix-cache": True}) == []
    assert rules(version, SPEC, "llama") == []


def test_speculation_is_no_problem_elsewhere() -> None:
    assert rules("0.5.9", SPEC) == []
    assert rules("0.5.23", SPEC) == []


def test_both_ways_out_together_are_refused() -> None:
    both: dict[str, ArgValue] = {
        "mamba-scheduler-strategy": "extra_buffer",
        "disable-radix-cache": True,
    }
    assert rules("0.5.11", {**SPEC, **both}) == ["extra-buffer-without-radix"]


def test_renamed_flags() -> None:
    assert rules("0.5.23", {"mamba-scheduler-strategy": "auto"}) == ["renamed-mamba-strategy"]
    assert rules("0.5.11", {"mamba-radix-cache-strategy": "auto"}) == ["new-mamba-strategy-name"]
    assert rules("0.5.23", {"cuda-graph-max-bs": 8}) == ["ambiguous-graph-bs"]
    assert rules("0.5.11", {"reasoning-parser": "auto"}) == ["auto-parser"]


def test_cuda_13_needs_its_driver() -> None:
    assert [one.rule for one in check("0.5.11", {}, None, "570.86.15")] == ["cuda13-driver"]
    assert check("0.5.10", {}, None, "570.86.15") == []
    assert check("0.5.11", {}, None, None) == []


def test_draft_figures_come_together() -> None:
    assert rules("0.5.11", {"speculative-num-steps": 3}, None) == ["draft-figures-incomplete"]


def test_versions() -> None:
    assert parse_version("0.5.10.post1") == (0, 5, 10, 1)
    assert parse_version("main") is None
    assert check("main", SPEC, "qwen3_5", "1") == []


def test_every_rule_names_its_source() -> None:
    assert all(rule.source and rule.change and rule.reason for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def model(**more: Any) -> ModelShape:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    return shape_of({**config, **more})


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def names(version: str, args: dict[str, ArgValue] | None = None, **known: Any) -> list[str]:
    return [one.rule for one in check(version, args or {}, None, None, **known)]


@pytest.mark.parametrize(
    ("version", "driver", "refused"),
    [
        ("0.5.9", "520.61.05", True),
        ("0.5.9", "525.60.13", False),
        ("0.5.10.post1", "570.211.01", False),
        ("0.5.11", "575.57.08", True),
        ("0.5.11", "580.65.06", False),
        ("0.5.12", "570.86.15", True),
        ("0.5.23", "570.86.15", True),
        ("0.5.99", "570.86.15", True),
        ("0.4.9", "500.1", False),
    ],
)
def test_every_version_has_its_least_driver(version: str, driver: str, refused: bool) -> None:
    assert bool(check(version, {}, None, driver)) == refused


@pytest.mark.parametrize(
    ("version", "capability", "refused"),
    [
        ("0.5.11", "7.5", True),
        ("0.5.23", "7.0", True),
        ("0.5.9", "8.6", False),
        ("0.5.11", "8.6", False),
        ("0.5.11", "8.9", False),
        ("0.5.11", "9.0", False),
        ("0.5.9", "10.0", False),
        ("0.5.9", "10.3", True),
        ("0.5.11", "10.3", False),
        ("0.5.11", "12.0", False),
        ("0.5.11", "11.0", True),
        ("0.5.23", "11.0", False),
    ],
)
def test_kernels_have_code_for_the_gpu(version: str, capability: str, refused: bool) -> None:
    assert names(version, capabilities=[capability]) == (["kernel-gpu"] if refused else [])


def test_python_and_libc_of_the_wheels() -> None:
    assert names("0.5.23", python="3.10") == ["python"]
    assert names("0.5.11", python="3.10") == []
    assert names("0.5.11", glibc="2.31") == ["glibc"]
    assert names("0.5.11", glibc="2.34") == []
    assert names("0.5.10", glibc="2.28") == []


def test_the_lock_must_be_of_this_release() -> None:
    good = {"torch": "2.11.0+cu130", "transformers": "5.6.0", "sglang-kernel": "0.4.2"}
    assert names("0.5.11", pins=good) == []
    assert names("0.5.11", pins={**good, "torch": "2.9.1"}) == ["lock-pins"]
    assert names("0.5.11", pins={**good, "transformers": "4.57.1"}) == ["lock-pins"]
    assert names("0.5.11", pins={**good, "transformers": "5.7.0"}) == []
    assert names("0.5.11", pins={**good, "sgl-kernel": "0.3.21"}) == ["lock-two-kernels"]
    assert names("0.5.22", pins={"torch": "2.13.0"}) == ["lock-pins"]
    assert names("0.5.24", pins={"torch": "2.0.0"}) == []


def test_a_model_newer_than_the_engine() -> None:
    text = model(
        architectures=["Qwen3_5ForCausalLM"],
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_num_value_heads=48,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )
    assert names("0.5.11", shape=text) == ["architecture-too-new"]
    assert names("0.5.16", shape=text) == ["architecture-too-new"]
    assert names("0.5.17", shape=text) == []


@pytest.mark.parametrize(
    ("tp", "more", "fits"),
    [
        (8, {}, ""),
        (16, {}, ""),
        (3, {}, "2"),
        (6, {"num_attention_heads": 24, "num_key_value_heads": 4}, "4"),
        (2, {"quantization_config": FP8}, ""),
        (8, {"quantization_config": FP8}, ""),
        (16, {"quantization_config": FP8}, "8"),
        (8, {"num_experts": 128, "moe_intermediate_size": 1536, "quantization_config": FP8}, "4"),
    ],
)
def test_tensor_parallelism_must_divide_the_model(tp: int, more: dict[str, Any], fits: str) -> None:
    found = check("0.5.11", {"tp-size": tp}, None, None, shape=model(**more))
    if not fits:
        assert found == []
        return
    assert [one.rule for one in found] == ["tp-split"]
    assert found[0].change == f"tp-size: {fits}"


def test_the_context_of_the_model() -> None:
    longer: dict[str, ArgValue] = {"context-length": 65536}
    assert names("0.5.11", longer, shape=model()) == ["context-too-long"]
    allowed = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    assert names("0.5.11", longer, shape=model(), env=allowed) == []
    assert names("0.5.11", {"context-length": "40k"}, shape=model()) == []


def test_quantisation_and_gpu() -> None:
    fp4 = model(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert names("0.5.11", shape=fp4, capabilities=["9.0"]) == ["quantization-gpu"]
    assert names("0.5.11", shape=fp4, capabilities=["10.0"]) == []
    assert names("0.5.14", shape=fp4, capabilities=["9.0"]) == []
    fp8 = model(quantization_config=FP8)
    assert names("0.5.11", shape=fp8, capabilities=["8.6"]) == []
    assert names("0.5.11", {"quantization": "w8a8_fp8"}, capabilities=["8.6"]) == [
        "quantization-gpu"
    ]


def test_crashes_of_0_5_13_and_0_5_14() -> None:
    assert rules("0.5.13.post1", SPEC) == ["mtp-crash-0.5.13"]
    assert rules("0.5.14", SPEC) == ["mtp-crash-0.5.14"]
    assert rules("0.5.14", {}) == []
    assert rules("0.5.15.post1", SPEC) == []
    assert rules("0.5.13", SPEC, "qwen3") == []


def test_parser_names_of_each_version() -> None:
    assert names("0.5.9", {"reasoning-parser": "gemma4"}) == ["unknown-parser"]
    assert names("0.5.11", {"reasoning-parser": "gemma4"}) == []
    assert names("0.5.9", {"reasoning-parser": "nano_v3"}) == []
    assert names("0.5.11", {"reasoning-parser": "nano_v3"}) == ["unknown-parser"]
    assert names("0.5.23", {"tool-call-parser": "qwen3-coder"}) == ["unknown-parser"]
    assert names("0.5.12", {"tool-call-parser": "minicpm5"}) == ["unknown-parser"]
    assert names("0.5.13", {"tool-call-parser": "minicpm5"}) == []
    assert names("0.5.24", {"tool-call-parser": "anything"}) == []


@pytest.mark.parametrize(
    ("version", "flag", "rule", "change"),
    [
        ("0.5.23", "stream-output", "unknown-flag", "serve.args incremental-streaming-output"),
        ("0.5.21", "prefill-cp-mode", "unknown-flag", "serve.args cp-strategy"),
        ("0.5.23", "nsa-prefill-backend", "unknown-flag", "serve.args dsa-prefill-backend"),
        ("0.5.11", "disable-prefill-cuda-graph", "unknown-flag", "disable-piecewise-cuda-graph"),
        ("0.5.11", "mem-fraction-sttic", "unknown-flag", "mem-fraction-static"),
        ("0.5.11", "speculative", "ambiguous-flag", "speculative-a"),
        ("0.5.11", "mem-frac", "", ""),
        ("0.5.11", "tp", "", ""),
        ("0.5.17", "no-such-flag", "unknown-flag", ""),
        ("0.5.24", "no-such-flag", "", ""),
    ],
)
def test_flags_that_the_release_has_not(version: str, flag: str, rule: str, change: str) -> None:
    found = check(version, {flag: "1"}, None, None)
    assert [one.rule for one in found] == ([rule] if rule else [])
    assert all(change in one.change for one in found)


def test_the_flag_tables_hold_what_every_release_has() -> None:
    for patch in READ:
        flags = flags_of((0, 5, patch))
        assert {"tp-size", "mem-fraction-static", "speculative-algorithm"} <= flags
        assert ("mamba-scheduler-strategy" in flags) == (patch <= 19)
        assert ("mamba-radix-cache-strategy" in flags) == (patch >= 14)
    assert len(flags_of((0, 5, 9))) == 342
    assert len(flags_of((0, 5, 23))) == 560
    assert len(flags_of((0, 5, 22))) == 545
    assert flags_of((0, 5, 24)) == frozenset()


def test_every_renamed_flag_is_of_a_release() -> None:
    every = {flag for patch in READ for flag in flags_of((0, 5, patch))}
    assert set(RENAMED) | set(RENAMED.values()) <= every


def test_mixtral_needs_its_head_dim_named() -> None:
    mixtral = model(architectures=["MixtralForCausalLM"], model_type="mixtral")
    assert names("0.5.11", shape=mixtral) == ["no-head-dim"]
    assert names("0.5.14", shape=mixtral) == []
    named: dict[str, ArgValue] = {"json-model-override-args": '{"head_dim": 80}'}
    assert names("0.5.11", named, shape=mixtral) == []
    mistral = model(architectures=["MistralForCausalLM"], model_type="mistral", head_dim=None)
    assert names("0.5.9", shape=mistral) == ["no-head-dim"]
    assert names("0.5.11", shape=mistral) == []
