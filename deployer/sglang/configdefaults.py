"""What a config.json leaves out: the defaults of transformers' config classes. Pure data.

Read from transformers 5.6.0 (SGLang 0.5.11), where 4.57.1 (0.5.9) has the same; only values that do
not depend on others. SGLang reads a model through these classes, so a missing key has these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"vocab_size": 131072, "max_position_embeddings": 65536},
    "arcee": {"vocab_size": 32000, "max_position_embeddings": 4096},
    "bamba": {"num_key_value_heads": 8, "vocab_size": 128000, "max_position_embeddings": 262144},
    "cohere": {"vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "cohere2": {"vocab_size": 256000, "max_position_embeddings": 8192, "tie_word_embeddings": True},
    "deepseek_v2": {"vocab_size": 32000, "max_position_embeddings": 2048},
    "deepseek_v3": {
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
    },
    "ernie4_5": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "vocab_size": 103424,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": {
        "num_key_value_heads": 4,
        "vocab_size": 103424,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "exaone4": {"num_key_value_heads": 32, "vocab_size": 102400, "max_position_embeddings": 2048},
    "falcon_h1": {"num_key_value_heads": 8, "vocab_size": 128000, "max_position_embeddings": 8192},
    "gemma": {
        "head_dim": 256,
        "num_key_value_heads": 16,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "intermediate_size": 9216,
    },
    "gemma3n_text": {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "vocab_size": 262400,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "glm": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
    },
    "glm4": {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
    },
    "glm4_moe": {"num_key_value_heads": 8, "vocab_size": 151552, "max_position_embeddings": 131072},
    "glm4_moe_lite": {
        "head_dim": 64,
        "num_key_value_heads": 20,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
    },
    "glm4v_moe_text": {
        "num_key_value_heads": 8,
        "vocab_size": 151424,
        "max_position_embeddings": 65536,
    },
    "glm4v_text": {
        "num_key_value_heads": 2,
        "vocab_size": 151552,
        "max_position_embeddings": 32768,
    },
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    },
    "granite": {"vocab_size": 32000, "max_position_embeddings": 2048},
    "granitemoe": {"vocab_size": 32000, "max_position_embeddings": 2048},
    "granitemoehybrid": {"vocab_size": 32000, "max_position_embeddings": 2048},
    "hunyuan_v1_dense": {"vocab_size": 290943, "max_position_embeddings": 2048},
    "hunyuan_v1_moe": {"vocab_size": 290943, "max_position_embeddings": 2048},
    "jamba": {"num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 262144},
    "lfm2": {
        "num_key_value_heads": 8,
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "llama": {"vocab_size": 32000, "max_position_embeddings": 2048},
    "llama4_text": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 202048,
        "max_position_embeddings": 131072,
    },
    "minimax": {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072},
    "minimax_m2": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
    },
    "ministral3": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    },
    "mistral": {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072},
    "mixtral": {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072},
    "nemotron": {"vocab_size": 256000, "max_position_embeddings": 4096},
    "olmo": {"vocab_size": 50304, "max_position_embeddings": 2048},
    "olmo2": {"vocab_size": 50304, "max_position_embeddings": 2048},
    "olmo3": {"vocab_size": 50304, "max_position_embeddings": 2048},
    "phi3": {"vocab_size": 32064, "max_position_embeddings": 4096},
    "phimoe": {"num_key_value_heads": 8, "vocab_size": 32064, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen2_5_vl_text": {
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "qwen2_vl_text": {
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
    "qwen3": {
        "head_dim": 128,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "qwen3_5_moe_text": {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
    },
    "qwen3_5_text": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 32768,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen3_next": {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "qwen3_vl_moe_text": {
        "num_key_value_heads": 16,
        "vocab_size": 151936,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_text": {
        "head_dim": 128,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 128000,
    },
    "seed_oss": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 155136,
        "max_position_embeddings": 524288,
    },
    "smollm3": {
        "num_key_value_heads": 4,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "stablelm": {"num_key_value_heads": 32, "vocab_size": 50304, "max_position_embeddings": 4096},
    "starcoder2": {
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
"""model_type (of the text part) -> key -> value."""


def defaults_for(config: Mapping[str, Any], text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a config and its text part, which may be the same."""
    outer = str(config.get("model_type") or "")
    for kind in (str(text.get("model_type") or ""), f"{outer}_text", outer):
        if kind in DEFAULTS:
            return DEFAULTS[kind]
    return {}
