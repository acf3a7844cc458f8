"""Does it fit: one playbook's flags on one kind of GPU, and what else is worth trying. Pure.

Memory is in GiB (1 << 30) of one GPU. What was not given but assumed is listed in words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployer.playbook import ArgValue
from deployer.sglang.engineversion import Engine, engine_of
from deployer.sglang.memory import Pools, largest, size
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.resolved import Refusal, Resolved, resolve
from deployer.sglang.serveflags import ServeFlags
from deployer.sglang.statepool import GIB, no_request_fits
from deployer.sglang.weights import (
    OtherCheckpoint,
    Tensors,
    estimate,
    from_tensors,
    measured,
)

DRIVER_SHARE = 0.008
"""Share of `memory.total` that no process gets; NVIDIA H200, driver 580, real run."""
CONTEXT_GIB = 0.15
CONTEXT_TP_GIB = 0.97
"""torch.distributed, and NCCL with tp > 1, before the weights; both from real runs on an H200."""
MAX_RUNNING_TRIED = 4096


@dataclass(frozen=True)
class Gpu:
    """One of the (equal) GPUs. `free` is what SGLang sees before it loads ("Load weight begin")."""

    total_mib: int
    free: float
    capability: tuple[int, int] | None = None
    """Compute capability, (9, 0); None counts as a GPU before Blackwell."""


@dataclass(frozen=True)
class Load:
    """Weights of one GPU, GiB."""

    target: float
    draft: float


@dataclass(frozen=True)
class Fit:
    """The answer for one set of flags; either `pools` or `refusal`."""

    flags: ServeFlags
    resolved: Resolved | None
    pools: Pools | None
    refusal: Refusal | None
    slack_needs: Mapping[str, float] = field(default_factory=dict)
    """What must find room in the slack, as far as it is known."""

    @property
    def slack_short(self) -> float:
        """GiB that the known needs exceed the slack by; 0 when they do not."""
        if self.pools is None:
            return 0.0
        return max(0.0, sum(self.slack_needs.values()) - self.pools.slack)


@dataclass(frozen=True)
class Alternative:
    """Another set of flags worth a thought."""

    title: str
    args: Mapping[str, ArgValue]
    trade: str
    fit: Fit


@dataclass(frozen=True)
class Machine:
    """What stays the same when flags are tried out."""

    shape: ModelShape
    version: str
    gpu: Gpu
    load: Load
    env: Mapping[str, str] = field(default_factory=dict)


def gpu_of(
    total_mib: int | None,
    free: float | None,
    tp: int,
    used_mib: int = 0,
    compute_cap: str = "",
) -> tuple[Gpu, list[str]]:
    """The GPU from what is known of it, and what was assumed.

    `used_mib` is what others hold (nvidia-smi memory.used), `compute_cap` its `8.6`. Raises
    ValueError when neither the total nor the free memory is given.
    """
    assumed = []
    context = CONTEXT_TP_GIB if tp > 1 else CONTEXT_GIB
    if total_mib is None:
        if free is None:
            raise ValueError("neither the GPU's memory nor the free memory is known")
        total_mib = round((free + context) / (1 - DRIVER_SHARE) * 1024)
        assumed.append(f"card size {total_mib} MiB (from the free memory)")
    if free is None:
        free = total_mib / 1024 * (1 - DRIVER_SHARE) - context - used_mib / 1024
        state = f"{used_mib} MiB in use" if used_mib else "an empty card"
        assumed.append(f"{free:.2f} GiB free on each GPU before the weights ({state})")
    major, _, minor = compute_cap.partition(".")
    known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    return Gpu(total_mib, free, known), assumed


def load_of(
    shape: ModelShape,
    flags: ServeFlags,
    target: float | None,
    draft: float | None,
    checkpoint_bytes: int = 0,
    tensors: Tensors | None = None,
) -> tuple[Load, list[str]]:
    """The weights from what is known of them, and what was assumed.

    `checkpoint_bytes`: all safetensors files together, 0 when not known. `tensors`, from their
    headers, say more: they count first.
    """
    assumed = []
    guess, source = estimate(shape, flags.tp, flags.quantization), "estimated from config.json"
    if tensors is not None:
        try:
            guess = from_tensors(shape, flags.tp, tensors, flags.quantization)
            source = "the safetensors headers"
        except OtherCheckpoint as error:
            assumed.append(f"{error}: the weights are those of the config")
            tensors = None
    elif checkpoint_bytes:
        try:
            guess = measured(shape, flags.tp, checkpoint_bytes, flags.quantization)
            source = f"{checkpoint_bytes / 1e9:.2f} GB of safetensors"
        except OtherCheckpoint as error:
            assumed.append(f"{error}: the weights are those of the config")
            checkpoint_bytes = 0
    if target is None:
        target = guess.target / GIB
        assumed.append(f"weights {target:.2f} GiB a GPU ({source})")
        if not (checkpoint_bytes or tensors) and shape.quantization and shape.quantization.excluded:
            assumed.append("all linear layers quantised (the config names exceptions)")
    if draft is None:
        draft = guess.draft / GIB
        if flags.speculative and flags.draft_path:
            assumed.append("the draft model is as large as the checkpoint's own head")
        if flags.speculative:
            assumed.append(f"draft weights {draft:.2f} GiB a GPU while loading (estimated)")
    return Load(target, draft), assumed


def evaluate(machine: Machine, args: Mapping[str, ArgValue]) -> Fit:
    """What the server will run with these arguments. Raises ValueError for a bad value."""
    flags = ServeFlags.from_args(args)
    return _evaluate(machine, flags)


def alternatives(
    machine: Machine, args: Mapping[str, ArgValue], asked: Fit
) -> tuple[Alternative, ...]:
    """At most three other sets that start and give something that `asked` does not."""
    found = []
    for title, changed, trade in _ideas(machine, args, asked):
        fit = evaluate(machine, {**args, **changed})
        if fit.pools is not None:
            found.append(Alternative(title, changed, trade, fit))
    return tuple(found[:3])


def most_full_requests(machine: Machine, fit: Fit) -> int:
    """Requests of the whole context length that could run at once, slots chosen for it; 0: none."""
    if fit.pools is None or fit.resolved is None:
        return 0
    each = fit.resolved.slots_per_request

    def fits(count: int) -> bool:
        flags = dataclasses.replace(fit.flags, max_running=count)
        if machine.shape.hybrid:
            flags = dataclasses.replace(flags, mamba_slots=count * each)
        pools = _evaluate(machine, flags).pools
        return pools is not None and pools.max_running >= count and pools.full_requests >= count

    return largest(1, MAX_RUNNING_TRIED, fits)


def _evaluate(machine: Machine, flags: ServeFlags) -> Fit:
    shape, gpu = machine.shape, machine.gpu
    engine, _ = engine_of(machine.version)
    resolved: Resolved | None = None
    try:
        resolved = resolve(engine, shape, flags, gpu.total_mib, machine.env, machine.gpu.capability)
        weights = machine.load.target
        if engine >= Engine.V0_5_14 and resolved.speculative is not None:
            weights += machine.load.draft
        pools = size(shape, resolved, flags, gpu.free, gpu.free - weights)
        if pools.max_running <= 0:
            raise no_request_fits(resolved, pools.slots or 0)
    except Refusal as refusal:
        return Fit(flags, resolved, None, refusal)
    return Fit(flags, resolved, pools, None, _slack_needs(machine, resolved, pools))


def _slack_needs(machine: Machine, resolved: Resolved, pools: Pools) -> dict[str, float]:
    if resolved.speculative is None or resolved.speculative in ("NGRAM",):
        return {}
    shape = machine.shape
    layer = shape.kv_token_bytes(resolved.tp, resolved.kv_bytes) / shape.full_layers
    needs = {}
    if resolved.engine < Engine.V0_5_14:
        needs["draft weights while loading"] = machine.load.draft
    if pools.kv_token_bytes == shape.kv_token_bytes(resolved.tp, resolved.kv_bytes):
        needs["draft KV"] = pools.tokens * layer / GIB
    return needs


def _ideas(
    machine: Machine, args: Mapping[str, ArgValue], asked: Fit
) -> list[tuple[str, dict[str, ArgValue], str]]:
    """(title, changed arguments, trade-off), best first; each may turn out not to start."""
    engine, _ = engine_of(machine.version)
    hybrid, flags = machine.shape.hybrid, asked.flags
    strategy = "mamba-radix-cache-strategy"
    if engine < Engine.V0_5_14:
        strategy = "mamba-scheduler-strategy"
    ideas: list[tuple[str, dict[str, ArgValue], str]] = []
    if hybrid and asked.refusal is not None and asked.resolved is None:
        ideas.append(
            (
                "keep the prefix cache",
                {strategy: "extra_buffer", "disable-radix-cache": False},
                "5 state slots a request instead of 1: fewer requests at once",
            )
        )
        ideas.append(
            (
                "more requests at once",
                {strategy: False, "disable-radix-cache": True},
                "no prefix cache: every prompt is computed in full",
            )
        )
    pools, resolved = asked.pools, asked.resolved
    if hybrid and pools is not None and resolved is not None and pools.slots is not None:
        wanted = resolved.max_running
        if wanted is not None and pools.max_running < wanted:
            slots = wanted * resolved.slots_per_request
            ideas.append(
                (
                    f"really run {wanted} requests",
                    {"max-mamba-cache-size": slots},
                    f"{slots} state slots instead of {pools.slots}: fewer KV tokens",
                )
            )
            ideas.append(
                (
                    "half the state",
                    {"mamba-ssm-dtype": "bfloat16"},
                    "recurrent state in bfloat16 instead of float32: verify the quality",
                )
            )
    if flags.speculative:
        off: dict[str, ArgValue] = {
            flag: False for flag in args if flag.startswith("speculative-") or flag == strategy
        }
        ideas.append(("no speculation", off, "slower single answers, more memory for the cache"))
    context = machine.shape.context
    if pools is not None and pools.context < context <= pools.tokens:
        ideas.append(
            (
                "the model's whole context",
                {"context-length": context},
                "one long request may fill the cache, and others then wait",
            )
        )
    fits_more = pools is not None and not hybrid and flags.max_running is not None
    if fits_more and pools is not None and pools.tokens // pools.context > 2 * pools.max_running:
        many = pools.tokens // pools.context
        ideas.append(
            (
                "as many full requests as the cache holds",
                {"max-running-requests": many},
                "more tokens a second in all, fewer for each request",
            )
        )
    if flags.kv_dtype == "auto" and (resolved is None or resolved.kv_bytes > 1):
        ideas.append(
            (
                "twice the KV tokens",
                {"kv-cache-dtype": "fp8_e4m3"},
                "8-bit KV cache: verify the quality",
            )
        )
    return ideas
