"""Rules about a model's shape: what this version, these GPUs and this split cannot serve. Pure."""

from __future__ import annotations

from deployer.sglang.compat_case import LATEST, Case, Check, Problem
from deployer.sglang.compat_machine import dotted
from deployer.sglang.modelclasses import first_with
from deployer.sglang.pages import lacks_head_dim
from deployer.sglang.releases import Version

LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
TRUE = ("1", "true", "yes", "y")

QUANT_SM: dict[str, tuple[tuple[Version, int], ...]] = {
    "mxfp8": ((LATEST, 100),),
    "modelopt_fp8": ((LATEST, 89),),
    "modelopt_fp4": (((0, 5, 12, 9999), 100),),
    "petit_nvfp4": ((LATEST, 90),),
    "w4afp8": ((LATEST, 90),),
    "w8a8_fp8": ((LATEST, 89),),
}
"""Quantisation -> (up to this version, least compute capability x 10).

`get_min_capability` in sglang/srt/layers/quantization/ of 0.5.9, 0.5.11 and 0.5.23; the loader
raises ValueError below it. fp8, awq, gptq, mxfp4 and the others need 80 or less, as the kernels do:
fp8 runs on sm_80 and sm_86 through Marlin, without the speed of native fp8."""


def architecture(case: Case) -> list[Problem]:
    """The engine must have a class for the model."""
    if case.shape is None:
        return []
    name = case.shape.architecture
    patch = first_with(name)
    if patch is None or case.version[:3] >= (0, 5, patch):
        return []
    return [
        Problem(
            "architecture-too-new",
            f"SGLang {dotted(case.version)} has no class for {name}; the first release that has "
            f"one is 0.5.{patch}",
            f"engine.version 0.5.{patch} or newer, with its own lock",
            "EntryClass of sglang/srt/models/ in the wheels",
        )
    ]


def split(case: Case) -> list[Problem]:
    """Tensor parallelism must divide what SGLang asserts that it divides."""
    shape, tp = case.shape, case.tp
    if shape is None or tp < 2 or any(case.args.get(flag) for flag in SPLITS_OTHERWISE):
        return []
    found = []
    if shape.heads % tp:
        found.append(f"{shape.heads} attention heads are not divisible by {tp}")
    elif shape.mla is None and shape.kv_heads % tp and tp % shape.kv_heads:
        found.append(f"{shape.kv_heads} key/value heads and tp-size {tp} do not divide each other")
    linear = shape.linear
    if linear is not None and linear.value_heads % tp:
        found.append(f"{linear.value_heads} linear value heads are not divisible by {tp}")
    block = shape.quantization.block if shape.quantization is not None else 0
    width, what = shape.width, "intermediate size"
    if shape.moe is not None:
        width, what = shape.moe.width, "expert width"
    if block and width and (width // tp) % block:
        found.append(
            f"{what} {width} over {tp} GPUs is {width / tp:g}, not divisible by the quantisation "
            f"block of {block}"
        )
    return [
        Problem(
            "tp-split",
            f"tp-size {tp} does not fit this model: {why}",
            f"tp-size: {_fitting(case)}",
            "models/llama.py, qwen3.py, qwen3_5.py and layers/quantization/fp8.py of 0.5.11",
        )
        for why in found[:1]
    ]


SPLITS_OTHERWISE = ("enable-dp-attention", "attn-dp-size", "ep-size", "expert-parallel-size")
"""With these flags the heads or the experts are divided by another number than tp."""


def _fitting(case: Case) -> str:
    """The largest smaller size that the rule would let through."""
    for tp in range(case.tp - 1, 0, -1):
        other = Case(case.version, {**case.args, "tp-size": tp}, shape=case.shape)
        if tp == 1 or not split(other):
            return str(tp)
    return "1"


def context(case: Case) -> list[Problem]:
    """SGLang refuses a context beyond the model's own."""
    length = case.count("context-length")
    if case.shape is None or length is None or length <= case.shape.context:
        return []
    if case.env.get(LONGER, "").lower() in TRUE:
        return []
    return [
        Problem(
            "context-too-long",
            f"context-length {length} is more than the model's {case.shape.context}: SGLang "
            "refuses to start",
            f"context-length: {case.shape.context}, or serve.env {LONGER}: '1' when the model's "
            "card allows it",
            "configs/model_config.py of 0.5.9, 0.5.11 and 0.5.23",
        )
    ]


def quantization(case: Case) -> list[Problem]:
    """The GPU must be new enough for the quantisation."""
    quant = case.shape.quantization if case.shape is not None else None
    method = case.text("quantization") or (quant.method if quant is not None else "")
    if method == "modelopt" and quant is not None:
        method = "modelopt_fp4" if quant.bits < 8 else "modelopt_fp8"
    least = next((sm for last, sm in QUANT_SM.get(method, ()) if case.version <= last), 0)
    weak = [one for one in case.capabilities if len(one) > 1 and one[0] * 10 + one[1] < least]
    if not weak:
        return []
    return [
        Problem(
            "quantization-gpu",
            f"quantisation {method} needs compute capability {least / 10:.1f}; "
            f"a GPU here has {dotted(weak[0])}",
            "another quantisation of the model (fp8, AWQ or GPTQ run on 8.0 and newer), or a newer "
            "GPU",
            "get_min_capability in sglang/srt/layers/quantization/, read by model_loader/loader.py",
        )
    ]


def head_dim(case: Case) -> list[Problem]:
    """A config without `head_dim` ends some versions with a TypeError after the weights."""
    if case.shape is None or case.version[:2] != (0, 5) or len(case.version) < 3:
        return []
    if not lacks_head_dim(case.version[2], case.shape) or case.text("json-model-override-args"):
        return []
    return [
        Problem(
            "no-head-dim",
            f"SGLang {dotted(case.version)} fails with a TypeError when the KV cache is sized: the "
            f"config of {case.shape.architecture} has no head_dim",
            f"serve.args json-model-override-args: '{{\"head_dim\": {case.shape.head_dim}}}', or a "
            "newer engine.version",
            "configs/model_config.py of 0.5.9 and 0.5.11, run with transformers 4.57.1 and 5.6.0",
        )
    ]


CHECKS: tuple[Check, ...] = (architecture, split, context, quantization, head_dim)
