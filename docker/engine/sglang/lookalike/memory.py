"""How much fits: each version's own arithmetic of state slots, KV tokens and running requests."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from sglang.lookalike import logs
from sglang.version import RELEASE

GIB = 1 << 30
NEW = RELEASE >= (0, 5, 20)
VISION_GIB = 100 / 1024
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
    """Raises RuntimeError or ValueError when nothing fits, with this version's words."""
    rest = post - pre * (1 - args.mem_fraction_static)
    tp = args.tp_size
    layers = int(text.get("num_hidden_layers", 1))
    hybrid = "linear_num_value_heads" in text
    full = layers // int(text.get("full_attention_interval", 4)) if hybrid else layers
    heads = int(text.get("num_key_value_heads") or text.get("num_attention_heads", 1))
    head_dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
    kv_bytes = 1 if str(args.kv_cache_dtype).startswith("fp8") else 2
    cell = max(1, heads // tp) * 2 * head_dim * max(1, full) * kv_bytes
    if NEW and args.model_config.architecture.endswith("ConditionalGeneration"):
        rest -= VISION_GIB
    states = States(0, 0.0, 0.0, 1)
    conv = ssm = 0
    if hybrid:
        conv, ssm = state_bytes(args, text, tp, layers - full)
        states = (new_states if NEW else old_states)(args, conv + ssm, rest)
        rest -= states.taken
    if NEW and rest <= 0:
        least = 1 - post / pre
        raise ValueError(
            "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static="
            f"{args.mem_fraction_static}. Raise --mem-fraction-static above "
            f"{math.ceil(least * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = "
            f"{least:.4f}). If using speculative decoding, draft weights are now counted."
        )
    tokens = int(rest * GIB / cell)
    if args.max_total_tokens:
        tokens = min(tokens, args.max_total_tokens)
    if tokens <= 0:
        value = f" Current value: self.server_args.mem_fraction_static={args.mem_fraction_static}"
        raise RuntimeError(
            "Not enough memory. Please try to increase --mem-fraction-static."
            + (value if RELEASE < (0, 5, 10) else "")
        )
    running = args.max_running_requests or max(
        2048, min(4096, int(tokens / args.model_config.context_len * 512))
    )
    if NEW:
        running = min(running, tokens // 2)
    if hybrid:
        running = capped(running, states)
    slots = states.slots
    return Pools(slots, slots * conv / GIB, slots * ssm / GIB, tokens, tokens * cell / GIB, running)


@dataclass
class States:
    """State slots, slots of one request, and the GiB that states take of the budget."""

    slots: int
    taken: float
    intermediate: float
    each: int


def slots_of_one(args: Any) -> int:
    """State slots that one running request needs."""
    if args.disable_radix_cache:
        return 1
    if not args.mamba_strategy.startswith("extra_buffer"):
        return 3
    if RELEASE < (0, 5, 10):
        return 4 if args.speculative_algorithm else 5
    return 4 if args.disable_overlap_schedule else 5


def old_states(args: Any, state: int, rest: float) -> States:
    """Before 0.5.23; the requested number of requests counts, not the one that will run."""
    asked, between = args.max_running_requests, 0.0
    if args.speculative_algorithm and asked:
        between = state * asked * args.speculative_num_draft_tokens / GIB
    ratio = args.mamba_full_memory_ratio
    if args.max_mamba_cache_size:
        slots = args.max_mamba_cache_size
    elif args.disable_radix_cache and asked:
        slots = asked
    else:
        slots = int(max(0.0, rest - between) * ratio / (1 + ratio) * GIB / state)
    return States(slots, slots * state / GIB + between, between, slots_of_one(args))


def new_states(args: Any, state: int, rest: float) -> States:
    """0.5.23: each pool has one slot more, and both come out of one budget."""
    asked, each = args.max_running_requests, slots_of_one(args)
    drafts = args.speculative_num_draft_tokens if args.speculative_algorithm else 0
    ratio = args.mamba_full_memory_ratio
    budget = rest * ratio / (1 + ratio) * GIB
    if args.max_mamba_cache_size:
        slots = args.max_mamba_cache_size
        both = min(asked or slots, slots // each)
    elif args.disable_radix_cache and asked:
        slots = both = asked
    elif drafts:
        slots = int((budget - state * (1 + drafts)) // (state * (1 + drafts / each)))
        both = min(asked or slots, slots // each)
    else:
        slots, both = int((budget - state) // state), 0
    if slots <= 0:
        raise RuntimeError(
            "Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
            f"max_mamba_cache_size={slots} (total_rest_memory={rest:.2f} GB, "
            f"mamba_cache_per_req={state / (1 << 20):.2f} MB). Try: (1) reduce "
            "--max-running-requests, (2) increase --mem-fraction-static, (3) reduce "
            "--speculative-num-draft-tokens, or (4) use GPUs with more memory."
        )
    between = state * (both + 1) * drafts / GIB
    return States(slots, (slots + 1) * state / GIB + between, between, each)


def capped(running: int, states: States) -> int:
    """Requests at once that the state cache allows."""
    most = states.slots // states.each
    if NEW and most < running:
        logs.say(
            f"max_running_requests is capped to {most} by the mamba state cache "
            f"(max_mamba_cache_size={states.slots}, {states.each} state slots per request). To "
            "raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or halve the "
            "state size with --mamba-ssm-dtype bfloat16."
        )
    if most <= 0 and NEW:
        raise RuntimeError(
            "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. "
            f"max_mamba_cache_size={states.slots}, mamba_ratio={states.each}, resulting "
            "max_num_reqs=0. Try: (1) reduce --max-running-requests, (2) increase "
            "--mem-fraction-static, or (3) use GPUs with more memory."
        )
    if most <= 0:
        raise AssertionError("max_running_request is zero")
    return min(running, most)


def draft_gib(text: dict[str, Any], tp: int) -> tuple[float, float]:
    """GiB a GPU of the MTP head, and of the embeddings it loads until it shares the target's."""
    hidden = int(text["hidden_size"])
    heads, kv_heads = text["num_attention_heads"], text.get("num_key_value_heads", 1)
    head_dim = int(text.get("head_dim") or hidden // heads)
    layer = 3 * hidden * int(text.get("intermediate_size", 0)) + 2 * hidden * hidden
    layer += hidden * head_dim * (3 * heads + 2 * kv_heads)
    both = 2 * int(text.get("vocab_size", 0)) * hidden
    return layer * 2 / tp / GIB, both * 2 / tp / GIB


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
