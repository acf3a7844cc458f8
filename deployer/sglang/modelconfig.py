"""Reads a model's `config.json` into a ModelShape. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deployer.sglang.configdefaults import defaults_for
from deployer.sglang.modelshape import (
    Mla,
    ModelShape,
    Moe,
    Quantization,
    Vision,
)
from deployer.sglang.modelstate import HYBRID_ARCHITECTURES, state_layers
from deployer.sglang.modelwindow import window_layers

Config = Mapping[str, Any]

CONTEXT_KEYS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
KV_HEAD_KEYS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
MLA_ARCHITECTURES = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekVL2ForCausalLM",
        "DotsVLMForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "KimiVLForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "MiniCPM3ForCausalLM",
        "MistralLarge3ForCausalLM",
        "SarvamMLAForCausalLM",
    }
)
INDEXED_ARCHITECTURES = frozenset({"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"})
QWEN_VISION: Config = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "spatial_merge_size": 2,
}
UNMODELLED = {
    "sliding-window pools": (
        *("Gemma4", "Step3p7", "Laguna", "Mellum", "DeepseekV4", "Inkling", "MuseGlimmer"),
        *("DiffusionGemma", "UnlimitedOCR", "Beam"),
    ),
    "state layers of another kind": (
        *("JetNemotron", "JetVLM", "Lfm2Moe", "Lfm2Vl", "Jamba", "KimiK3", "BailingMoeV2_5"),
        *("BailingMoeV3", "MiniMaxText", "MiniMaxForCausalLM", "Qwen4Exp", "Mamba", "FalconMamba"),
        *("NemotronH_", "NemotronHPuzzle", "InternS2", "MiniCPMV4_6", "Zaya"),
    ),
    "a sparse-attention index": ("GlmMoeDsa", "MiniMaxM3", "Glm5Next"),
    "an encoder besides its decoder": ("Whisper",),
}
"""Architecture prefixes whose cache is sized by other rules than the ones written here."""


class ConfigNotUnderstood(ValueError):
    """The file is no config.json, or of a model that the arithmetic does not cover."""


def parse_config(text: str) -> ModelShape:
    """The shape in a `config.json`. Raises ConfigNotUnderstood with the reason."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigNotUnderstood(f"not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigNotUnderstood("a config.json holds one object")
    try:
        return shape_of(config)
    except (TypeError, AttributeError) as error:
        raise ConfigNotUnderstood(f"a value of an unusual kind: {error}") from error
    except ValueError as error:
        if isinstance(error, ConfigNotUnderstood):
            raise
        raise ConfigNotUnderstood(f"a value of an unusual kind: {error}") from error


