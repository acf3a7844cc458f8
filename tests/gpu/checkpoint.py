"""The files of the tiny checkpoint: config as Qwen3.5's own, tokenizer, safetensors shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import texts

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
PLAIN = ["<think>", "</think>"]
"""Added tokens that are part of the text, as in Qwen's own tokenizers."""
VOCAB = 2048
CONTEXT = texts.CONTEXT
SHARDS = 3
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attn_output_gate": True,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "max_position_embeddings": CONTEXT,
    "partial_rotary_factor": 0.25,
    "rope_parameters": ROPE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "initializer_range": 0.02,
    "eos_token_id": SPECIAL.index("<|im_end|>"),
}
VISION = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    # So that two ranks can share them.
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 256,
    "num_position_embeddings": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
MODEL: dict[str, Any] = {
    "vision_config": VISION,
    "image_token_id": SPECIAL.index("<|image_pad|>"),
    "video_token_id": SPECIAL.index("<|video_pad|>"),
    "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
    "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
    "tie_word_embeddings": False,
}
GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "eos_token_id": [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")],
}
IMAGES = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_tokenizer() -> Any:
    """A byte-level BPE trained on the lessons; digits stand alone, as in Qwen's."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(PLAIN),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = [text for lesson in texts.lessons() for text in (lesson.prompt, lesson.answer)]
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in PLAIN])
    return tokenizer


def tensors(model: Any, mtp: Any) -> dict[str, Any]:
    """All tensors by their names in a published checkpoint, bf16 but for the state's decay."""
    import torch

    found = {
        name: value
        for name, value in model.state_dict().items()
        if "rotary" not in name and "inv_freq" not in name
    }
    found |= {
        f"mtp.{name}": value for name, value in mtp.state_dict().items() if "rotary" not in name
    }
    keep = (".A_log", ".linear_attn.norm.weight")
    return {
        name: value.detach()
        .to(torch.float32 if name.endswith(keep) else torch.bfloat16)
        .cpu()
        .contiguous()
        .clone()
        for name, value in found.items()
    }


def save(folder: Path, model: Any, mtp: Any, tokenizer: Any) -> list[str]:
    """Writes every file; the names, small files first."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    everything = tensors(model, mtp)
    order = sorted(everything)
    shards = [f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors" for i in range(SHARDS)]
    weight_map = {name: shards[i * SHARDS // len(order)] for i, name in enumerate(order)}
    for shard in shards:
        part = {name: everything[name] for name in order if weight_map[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    size = sum(value.numel() * value.element_size() for value in everything.values())
    small: dict[str, Any] = {
        "config.json": {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": "bfloat16",
            "text_config": {**TEXT, "dtype": "bfloat16"},
            **MODEL,
        },
        "generation_config.json": GENERATION,
        "model.safetensors.index.json": {
            "metadata": {"total_size": size},
            "weight_map": weight_map,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {**IMAGES, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {
            **IMAGES,
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
    }
    for name, body in small.items():
        (folder / name).write_text(json.dumps(body, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    return [*sorted(small), "tokenizer.json", *shards]
