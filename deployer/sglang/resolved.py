"""What a SGLang version makes of the flags before it loads a model. Pure; sizes are MiB.

Source: `server_args.py`, and `arg_groups/` where it exists, of every release from 0.5.9 to 0.5.23;
the rules agree with SGLang's own code on the recorded cases (tests/fixtures/sglang-plan).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployer.sglang.engineversion import Engine
from deployer.sglang.memfraction import auto_fraction, band
from deployer.sglang.modelshape import DTYPE_BYTES, ModelShape
from deployer.sglang.pages import has_extra_buffer, page_size
from deployer.sglang.serveflags import ServeFlags

EAGLE = frozenset({"NEXTN", "EAGLE", "EAGLE3", "STANDALONE"})
DEFAULT_SPECULATIVE_RUNNING = 48
TRUE = ("1", "true", "yes", "y")
HOPPER_VISION = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""arg_groups/model_overrides/qwen3_vl.py of 0.5.20 and 0.5.23."""


class Refusal(Exception):
    """SGLang would not start; `error` is what it raises, `phase` where."""

    def __init__(self, error: str, phase: str, fix: str) -> None:
        super().__init__(error)
        self.error = error
        self.phase = phase
        self.fix = fix


@dataclass(frozen=True)
class Resolved:
    """The flags after SGLang's own changes."""

    engine: Engine
    tp: int
    mem_fraction: float
    mem_fraction_auto: bool
    max_running: int | None
    radix: bool
    overlap: bool
    extra_buffer: bool
    slots_per_request: int
    speculative: str | None
    draft_tokens: int
    chunked_prefill: int
    graph_max_bs: int
    kv_bytes: int
    conv_bytes: int
    ssm_dtype: str | None
    page_size: int
    vision_mib: int
    """What is kept out of the pools for a vision model's caches."""
    changes: tuple[str, ...]
    """What SGLang does by itself, in words."""


def resolve(
    engine: Engine,
    shape: ModelShape,
    flags: ServeFlags,
    gpu_mib: int,
    env: Mapping[str, str] | None = None,
    capability: tuple[int, int] | None = None,
) -> Resolved:
    """The effective flags on cards of `gpu_mib` (`memory.total`). Raises Refusal.

    `capability`: (9, 0); None counts as a GPU before Blackwell.
    """
    env = env or {}
    changes: list[str] = []
    _check_context(shape, flags, env)
    if engine >= Engine.V0_5_17 and shape.mla is not None and shape.mla.index_dim:
        raise Refusal(
            "the sparse-attention index of this version is not covered by this arithmetic",
            "deploy fit",
            "trust the server's own figures; up to 0.5.16 they can be computed",
        )
    speculative = "EAGLE" if flags.speculative == "NEXTN" else flags.speculative
    draft_tokens = _draft_tokens(shape, flags, changes)
    max_running = flags.max_running
    if speculative and max_running is None:
        max_running = DEFAULT_SPECULATIVE_RUNNING
        changes.append(f"max-running-requests becomes {max_running} with speculation")
    overlap = _overlap(engine, flags, env)
    radix, overlap, extra = not flags.no_radix, overlap, False
    if shape.hybrid:
        radix, overlap, extra = _hybrid(engine, shape, flags, overlap, changes)
    page = page_size(engine, shape, flags, capability, radix and not extra)
    chunk, graph = band(engine, gpu_mib, flags)
    fraction = flags.mem_fraction
    if fraction is None:
        fraction = auto_fraction(engine, shape, flags, gpu_mib, chunk, graph)
    return Resolved(
        engine=engine,
        tp=flags.tp,
        mem_fraction=fraction,
        mem_fraction_auto=flags.mem_fraction is None,
        max_running=max_running,
        radix=radix,
        overlap=overlap,
        extra_buffer=extra,
        slots_per_request=_slots_per_request(engine, flags, radix, overlap, extra),
        speculative=speculative,
        draft_tokens=draft_tokens,
        chunked_prefill=chunk,
        graph_max_bs=graph,
        kv_bytes=_kv_bytes(shape, flags, capability),
        conv_bytes=DTYPE_BYTES.get(env.get("SGLANG_MAMBA_CONV_DTYPE", "bfloat16"), 2),
        ssm_dtype=_ssm_dtype(flags, env),
        page_size=page,
        vision_mib=_vision_mib(engine, shape, flags, gpu_mib, capability),
        changes=tuple(changes),
    )


