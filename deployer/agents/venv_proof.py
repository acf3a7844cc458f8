"""Proves a freshly built environment on the real GPUs, then switches to it.

Self-contained (stdlib, Python 3.9+); runs on the target with the *new* environment's Python, in
its job's folder, where `proof.json` says what is wanted:

    venv_proof.py prove    versions, imports, architectures, a tiny kernel on every GPU
    venv_proof.py switch   writes deployer.json, switches the symlink atomically, prunes old builds

`prove` prints one JSON object (also to `proof.out`). Exit codes: 0 right; 20 other versions than
the lock; 21 an import fails; 22 built for other GPUs; 23 no kernel runs; 2 bad proof.json.
"""

# The names are those of the target; plain strings keep this file free of surprises there.
# ruff: noqa: PTH103, PTH104, PTH105, PTH106, PTH108, PTH112, PTH113, PTH114, PTH116, PTH118, PTH119
# ruff: noqa: PTH120, PTH123, PTH207, PTH208, PTH211

from __future__ import annotations

import glob
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

VERSIONS, IMPORT, ARCH, KERNEL = 20, 21, 22, 23
KEEP = 2


class Unproven(Exception):
    """What is wrong with the build, and the exit code for it."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def check_versions(pins: dict[str, str]) -> dict[str, str]:
    """The installed versions of all pinned names; raises Unproven at the first that differs."""
    seen = {}
    for name, wanted in sorted(pins.items()):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise Unproven(VERSIONS, f"{name} {wanted} is locked and not installed") from None
        if version not in (wanted, wanted.partition("+")[0]) and (
            version.partition("+")[0] != wanted
        ):
            raise Unproven(VERSIONS, f"{name} {version} is installed, the lock says {wanted}")
        seen[name] = version
    return seen


def runs_on(arch_list: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether a build for `arch_list` (sm_80, sm_90a, compute_90) has code for this GPU.

    SASS runs within its major version from its minor on; PTX from its version on; SASS with the
    suffix `a` on exactly its own version.
    """
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if not match:
            continue
        built = (int(match[2]), int(match[3]))
        if match[4] == "a":
            if built == capability:
                return True
        elif match[1] == "compute":
            if built <= capability:
                return True
        elif built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False