def shape_of(config: Config) -> ModelShape:
    """The shape of a parsed config. Raises ConfigNotUnderstood with the reason."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigNotUnderstood("the config names no `architectures`")
    architecture = str(names[0])
    nested: Config = next(
        (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)),
        {},
    )
    text: Config = {**defaults_for(config, nested or config), **config, **nested}
    for kind, prefixes in UNMODELLED.items():
        if architecture.startswith(prefixes):
            raise ConfigNotUnderstood(f"{architecture} has {kind}, whose sizing is not known here")
    if text.get("index_topk") is not None and architecture not in INDEXED_ARCHITECTURES:
        raise ConfigNotUnderstood(f"{architecture} has a sparse-attention index; not known here")
    mla = _mla(architecture, text)
    layers, heads, hidden = (
        _number(text, key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    window, linear = window_layers(architecture, text, layers), None
    if window is not None:
        full = layers - window.layers
    else:
        full, linear = state_layers(architecture, text, layers)
    if full <= 0 and window is None:
        raise ConfigNotUnderstood("the config has no full-attention layer")
    head_dim = int(text.get("head_dim") or hidden // heads)
    return ModelShape(
        architecture=architecture,
        model_type=str(config.get("model_type", "")),
        hidden=hidden,
        width=int(text.get("intermediate_size") or 0),
        layers=layers,
        full_layers=full,
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=head_dim,
        v_head_dim=int(text.get("v_head_dim") or head_dim),
        vocab=_number(text, "vocab_size"),
        context=_context(text),
        dtype=_dtype(text),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        gated_attention=bool(text.get("attn_output_gate", architecture in HYBRID_ARCHITECTURES)),
        rotary_dim=mla.rope_dim if mla else int(head_dim * _rotary_share(architecture, text)),
        linear=linear,
        mla=mla,
        moe=_moe(text, layers),
        vision=_vision(architecture, config),
        quantization=_quantization(text),
        nextn_layers=int(text.get("num_nextn_predict_layers") or 0),
        mtp_layers=_mtp_layers(architecture, text),
        window=window,
        head_dim_given=text.get("head_dim") is not None,
    )


def _dtype(text: Config) -> str:
    """As SGLang loads it: 32-bit weights become 16-bit ones (bfloat16 only for Gemma)."""
    name = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in ("float32", "float"):
        return name
    return "bfloat16" if str(text.get("model_type", "")).startswith("gemma") else "float16"


def _number(text: Config, key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigNotUnderstood(f"the config has no usable `{key}`")
    return value


def _kv_heads(text: Config, heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    found = next((text[key] for key in KV_HEAD_KEYS if text.get(key) is not None), heads)
    return int(found)


def _mla(architecture: str, text: Config) -> Mla | None:
    if architecture not in MLA_ARCHITECTURES or text.get("use_mla") is False:
        return None
    return Mla(
        kv_rank=_number(text, "kv_lora_rank"),
        rope_dim=_number(text, "qk_rope_head_dim"),
        nope_dim=int(text.get("qk_nope_head_dim") or 0),
        q_rank=int(text.get("q_lora_rank") or 0),
        index_dim=int(text["index_head_dim"]) if text.get("index_topk") is not None else 0,
    )


def _moe(text: Config, layers: int) -> Moe | None:
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((int(text[key]) for key in keys if text.get(key)), 0)
    if experts <= 1:
        return None
    width = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 0)
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    shared = shared or int(text.get("n_shared_experts") or 0) * width
    dense = {int(layer) for layer in text.get("mlp_only_layers") or []}
    dense |= set(range(int(text.get("first_k_dense_replace") or 0)))
    step = text.get("decoder_sparse_step") or text.get("moe_layer_freq") or 1
    step = step if isinstance(step, int) else 1
    sparse = sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    return Moe(experts=experts, width=width, shared_width=shared, layers=sparse)


def _vision(architecture: str, config: Config) -> Vision | None:
    vision = config.get("vision_config")
    if (
        vision is None
        and architecture.startswith("Qwen3_5")
        and architecture.endswith("Generation")
    ):
        # SGLang's config class makes one; its figures count in the memory fraction.
        vision = QWEN_VISION
    if not isinstance(vision, dict):
        return None
    layers_field = int(vision.get("num_hidden_layers") or 24)
    return Vision(
        depth=int(vision.get("depth") or layers_field),
        layers_field=layers_field,
        hidden=int(vision.get("hidden_size") or 1024),
        width=int(vision.get("intermediate_size") or 4 * int(vision.get("hidden_size") or 1024)),
        out=int(vision.get("out_hidden_size") or 0),
        patch=int(vision.get("patch_size") or 14),
        positions=int(vision.get("num_position_embeddings") or 0),
        merge=int(vision.get("spatial_merge_size") or 1),
    )


def _quantization(text: Config) -> Quantization | None:
    raw = text.get("quantization_config")
    if not isinstance(raw, dict):
        return None
    method = str(raw.get("quant_method") or raw.get("quant_algo") or "unknown").lower()
    algorithm = str(raw.get("quant_algo") or "").upper()
    kv_algorithm = str(raw.get("kv_cache_quant_algo") or "").upper()
    scheme = raw.get("kv_cache_scheme")
    if method.startswith("modelopt") and isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        kv_algorithm = kv_algorithm or "FP8"
    groups = raw.get("config_groups")
    weights: Config = {}
    if isinstance(groups, dict) and groups:
        weights = next(iter(groups.values())).get("weights") or {}
    bits = weights.get("num_bits") or raw.get("bits") or raw.get("w_bit")
    if bits is None:
        bits = 4 if "FP4" in algorithm or method in ("awq", "gptq", "mxfp4") else 8
    group = weights.get("group_size") or raw.get("group_size") or raw.get("q_group_size") or 0
    lists = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    return Quantization(
        method=method,
        bits=float(bits),
        group=max(0, int(group)),
        kv_fp8=kv_algorithm == "FP8",
        excluded=any(raw.get(key) for key in lists),
        block=_block(raw),
    )


def _block(raw: Config) -> int:
    sides = raw.get("weight_block_size")
    return int(sides[0]) if isinstance(sides, list) and sides else 0


def _mtp_layers(architecture: str, text: Config) -> int:
    named = text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers")
    # Qwen3-Next ships one MTP layer that its config does not name.
    return int(named or (1 if architecture == "Qwen3NextForCausalLM" else 0))


def _rotary_share(architecture: str, text: Config) -> float:
    rope = text.get("rope_parameters")
    nested = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    default = 0.25 if architecture in HYBRID_ARCHITECTURES else 1.0
    return float(text.get("partial_rotary_factor") or nested or default)


def _context(text: Config) -> int:
    """As SGLang derives it: the first length key, times a rope factor that is not llama3's."""
    factor = 1.0
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if isinstance(rope, dict):
        factor = float(rope.get("factor") or 1)
        if "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3":
            factor = 1.0
    if str(text.get("model_type", "")).startswith("gemma3"):
        # transformers 5 keeps its factors by kind of layer, where SGLang does not see them.
        factor = 1.0
    length = next((text[key] for key in CONTEXT_KEYS if text.get(key) is not None), 2048)
    return int(factor * int(length))
