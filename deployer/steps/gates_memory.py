"""GPU memory of the deployment's GPUs as the host sees it."""

from __future__ import annotations

from collections.abc import Mapping

from deployer.errors import REFUSALS, Unreachable
from deployer.model import Where
from deployer.steps.base import StepContext
from deployer.steps.stop_gpu import read_gpu_memory


def used_by_gpu(context: StepContext) -> dict[str, int] | None:
    """Used MiB by PCI address; None when the host cannot tell: no gate fails for that."""
    want = context.want
    try:
        memory = read_gpu_memory(context.on(Where.HOST), want.gpus)
    except REFUSALS:
        raise
    except Unreachable as error:
        context.note(f"GPU memory could not be read on the host: {error}", "warning")
        return None
    return dict(memory.used) if memory.known else None


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """MiB more than before, of each GPU that was seen both times."""
    return {gpu: now[gpu] - mib for gpu, mib in before.items() if gpu in now}
