"""The oldest driver that the engine lock can do with, by its CUDA. Pure.

Source of the minimum: NVIDIA's CUDA compatibility guide (minor version compatibility), as
sglang/releases has it: 525.60.13 for all of CUDA 12, 580 for all of CUDA 13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.gpu import version_key
from deployer.sglang.compat import parse_version
from deployer.sglang.releases import CUDA_DRIVER, built_like
from deployer.steps.venv_build import lock_pins

_LOCAL_CUDA = re.compile(r"\+cu(\d{2})\d+$")


@dataclass(frozen=True)
class CudaNeed:
    """`cuda`: major version; `driver`: the oldest; `because`: what of the lock says so."""

    cuda: int
    driver: str
    because: str

    def refuses(self, version: str) -> str:
        """Why a driver of this version will not do; '' when it will, or when it is unknown."""
        key = version_key(version)
        if not key or key >= version_key(self.driver):
            return ""
        return (
            f"driver {version} is too old for the engine: {self.because} is built for CUDA "
            f"{self.cuda}, which needs driver >= {self.driver}"
        )


def cuda_of_pins(pins: Mapping[str, str]) -> tuple[int, str]:
    """CUDA major version that a lock brings, and the pin that tells; (0, '') when none does."""
    torch = pins.get("torch", "")
    if found := _LOCAL_CUDA.search(torch):
        return int(found[1]), f"torch {torch}"
    for name, version in sorted(pins.items()):
        if found := re.fullmatch(r"nvidia-cuda-runtime-cu(\d{2})", name):
            return int(found[1]), f"{name} {version}"
        if name == "nvidia-cuda-runtime" and version[:2].isdigit():
            return int(version[:2]), f"{name} {version}"
    return 0, ""


def cuda_need(want: Deployment) -> CudaNeed | None:
    """What the lock asks of the driver, else what the engine's wheels do; None when unknown."""
    engine = want.playbook.engine
    cuda, because = cuda_of_pins(lock_pins(want.lock_text))
    if not cuda:
        version = parse_version(engine.version)
        release = built_like(version) if version is not None else None
        if release is None:
            return None
        cuda, because = release.cuda, f"{engine.name} {engine.version}"
    least = CUDA_DRIVER.get(cuda)
    return None if least is None else CudaNeed(cuda, ".".join(map(str, least)), because)
