"""What a SGLang version makes of the flags before it loads a model. Pure; sizes are MiB.

Source: `server_args.py` of 0.5.9 to 0.5.18, `arg_groups/` of 0.5.20 and 0.5.23; the rules agree
with SGLang's own code on the recorded cases (tests/fixtures/sglang-plan).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from deployer.sglang.modelshape import DTYPE_BYTES, ModelShape
from deployer.sglang.pages import has_extra_buffer, page_size
from deployer.sglang.serveflags import ServeFlags

EAGLE = frozenset({"NEXTN", "EAGLE", "EAGLE3", "STANDALONE"})
DEFAULT_SPECULATIVE_RUNNING = 48
TRUE = ("1", "true", "yes", "y")
PIECEWISE_OFF = frozenset({"Qwen3NextForCausalLM", "BailingMoeV2_5ForCausalLM"})
NEW_GRAPHS_OFF = frozenset({"KimiLinearForCausalLM"})
"""Since 0.5.18; its other graphs capture what PIECEWISE_OFF names."""
PREFILL_GRAPH_VISION = frozenset(
    {
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
    }
)
"""Vision models that keep the captured prefill in 0.5.23."""


HOPPER_VISION = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""arg_groups/model_overrides/qwen3_vl.py of 0.5.20 and 0.5.23."""


class Engine(IntEnum):
    """Versions whose arithmetic was read; each stands for itself and those up to the next."""

    V0_5_9 = 9
    V0_5_10 = 10
    V0_5_11 = 11
    """Of 0.5.12 too: its functions are the same."""
    V0_5_14 = 14
    """Of 0.5.15 too. 0.5.16 has the same pools, and graphs of another kind for vision models."""
    V0_5_18 = 18
    V0_5_20 = 20
    V0_5_23 = 23


SAME = {12: Engine.V0_5_11, 15: Engine.V0_5_14}
"""Releases that were read and compute as an older one."""


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


def engine_of(version: str) -> tuple[Engine, str]:
    """The arithmetic for this version, and a warning ("" when this very version was read)."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
    patch = numbers[2] if len(numbers) == 3 and numbers[:2] == (0, 5) else None
    if patch is None:
        patch = 0 if numbers < (0, 5, 9) else 10**6
    known = [engine for engine in Engine if engine <= patch]
    engine = known[-1] if known else Engine.V0_5_9
    if patch == engine or SAME.get(patch) == engine:
        return engine, ""
    return engine, f"SGLang {version} was not read: computed as 0.5.{int(engine)}"


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
    if engine >= Engine.V0_5_18 and shape.mla is not None and shape.mla.index_dim:
        raise Refusal(
            "the sparse-attention index of this version is not covered by this arithmetic",
            "deploy fit",
            "trust the server's own figures; up to 0.5.15 they can be computed",
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
    chunk, graph = _band(engine, gpu_mib, flags)
    fraction = flags.mem_fraction
    if fraction is None:
        fraction = _auto_fraction(engine, shape, flags, gpu_mib, chunk, graph)
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
    if engine == Engine.V0_5_11 and given in ("0", "false", "no"):
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
    if strategy == "extra_buffer":
        if not radix and engine >= Engine.V0_5_10:
            raise Refusal(
                "ValueError: mamba extra_buffer is not compatible with --disable-radix-cache "
                "Overlap scheduling is already supported with no_buffer + disable_radix_cache. "
                "Please use --mamba-scheduler-strategy no_buffer instead.",
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


def _band(engine: Engine, gpu_mib: int, flags: ServeFlags) -> tuple[int, int]:
    """(chunked prefill tokens, largest captured batch) for this card, unless given."""
    many = flags.tp >= 4
    newest = engine >= Engine.V0_5_20
    if gpu_mib < 20 * 1024:
        chunk, graph = 2048, 8
    elif gpu_mib < 35 * 1024:
        chunk, small, large = (4096, 48, 160) if newest else (2048, 24, 80)
        graph = large if many else small
    elif gpu_mib < 60 * 1024:
        chunk, graph = 4096, 160 if many else 32
    elif gpu_mib < 160 * 1024:
        chunk, graph = 8192, 512 if many else 256
    else:
        chunk, graph = 16384, 512
    if engine >= Engine.V0_5_23 and flags.max_running is not None:
        graph = min(graph, flags.max_running)
    return flags.chunked_prefill or chunk, flags.graph_max_bs or graph


def _auto_fraction(
    engine: Engine, shape: ModelShape, flags: ServeFlags, gpu_mib: int, chunk: int, graph: int
) -> float:
    tokens = max(chunk if chunk > 0 else flags.max_prefill, 2048)
    reserved = 512 + 1.5 * tokens + flags.tp / 8 * 1024
    if engine < Engine.V0_5_18 or not flags.no_graph:
        reserved += 2 * graph
    reserved += _graph_tokens_mib(engine, shape, flags, chunk)
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if flags.speculative and engine < Engine.V0_5_14:
        if flags.speculative == "STANDALONE":
            reserved += 6144
        elif flags.speculative != "NGRAM":
            reserved += 2048 if engine == Engine.V0_5_9 else 4096
    fraction = round((gpu_mib - reserved) / gpu_mib, 3)
    if shape.vision is None or not shape.multimodal:
        return fraction
    size = shape.vision.layers_field * shape.vision.hidden**2 / (24 * 1024**2)
    return fraction * (0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (size - 1.0))))


def _graph_tokens_mib(engine: Engine, shape: ModelShape, flags: ServeFlags, chunk: int) -> float:
    """What is set aside for the captured prefill."""
    if engine == Engine.V0_5_9:
        if not flags.piecewise:
            return 0.0
        return 8.0 * _captured_sizes(2048 if shape.mla else chunk)
    if engine >= Engine.V0_5_14:
        newest = engine > Engine.V0_5_14
        kept = PREFILL_GRAPH_VISION if newest else {"Cohere2VisionForConditionalGeneration"}
        vision = shape.multimodal and shape.architecture not in kept
        vision = vision or shape.architecture in (NEW_GRAPHS_OFF if newest else PIECEWISE_OFF)
        off = flags.no_graph or flags.no_prefill_graph or flags.no_piecewise or vision
        widest = min(8192, chunk) if engine >= Engine.V0_5_23 else 2048
        largest = widest if shape.mla else chunk
    else:
        off = flags.no_piecewise or flags.torch_compile or shape.multimodal
        off = off or shape.architecture in PIECEWISE_OFF
        off = off or (engine == Engine.V0_5_10 and flags.speculative is not None)
        off = off or (shape.quantization is not None and shape.quantization.method == "gguf")
        off = off or (shape.mla is not None and shape.mla.index_dim > 0)
        largest = 2048 if shape.mla else chunk
    if off:
        return 0.0
    if shape.mla is not None:
        return 1536.0
    if flags.max_total_tokens is not None:
        largest = min(largest, flags.max_total_tokens)
    if engine == Engine.V0_5_14 and flags.context_length is not None:
        largest = min(largest, flags.context_length)
    return 8.0 * _captured_sizes(largest)


def _captured_sizes(largest: int) -> int:
    """How many token counts are captured up to `largest`."""
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, largest + 1, 512),
    ]
    return sum(1 for size in sizes if size <= largest)


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