def _vision_mib(
    engine: Engine,
    shape: ModelShape,
    flags: ServeFlags,
    gpu_mib: int,
    capability: tuple[int, int] | None,
) -> int:
    """SGLANG_VLM_CACHE_SIZE_MB, or on a large Hopper GPU the feature cache of Qwen3-VL instead."""
    if engine < Engine.V0_5_18 or not shape.multimodal:
        return 0
    hopper = capability is not None and capability[0] == 9 and gpu_mib >= 60 * 1024
    if engine >= Engine.V0_5_20 and hopper and shape.model_type in HOPPER_VISION:
        return 3072 if (flags.max_running or 0) >= 400 else 1024
    return 100


def _check_context(shape: ModelShape, flags: ServeFlags, env: Mapping[str, str]) -> None:
    allow = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    if env.get(allow, "").lower() in TRUE:
        return
    if flags.context_length is not None and flags.context_length > shape.context:
        raise Refusal(
            f"ValueError: Warning: User-specified context_length ({flags.context_length}) is "
            f"greater than the derived context_length ({shape.context}). This may lead to "
            "incorrect model outputs or CUDA errors. Note that the derived context_length may "
            "differ from max_position_embeddings in the model's config. To allow overriding this "
            f"maximum, set the env var {allow}=1",
            "ServerArgs",
            f"context-length: {shape.context}",
        )


def _draft_tokens(shape: ModelShape, flags: ServeFlags, changes: list[str]) -> int:
    """Draft tokens a step, 0 without speculation."""
    if not flags.speculative:
        return 0
    if flags.speculative not in EAGLE:
        return flags.draft_tokens or 12
    if flags.steps is None:
        llama = shape.architecture == "LlamaForCausalLM" and flags.speculative != "STANDALONE"
        return 8 if llama else 4
    tokens = flags.draft_tokens or flags.steps + 1
    if flags.topk == 1 and tokens != flags.steps + 1:
        changes.append(
            f"speculative-num-draft-tokens becomes {flags.steps + 1} (steps + 1, topk is 1)"
        )
        tokens = flags.steps + 1
    return tokens


def _overlap(engine: Engine, flags: ServeFlags, env: Mapping[str, str]) -> bool:
    """Is the overlap schedule on, before a hybrid model's own rules?"""
    if not flags.speculative:
        return not flags.no_overlap
    given = env.get("SGLANG_ENABLE_SPEC_V2", "").lower()
    if engine <= Engine.V0_5_10:
        return given in TRUE
    if engine <= Engine.V0_5_13 and given in ("0", "false", "no"):
        return False
    return not flags.no_overlap and (flags.topk or 1) == 1


