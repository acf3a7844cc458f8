"""Flags for a model that has no playbook yet: the first set that fits, by SGLang's own arithmetic.

Pure. Context before everything else, then as little less memory fraction as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deployer.playbook import ArgValue
from deployer.sglang.compat import parse_version
from deployer.sglang.engineversion import Engine, engine_of
from deployer.sglang.fit import Alternative, Fit, Machine, alternatives, evaluate
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.parsers import parsers_for

CONTEXTS = (32768, 16384, 8192, 4096)
"""Largest first; a model with a shorter context is asked for its own."""
FRACTIONS = (0.88, 0.86, 0.84, 0.82, 0.8, 0.75, 0.7)
REQUESTS = 16
STATE_RATIO = 0.5
"""mamba-full-memory-ratio that the real 27B runs were made with (SGLang's default is 0.9)."""
DRAFT: dict[str, ArgValue] = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
}


@dataclass(frozen=True)
class Proposal:
    """What a new playbook gets. `variants`: name -> changes, the first is launched."""

    args: dict[str, ArgValue]
    variants: dict[str, dict[str, ArgValue]]
    fits: dict[str, Fit]
    """Variant -> what it will run."""
    others: tuple[Alternative, ...] = ()
    """More sets worth a thought, beside the first variant."""


def propose(machine: Machine, tp: int) -> Proposal | Fit:
    """The proposal; the Fit of the smallest set when not even that starts."""
    variants = _variants(machine)
    worst: Fit | None = None
    for context in _contexts(machine.shape):
        for fraction in FRACTIONS:
            args = _args(machine, tp, context, fraction)
            fits = {name: evaluate(machine, {**args, **more}) for name, more in variants.items()}
            if all(_good(fit) for fit in fits.values()):
                return Proposal(args, variants, fits, _others(machine, args, variants, fits))
            worst = next(fit for fit in fits.values() if not _good(fit))
    if worst is None:
        raise ValueError("no context to try")
    return worst


def tensor_parallel(shape: ModelShape, gpus: int) -> int:
    """The most GPUs, a power of two, over which the attention heads can be split."""
    tp = 1
    while tp * 2 <= gpus and shape.heads % (tp * 2) == 0:
        tp *= 2
    return tp


def _good(fit: Fit) -> bool:
    return fit.pools is not None and fit.pools.full_requests >= 1 and fit.slack_short == 0


def _contexts(shape: ModelShape) -> Iterator[int]:
    yield min(shape.context, CONTEXTS[0])
    yield from (context for context in CONTEXTS[1:] if context < shape.context)


def _others(
    machine: Machine,
    args: dict[str, ArgValue],
    variants: dict[str, dict[str, ArgValue]],
    fits: dict[str, Fit],
) -> tuple[Alternative, ...]:
    """What `deploy fit` would name beside the first variant, less what is a variant already."""
    first = next(iter(variants))
    found = alternatives(machine, {**args, **variants[first]}, fits[first])
    return tuple(one for one in found if one.title != "no speculation")


def _args(machine: Machine, tp: int, context: int, fraction: float) -> dict[str, ArgValue]:
    shape = machine.shape
    args: dict[str, ArgValue] = {
        "tp-size": tp,
        "context-length": context,
        "mem-fraction-static": fraction,
        "max-running-requests": REQUESTS,
    }
    if shape.hybrid:
        args["mamba-full-memory-ratio"] = STATE_RATIO
    version = parse_version(machine.version)
    if version is not None:
        args.update(parsers_for(shape.model_type, version))
    return args


def _variants(machine: Machine) -> dict[str, dict[str, ArgValue]]:
    if not machine.shape.mtp_layers:
        return {"base": {}}
    draft = dict(DRAFT)
    engine = engine_of(machine.version)[0]
    if machine.shape.hybrid and Engine.V0_5_9 < engine < Engine.V0_5_14:
        draft["mamba-scheduler-strategy"] = "extra_buffer"
    return {"mtp": draft, "no-mtp": {}}
