"""The table of failure classes: which text in a launch's log names which cause. Data.

Read top down: narrow causes stand above the wide ones that they set off. A pattern that a healthy
log may hold (a warning, a caught import) is bound to the head of an exception's last line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deployer.sglang.failure_rule import Rule
from deployer.sglang.failures_files import FILES
from deployer.sglang.failures_gpu import GPU
from deployer.sglang.failures_nodes import NODES
from deployer.sglang.failures_program import PROGRAM
from deployer.sglang.failures_start import START

RULES: tuple[Rule, ...] = (*NODES, *START, *FILES, *GPU, *PROGRAM)


@dataclass(frozen=True)
class Place:
    """A part of SGLang in whose code an error of no known text was raised.

    `frame` is looked for in the last frames of the traceback; `phases` as in Rule.
    """

    cls: str
    frame: re.Pattern[str]
    action: str
    next_variant: bool = False
    phases: tuple[str, str] | None = None


LOADING = ("starting", "mamba")
PLACES: tuple[Place, ...] = (
    Place(
        "arguments-refused",
        re.compile(r"/sglang/srt/(?:server_args|arg_groups/\w+)\.py"),
        "the engine refuses this combination of arguments: change serve.args as the line says",
        phases=("starting", "args"),
    ),
    Place(
        "quantization-unsupported",
        re.compile(r"/sglang/srt/layers/quantization/"),
        "this engine cannot load this quantization so: another serve.args quantization, another "
        "engine.version, or a checkpoint of another format",
        phases=LOADING,
    ),
    Place(
        "speculation-failed",
        re.compile(r"/sglang/srt/speculative/"),
        "the code that drafts failed: the variant without speculation, or other speculative-* "
        "arguments",
        next_variant=True,
    ),
    Place(
        "grammar-failed",
        re.compile(r"/sglang/srt/constrained/"),
        "structured output failed: another serve.args grammar-backend (xgrammar, llguidance, none)",
    ),
    Place(
        "adapter-failed",
        re.compile(r"/sglang/srt/lora/"),
        "a LoRA adapter does not fit: see serve.args lora-paths, max-lora-rank and target modules",
    ),
    Place(
        "attention-backend-failed",
        re.compile(r"/sglang/srt/layers/attention/"),
        "the attention backend cannot do this: another serve.args attention-backend (triton, "
        "flashinfer, fa3), page-size or kv-cache-dtype",
        next_variant=True,
    ),
    Place(
        "moe-backend-failed",
        re.compile(r"/sglang/srt/layers/moe/"),
        "the code for experts cannot do this: another serve.args moe-runner-backend or "
        "moe-a2a-backend",
        next_variant=True,
    ),
    Place(
        "cache-storage-failed",
        re.compile(
            r"/sglang/srt/(?:mem_cache/(?:storage|hicache_storage|memory_pool_host|pool_host|"
            r"hiradix_cache|hi_mamba)|managers/cache_controller)"
        ),
        "the cache in host memory or in a store failed: leave out serve.args "
        "enable-hierarchical-cache, or see its hicache-* arguments and the store",
    ),
    Place(
        "disaggregation-failed",
        re.compile(r"/sglang/srt/disaggregation/"),
        "prefill and decode servers do not reach each other: see serve.args disaggregation-*",
    ),
    Place(
        "model-code-failed",
        re.compile(r"/sglang/srt/models/"),
        "the engine's code for this model does not fit the checkpoint: another engine.version, or "
        "another tp-size",
        phases=LOADING,
    ),
)
"""Looked at in this order, after every text has failed."""
