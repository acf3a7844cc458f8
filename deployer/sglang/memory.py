"""SGLang's own pool sizing: state slots, KV tokens, requests at once. Pure.

Memory is in GiB (1 << 30).

`before` is the free memory of the fullest GPU after NCCL started and before the weights, `after`
the same once they are loaded (0.5.23: target and draft; older: target only).
Real pools come out 0.1-0.25 % smaller, since some 0.05 GiB go between the two readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deployer.sglang.modelshape import ModelShape
from deployer.sglang.resolved import Engine, Refusal, Resolved
from deployer.sglang.serveflags import ServeFlags

GIB = 1 << 30
VISION_RESERVE_GIB = 100 / 1024
"""0.5.23 keeps SGLANG_VLM_CACHE_SIZE_MB (100) out of the pools of a vision model."""
NOT_ENOUGH = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
MORE_MEMORY = "raise mem-fraction-static, free the GPU, or use more GPUs"


@dataclass(frozen=True)
class Pools:
    """What the server will run with, and how the memory of one GPU is divided (GiB)."""

    tokens: int
    max_running: int
    context: int
    kv_token_bytes: int
    slots: int | None
    slots_per_request: int | None
    slot_bytes: int | None
    slack: float
    weights: float
    states: float
    intermediate: float
    kv: float

    @property
    def full_requests(self) -> int:
        """Requests of the whole context length that run at once."""
        return min(self.max_running, self.tokens // self.context)


def size(
    shape: ModelShape, resolved: Resolved, flags: ServeFlags, before: float, after: float
) -> Pools:
    """The pools, as SGLang computes them. Raises Refusal with SGLang's error.

    Before 0.5.23 a state cache too small for one request is sized without a word: `max_running`
    is 0, and the worker dies afterwards (`no_request_fits` says how).
    """
    engine = resolved.engine
    slack = before * (1 - resolved.mem_fraction)
    rest = after - slack
    if engine == Engine.V0_5_23 and shape.multimodal:
        rest -= VISION_RESERVE_GIB
    slots: int | None = None
    slot_bytes: int | None = None
    states = intermediate = 0.0
    if shape.linear is not None:
        slot_bytes = shape.linear.slot_bytes(resolved.tp, resolved.ssm_dtype, resolved.conv_bytes)
        share = _new_states if engine == Engine.V0_5_23 else _old_states
        slots, states, intermediate = share(resolved, flags, rest, slot_bytes)
        rest -= states + intermediate
    if engine == Engine.V0_5_23 and rest <= 0:
        raise _no_room_left(resolved, before, after)
    cell = kv_token_bytes(shape, resolved, flags)
    available = int(rest * GIB)
    profiled = _aligned(available // cell, flags)
    tokens = profiled
    if flags.max_total_tokens is not None:
        tokens = _aligned(min(profiled, flags.max_total_tokens), flags)
    if tokens <= 0:
        raise Refusal(_not_enough(resolved), "pool sizing", MORE_MEMORY)
    context = flags.context_length or shape.context
    running = _max_running(resolved, context, tokens, profiled)
    if slots is not None:
        running = min(running, slots // resolved.slots_per_request)
        if running <= 0 and engine == Engine.V0_5_23:
            raise no_request_fits(resolved, slots)
    return Pools(
        tokens=tokens,
        max_running=running,
        context=context,
        kv_token_bytes=cell,
        slots=slots,
        slots_per_request=resolved.slots_per_request if slots is not None else None,
        slot_bytes=slot_bytes,
        slack=slack,
        weights=before - after,
        states=states,
        intermediate=intermediate,
        kv=tokens * cell / GIB,
    )


def kv_token_bytes(shape: ModelShape, resolved: Resolved, flags: ServeFlags) -> int:
    """Budgeted KV bytes of one token on one GPU; 0.5.23 adds the draft's where it knows them."""
    cell = shape.kv_token_bytes(resolved.tp, resolved.kv_bytes)
    if resolved.engine != Engine.V0_5_23 or resolved.speculative is None:
        return cell
    if resolved.speculative not in ("EAGLE", "EAGLE3", "STANDALONE"):
        return cell
    draft = shape.nextn_layers or (1 if flags.draft_path else 0)
    return cell + int(cell * draft / shape.full_layers)


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of [low, high] that fits, `low - 1` when none does; `fits` is monotone."""
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            low = middle + 1
        else:
            high = middle - 1
    return high


def _old_states(
    resolved: Resolved, flags: ServeFlags, rest: float, slot: int
) -> tuple[int, float, float]:
    """(slots, their GiB, GiB of intermediate states) before 0.5.23."""
    intermediate = 0.0
    if resolved.speculative is not None:
        # The requested number of requests counts, not the one that will run.
        intermediate = slot * (resolved.max_running or 0) * resolved.draft_tokens / GIB
    if flags.mamba_slots is not None:
        slots = flags.mamba_slots
    elif not resolved.radix and resolved.max_running is not None:
        slots = resolved.max_running
    else:
        ratio = 0.9 if flags.mamba_ratio is None else flags.mamba_ratio
        slots = int((rest - intermediate) * ratio / (1 + ratio) * GIB // slot)
    return slots, slots * slot / GIB, intermediate


def _new_states(
    resolved: Resolved, flags: ServeFlags, rest: float, slot: int
) -> tuple[int, float, float]:
    """(slots, their GiB, GiB of intermediate states) of 0.5.23. Each pool has one slot more."""
    asked = max(1, resolved.max_running) if resolved.max_running is not None else None
    drafts, each = resolved.draft_tokens, resolved.slots_per_request
    ratio = 0.9 if flags.mamba_ratio is None else flags.mamba_ratio
    budget = rest * ratio / (1 + ratio) * GIB
    if flags.mamba_slots is not None:
        slots = flags.mamba_slots
        capped = min(asked or slots, slots // each)
    elif not resolved.radix and asked is not None:
        slots = capped = asked
    elif resolved.speculative is not None:
        slots = int((budget - slot * (1 + drafts)) // (slot * (1 + drafts / each)))
        capped = min(asked or slots, slots // each)
    else:
        slots = int((budget - slot) // slot)
        capped = 0
    intermediate = slot * (capped + 1) * drafts / GIB if resolved.speculative else 0.0
    if slots <= 0:
        raise Refusal(
            "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
            f"Computed max_mamba_cache_size={slots}",
            "pool sizing",
            MORE_MEMORY + ", or lower max-running-requests",
        )
    return slots, (slots + 1) * slot / GIB, intermediate


def _max_running(resolved: Resolved, context: int, tokens: int, profiled: int) -> int:
    # 0.5.9 estimates before --max-total-tokens cuts the pool.
    basis = profiled if resolved.engine == Engine.V0_5_9 else tokens
    estimated = max(min(int(basis / context * 512), 4096), 2048)
    asked = resolved.max_running
    if resolved.engine == Engine.V0_5_9:
        return estimated if asked is None else asked
    if asked is None:
        return min(estimated, tokens // 2)
    if resolved.engine == Engine.V0_5_23:
        return min(max(1, asked), tokens // 2)
    return min(asked, estimated)


def _aligned(tokens: int, flags: ServeFlags) -> int:
    return tokens // flags.page_size * flags.page_size


def _not_enough(resolved: Resolved) -> str:
    if resolved.engine == Engine.V0_5_9:
        return (
            f"{NOT_ENOUGH} Current value: "
            f"self.server_args.mem_fraction_static={resolved.mem_fraction}"
        )
    return NOT_ENOUGH


def _no_room_left(resolved: Resolved, before: float, after: float) -> Refusal:
    least = 1 - after / before
    return Refusal(
        "ValueError: Loaded weights leave no GPU memory for the KV cache under "
        f"--mem-fraction-static={resolved.mem_fraction}. Raise --mem-fraction-static above "
        f"{math.ceil(least * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = {least:.4f}). "
        "If using speculative decoding, draft weights are now counted.",
        "pool sizing",
        MORE_MEMORY,
    )


def no_request_fits(resolved: Resolved, slots: int) -> Refusal:
    """The state slots do not hold one request."""
    each = resolved.slots_per_request
    if resolved.engine == Engine.V0_5_23:
        error = (
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any "
            f"requests. max_mamba_cache_size={slots}, mamba_ratio={each}"
        )
    else:
        error = "AssertionError: max_running_request is zero"
    return Refusal(
        error,
        "pool sizing",
        "raise mamba-full-memory-ratio or max-mamba-cache-size, or mamba-ssm-dtype: bfloat16",
    )
