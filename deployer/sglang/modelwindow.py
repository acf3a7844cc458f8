"""Layers with a sliding window that SGLang keeps in a pool of their own, read from a config. Pure.

Source: `is_hybrid_swa_model` and `get_hybrid_layer_ids` in configs/model_config.py of 0.5.9 and
0.5.11. Gemma 2 and 3, Olmo and Exaone have windows too, but one pool (their hybrid memory is off).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deployer.sglang.modelshape import Window

Config = Mapping[str, Any]


def window_layers(architecture: str, text: Config, layers: int) -> Window | None:
    """The window layers, None when the model has one pool. Raises ValueError for a bad config."""
    if architecture == "Llama4ForConditionalGeneration":
        count = sum(1 for layer in range(layers) if (layer + 1) % 4)
    elif architecture in ("GptOssForCausalLM", "Step3p5ForCausalLM"):
        kinds = text.get("layer_types")
        if not isinstance(kinds, list):
            raise ValueError("the config has no `layer_types`")
        count = sum(1 for kind in kinds[:layers] if kind == "sliding_attention")
    elif architecture in ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"):
        pattern = text.get("hybrid_layer_pattern")
        if not isinstance(pattern, list) or len(pattern) < layers:
            raise ValueError("`hybrid_layer_pattern` does not name each layer")
        count = sum(1 for mark in pattern[:layers] if mark == 1)
    else:
        return None
    heads = int(text["num_attention_heads"])
    size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    other = text.get("attention_other_setting")
    kv_heads = text.get("swa_num_key_value_heads")
    if kv_heads is None and isinstance(other, dict):
        kv_heads = other.get("num_attention_groups")
    if kv_heads is None:
        kv_heads = text.get("num_key_value_heads") or text.get("num_attention_groups") or heads
    own = int(text.get("swa_head_dim") or size)
    span = int(text.get("sliding_window") or text.get("attention_chunk_size") or 0)
    return Window(count, int(kv_heads), own, int(text.get("swa_v_head_dim") or own), span)
