"""The command line: every flag of the recorded `--help` text, and the rules applied to them.

The traceback of a refused argument names this module and these functions, as the real one does.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib import resources
from typing import Any

import torch

from sglang.lookalike import logs
from sglang.srt.configs.model_config import ModelConfig
from sglang.version import RELEASE

ALIASES = {
    "--model-path": ["--model"],
    "--tensor-parallel-size": ["--tp-size"],
    "--data-parallel-size": ["--dp-size"],
    "--pipeline-parallel-size": ["--pp-size"],
    "--expert-parallel-size": ["--ep-size", "--ep"],
    "--attention-context-parallel-size": ["--attn-cp-size"],
    "--moe-data-parallel-size": ["--moe-dp-size"],
    "--dist-init-addr": ["--nccl-init-addr"],
    "--speculative-draft-model-path": ["--speculative-draft-model"],
}
ATTRIBUTES = {
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
}
INTEGERS = {
    "max_running_requests", "max_queued_requests", "max_total_tokens", "chunked_prefill_size",
    "page_size", "random_seed", "max_mamba_cache_size", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "cuda_graph_max_bs", "cuda_graph_bs",
    "nccl_port", "dist_timeout", "numa_node", "piecewise_cuda_graph_max_tokens",
    "piecewise_cuda_graph_tokens", "default_priority_value", "gc_threshold",
}  # fmt: skip
FLOATS = {"mem_fraction_static", "soft_watchdog_timeout"}
ONLY_SINCE_0511 = ("--linear-attn-", "--disable-piecewise-cuda-graph", "--strip-thinking-cache")
SPEC_V2 = {"EAGLE", "EAGLE3", "STANDALONE"}


def human_readable_int(text: str) -> int:
    """4096, 32k, 1M or 1Ki; case matters."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g|M|G|Ki|Mi|Gi)?", text)
    units = {None: 1, "k": 1000, "m": 10**6, "M": 10**6, "g": 10**9, "G": 10**9}
    units |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    if not m or m[2] not in units:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return int(float(m[1]) * units[m[2]])


