"""Layers that keep a state of fixed size for each request, read from a config. Pure.

Gated delta nets (Qwen3-Next, Qwen3.5), Mamba2 (Falcon-H1, Nemotron-H, Granite 4), Kimi's delta
attention and LFM2's short convolutions; source: sglang/srt/configs/ of 0.5.9 and 0.5.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployer.sglang.modelshape import DTYPE_BYTES, LinearState

Config = Mapping[str, Any]

HYBRID_ARCHITECTURES = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
"""Gated-delta-net layers beside full attention. Qwen3.6 uses the qwen3_5 architecture."""


def state_layers(architecture: str, text: Config, layers: int) -> tuple[int, LinearState | None]:
    """(layers with a KV cache, the state layers or None). Raises ValueError for a bad config."""
    if architecture in HYBRID_ARCHITECTURES:
        return _delta_net(text, layers)
    if architecture == "FalconH1ForCausalLM":
        return layers, _falcon(text, layers)
    if architecture == "NemotronHForCausalLM":
        return _nemotron(text, layers)
    if architecture == "GraniteMoeHybridForCausalLM":
        return _granite(text, layers)
    if architecture == "Lfm2ForCausalLM":
        return _short_convolution(text, layers)
    if architecture == "KimiLinearForCausalLM":
        return _kimi(text, layers)
    return layers, None


def _delta_net(text: Config, layers: int) -> tuple[int, LinearState]:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        full = sum(1 for kind in kinds if kind == "full_attention")
    else:
        full = layers // int(text.get("full_attention_interval") or 4)
    return full, LinearState(
        layers=layers - full,
        key_heads=_count(text, "linear_num_key_heads"),
        key_dim=_count(text, "linear_key_head_dim"),
        value_heads=_count(text, "linear_num_value_heads"),
        value_dim=_count(text, "linear_value_head_dim"),
        conv_kernel=_count(text, "linear_conv_kernel_dim"),
        ssm_dtype=_ssm_dtype(text),
    )


def _falcon(text: Config, layers: int) -> LinearState:
    """Attention and Mamba2 side by side in every layer."""
    return LinearState(
        layers=layers,
        key_heads=_count(text, "mamba_n_groups", 1),
        key_dim=_count(text, "mamba_d_state", 256),
        value_heads=_count(text, "mamba_n_heads", 128),
        value_dim=_count(text, "mamba_d_head"),
        conv_kernel=_count(text, "mamba_d_conv", 4),
        ssm_dtype=_ssm_dtype(text),
    )


def _nemotron(text: Config, layers: int) -> tuple[int, LinearState]:
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) == layers:
        full, mamba = pattern.count("*"), pattern.count("M")
    else:
        kinds = text.get("layers_block_type")
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError("`hybrid_override_pattern` does not name each layer")
        full, mamba = kinds.count("attention"), kinds.count("mamba")
    return full, LinearState(
        layers=mamba,
        key_heads=_count(text, "n_groups", 8),
        key_dim=_count(text, "ssm_state_size", 128),
        value_heads=_count(text, "mamba_num_heads", 128),
        value_dim=_count(text, "mamba_head_dim", 64),
        conv_kernel=_count(text, "conv_kernel", 4),
        ssm_dtype=_ssm_dtype(text),
    )


def _granite(text: Config, layers: int) -> tuple[int, LinearState | None]:
    """Its mamba_ssm_dtype is not read: the state is float32."""
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or "mamba" not in kinds:
        return layers, None
    heads = _count(text, "mamba_n_heads", 128)
    size = text.get("mamba_d_head")
    if not isinstance(size, int):
        size = _count(text, "mamba_expand", 2) * _count(text, "hidden_size") // heads
    return kinds.count("attention"), LinearState(
        layers=kinds.count("mamba"),
        key_heads=_count(text, "mamba_n_groups", 1),
        key_dim=_count(text, "mamba_d_state", 256),
        value_heads=heads,
        value_dim=size,
        conv_kernel=_count(text, "mamba_d_conv", 4),
        ssm_dtype="float32",
    )


def _short_convolution(text: Config, layers: int) -> tuple[int, LinearState]:
    kinds = text.get("layer_types")
    if not isinstance(kinds, list):
        at = text.get("full_attn_idxs") or range(layers)
        kinds = ["full_attention" if layer in at else "conv" for layer in range(layers)]
    full = kinds.count("full_attention")
    return full, LinearState(
        layers=sum(1 for kind in kinds if kind in ("conv", "short_conv")),
        key_heads=1,
        key_dim=0,
        value_heads=1,
        value_dim=_count(text, "hidden_size"),
        conv_kernel=_count(text, "conv_L_cache", 3),
        ssm_dtype="float32",
    )


def _kimi(text: Config, layers: int) -> tuple[int, LinearState]:
    inner = text.get("linear_attn_config")
    if not isinstance(inner, dict) or not isinstance(inner.get("kda_layers"), list):
        raise ValueError("`linear_attn_config` names no `kda_layers`")
    # They are counted from 1.
    states = sum(1 for layer in range(layers) if layer + 1 in inner["kda_layers"])
    heads, size = _count(inner, "num_heads"), _count(inner, "head_dim")
    return layers - states, LinearState(
        layers=states,
        key_heads=heads,
        key_dim=size,
        value_heads=heads,
        value_dim=size,
        conv_kernel=_count(inner, "short_conv_kernel_size"),
        ssm_dtype="float32",
    )


def _ssm_dtype(text: Config) -> str:
    name = str(text.get("mamba_ssm_dtype") or "float32")
    return name if name in DTYPE_BYTES else "float32"


def _count(text: Config, key: str, default: int = 0) -> int:
    value = text.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"the config has no usable `{key}`")
    return value
