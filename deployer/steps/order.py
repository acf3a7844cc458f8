"""The steps of `up`, in order (DESIGN section 6)."""

from __future__ import annotations

from deployer.steps.base import Step

NAMES = ("driver", "gpus", "container", "venv", "shards", "stop", "launch", "verify")


def all_steps(*, retry: bool = False) -> list[Step]:
    """A fresh list of the eight steps, in order.

    `retry`: a wish that has failed before may end the server that serves in its place.
    """
    from deployer.steps.container import ContainerStep
    from deployer.steps.driver import DriverStep
    from deployer.steps.gpus import GpusStep
    from deployer.steps.launch import LaunchStep
    from deployer.steps.shards import ShardsStep
    from deployer.steps.stop import StopStep
    from deployer.steps.venv import VenvStep
    from deployer.steps.verify import VerifyStep

    return [
        DriverStep(),
        GpusStep(),
        ContainerStep(),
        VenvStep(),
        ShardsStep(),
        StopStep(retry=retry, restores=True),
        LaunchStep(),
        VerifyStep(),
    ]