def recorded() -> dict[str, Any]:
    text = resources.files("sglang.srt").joinpath("flags_0511.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


class ServerArgs:
    """The arguments, resolved: attributes as in the recorded `server_args=` line."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k != "model_config"}
        return f"ServerArgs({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def __post_init__(self) -> None:
        self._handle_missing_default_values()
        self.get_model_config()
        self._handle_model_specific_adjustments()
        self._handle_speculative_decoding()
        self._handle_memory()

    def _handle_missing_default_values(self) -> None:
        if self.device is None:
            self.device = get_device()
        self.tokenizer_path = self.tokenizer_path or self.model_path
        self.served_model_name = self.served_model_name or self.model_path
        self.random_seed = self.random_seed if self.random_seed is not None else 858488723
        self.page_size = self.page_size or 1

    def get_model_config(self) -> ModelConfig:
        if "model_config" not in vars(self):
            self.model_config = ModelConfig.from_server_args(self)
        return self.model_config

    def _handle_model_specific_adjustments(self) -> None:
        if self.model_config.hybrid:
            self._handle_mamba_radix_cache(self.model_config.architecture)
        if self.mamba_scheduler_strategy == "auto":
            self.mamba_scheduler_strategy = "no_buffer"

    def _handle_mamba_radix_cache(self, model_arch: str) -> None:
        extra = self.mamba_scheduler_strategy == "extra_buffer"
        if extra and self.disable_radix_cache:
            raise ValueError(
                "mamba extra_buffer is not compatible with --disable-radix-cache "
                "Overlap scheduling is already supported with no_buffer + disable_radix_cache"
            )
        if extra or self.disable_radix_cache:
            return
        if self.speculative_algorithm is None:
            logs.say(
                "Disabling overlap schedule since mamba no_buffer is not compatible with overlap "
                "schedule, try to use --disable-radix-cache if overlap schedule is necessary"
            )
            self.disable_overlap_schedule = True
            return
        if RELEASE < (0, 5, 10):
            logs.say(
                f"Disabling radix cache since speculative decoding for {model_arch} is not "
                "supported with radix cache yet."
            )
            self.disable_radix_cache = True
            return
        raise ValueError(
            f"Speculative decoding for {model_arch} is not compatible with radix cache when using "
            "--mamba-scheduler-strategy no_buffer.To use radix cache with speculative decoding, "
            "please use --mamba-scheduler-strategy extra_buffer and set SGLANG_ENABLE_SPEC_V2=1."
        )

    def _handle_speculative_decoding(self) -> None:
        if self.speculative_algorithm is None:
            return
        if self.speculative_algorithm == "NEXTN":
            self.speculative_algorithm = "EAGLE"
        if RELEASE >= (0, 5, 11) and self.speculative_algorithm in SPEC_V2:
            logs.say(
                "Spec v2 is enabled by default for eagle/eagle3/standalone speculative decoding."
            )
        if self.max_running_requests is None:
            self.max_running_requests = 48
            logs.say(
                "Max running requests is reset to 48 for speculative decoding. You can override "
                "this by explicitly setting --max-running-requests."
            )
        if self.speculative_num_steps is None:
            self.speculative_num_steps, self.speculative_eagle_topk = 3, 1
            self.speculative_num_draft_tokens = 4
        wanted = self.speculative_num_steps + 1
        if self.speculative_eagle_topk == 1 and self.speculative_num_draft_tokens != wanted:
            logs.say(
                "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when "
                "speculative_eagle_topk == 1"
            )
            self.speculative_num_draft_tokens = wanted

    def _handle_memory(self) -> None:
        """The automatic memory fraction of 0.5.11 (for GPUs below 60 GiB; close enough above)."""
        mib = min(gpu.total_mib for gpu in torch.cuda.gpus())
        small = mib < 35 * 1024
        self.chunked_prefill_size = self.chunked_prefill_size or (2048 if small else 4096)
        if self.cuda_graph_max_bs is None:
            self.cuda_graph_max_bs = 24 if small else 32 if self.tp_size < 4 else 160
        self.attention_backend = self.attention_backend or "flashinfer"
        self.sampling_backend = self.sampling_backend or "flashinfer"
        self.grammar_backend = self.grammar_backend or "xgrammar"
        if self.mem_fraction_static is None:
            held = 512 + 1.5 * max(self.chunked_prefill_size, 2048) + 2 * self.cuda_graph_max_bs
            held += self.tp_size * self.pp_size / 8 * 1024
            held += 4096 if self.speculative_algorithm else 0
            fraction = round((mib - held) / mib, 3)
            self.mem_fraction_static = round(fraction * 0.92477, 4)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Every flag of the recorded help text."""
        found = recorded()
        for usage in found["usage"]:
            _add_flag(parser, usage, found["defaults"])

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        values = dict(recorded()["defaults"])
        for name, value in vars(args).items():
            attribute = ATTRIBUTES.get(name, name)
            if attribute in values:
                values[attribute] = value
        return cls(**values)

    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"


def _add_flag(parser: argparse.ArgumentParser, usage: str, defaults: dict[str, Any]) -> None:
    """One flag from its piece of usage text, such as `[--load-format {auto,pt}]`."""
    required = not usage.startswith("[")
    text = usage if required else usage[1:-1]
    flag, _, rest = text.partition(" ")
    if RELEASE < (0, 5, 10) and flag.startswith(ONLY_SINCE_0511):
        return
    dest = flag[2:].replace("-", "_")
    attribute = ATTRIBUTES.get(dest, dest)
    default = defaults.get(attribute)
    names = [flag, *ALIASES.get(flag, [])]
    if rest.startswith("| --no-"):
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=default)
        return
    if not rest:
        parser.add_argument(*names, action="store_true", default=bool(default))
        return
    options: dict[str, Any] = {"default": default}
    if required:
        options["required"] = True
    if rest.endswith(" ...]]"):
        options["nargs"] = "*"
    elif rest.endswith(" ...]"):
        options["nargs"] = "+"
    elif rest.startswith("["):
        options["nargs"] = "?"
    kind = _type_of(attribute, default)
    if kind:
        options["type"] = kind
    if m := re.search(r"\{([^}]*)\}", rest):
        choices = m[1].split(",")
        if RELEASE < (0, 5, 10) and "DFLASH" in choices:
            choices.remove("DFLASH")
        options["choices"] = [kind(c) for c in choices] if kind else choices
    parser.add_argument(*names, **options)


def _type_of(attribute: str, default: Any) -> Any:
    if attribute == "context_length":
        return human_readable_int if RELEASE >= (0, 5, 11) else int
    if attribute in FLOATS or isinstance(default, float):
        return float
    if attribute in INTEGERS or (isinstance(default, int) and not isinstance(default, bool)):
        return int
    return None


def get_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    raise RuntimeError("No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available.")


def prepare_server_args(argv: list[str]) -> ServerArgs:
    """Raises SystemExit(2) as argparse does; ValueError or OSError for what cannot work."""
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))
