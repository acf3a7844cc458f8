"""What each SGLang release is built from, as its wheel's METADATA says. Pure data.

Read from the wheels of every release from 0.5.9 to 0.5.23 (0.5.10, 0.5.12, 0.5.13 and 0.5.15 in
their post releases); 0.5.8.post1 from field/sglang.md section 4. A newer release counts as the
newest row where that is safe to say (see `built_like`).
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, ...]

CUDA_DRIVER: dict[int, Version] = {12: (525, 60, 13), 13: (580,)}
"""Oldest NVIDIA driver (R525, R580) that runs programs of a CUDA major version.

Source: NVIDIA's CUDA compatibility guide, minor version compatibility."""


@dataclass(frozen=True)
class Release:
    """One release. `python`: the oldest; `glibc`: of its wheel, None when it is pure Python."""

    version: Version
    python: Version
    torch: str
    transformers: str
    kernel: str
    """The kernel package and its version, `sgl-kernel 0.3.21`."""
    cuda: int
    glibc: Version | None


_GLIBC: Version = (2, 34)
RELEASES: tuple[Release, ...] = (
    Release((0, 5, 8, 1), (3, 10), "2.9.1", "4.57.1", "sgl-kernel 0.3.21", 12, None),
    Release((0, 5, 9), (3, 10), "2.9.1", "4.57.1", "sgl-kernel 0.3.21", 12, None),
    Release((0, 5, 10), (3, 10), "2.9.1", "5.3.0", "sglang-kernel 0.4.1", 12, None),
    Release((0, 5, 11), (3, 10), "2.11.0", "5.6.0", "sglang-kernel 0.4.2", 13, _GLIBC),
    Release((0, 5, 12, 1), (3, 10), "2.11.0", "5.6.0", "sglang-kernel 0.4.2.post2", 13, _GLIBC),
    Release((0, 5, 13, 1), (3, 10), "2.11.0", "5.8.1", "sglang-kernel 0.4.3", 13, _GLIBC),
    Release((0, 5, 14), (3, 10), "2.11.0", "5.8.1", "sglang-kernel 0.4.4", 13, _GLIBC),
    Release((0, 5, 15, 1), (3, 10), "2.11.0", "5.12.1", "sglang-kernel 0.4.4", 13, _GLIBC),
    Release((0, 5, 16), (3, 10), "2.11.0", "5.12.1", "sglang-kernel 0.4.5", 13, _GLIBC),
    Release((0, 5, 17), (3, 10), "2.11.0", "5.12.1", "sglang-kernel 0.4.5", 13, _GLIBC),
    Release((0, 5, 18), (3, 10), "2.13.0", "5.12.1", "sglang-kernel 0.4.6.post1", 13, _GLIBC),
    Release((0, 5, 19), (3, 10), "2.13.0", "5.12.1", "sglang-kernel 0.4.6.post1", 13, _GLIBC),
    Release((0, 5, 20), (3, 10), "2.13.0", "5.12.1", "sglang-kernel 0.4.7", 13, _GLIBC),
    Release((0, 5, 21), (3, 10), "2.13.0", "5.12.1", "sglang-kernel 0.4.7", 13, _GLIBC),
    Release((0, 5, 22), (3, 11), "2.14.1", "5.19.0", "sglang-kernel 0.4.9", 13, _GLIBC),
    Release((0, 5, 23), (3, 11), "2.14.1", "5.19.0", "sglang-kernel 0.4.10", 13, _GLIBC),
)

KERNEL_SASS: dict[str, tuple[str, ...]] = {
    "sgl-kernel 0.3.21": ("80", "89", "90", "90a", "100a", "120a"),
    "sglang-kernel 0.4.2": ("80", "89", "90", "100", "103", "120"),
}
"""Machine code in a kernel wheel's common_ops (cuobjdump; neither has PTX, so nothing is compiled
for other GPUs). A GPU runs code of its own major version and an older minor; `a` code only exactly.
"""
OLDEST_SM: Version = (8, 0)
"""Both kernel wheels that were read have nothing below sm_80."""


def built_like(version: Version) -> Release | None:
    """The newest row that is not newer than `version`; None before the first."""
    older = [release for release in RELEASES if release.version[:3] <= version[:3]]
    return older[-1] if older else None


def same_release(release: Release, version: Version) -> bool:
    """Is the row of this very release? Post releases count as their base."""
    return release.version[:3] == version[:3]


def runs_on(sass: tuple[str, ...], capability: Version) -> bool:
    """Has a kernel wheel code that a GPU of this compute capability (8, 6) runs?"""
    major, minor = capability[0], capability[1]
    for code in sass:
        number = int(code.rstrip("a"))
        if number // 10 != major:
            continue
        if number % 10 == minor or (number % 10 < minor and not code.endswith("a")):
            return True
    return False
