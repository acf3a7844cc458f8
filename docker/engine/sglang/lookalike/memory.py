"""How much fits: SGLang 0.5.11's own arithmetic of state slots, KV tokens and running requests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

GIB = 1 << 30
CONTEXT_GIB = {True: 0.97, False: 0.35}
"""CUDA context (and NCCL's buffers at tp > 1)."""


@dataclass
class Pools:
    """Sizes in GiB a GPU, counts a server."""

    slots: int
    conv: float
    ssm: float
    tokens: int
    kv: float
    running: int


def free_gib(index: int) -> float:
    """Free memory of one visible GPU now, from nvidia-smi."""
    return torch.cuda.mem_get_info(index)[0] / GIB


def size(args: Any, text: dict[str, Any], pre: float, post: float) -> Pools:
    """Raises RuntimeError when no KV token fits."""
    rest = post - pre * (1 - args.mem_fraction_static)
    tp = args.tp_size
    layers = int(text.get("num_hidden_layers", 1))
    hybrid = "linear_num_value_heads" in text
    full = layers // int(text.get("full_attention_interval", 4)) if hybrid else layers
    heads = int(text.get("num_key_value_heads") or text.get("num_attention_heads", 1))
    head_dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
    kv_bytes = 1 if str(args.kv_cache_dtype).startswith("fp8") else 2
    cell = max(1, heads // tp) * 2 * head_dim * max(1, full) * kv_bytes
    asked, slots, conv, ssm = args.max_running_requests, 0, 0.0, 0.0
    running = asked or 2048
    if hybrid:
        conv, ssm = state_bytes(args, text, tp, layers - full)
        state = conv + ssm
        if args.speculative_algorithm and asked:
            rest -= state * asked * args.speculative_num_draft_tokens / GIB
        ratio = args.mamba_full_memory_ratio
        if args.max_mamba_cache_size:
            slots = args.max_mamba_cache_size
        elif args.disable_radix_cache and asked:
            slots = asked
        else:
            slots = int(max(0.0, rest) * ratio / (1 + ratio) * GIB / state)
        rest -= slots * state / GIB
        extra = args.mamba_scheduler_strategy == "extra_buffer"
        overlap = 1 if args.disable_overlap_schedule else 2
        each = 1 if args.disable_radix_cache else 3 + (overlap if extra else 0)
        running = min(running, slots // each)
    tokens = int(rest * GIB / cell)
    if args.max_total_tokens:
        tokens = min(tokens, args.max_total_tokens)
    if tokens <= 0:
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
    return Pools(slots, slots * conv / GIB, slots * ssm / GIB, tokens, tokens * cell / GIB, running)


def state_bytes(args: Any, text: dict[str, Any], tp: int, linear: int) -> tuple[int, int]:
    """Bytes of one request's conv and SSM state on one GPU."""
    k_heads, v_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    k_dim, v_dim = text["linear_key_head_dim"], text["linear_value_head_dim"]
    conv_dim = v_heads * v_dim + 2 * k_heads * k_dim
    name = os.environ.get("SGLANG_MAMBA_SSM_DTYPE") or args.mamba_ssm_dtype
    name = name or text.get("mamba_ssm_dtype", "float32")
    conv = linear * conv_dim // tp * (text["linear_conv_kernel_dim"] - 1) * 2
    ssm = linear * v_heads // tp * v_dim * k_dim * (4 if name == "float32" else 2)
    return conv, ssm