def check_gpus(wanted: int) -> dict[str, Any]:
    """Architectures and a kernel on every GPU that torch sees; `wanted` is how many at least."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    if not torch.cuda.is_available():
        raise Unproven(KERNEL, f"torch {torch.__version__} sees no CUDA (CUDA {torch_cuda(torch)})")
    archs = [str(arch) for arch in torch.cuda.get_arch_list()]
    count = int(torch.cuda.device_count())
    if count < wanted:
        raise Unproven(KERNEL, f"torch sees {count} GPUs, {wanted} are wanted")
    seen = []
    for index in range(count):
        capability = tuple(torch.cuda.get_device_capability(index))[:2]
        name = f"{capability[0]}.{capability[1]}"
        if not runs_on(archs, (int(capability[0]), int(capability[1]))):
            text = f"GPU {index} is sm_{capability[0]}{capability[1]}, torch is built for {archs}"
            raise Unproven(ARCH, text)
        try:
            total = float((torch.ones(8, device=f"cuda:{index}") * 2).sum().item())
        except Exception as error:  # torch raises what the driver says, of many classes
            raise Unproven(KERNEL, f"GPU {index}: {type(error).__name__}: {error}") from error
        if total != 16.0:
            raise Unproven(KERNEL, f"GPU {index} computes {total} instead of 16.0")
        seen.append(name)
    return {"archs": archs, "cuda": torch_cuda(torch), "gpus": seen, "kernel": 16.0}


def torch_cuda(torch: Any) -> str:
    """The CUDA version that torch was built for, `none` for a CPU build."""
    return str(getattr(getattr(torch, "version", None), "cuda", None) or "none")


def prove(want: dict[str, Any]) -> dict[str, Any]:
    """Everything that is proven, as the record says it. Raises Unproven."""
    versions = check_versions(want["pins"])
    engine = want["engine"]
    try:
        version = importlib.metadata.version(engine)
        importlib.import_module(engine)
    except importlib.metadata.PackageNotFoundError:
        raise Unproven(VERSIONS, f"{engine} is not installed by the lock") from None
    except Exception as error:  # an import may raise anything, and all of it is our answer
        raise Unproven(IMPORT, f"import {engine}: {type(error).__name__}: {error}") from error
    if version != want["version"]:
        raise Unproven(VERSIONS, f"{engine} {version} is installed, wanted {want['version']}")
    try:
        importlib.metadata.version("torch")
        proof = check_gpus(int(want["gpus"]))
    except importlib.metadata.PackageNotFoundError:
        proof = {}
    except ImportError as error:
        raise Unproven(IMPORT, f"import torch: {error}") from error
    return {
        "schema": 1,
        "lock": want["lock"],
        "engine": engine,
        "version": version,
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "capabilities": sorted(want["capabilities"]),
        "proof": proof,
        "versions": versions,
        "time": int(time.time()),
    }


def write(path: str, text: str) -> None:
    """Temp file, fsync, rename."""
    with open(path + ".tmp", "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(path + ".tmp", path)


def in_use(folder: str) -> bool:
    """Whether any process that we can see has a file of `folder` mapped or as its command, by this
    name or by the real one: the folder of the builds may be a symlink.
    """
    names = {os.path.join(folder, ""), os.path.join(os.path.realpath(folder), "")}
    needles = [os.fsencode(name) for name in names]
    for process in glob.glob("/proc/[0-9]*"):
        for name in ("maps", "cmdline"):
            try:
                with open(f"{process}/{name}", "rb") as stream:
                    text = stream.read()
                    if any(needle in text for needle in needles):
                        return True
            except OSError:  # it ended meanwhile, or it is a kernel thread
                continue
    return False


def recorded(folder: str) -> list[str]:
    """The capabilities that a build was proven on; [] when it has no record."""
    try:
        with open(os.path.join(folder, "deployer.json"), encoding="utf-8") as stream:
            return list(json.load(stream)["capabilities"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def ours(folder: str) -> bool:
    """Whether a folder beside the builds holds what only this tool writes."""
    names = ("deployer.json", "deployer.build", "complete")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


def prune(build: str, capabilities: list[str], keep: int, needed: Iterable[str]) -> list[str]:
    """Removes old builds beside `build`: all but the newest `keep` with it, and all for other GPUs.

    What is `needed`, in use, or not ours stays. A build loses its name before it is deleted, as
    with `deploy gc`, which finds and frees what a kill has left of it.
    """
    parent = os.path.dirname(build)
    others = [os.path.join(parent, name) for name in os.listdir(parent)]
    others = [path for path in others if path != build and os.path.isdir(path) and ours(path)]
    stays = {os.path.realpath(path) for path in needed}
    others = [path for path in others if not os.path.islink(path)]
    others = [path for path in others if os.path.realpath(path) not in stays]
    others.sort(key=lambda path: os.stat(path).st_mtime, reverse=True)
    removed, kept = [], 1
    for path in others:
        if kept < keep and recorded(path) == sorted(capabilities):
            kept += 1
        elif not in_use(path):
            remove(path)
            removed.append(path)
    return removed


def remove(build: str) -> None:
    """By way of the trash; its names are those of deployer/gc_scripts.py."""
    trash = os.path.join(os.path.dirname(build), ".deployer-trash")
    os.makedirs(trash, exist_ok=True)
    mark = os.path.join(trash, "of-deployer")
    with open(mark, "w", encoding="utf-8"):
        pass
    there = os.path.join(trash, f"{os.path.basename(build)}.{os.getpid()}")
    os.rename(build, there)
    shutil.rmtree(there)
    if os.listdir(trash) == ["of-deployer"]:
        os.unlink(mark)
        os.rmdir(trash)


def switch(want: dict[str, Any]) -> None:
    """The record, the symlink, the old builds, in this order."""
    build, link = want["build"], want["link"]
    with open("proof.out", encoding="utf-8") as stream:
        proof = json.load(stream)
    write(os.path.join(build, "deployer.json"), json.dumps(proof, indent=1) + "\n")
    if os.path.isdir(link) and not os.path.islink(link):
        raise Unproven(2, f"{link} is a folder, not a symlink of ours")
    temporary = f"{link}.new"
    if os.path.islink(temporary):
        os.unlink(temporary)
    os.symlink(build, temporary)
    os.replace(temporary, link)
    print(f"{link} -> {build}", flush=True)
    try:
        needed = want.get("needed", [])
        for path in prune(build, want["capabilities"], want.get("keep", KEEP), needed):
            print(f"removed {path}", flush=True)
    except OSError as error:
        # The new build is in its place; `deploy gc` frees the others.
        print(f"old builds were not removed: {error}", flush=True)


def main() -> int:
    """`prove` or `switch`; see the module for exit codes."""
    try:
        with open("proof.json", encoding="utf-8") as stream:
            want = json.load(stream)
        if sys.argv[1:] == ["switch"]:
            switch(want)
            return 0
        proof = prove(want)
        write("proof.out", json.dumps(proof))
        print("proof: " + json.dumps({k: v for k, v in proof.items() if k != "versions"}))
    except Unproven as error:
        print(f"error: {error}", flush=True)
        return error.code
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {type(error).__name__}: {error}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
