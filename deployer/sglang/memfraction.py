"""The memory fraction that SGLang chooses when none is given, and what it is made from. Pure; MiB.

`handle_gpu_memory_settings` of server_args.py (since 0.5.19 arg_groups/memory_hook.py),
what is captured in `_apply_cuda_graph_compatibility` (since 0.5.19 in cuda_graph_hook.py there)
and the lists of architectures in configs/model_config.py.
"""

from __future__ import annotations

from deployer.sglang.engineversion import Engine
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.serveflags import ServeFlags

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
PIECEWISE_VISION = frozenset({"Cohere2VisionForConditionalGeneration"})
PIECEWISE_VISION_0_5_16 = PIECEWISE_VISION | {"KimiK25ForConditionalGeneration"}
"""Captured by the piecewise backend where the breakable one is the default (0.5.16, 0.5.17)."""
BREAKABLE_VISION = frozenset(
    {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)


def band(engine: Engine, gpu_mib: int, flags: ServeFlags) -> tuple[int, int]:
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
    if engine >= Engine.V0_5_22 and flags.max_running is not None:
        graph = min(graph, flags.max_running)
    return flags.chunked_prefill or chunk, flags.graph_max_bs or graph


def auto_fraction(
    engine: Engine, shape: ModelShape, flags: ServeFlags, gpu_mib: int, chunk: int, graph: int
) -> float:
    tokens = max(chunk if chunk > 0 else flags.max_prefill, 2048)
    reserved = 512 + 1.5 * tokens + flags.tp / 8 * 1024
    if engine < Engine.V0_5_15 or not flags.no_graph:
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
    if engine < Engine.V0_5_14:
        off = _piecewise_off(shape, flags) or shape.multimodal
        off = off or (engine == Engine.V0_5_10 and flags.speculative is not None)
        off = off or (shape.mla is not None and shape.mla.index_dim > 0)
    else:
        off = flags.no_graph or flags.no_prefill_graph or flags.no_piecewise
        off = off or _prefill_graph_off(engine, shape, flags)
    if off:
        return 0.0
    if shape.mla is not None:
        return 1536.0
    largest = chunk
    if flags.max_total_tokens is not None:
        largest = min(largest, flags.max_total_tokens)
    if Engine.V0_5_13 <= engine <= Engine.V0_5_16 and flags.context_length is not None:
        largest = min(largest, flags.context_length)
    return 8.0 * _captured_sizes(largest)


def _piecewise_off(shape: ModelShape, flags: ServeFlags) -> bool:
    """What the piecewise backend does not capture (the default up to 0.5.14)."""
    gguf = shape.quantization is not None and shape.quantization.method == "gguf"
    return flags.no_piecewise or flags.torch_compile or gguf or shape.architecture in PIECEWISE_OFF


def _prefill_graph_off(engine: Engine, shape: ModelShape, flags: ServeFlags) -> bool:
    """`_disable_*_cudagraph_if_incompatible` since 0.5.14; the breakable backend since 0.5.15."""
    if engine == Engine.V0_5_14:
        vision = shape.multimodal and shape.architecture not in PIECEWISE_VISION
        return vision or _piecewise_off(shape, flags)
    if engine >= Engine.V0_5_18:
        vision = shape.multimodal and shape.architecture not in PREFILL_GRAPH_VISION
        return vision or shape.architecture in NEW_GRAPHS_OFF
    if engine >= Engine.V0_5_16 and shape.architecture in PIECEWISE_VISION_0_5_16:
        return _piecewise_off(shape, flags)
    if shape.mla is not None and (engine < Engine.V0_5_17 or not shape.mla.index_dim):
        return True
    if engine == Engine.V0_5_17 and shape.architecture.startswith("NemotronH"):
        return True
    kept = BREAKABLE_VISION if engine >= Engine.V0_5_16 else frozenset[str]()
    return shape.multimodal and shape.architecture not in kept


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
