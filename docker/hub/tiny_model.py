"""A small, valid, deterministic checkpoint in the form of Qwen3.5: config, index, shards.

The tensors have the names and the shapes that the config promises, in bf16; only the numbers are
noise. `build()` writes it once; a second call with the same size keeps the files.
"""

from __future__ import annotations

import functools
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LINEAR_K_HEADS, LINEAR_V_HEADS, LINEAR_DIM, CONV = 2, 4, 64, 4
VOCAB, INTERVAL = 4096, 4
NOISE = 1 << 20
LAYOUT = 2
"""Changes when the same size gives other bytes."""
WORDS = "the of and to in is that for it as was with be by on not he his but at are this".split()

Tensor = tuple[str, tuple[int, ...]]


def text_config(total_bytes: int, shards: int = 1) -> dict[str, Any]:
    """A hybrid text_config whose weights come to about `total_bytes` in bf16.

    More than eight shards get more layers, so that they are of about one size.
    """
    hidden = 64 if total_bytes < 12 << 20 else 256 if total_bytes < 256 << 20 else 1024
    layers = max(8, -(-2 * shards // INTERVAL) * INTERVAL if shards > 8 else 0)
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "full_attention_interval": INTERVAL,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attn_output_gate": True,
        "linear_num_key_heads": LINEAR_K_HEADS,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_num_value_heads": LINEAR_V_HEADS,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_conv_kernel_dim": CONV,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "dtype": "bfloat16",
        "eos_token_id": 2,
    }
    config["layer_types"] = [
        "full_attention" if (i + 1) % INTERVAL == 0 else "linear_attention" for i in range(layers)
    ]
    spare = total_bytes // 2 - sum(count(shape) for _, shape in tensors(config))
    config["intermediate_size"] += max(0, spare // (3 * hidden * (layers + 1)) // 16 * 16)
    return config


def count(shape: tuple[int, ...]) -> int:
    n = 1
    for side in shape:
        n *= side
    return n


def tensors(c: dict[str, Any]) -> list[Tensor]:
    """Every tensor of the checkpoint, in file order."""
    h, inter = c["hidden_size"], c["intermediate_size"]
    kd, vd = LINEAR_K_HEADS * LINEAR_DIM, LINEAR_V_HEADS * LINEAR_DIM
    top = "model.language_model."

    def mlp(at: str) -> list[Tensor]:
        return [
            (f"{at}.mlp.gate_proj.weight", (inter, h)),
            (f"{at}.mlp.up_proj.weight", (inter, h)),
            (f"{at}.mlp.down_proj.weight", (h, inter)),
            (f"{at}.input_layernorm.weight", (h,)),
            (f"{at}.post_attention_layernorm.weight", (h,)),
        ]

    def full(at: str) -> list[Tensor]:
        return [
            (f"{at}.self_attn.q_proj.weight", (2 * HEADS * HEAD_DIM, h)),
            (f"{at}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, h)),
            (f"{at}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, h)),
            (f"{at}.self_attn.o_proj.weight", (h, HEADS * HEAD_DIM)),
        ]

    def linear(at: str) -> list[Tensor]:
        return [
            (f"{at}.linear_attn.in_proj_qkv.weight", (2 * kd + vd, h)),
            (f"{at}.linear_attn.in_proj_z.weight", (vd, h)),
            (f"{at}.linear_attn.in_proj_a.weight", (LINEAR_V_HEADS, h)),
            (f"{at}.linear_attn.in_proj_b.weight", (LINEAR_V_HEADS, h)),
            (f"{at}.linear_attn.conv1d.weight", (2 * kd + vd, 1, CONV)),
            (f"{at}.linear_attn.out_proj.weight", (h, vd)),
        ]

    out: list[Tensor] = [(f"{top}embed_tokens.weight", (VOCAB, h))]
    for i in range(c["num_hidden_layers"]):
        at = f"{top}layers.{i}"
        out += (full(at) if (i + 1) % INTERVAL == 0 else linear(at)) + mlp(at)
    out += [(f"{top}norm.weight", (h,)), ("mtp.fc.weight", (h, 2 * h))]
    out += full("mtp.layers.0") + mlp("mtp.layers.0")
    return [*out, ("mtp.norm.weight", (h,)), ("lm_head.weight", (VOCAB, h))]


def split(all_tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """The tensors in file order, in `shards` groups of about equal size; none is empty."""
    total = sum(count(shape) for _, shape in all_tensors)
    groups: list[list[Tensor]] = [[] for _ in range(shards)]
    done = 0
    for i, (name, shape) in enumerate(all_tensors):
        middle = done + count(shape) / 2
        at = min(shards - 1, int(middle * shards / total))
        at = max(at, shards - (len(all_tensors) - i))  # leave one tensor for every later group
        groups[at].append((name, shape))
        done += count(shape)
    return groups


@functools.cache
def _noise_base() -> bytes:
    return random.Random(0).randbytes(NOISE) * 2


def noise(seed: int, size: int) -> Iterator[bytes]:
    """`size` random bytes, no block like another: made at above 1 GB/s, where the generator
    itself makes 300 MB/s. Each block is one rotation of the base under one substitution."""
    choose = random.Random(seed)
    table = bytearray(range(256))
    while size > 0:
        choose.shuffle(table)
        start, n = choose.randrange(NOISE), min(size, NOISE)
        yield _noise_base()[start : start + n].translate(bytes(table))
        size -= n


def write_shard(path: Path, group: list[Tensor], seed: int) -> None:
    """One safetensors file; the same bytes for the same arguments."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in group:
        end = at + 2 * count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for block in noise(seed, at):
            f.write(block)
    part.replace(path)


def side_files(config: dict[str, Any]) -> dict[str, bytes]:
    """Config and tokenizer files."""
    vocab = {"<unk>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    for word in WORDS:
        vocab[word] = len(vocab)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    model = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": config,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
    }
    files = {
        "config.json": model,
        "generation_config.json": {"temperature": 0.7, "top_p": 0.8, "eos_token_id": 2},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "unk_token": "<unk>",
            "model_max_length": 32768,
        },
    }
    return {name: json.dumps(body, indent=2).encode() + b"\n" for name, body in files.items()}


def build(root: Path, shards: int, mb: float) -> list[str]:
    """Write the checkpoint below `root`; returns the file names, small files first.

    `mb` is MiB a shard. Files that are there with the right layout are kept.
    """
    root.mkdir(parents=True, exist_ok=True)
    config = text_config(int(shards * mb * (1 << 20)), shards)
    groups = split(tensors(config), shards)
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    layout = json.dumps([LAYOUT, shards, mb, config])
    stamp = root / ".layout"
    kept = stamp.exists() and stamp.read_text() == layout
    weight_map = {}
    for i, (name, group) in enumerate(zip(names, groups, strict=True)):
        weight_map.update({tensor: name for tensor, _ in group})
        if not (kept and (root / name).exists()):
            write_shard(root / name, group, seed=i)
    total = sum(2 * count(shape) for _, shape in tensors(config))
    small = side_files(config)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    small["model.safetensors.index.json"] = json.dumps(index, indent=2).encode() + b"\n"
    small["README.md"] = b"# tiny-hybrid\nA small hybrid model with random weights.\n"
    for name, body in small.items():
        (root / name).write_bytes(body)
    stamp.write_text(layout)
    return sorted(small) + names
