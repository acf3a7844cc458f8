"""config.json to a shape: dense, grouped, latent, mixture, recurrent, quantised."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployer.sglang.modelconfig import ConfigNotUnderstood, parse_config, shape_of
from deployer.sglang.weights import estimate

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "torch_dtype": "bfloat16",
}
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
}
RECURRENT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
    },
    "vision_config": {"depth": 27, "hidden_size": 1152},
}


def test_dense_with_grouped_heads() -> None:
    shape = shape_of(DENSE)
    assert shape.context == 131072
    assert shape.kv_token_bytes(1, 2) == 8 * 256 * 32 * 2
    assert shape.kv_token_bytes(16, 2) == 256 * 32 * 2
    assert estimate(shape, 1).target == pytest.approx(8.03e9 * 2, rel=0.01)
    assert (shape.hybrid, shape.multimodal, shape.moe) == (False, False, None)


def test_latent_attention_is_the_same_on_every_gpu() -> None:
    shape = shape_of(LATENT)
    assert shape.kv_token_bytes(1, 2) == shape.kv_token_bytes(4, 2) == (512 + 64) * 27 * 2
    assert shape.moe is not None
    assert (shape.moe.layers, shape.moe.shared_width) == (26, 2816)
    assert estimate(shape, 1).target == pytest.approx(15.7e9 * 2, rel=0.01)


def test_recurrent_layers_keep_a_state_instead_of_tokens() -> None:
    shape = shape_of(RECURRENT)
    assert shape.linear is not None
    assert (shape.full_layers, shape.linear.layers) == (1, 3)
    assert shape.linear.slot_bytes(2, None) == 3 * 76_972_032 // 48
    assert shape.linear.slot_bytes(2, "bfloat16") < shape.linear.slot_bytes(2, None) * 0.52
    assert shape.kv_token_bytes(2, 2) == 2 * 512 * 2
    assert shape.multimodal


def test_key_heads_that_do_not_divide_become_one_a_rank() -> None:
    text = {**RECURRENT["text_config"], "linear_num_key_heads": 3, "linear_num_value_heads": 6}
    linear = shape_of({**RECURRENT, "text_config": text}).linear
    assert linear is not None
    channels = 6 * 128 + 2 * 2 * 128
    assert linear.slot_bytes(2, None) == 3 * (channels // 2 * 3 * 2 + 3 * 128 * 128 * 4)


@pytest.mark.parametrize(
    ("raw", "method", "bits", "kv_fp8"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", 8, False),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq", 4, False),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
            "modelopt",
            4,
            True,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            "compressed-tensors",
            4,
            False,
        ),
    ],
)
def test_quantised(raw: dict[str, Any], method: str, bits: float, kv_fp8: bool) -> None:
    shape = shape_of({**DENSE, "quantization_config": raw})
    found = shape.quantization
    assert found is not None
    assert (found.method, found.bits, found.kv_fp8) == (method, bits, kv_fp8)
    assert estimate(shape, 1).target < estimate(shape_of(DENSE), 1).target * 0.6


def test_context_follows_the_rope_factor() -> None:
    yarn = {**DENSE, "max_position_embeddings": 32768, "rope_scaling": {"type": "x", "factor": 4}}
    assert shape_of(yarn).context == 131072
    yarn["rope_scaling"]["original_max_position_embeddings"] = 32768
    assert shape_of(yarn).context == 32768


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "one object"),
        ("{}", "names no `architectures`"),
        (json.dumps({**DENSE, "hidden_size": None}), "no usable `hidden_size`"),
        (json.dumps({**DENSE, "architectures": ["Gemma4ForCausalLM"]}), "sliding-window pools"),
        (json.dumps({**DENSE, "architectures": ["JetNemotronForCausalLM"]}), "another kind"),
        (json.dumps({**DENSE, "intermediate_size": [1, 2]}), "unusual kind"),
        (json.dumps({**DENSE, "head_dim": "wide"}), "unusual kind"),
        (json.dumps({**DENSE, "index_topk": 2048}), "sparse-attention index"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigNotUnderstood, match=why):
        parse_config(text)


@pytest.mark.parametrize(
    ("kind", "left_out", "field", "value"),
    [
        ("qwen3", "head_dim", "head_dim", 128),
        ("llama", "head_dim", "head_dim", 128),
        ("gemma2", "head_dim", "head_dim", 256),
        ("llama", "num_key_value_heads", "kv_heads", 32),
        ("mixtral", "num_key_value_heads", "kv_heads", 8),
        ("qwen2", "max_position_embeddings", "context", 32768),
        ("llama", "vocab_size", "vocab", 32000),
    ],
)
def test_keys_left_out_have_the_defaults_of_their_config_class(
    kind: str, left_out: str, field: str, value: int
) -> None:
    config = {**DENSE, "model_type": kind, "rope_scaling": None}
    config.pop(left_out, None)
    assert getattr(parse_config(json.dumps(config)), field) == value


def test_32_bit_weights_are_loaded_as_16_bit_ones() -> None:
    shape = parse_config(json.dumps({**DENSE, "torch_dtype": "float32"}))
    assert (shape.dtype, shape.dtype_bytes) == ("float16", 2)