def _hybrid(
    engine: Engine, shape: ModelShape, flags: ServeFlags, overlap: bool, changes: list[str]
) -> tuple[bool, bool, bool]:
    """(radix cache, overlap, extra buffer) of a model with recurrent layers."""
    strategy, radix = flags.strategy, not flags.no_radix
    buffered = has_extra_buffer(engine, shape.architecture)
    if shape.architecture == "KimiLinearForCausalLM" and engine < Engine.V0_5_14:
        if radix:
            changes.append("the radix cache is off (this model has none in this version)")
        return False, overlap, False
    if strategy.startswith("extra_buffer") and not buffered:
        text = f"mamba extra_buffer is not supported for {shape.architecture} model"
        if engine >= Engine.V0_5_14:
            text = f"extra_buffer is not supported for {shape.architecture}; use no_buffer."
        raise Refusal(f"AssertionError: {text}", "ServerArgs", "leave the mamba strategy out")
    if strategy == "extra_buffer_lazy" and flags.speculative and engine < Engine.V0_5_17:
        raise Refusal(
            "AssertionError: extra_buffer_lazy unsupported with spec.",
            "ServerArgs",
            "mamba-radix-cache-strategy: extra_buffer",
        )
    if engine >= Engine.V0_5_14:
        if strategy == "auto" and radix:
            paged = (flags.page_size or 1) > 1
            strategy = "extra_buffer" if buffered and (overlap or paged) else "no_buffer"
            changes.append(f"mamba-radix-cache-strategy becomes {strategy}")
            overlap = overlap and strategy != "no_buffer"
        if radix and strategy == "no_buffer" and overlap:
            raise Refusal(
                "AssertionError: no_buffer do not support overlap schedule. "
                "Try to set disable_overlap_schedule=True.",
                "ServerArgs",
                "leave mamba-radix-cache-strategy out, or set disable-overlap-schedule: true",
            )
        return radix, overlap, radix and strategy.startswith("extra_buffer")
    if strategy.startswith("extra_buffer"):
        if not radix and engine >= Engine.V0_5_10:
            stop = "." if engine >= Engine.V0_5_13 else ""
            raise Refusal(
                "ValueError: mamba extra_buffer is not compatible with --disable-radix-cache"
                f"{stop} Overlap scheduling is already supported with no_buffer + "
                "disable_radix_cache. Please use --mamba-scheduler-strategy no_buffer instead.",
                "ServerArgs",
                "leave out one of mamba-scheduler-strategy and disable-radix-cache",
            )
        return radix, overlap, True
    if radix and not flags.speculative:
        changes.append("the overlap schedule is off (no_buffer with the radix cache)")
        return True, False, False
    if radix and engine == Engine.V0_5_9:
        changes.append("the radix cache is off (0.5.9 has none with speculation and no_buffer)")
        return False, overlap, False
    if radix:
        raise Refusal(
            f"ValueError: Speculative decoding for {shape.architecture} is not compatible with "
            "radix cache when using --mamba-scheduler-strategy no_buffer.To use radix cache with "
            "speculative decoding, please use --mamba-scheduler-strategy extra_buffer and set "
            "SGLANG_ENABLE_SPEC_V2=1.",
            "ServerArgs",
            "add mamba-scheduler-strategy: extra_buffer, or disable-radix-cache: true",
        )
    return False, overlap, False


def _slots_per_request(
    engine: Engine, flags: ServeFlags, radix: bool, overlap: bool, extra: bool
) -> int:
    if not radix:
        return 1
    if not extra:
        return 3
    if engine == Engine.V0_5_9:
        return 4 if flags.speculative else 5
    if flags.strategy == "extra_buffer_lazy":
        return 4
    return 5 if overlap else 4


def _kv_bytes(shape: ModelShape, flags: ServeFlags, capability: tuple[int, int] | None) -> int:
    indexed = shape.mla is not None and shape.mla.index_dim > 0
    if indexed and flags.kv_dtype == "auto":
        return 1 if capability is not None and capability >= (10, 0) else 2
    if flags.kv_dtype.startswith("fp8"):
        return 1
    if flags.kv_dtype == "auto" and shape.quantization and shape.quantization.kv_fp8:
        return 1
    if flags.kv_dtype in ("auto", "bf16", "bfloat16"):
        return shape.dtype_bytes if flags.kv_dtype == "auto" else 2
    raise Refusal(
        f"kv-cache-dtype {flags.kv_dtype} is not covered by this arithmetic",
        "deploy fit",
        "use auto, bf16 or fp8_e4m3",
    )


def _ssm_dtype(flags: ServeFlags, env: Mapping[str, str]) -> str | None:
    """The state's type when the config's is overridden."""
    given = flags.ssm_dtype or env.get("SGLANG_MAMBA_SSM_DTYPE")
    return given if given in DTYPE_BYTES else None
