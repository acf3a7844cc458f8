"""Partial files that other clients left behind."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH105, PTH110, PTH112, PTH116, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import fcntl
import os

from deployer.agents.fetch.common import disk, log
from deployer.agents.fetch.manifest import File


def lock_is_held(path: str) -> bool:
    """True while another process holds a flock on `path`."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def adopt_orphan(root: str, file: File, part: str) -> None:
    """Takes over the dense prefix that a killed huggingface_hub left behind, if any."""
    cache = os.path.join(root, ".cache", "huggingface", "download")
    if os.path.exists(part) or not file.sha256 or not os.path.isdir(cache):
        return
    if lock_is_held(os.path.join(cache, file.path + ".lock")):
        return
    found: list[tuple[int, str]] = []
    folder = os.path.join(cache, os.path.dirname(file.path))
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if f".{file.sha256}." in name and name.endswith(".incomplete"):
            facts = os.stat(os.path.join(folder, name))
            if 0 < facts.st_size <= file.size and facts.st_blocks * 512 >= facts.st_size:
                found.append((facts.st_size, os.path.join(folder, name)))
    if found:
        size, path = max(found)
        with disk(part):
            os.replace(path, part)
        log(f"{file.path}: took over {size} bytes of an earlier download")
