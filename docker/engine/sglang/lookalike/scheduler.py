"""The child processes: schedulers that load and capture with the recorded lines, a detokenizer."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from sglang.lookalike import deaths, faults, logs, memory, process, rendezvous, weights
from sglang.version import RELEASE

NEW = RELEASE >= (0, 5, 20)
BAR = "Multi-thread loading shards" if RELEASE >= (0, 5, 11) else (
    "Loading safetensors checkpoint shards"
)  # fmt: skip


def ranks(args: Any) -> range:
    """The tensor-parallel ranks of this node (`_calculate_rank_ranges`, without pipelines)."""
    each = args.tp_size // args.nnodes
    return range(each * args.node_rank, each * (args.node_rank + 1))


def run_scheduler_process(args: Any, rank: int, parent: int, pipe: Connection) -> None:
    """Reports `("ready", info)` through the pipe, then waits to be killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(parent)
    tp = args.tp_size > 1
    process.set_title(f"sglang::scheduler_TP{rank}" if tp else "sglang::scheduler")
    logs.set_rank(f"TP{rank}" if tp else "")
    try:
        info = Scheduler(args, rank).start()
    except Exception:
        logs.say(f"Scheduler hit an exception: {traceback.format_exc()}")
        os.kill(parent, signal.SIGQUIT)
        return
    pipe.send(("ready", info))
    while wait_for_word(pipe):
        if rank == 0:
            serve(args)


def serve(args: Any) -> None:
    """Dies while it serves, a moment after the order."""
    threading.Thread(target=wait_for_order, args=(args,), daemon=True).start()


def wait_for_order(args: Any) -> None:
    while deaths.ordered(deaths.SERVING) is None:
        time.sleep(1.0)
    logs.wait(deaths.SERVES_S)
    deaths.strike(deaths.SERVING, args)


