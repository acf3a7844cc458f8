"""Rules about what an engine is installed on: driver, GPU, Python, libc, and its own lock. Pure."""

from __future__ import annotations

import re

from deployer.sglang.compat_case import Case, Check, Problem
from deployer.sglang.releases import (
    CUDA_DRIVER,
    KERNEL_SASS,
    OLDEST_SM,
    Release,
    Version,
    built_like,
    runs_on,
    same_release,
)

METADATA = "METADATA of the SGLang wheels (deployer/sglang/releases.py)"
KERNELS = ("sgl-kernel", "sglang-kernel")


def dotted(version: Version) -> str:
    """(0, 5, 11) -> `0.5.11`."""
    return ".".join(str(part) for part in version)


def driver(case: Case) -> list[Problem]:
    """The driver must run programs of the CUDA version that the wheels are built for."""
    release = built_like(case.version)
    if release is None or case.driver is None:
        return []
    least = CUDA_DRIVER[release.cuda]
    if case.driver >= least:
        return []
    older = ", or engine.version 0.5.10 with its own lock (CUDA 12)" if release.cuda > 12 else ""
    return [
        Problem(
            f"cuda{release.cuda}-driver",
            f"SGLang {dotted(case.version)} is built for CUDA {release.cuda} and needs an NVIDIA "
            f"driver >= {dotted(least)}; this one is {dotted(case.driver)}",
            f"driver.version {dotted(least)} or newer{older}",
            f"{METADATA}: torch {release.torch}, {release.kernel}; NVIDIA's CUDA compatibility "
            "guide",
        )
    ]


def kernel(case: Case) -> list[Problem]:
    """The kernel wheel must hold machine code for every GPU."""
    release = built_like(case.version)
    if release is None:
        return []
    sass = KERNEL_SASS.get(release.kernel) if same_release(release, case.version) else None
    found = []
    for capability in dict.fromkeys(case.capabilities):
        name = f"sm_{capability[0]}{capability[1] if len(capability) > 1 else 0}"
        exact = (capability[0], capability[1] if len(capability) > 1 else 0)
        if exact < OLDEST_SM:
            why = "no kernel wheel of SGLang has code below sm_80"
        elif sass is not None and not runs_on(sass, exact):
            why = f"{release.kernel} has code for sm_{', sm_'.join(sass)} only"
        else:
            continue
        found.append(
            Problem(
                "kernel-gpu",
                f"SGLang {dotted(case.version)} does not run on this GPU ({name}): {why}",
                "use another GPU, or an SGLang whose kernels are built for it",
                "cuobjdump of sgl-kernel 0.3.21 and sglang-kernel 0.4.2",
            )
        )
    return found


def python(case: Case) -> list[Problem]:
    """The wheel's Requires-Python."""
    release = built_like(case.version)
    if release is None or case.python is None or case.python >= release.python:
        return []
    return [
        Problem(
            "python",
            f"SGLang {dotted(case.version)} needs Python >= {dotted(release.python)}; "
            f"engine.python is {dotted(case.python)}",
            'engine.python "3.12", with a lock made for it',
            METADATA,
        )
    ]


def libc(case: Case) -> list[Problem]:
    """The wheel's platform tag."""
    release = built_like(case.version)
    if release is None or release.glibc is None or case.glibc is None:
        return []
    if case.glibc >= release.glibc:
        return []
    return [
        Problem(
            "glibc",
            f"the wheel of SGLang {dotted(case.version)} is for glibc >= {dotted(release.glibc)} "
            f"(manylinux_{release.glibc[0]}_{release.glibc[1]}); this system has "
            f"{dotted(case.glibc)}",
            "a newer system in the guest (Ubuntu 22.04, Debian 12), or engine.version 0.5.10",
            "name of the wheel on PyPI",
        )
    ]


def lock(case: Case) -> list[Problem]:
    """What the lock pins must be what this release was built with."""
    release = built_like(case.version)
    if release is None or not same_release(release, case.version) or not case.pins:
        return []
    found = []
    name, _, kernel_version = release.kernel.partition(" ")
    for pinned, wanted, exact in (
        ("torch", release.torch, True),
        (name, kernel_version, False),
        ("transformers", release.transformers, False),
    ):
        there = case.pins.get(pinned)
        if there is not None and not _fits(there, wanted, exact):
            found.append(_pin(case, release, pinned, there, wanted, exact))
    other = next(one for one in KERNELS if one != name)
    if other in case.pins:
        found.append(
            Problem(
                "lock-two-kernels",
                f"the lock has {other}, but SGLang {dotted(case.version)} uses {name}; both are "
                "imported as sgl_kernel, so one overwrites the other",
                f"take {other} out of the lock",
                METADATA,
            )
        )
    return found


def _fits(there: str, wanted: str, exact: bool) -> bool:
    have, want = _numbers(there), _numbers(wanted)
    if exact:
        return have == want
    # A newer one within the same major version is somebody's decision; an older one cannot work.
    return have >= want and have[:1] == want[:1]


def _numbers(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0]))


def _pin(case: Case, release: Release, name: str, there: str, wanted: str, exact: bool) -> Problem:
    return Problem(
        "lock-pins",
        f"SGLang {dotted(case.version)} is built with {name} {wanted}; the lock pins {there}"
        + (" (its kernels link that torch)" if exact else ""),
        f"{name}=={wanted} in the engine lock, or the engine.version that the lock was made for",
        METADATA + f" of {dotted(release.version)}",
    )


CHECKS: tuple[Check, ...] = (driver, kernel, python, libc, lock)
