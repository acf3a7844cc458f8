"""The slots of a state cache (mamba, linear attention), as SGLang computes them. Pure; GiB.

`_handle_max_mamba_cache`: 2,200 random cases of the releases from 0.5.13 to 0.5.23 agree with it.
"""

from __future__ import annotations

from deployer.sglang.engineversion import Engine
from deployer.sglang.resolved import Refusal, Resolved
from deployer.sglang.serveflags import ServeFlags

GIB = 1 << 30
MORE_MEMORY = "raise mem-fraction-static, free the GPU, or use more GPUs"


def old_states(
    resolved: Resolved, flags: ServeFlags, rest: float, slot: int
) -> tuple[int, float, float]:
    """(slots, their GiB, GiB of intermediate states) before 0.5.13."""
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


def new_states(
    resolved: Resolved, flags: ServeFlags, rest: float, slot: int
) -> tuple[int, float, float]:
    """(slots, their GiB, GiB of intermediate states) since 0.5.13; a padding slot since 0.5.17."""
    asked = max(1, resolved.max_running) if resolved.max_running is not None else None
    drafts, each = resolved.draft_tokens, resolved.slots_per_request
    padding = 1 if resolved.engine >= Engine.V0_5_17 else 0
    ratio = 0.9 if flags.mamba_ratio is None else flags.mamba_ratio
    budget = rest * ratio / (1 + ratio) * GIB
    if flags.mamba_slots is not None:
        slots = flags.mamba_slots
        capped = min(asked or slots, slots // each)
    elif not resolved.radix and asked is not None:
        slots = capped = asked
    elif resolved.speculative is not None:
        taken = budget - slot * (1 + drafts) * padding
        slots = int(taken // (slot * (1 + drafts / each)))
        capped = min(asked or slots, slots // each)
    else:
        slots = int((budget - slot * padding) // slot)
        capped = 0
    intermediate = slot * (capped + padding) * drafts / GIB if resolved.speculative else 0.0
    if slots <= 0:
        raise Refusal(
            "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. "
            f"Computed max_mamba_cache_size={slots} (total_rest_memory={rest - intermediate:.2f} "
            f"GB, mamba_cache_per_req={slot / (1 << 20):.2f} MB). Try: (1) reduce "
            "--max-running-requests, (2) increase --mem-fraction-static, (3) reduce "
            "--speculative-num-draft-tokens, or (4) use GPUs with more memory.",
            "pool sizing",
            MORE_MEMORY + ", or lower max-running-requests",
        )
    return slots, (slots + padding) * slot / GIB, intermediate


def no_request_fits(resolved: Resolved, slots: int) -> Refusal:
    """The state slots do not hold one request."""
    each = resolved.slots_per_request
    if resolved.engine >= Engine.V0_5_13:
        error = (
            "RuntimeError: Hybrid (mamba/linear-attention) state cache is too small to serve any "
            f"requests. max_mamba_cache_size={slots}, mamba_ratio={each}, resulting "
            "max_num_reqs=0. Try: (1) reduce --max-running-requests, (2) increase "
            "--mem-fraction-static, or (3) use GPUs with more memory."
        )
    else:
        error = "AssertionError: max_running_request is zero"
    return Refusal(
        error,
        "pool sizing",
        "raise mamba-full-memory-ratio or max-mamba-cache-size, or mamba-ssm-dtype: bfloat16",
    )
