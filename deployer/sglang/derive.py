"""One small step away from arguments that failed for memory, by SGLang's own arithmetic. Pure.

Two failures ask for opposite moves: pools that do not fit into `mem-fraction-static` want it up, an
allocation outside of the pools (graphs, warm-up) wants it down. A step is only taken when the
arithmetic, with the memory that the failed launch itself has measured, says that it will start.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deployer.playbook import ArgValue
from deployer.sglang.fit import Fit, Load, Machine, evaluate
from deployer.sglang.log import PHASES

UP, DOWN = "up", "down"
STEPS = (0.02, 0.04)
MOST = 0.95
"""Above it there is no room for CUDA graphs on any card."""
WITHIN = frozenset({"not-enough-memory", "mamba-pool-too-small"})
"""The weights and pools do not fit into the fraction."""
OUTSIDE = frozenset({"graph-capture-out-of-memory", "out-of-memory"})
"""What lies outside of the fraction does not fit."""
MARGIN_GIB = 0.25
"""What a step down must free beyond what the failed allocation lacked."""
TRIED = re.compile(r"Tried to allocate ([\d.]+) ([KMG])iB.*? of which ([\d.]+) ([KMG])iB is free")
UNITS = {"K": 1 / (1 << 20), "M": 1 / 1024, "G": 1.0}


@dataclass(frozen=True)
class Seen:
    """GiB a GPU, from the failed launch's own log; None where it did not come so far."""

    before: float | None = None
    """Free before the weights, on the fullest GPU."""
    weights: float | None = None


@dataclass(frozen=True)
class Derived:
    """`changes` to the arguments; `label` names them (`mem-0.02`), `words` explain them."""

    label: str
    changes: Mapping[str, ArgValue]
    way: str
    words: str


def derive(
    machine: Machine,
    args: Mapping[str, ArgValue],
    cls: str,
    cause: str,
    phase: str,
    seen: Seen,
) -> Derived | None:
    """The one step worth trying after a failure of class `cls`; None: nothing small would help."""
    machine = _measured(machine, seen)
    try:
        asked = evaluate(machine, args)
    except ValueError:
        return None
    if asked.resolved is None:
        return None
    before = machine.gpu.free
    fraction = asked.resolved.mem_fraction
    if cls in WITHIN:
        candidates = _up(args, asked, fraction)
    elif cls in OUTSIDE and phase in PHASES and PHASES.index(phase) > PHASES.index("weights"):
        candidates = _down(fraction, before, _lacking(cause))
    else:
        return None
    for one in candidates:
        try:
            fit = evaluate(machine, {**args, **one.changes})
        except ValueError:
            continue
        if _starts(fit) and fit != asked:
            return dataclasses.replace(one, words=f"{one.words}; {_told(fit)}")
    return None


def _measured(machine: Machine, seen: Seen) -> Machine:
    gpu, load = machine.gpu, machine.load
    if seen.before is not None:
        gpu = dataclasses.replace(gpu, free=seen.before)
    if seen.weights is not None:
        load = Load(seen.weights, load.draft)
    return dataclasses.replace(machine, gpu=gpu, load=load)


def _up(args: Mapping[str, ArgValue], asked: Fit, fraction: float) -> Iterator[Derived]:
    for step in STEPS:
        if fraction + step <= MOST:
            yield _fraction(fraction, step, UP)
    wanted = args.get("max-running-requests") or (asked.resolved and asked.resolved.max_running)
    requests = int(wanted) if isinstance(wanted, int | float) else 0
    while requests > 1:
        requests //= 2
        yield Derived(
            f"requests={requests}",
            {"max-running-requests": requests},
            UP,
            f"{requests} requests at once leave room for the pools",
        )


def _down(fraction: float, before: float, lacking: float | None) -> Iterator[Derived]:
    for step in STEPS:
        if lacking is None or step * before >= lacking + MARGIN_GIB:
            yield _fraction(fraction, -step, DOWN)


def _fraction(fraction: float, step: float, way: str) -> Derived:
    return Derived(
        f"mem{step:+.2f}",
        {"mem-fraction-static": round(fraction + step, 4)},
        way,
        f"mem-fraction-static {fraction:g} -> {fraction + step:.4g}",
    )


def _lacking(cause: str) -> float | None:
    """GiB that the failed allocation lacked, as torch tells it."""
    found = TRIED.search(cause)
    if found is None:
        return None
    tried, free = float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]
    return max(0.0, tried - free)


def _starts(fit: Fit) -> bool:
    return fit.pools is not None and fit.pools.full_requests >= 1 and fit.slack_short == 0


def _told(fit: Fit) -> str:
    if fit.pools is None:
        return "it will not start"
    return f"by its arithmetic {fit.pools.tokens} KV tokens, {fit.pools.max_running} requests"
