"""The command line, and the rules that each version applies to it.

The traceback of a refused argument names this module and these functions, as the real one does.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from sglang.lookalike import logs
from sglang.srt import flags
from sglang.srt.configs.model_config import ModelConfig
from sglang.version import RELEASE

SPEC_V2 = {"EAGLE", "EAGLE3", "STANDALONE"}
NEW = RELEASE >= (0, 5, 20)
STRATEGY = "mamba_radix_cache_strategy" if NEW else "mamba_scheduler_strategy"
SPEC_RESERVE_MIB = 0 if NEW else 4096 if RELEASE >= (0, 5, 10) else 2048
GRAPH_MAX_BS = "cuda_graph_max_bs_decode" if NEW else "cuda_graph_max_bs"


class ServerArgs:
    """The arguments, resolved: attributes as in the recorded `server_args=` line."""

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k != "model_config"}
        if NEW:
            return repr(shown)
        return f"ServerArgs({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def check_server_args(self) -> None:
        """At the launch, before the arguments are shown."""
        if self.tp_size * self.pp_size % self.nnodes:
            raise AssertionError("tp_size must be divisible by number of nodes")

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

    @property
    def mamba_strategy(self) -> str:
        """The flag was renamed in 0.5.23."""
        found: str = getattr(self, STRATEGY)
        return found

    @property
    def graph_max_bs(self) -> int:
        """The flag was renamed in 0.5.23."""
        found: int = getattr(self, GRAPH_MAX_BS)
        return found

    def _handle_model_specific_adjustments(self) -> None:
        self.speculative_algorithm = (self.speculative_algorithm or "").upper() or None
        if self.model_config.hybrid:
            self._handle_mamba_radix_cache(self.model_config.architecture)
        if self.mamba_strategy == "auto":
            setattr(self, STRATEGY, "no_buffer")

    def _handle_mamba_radix_cache(self, model_arch: str) -> None:
        if NEW and self.mamba_strategy == "auto" and not self.disable_radix_cache:
            if self.disable_overlap_schedule:
                return
            setattr(self, STRATEGY, "extra_buffer")
        extra = self.mamba_strategy.startswith("extra_buffer")
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
        name = "--" + STRATEGY.replace("_", "-")
        raise ValueError(
            f"Speculative decoding for {model_arch} is not compatible with radix cache when using "
            f"{name} no_buffer.To use radix cache with speculative decoding, "
            f"please use {name} extra_buffer and set SGLANG_ENABLE_SPEC_V2=1."
        )

    def _handle_speculative_decoding(self) -> None:
        if self.speculative_algorithm is None:
            return
        if self.speculative_algorithm == "NEXTN":
            self.speculative_algorithm = "EAGLE"
        if self.speculative_algorithm in SPEC_V2:
            self._handle_spec_v2()
        if self.max_running_requests is None:
            self.max_running_requests = 48
            logs.say(
                "Max running requests is reset to 48 for speculative decoding. You can override "
                "this by explicitly setting --max-running-requests."
            )
        others = (self.speculative_eagle_topk, self.speculative_num_draft_tokens)
        if self.speculative_num_steps is None and others != (None, None):
            raise AssertionError  # a bare assert in all versions
        if self.speculative_num_steps is not None and self.speculative_eagle_topk is None:
            raise TypeError("'>' not supported between instances of 'NoneType' and 'int'")
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

    def _handle_spec_v2(self) -> None:
        if RELEASE >= (0, 5, 11):
            logs.say(
                "Spec v2 is enabled by default for eagle/eagle3/standalone speculative decoding."
            )
        elif os.environ.get("SGLANG_ENABLE_SPEC_V2", "").lower() not in ("1", "true"):
            self.disable_overlap_schedule = True
            logs.say(
                "Overlap scheduler is disabled when spec v2 is off or using unsupported "
                "speculative algorithm."
            )

    def _handle_memory(self) -> None:
        """The automatic memory fraction (for GPUs below 60 GiB; close enough above)."""
        mib = min(gpu.total_mib for gpu in torch.cuda.gpus())
        small = mib < 35 * 1024
        self.chunked_prefill_size = self.chunked_prefill_size or (2048 if small else 4096)
        if self.mamba_full_memory_ratio is None:
            self.mamba_full_memory_ratio = 0.9
        if self.graph_max_bs is None:
            most = 24 if small else 32 if self.tp_size < 4 else 160
            if NEW and self.max_running_requests:
                most = min(most, self.max_running_requests)
            setattr(self, GRAPH_MAX_BS, most)
        self.attention_backend = self.attention_backend or "flashinfer"
        self.sampling_backend = self.sampling_backend or "flashinfer"
        self.grammar_backend = self.grammar_backend or "xgrammar"
        if self.mem_fraction_static is None:
            held = 512 + 1.5 * max(self.chunked_prefill_size, 2048) + 2 * self.graph_max_bs
            held += self.tp_size * self.pp_size / 8 * 1024
            held += SPEC_RESERVE_MIB if self.speculative_algorithm else 0
            fraction = round((mib - held) / mib, 3)
            self.mem_fraction_static = round(fraction * 0.92477, 4)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Every flag of this version's parser."""
        flags.add_all(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        return cls(**{flags.attribute(name): value for name, value in vars(args).items()})

    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"


def get_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    raise RuntimeError("No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available.")


def prepare_server_args(argv: list[str]) -> ServerArgs:
    """Raises SystemExit(2) as argparse does; ValueError or OSError for what cannot work."""
    # 0.5.9 leaves the name to argparse: the file that runs.
    parser = argparse.ArgumentParser(prog=None if RELEASE < (0, 5, 10) else "sglang serve")
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(argv))
