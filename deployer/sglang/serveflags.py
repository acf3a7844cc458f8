"""SGLang's flags that decide about memory, read from a playbook's arguments or from argv. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployer.playbook import ArgValue

NAMES = {
    "tp-size": "tp",
    "mem-fraction-static": "mem_fraction",
    "max-running-requests": "max_running",
    "max-total-tokens": "max_total_tokens",
    "context-length": "context_length",
    "mamba-full-memory-ratio": "mamba_ratio",
    "max-mamba-cache-size": "mamba_slots",
    "mamba-ssm-dtype": "ssm_dtype",
    "mamba-radix-cache-strategy": "strategy",
    "speculative-algorithm": "speculative",
    "speculative-num-steps": "steps",
    "speculative-eagle-topk": "topk",
    "speculative-num-draft-tokens": "draft_tokens",
    "speculative-draft-model-path": "draft_path",
    "kv-cache-dtype": "kv_dtype",
    "quantization": "quantization",
    "page-size": "page_size",
    "attention-backend": "attention_backend",
    "swa-full-tokens-ratio": "window_ratio",
    "disable-hybrid-swa-memory": "one_pool",
    "chunked-prefill-size": "chunked_prefill",
    "max-prefill-tokens": "max_prefill",
    "cuda-graph-max-bs": "graph_max_bs",
    "disable-radix-cache": "no_radix",
    "disable-overlap-schedule": "no_overlap",
    "disable-cuda-graph": "no_graph",
    "disable-prefill-cuda-graph": "no_prefill_graph",
    "disable-piecewise-cuda-graph": "no_piecewise",
    "enable-piecewise-cuda-graph": "piecewise",
    "enable-torch-compile": "torch_compile",
}
ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "speculative-algo": "speculative-algorithm",
    "speculative-draft-model": "speculative-draft-model-path",
    "mamba-scheduler-strategy": "mamba-radix-cache-strategy",
    "cuda-graph-max-bs-decode": "cuda-graph-max-bs",
    "mem-frac": "mem-fraction-static",
}
NUMBERS = frozenset(
    {
        *("tp", "max_running", "max_total_tokens", "context_length", "mamba_slots", "steps"),
        *("topk", "draft_tokens", "page_size", "chunked_prefill", "max_prefill", "graph_max_bs"),
    }
)
FRACTIONS = frozenset({"mem_fraction", "mamba_ratio", "window_ratio"})
SWITCHES = frozenset(
    {
        *("no_radix", "no_overlap", "no_graph", "no_prefill_graph", "no_piecewise", "piecewise"),
        *("torch_compile", "one_pool"),
    }
)
UNMODELLED = frozenset(
    {
        *("enable-dp-attention", "dp-size", "attn-dp-size", "pp-size", "ep-size", "cpu-offload-gb"),
        *("disaggregation-mode", "enable-hierarchical-cache", "enable-lora", "lora-paths"),
        *("enable-symm-mem", "enable-memory-saver", "enable-unified-memory", "dcp-size"),
        *("mm-feature-transport", "language-only", "moe-a2a-backend", "decode-attention-backend"),
        *("enable-mamba-extra-buffer", "cuda-graph-bs", "cuda-graph-bs-decode", "nnodes"),
        *("cuda-graph-max-bs-prefill", "cuda-graph-backend-prefill", "load-format"),
        *("cuda-graph-backend-decode", "enable-dflash", "enable-linear-replayssm-spec"),
        *("prefill-attention-backend", "enable-multimodal", "json-model-override-args"),
    }
)
"""Flags that move memory by rules that are not written here; naming one is said in the answer."""
SUFFIXES = {"": 1, "k": 1000, "M": 10**6, "Ki": 1024, "Mi": 1024**2}


@dataclass(frozen=True)
class ServeFlags:
    """What was asked for; None is SGLang's default."""

    tp: int = 1
    mem_fraction: float | None = None
    max_running: int | None = None
    max_total_tokens: int | None = None
    context_length: int | None = None
    mamba_ratio: float | None = None
    mamba_slots: int | None = None
    ssm_dtype: str | None = None
    strategy: str = "auto"
    speculative: str | None = None
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    draft_path: str | None = None
    kv_dtype: str = "auto"
    quantization: str | None = None
    page_size: int | None = None
    attention_backend: str = ""
    window_ratio: float | None = None
    one_pool: bool = False
    chunked_prefill: int | None = None
    max_prefill: int = 16384
    graph_max_bs: int | None = None
    no_radix: bool = False
    no_overlap: bool = False
    no_graph: bool = False
    no_prefill_graph: bool = False
    no_piecewise: bool = False
    piecewise: bool = False
    torch_compile: bool = False
    unmodelled: tuple[str, ...] = ()

    @classmethod
    def from_args(cls, args: Mapping[str, ArgValue]) -> ServeFlags:
        """From `serve.args`, flags without dashes. Raises ValueError for a bad value."""
        fields: dict[str, Any] = {}
        unmodelled = []
        for flag, value in args.items():
            name = flag.lstrip("-").replace("_", "-")
            name = ALIASES.get(name, name)
            if name in UNMODELLED and value is not False:
                unmodelled.append(name)
            if name in NAMES and value is not False:
                fields[NAMES[name]] = _value(name, NAMES[name], value)
        if "speculative" in fields:
            fields["speculative"] = fields["speculative"].upper()
        return cls(**fields, unmodelled=tuple(unmodelled))


def token_count(text: str) -> int:
    """`32768`, `32k`, `1M`, `1Ki` as SGLang 0.5.11 reads them. Raises ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(k|M|Ki|Mi)?", text.strip())
    if match is None:
        raise ValueError(f"`{text}` is not a count")
    return int(float(match.group(1)) * SUFFIXES[match.group(2) or ""])


def _value(flag: str, field: str, value: ArgValue) -> Any:
    try:
        if field in SWITCHES:
            return bool(value)
        if isinstance(value, bool):
            raise ValueError("it needs a value")
        if field in NUMBERS:
            number = token_count(str(value))
            if number < 1 and field != "chunked_prefill":
                raise ValueError(f"{number} is not a positive count")
            return number
        if field in FRACTIONS:
            share = float(value)
            if not 0 <= share < (1 if field == "mem_fraction" else float("inf")):
                raise ValueError(f"{share} is out of range")
            return share
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from error
    return str(value)
