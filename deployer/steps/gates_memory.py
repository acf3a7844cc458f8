"""GPU memory of the deployment's GPUs as the host sees it: our own processes', else the card's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from deployer.errors import REFUSALS, Unreachable
from deployer.model import Where
from deployer.steps.base import StepContext
from deployer.steps.stop_gpu import GpuMemory, read_gpu_memory


@dataclass(frozen=True)
class GpuUse:
    """MiB by PCI address. `ours` lacks a GPU where our processes could not be told from others."""

    card: Mapping[str, int]
    ours: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Growth:
    """MiB more than before on one GPU; `card`: measured on the whole card, neighbours included."""

    mib: int
    card: bool

    def __str__(self) -> str:
        return f"{self.mib:+d} MiB{' on the whole card' if self.card else ''}"


def gpu_use(context: StepContext, members: Collection[int]) -> GpuUse | None:
    """Used now; None when the host cannot tell: no gate fails for that.

    `members`: pids of the launch where it runs.
    """
    want = context.want
    try:
        memory = read_gpu_memory(context.on(Where.HOST), want.gpus)
    except REFUSALS:
        raise
    except Unreachable as error:
        context.note(f"GPU memory could not be read on the host: {error}", "warning")
        return None
    if not memory.known:
        return None
    return GpuUse(dict(memory.used), _ours(memory, want.vmid, members))


def _ours(memory: GpuMemory, vmid: int | None, members: Collection[int]) -> dict[str, int]:
    found: dict[str, int] = {}
    unknown: set[str] = set()
    for app in memory.apps:
        if not app.is_of(vmid, members):
            continue
        if app.mib is None:
            unknown.add(app.address)
        else:
            found[app.address] = found.get(app.address, 0) + app.mib
    return {gpu: mib for gpu, mib in found.items() if gpu not in unknown}


def grown(before: GpuUse, now: GpuUse) -> dict[str, Growth]:
    """Of each GPU that was seen both times."""
    found = {}
    for gpu, card in before.card.items():
        if gpu in before.ours and gpu in now.ours:
            found[gpu] = Growth(now.ours[gpu] - before.ours[gpu], False)
        elif gpu in now.card:
            found[gpu] = Growth(now.card[gpu] - card, True)
    return found