def run_detokenizer_process(parent: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.die_with_parent(parent)
    process.set_title("sglang::detokenizer")
    pipe.send(("ready", {}))
    while wait_for_word(pipe):
        pass


def wait_for_word(pipe: Connection) -> bool:
    """The parent says one word, when it is ready. False: it has gone."""
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


class Scheduler:
    """One rank's start."""

    def __init__(self, args: Any, rank: int) -> None:
        self.args, self.rank = args, rank
        self.text = args.model_config.text
        self.hybrid = args.model_config.hybrid
        self.leader = rank == 0
        self.local = rank - ranks(args).start

    def start(self) -> dict[str, Any]:
        deaths.strike(deaths.STARTING, self.args)
        self.init_torch_distributed()
        deaths.strike(deaths.DISTRIBUTED, self.args)
        found = weights.prepare_weights(self.args.model_path)
        loaded = self.load_model(found, self.args.model_config.architecture)
        self.avail = self.pre - loaded
        spec = bool(self.args.speculative_algorithm)
        if spec and NEW:
            self.load_draft()
        deaths.strike(deaths.LOADED, self.args)
        pools = memory.size(self.args, self.text, self.pre, self.avail)
        self.allocate(pools, draft=False)
        if spec and NEW:
            self.allocate(pools, draft=True)
        graphs = self.capture("target verify " if spec and NEW else "", pools, 0.05)
        if spec and not NEW:
            logs.say("Init torch distributed begin.")
            logs.say("Init torch distributed ends. elapsed=0.00 s, mem usage=0.00 GB")
            self.load_draft()
            self.allocate(pools, draft=True)
        if spec:
            self.capture("draft decode " if NEW else "draft ", pools, 0.01)
            self.capture("draft extend ", pools, 0.01)
        return self.report(found, loaded, pools, graphs)

    def init_torch_distributed(self) -> None:
        logs.say("Init parallel begin." if NEW else "Init torch distributed begin.")
        index = self.args.base_gpu_id + self.local * self.args.gpu_id_step
        try:
            torch.cuda.set_device(index)
        except RuntimeError:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            logs.say(
                f"Context: self.device='cuda' self.gpu_id={index} os.environ.get("
                f"'CUDA_VISIBLE_DEVICES')={shown!r} self.tp_rank={self.rank} "
                f"self.tp_size={self.args.tp_size}"
            )
            raise torch.AcceleratorError(
                "CUDA error: invalid device ordinal\n"
                "GPU device may be out of range, do you have enough GPUs?\n"
                "CUDA kernel errors might be asynchronously reported at some other API call, so "
                "the stacktrace below might be incorrect.\n"
                "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
                "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
            ) from None
        free = memory.free_gib(index)  # before this process itself is counted
        gpu = torch.cuda.gpus()[index]
        self.held = process.hold_gpu(gpu.minor, torch.cuda.dev_root())
        if faults.STRAYS in faults.active() and self.leader:
            process.stray(gpu.minor, torch.cuda.dev_root())
        used = memory.CONTEXT_GIB[self.args.tp_size > 1]
        self.pre = free - used
        logs.wait(0.3)
        if self.args.nnodes > 1:
            peers = rendezvous.join(self.args, self.rank, self.args.tp_size)
            rendezvous.watch(peers, os.getppid())
        if self.args.tp_size > 1 and self.leader:
            logs.say("sglang is using nccl==2.28.9")
        if NEW:
            logs.say("Init parallel ends. elapsed=0.31 s")
        else:
            logs.say(f"Init torch distributed ends. elapsed=0.31 s, mem usage={used:.2f} GB")

    def load_model(self, found: weights.Found, name: str) -> float:
        """GiB a GPU. The bar counts the files that are there, not those of the index."""
        logs.say(f"Load weight begin. avail mem={self.pre:.2f} GB")
        begun, total, done, size = time.monotonic(), len(found.files), 0, 0
        self.bar(0, total, begun, done)
        for loaded in weights.load(found):
            size += loaded
            done += 1
            logs.wait(0.06)
            self.bar(done, total, begun, done)
        deaths.strike(deaths.WEIGHTS, self.args)
        usage = size / self.args.tp_size / memory.GIB
        logs.say(
            f"Load weight end. elapsed={time.monotonic() - begun:.2f} s, type={name}, "
            f"avail mem={self.pre - usage:.2f} GB, mem usage={usage:.2f} GB."
        )
        return usage

    def bar(self, done: int, total: int, begun: float, n: int) -> None:
        if not self.leader:
            return
        spent = time.monotonic() - begun
        rate = f"{n / spent:.2f}it/s" if n and spent else "?it/s"
        left = logs.clock(spent / done * (total - done)) if done else "?"
        logs.raw(
            f"\r{BAR}: {100 * done / total:3.0f}% Completed | {done}/{total} "
            f"[{logs.clock(spent)}<{left}, {rate}]\n" + ("" if done == total else "\n")
        )

    def allocate(self, pools: memory.Pools, *, draft: bool) -> None:
        if self.leader and not NEW:
            logs.say("Using KV cache dtype: torch.bfloat16")
        kv = pools.kv
        if self.hybrid and not draft:
            per = self.args.speculative_num_draft_tokens or 0
            inter = pools.ssm / max(1, pools.slots) * (pools.running + 1) * per
            window = pools.conv / max(1, pools.slots) * (pools.running + 1) * per
            logs.say(
                f"Mamba Cache is allocated. max_mamba_cache_size: {pools.slots}, conv_state size: "
                f"{pools.conv:.2f}GB, ssm_state size: {pools.ssm:.2f}GB "
                f"intermediate_ssm_state_cache size: {inter:.2f}GB "
                f"intermediate_conv_window_cache size: {window:.2f}GB "
            )
            self.avail -= pools.conv + pools.ssm + inter + window
        if draft:
            kv /= max(1, self.text.get("num_hidden_layers", 4) // 4)
        kind = "dtype: torch.bfloat16, " if NEW else ""
        logs.say(
            f"KV Cache is allocated. {kind}#tokens: {pools.tokens}, K size: {kv / 2:.2f} GB, "
            f"V size: {kv / 2:.2f} GB"
        )
        # A real GPU may run out here; this one only says that it is nearly full.
        self.avail = max(1.0, self.avail - kv)
        logs.say(f"Memory pool end. avail mem={self.avail:.2f} GB")

    def capture(self, what: str, pools: memory.Pools, each: float) -> float:
        """Capture graphs; `what` is a role with a blank after it, or "". GiB used."""
        if self.args.disable_cuda_graph:
            return 0.0
        most = min(self.args.graph_max_bs, max(1, pools.running))
        sizes = [n for n in [*range(1, 9), *range(10, 33, 2), *range(40, 513, 8)] if n <= most]
        begun = time.monotonic()
        self.capture_begin(what or ("target decode " if NEW else ""), sizes)
        deaths.strike(deaths.GRAPHS, self.args)
        if faults.NEVER_READY in faults.active():
            while True:
                time.sleep(3600)
        for i, bs in enumerate(reversed(sizes)):
            logs.wait(each)
            self.graph_bar(bs, i, len(sizes), begun)
        if self.leader:
            self.graph_bar(1, len(sizes), len(sizes), begun)
            logs.raw("\n")
        deaths.strike(deaths.CAPTURED, self.args)
        used = 0.02 * len(sizes)
        self.avail -= used
        spent = time.monotonic() - begun
        if NEW:
            logs.say(
                f"Capture {what or 'target decode '}CUDA graph end. bs={sizes}, elapsed="
                f"{spent:.2f} s, mem usage={used:.2f} GB, avail mem={self.avail:.2f} GB."
            )
        else:
            logs.say(
                f"Capture {what}cuda graph end. Time elapsed: {spent:.2f} s. "
                f"mem usage={used:.2f} GB. avail mem={self.avail:.2f} GB."
            )
        return used

    def capture_begin(self, what: str, sizes: list[int]) -> None:
        if NEW:
            each = self.args.speculative_num_draft_tokens or 1
            logs.say(
                f"Capture {what}CUDA graph begin. backend=full, num_tokens_per_req={each}, "
                f"avail mem={self.avail:.2f} GB"
            )
            return
        logs.say(
            f"Capture {what}cuda graph begin. This can take up to several minutes. "
            f"avail mem={self.avail:.2f} GB"
        )
        if not what:
            logs.say(f"Capture cuda graph bs {sizes}")

    def graph_bar(self, bs: int, done: int, total: int, begun: float) -> None:
        if not self.leader:
            return
        spent = time.monotonic() - begun
        filled = "█" * (10 * done // total)
        left = logs.clock(spent / done * (total - done)) if done else "?"
        rate = f"{spent / done:.2f}s/it" if done else "?it/s"
        logs.raw(
            f"\rCapturing batches (bs={bs} avail_mem={self.avail:.2f} GB): "
            f"{100 * done / total:3.0f}%|{filled:10s}| {done}/{total} "
            f"[{logs.clock(spent)}<{left}, {rate}]"
        )

    def load_draft(self) -> None:
        """The MTP head, from the same folder."""
        name = self.args.model_config.architecture.replace(
            "ForConditionalGeneration", "ForCausalLM"
        )
        logs.say(f"Load weight begin. avail mem={self.avail:.2f} GB")
        logs.wait(0.05)
        head, shared = memory.draft_gib(self.text, self.args.tp_size)
        left = self.avail - head - shared
        logs.say(
            f"Load weight end. elapsed=0.05 s, type={name}MTP, avail mem={left:.2f} GB, "
            f"mem usage={head + shared:.2f} GB."
        )
        # 0.5.23 sizes its pools while the embeddings are still there twice.
        self.avail = left if NEW else self.avail - head

    def report(
        self, found: weights.Found, loaded: float, pools: memory.Pools, graphs: float
    ) -> dict[str, Any]:
        args = self.args
        if self.leader:
            logs.say(
                f"max_total_num_tokens={pools.tokens}, chunked_prefill_size="
                f"{args.chunked_prefill_size}, max_prefill_tokens={args.max_prefill_tokens}, "
                f"max_running_requests={pools.running}, context_len="
                f"{args.model_config.context_len}, available_gpu_mem={self.avail:.2f} GB"
            )
        return {
            "max_total_num_tokens": pools.tokens,
            "max_running_requests": pools.running,
            "missing_shards": found.missing,
            "memory_usage": {
                "weight": round(loaded, 2),
                "kvcache": round(pools.kv, 2),
                "token_capacity": pools.tokens,
                "graph": round(graphs, 2),
            },
        }
