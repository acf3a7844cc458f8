"""SGLang's own pool sizing: state slots, KV tokens, requests at once. Pure.

Memory is in GiB (1 << 30).

`before` is the free memory of the fullest GPU after NCCL started and before the weights, `after`
the same once they are loaded (since 0.5.14: target and draft; older: target only).
Real pools come out 0.1-0.25 % smaller, since some 0.05 GiB go between the two readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deployer.sglang.engineversion import Engine
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.pages import lacks_head_dim
from deployer.sglang.resolved import Refusal, Resolved
from deployer.sglang.serveflags import ServeFlags
from deployer.sglang.statepool import GIB, MORE_MEMORY, new_states, no_request_fits, old_states

EVICTION_INTERVAL = 128
"""SGLANG_SWA_EVICTION_INTERVAL: tokens that a window layer keeps beyond its window."""
NOT_ENOUGH = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."


@dataclass(frozen=True)
class Pools:
    """What the server will run with, and how the memory of one GPU is divided (GiB)."""

    tokens: int
    max_running: int
    context: int
    kv_token_bytes: float
    slots: int | None
    slots_per_request: int | None
    slot_bytes: int | None
    slack: float
    weights: float
    states: float
    intermediate: float
    kv: float
    window_tokens: int | None = None
    """Of the sliding-window pool; `tokens` is then the pool of the full layers."""

    @property
    def full_requests(self) -> int:
        """Requests of the whole context length that run at once."""
        return min(self.max_running, self.tokens // self.context)


def size(
    shape: ModelShape, resolved: Resolved, flags: ServeFlags, before: float, after: float
) -> Pools:
    """The pools, as SGLang computes them. Raises Refusal with SGLang's error.

    Before 0.5.13 a state cache too small for one request is sized without a word: `max_running`
    is 0, and the worker dies afterwards (`no_request_fits` says how).
    """
    engine = resolved.engine
    slack = before * (1 - resolved.mem_fraction)
    rest = after - slack
    rest -= resolved.vision_mib / 1024
    slots: int | None = None
    slot_bytes: int | None = None
    states = intermediate = 0.0
    if shape.linear is not None:
        slot_bytes = shape.linear.slot_bytes(resolved.tp, resolved.ssm_dtype, resolved.conv_bytes)
        share = new_states if engine >= Engine.V0_5_13 else old_states
        slots, states, intermediate = share(resolved, flags, rest, slot_bytes)
        rest -= states + intermediate
    if engine >= Engine.V0_5_14 and rest <= 0:
        raise _no_room_left(resolved, before, after)
    _has_head_dim(shape, resolved)
    cell = kv_token_bytes(shape, resolved, flags)
    available = int(rest * GIB)
    profiled = int(available // cell)
    if engine > Engine.V0_5_10:
        profiled = _aligned(profiled, resolved)
    tokens = profiled
    if flags.max_total_tokens is not None:
        tokens = min(profiled, flags.max_total_tokens)
    tokens = _aligned(tokens, resolved)
    capped = _window_cap(shape, resolved, flags)
    if capped is not None:
        tokens = _beside_cap(shape, resolved, flags, available, capped)
    if tokens <= 0:
        raise Refusal(_not_enough(resolved), "pool sizing", MORE_MEMORY)
    pool = tokens * cell
    window_tokens: int | None = None
    if capped is not None and shape.window is not None:
        window_tokens = capped
        pool = tokens * shape.kv_token_bytes(resolved.tp, resolved.kv_bytes)
        pool += capped * shape.window.token_bytes(resolved.tp, resolved.kv_bytes)
    elif shape.window is not None and not flags.one_pool:
        tokens, window_tokens = _two_pools(shape, resolved, flags, tokens, cell)
    context = flags.context_length or shape.context
    running = _max_running(resolved, context, tokens, profiled)
    if slots is not None:
        running = min(running, slots // resolved.slots_per_request)
        if running <= 0 and engine >= Engine.V0_5_13:
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
        kv=pool / GIB,
        window_tokens=window_tokens,
    )


def kv_token_bytes(shape: ModelShape, resolved: Resolved, flags: ServeFlags) -> float:
    """Budgeted KV bytes of one token on one GPU; newer versions add the draft's if they know it.

    With a sliding-window pool it is of a token of the full layers, and of its share of the window's
    since 0.5.11 (before, of a token of every layer).
    """
    cell: float = shape.kv_token_bytes(resolved.tp, resolved.kv_bytes)
    if shape.window is not None:
        window: float = shape.window.token_bytes(resolved.tp, resolved.kv_bytes)
        if flags.one_pool:
            layers = shape.full_layers + shape.window.layers
            return cell / shape.full_layers * layers if shape.full_layers else window
        if resolved.engine > Engine.V0_5_10 and shape.full_layers:
            window *= _window_ratio(flags)
        return cell + window
    if resolved.engine < Engine.V0_5_14 or resolved.speculative is None:
        return int(cell)
    if resolved.speculative not in ("EAGLE", "EAGLE3", "STANDALONE"):
        return int(cell)
    draft = shape.nextn_layers or (1 if flags.draft_path else 0)
    return int(cell) + int(cell * draft / shape.full_layers)


def _window_ratio(flags: ServeFlags) -> float:
    return 0.8 if flags.window_ratio is None else flags.window_ratio


def _two_pools(
    shape: ModelShape, resolved: Resolved, flags: ServeFlags, tokens: int, cell: float
) -> tuple[int, int]:
    """(tokens of the full layers, tokens of the window layers); all-window models have one pool."""
    if shape.window is None or not shape.full_layers:
        return tokens, tokens
    full = tokens
    if resolved.engine <= Engine.V0_5_10:
        own = shape.kv_token_bytes(resolved.tp, resolved.kv_bytes)
        window = shape.window.token_bytes(resolved.tp, resolved.kv_bytes)
        full = int(tokens * cell / (own + _window_ratio(flags) * window))
    share = int(full * _window_ratio(flags))
    return _aligned(full, resolved), _aligned(share, resolved)


def _window_cap(shape: ModelShape, resolved: Resolved, flags: ServeFlags) -> int | None:
    """Tokens of the window pool where it is sized by what the asked requests can hold at most.

    SWAChunkCapPoolConfigurator since 0.5.14 (SWARequestCapPoolConfigurator in 0.5.23): without the
    radix cache and with max-running-requests. None: the pools are divided by their ratio.
    """
    window, engine = shape.window, resolved.engine
    if window is None or flags.one_pool or not shape.full_layers or not window.span:
        return None
    if engine < Engine.V0_5_14 or resolved.radix or flags.max_running is None:
        return None
    if shape.architecture.startswith("Llama4") and engine >= Engine.V0_5_18:
        # Its chunks of attention count as no window there.
        return None
    if resolved.speculative is not None:
        raise Refusal(
            "the window pool of a draft without the radix cache is not covered by this arithmetic",
            "deploy fit",
            "leave out disable-radix-cache, or trust the server's own figures",
        )
    page = resolved.page_size
    each = window.span + EVICTION_INTERVAL + page + page
    chunks = 2 if resolved.overlap else 1
    cap = each * max(1, flags.max_running) + chunks * resolved.chunked_prefill + page
    return -(-cap // page) * page


def _beside_cap(
    shape: ModelShape, resolved: Resolved, flags: ServeFlags, available: int, capped: int
) -> int:
    """Tokens of the full layers in what a capped window pool leaves."""
    if shape.window is None:
        return 0
    rest = available - capped * shape.window.token_bytes(resolved.tp, resolved.kv_bytes)
    tokens = int(rest // shape.kv_token_bytes(resolved.tp, resolved.kv_bytes))
    if flags.max_total_tokens is not None:
        tokens = min(tokens, flags.max_total_tokens)
    return _aligned(tokens, resolved)


def _has_head_dim(shape: ModelShape, resolved: Resolved) -> None:
    """Some config classes leave `head_dim` None, and these versions then add None to it."""
    if lacks_head_dim(resolved.engine, shape):
        raise Refusal(
            "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'",
            "pool sizing",
            f"serve.args json-model-override-args: '{{\"head_dim\": {shape.head_dim}}}'",
        )


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of [low, high] that fits, `low - 1` when none does; `fits` is monotone."""
    while low <= high:
        middle = (low + high) // 2
        if fits(middle):
            low = middle + 1
        else:
            high = middle - 1
    return high


def _max_running(resolved: Resolved, context: int, tokens: int, profiled: int) -> int:
    # 0.5.9 estimates before --max-total-tokens cuts the pool.
    basis = profiled if resolved.engine == Engine.V0_5_9 else tokens
    estimated = max(min(int(basis / context * 512), 4096), 2048)
    asked = resolved.max_running
    if resolved.engine == Engine.V0_5_9:
        return estimated if asked is None else asked
    if asked is None:
        return min(estimated, tokens // 2)
    if resolved.engine >= Engine.V0_5_14:
        return min(max(1, asked), tokens // 2)
    return min(asked, estimated)


def _aligned(tokens: int, resolved: Resolved) -> int:
    return tokens // resolved.page_size * resolved.page_size


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
