"""Are all the weights there? Looked at on the target, without hashing: the download did that."""

# The target may run Python 3.9; the names are the manifest's own.
# ruff: noqa: PTH118, PTH123, PTH202, PTH208

from __future__ import annotations

import json
import os
import re
import struct
from typing import Any

Record = dict[str, Any]
INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000
HEAD_TENSOR = re.compile(r"(?:^|\.)mtp[._]|\.eh_proj\.|\.nextn[._]|(?:^|\.)mtp_")
"""Tensors of a head that drafts: qwen3_5, qwen3_next, mimo, ernie; deepseek and glm (eh_proj)."""
SHOWN = 5


def weights(command: Record) -> Record:
    """What of `files` ([name, bytes]) and of the index is missing or cut; is there an MTP head?

    {missing, wrong, cut, indexed, tensors, mtp}; `mtp` is None when no tensor name could be read.
    """
    root = str(command["path"])
    missing, wrong, cut = [], [], []
    for name, size in command.get("files") or []:
        have = _size(os.path.join(root, name))
        if have is None:
            missing.append(name)
        elif have != size:
            wrong.append(f"{name} has {have} of {size} bytes")
    names, indexed = _index(root)
    shards = sorted(set(indexed)) or sorted(
        one for one in _listed(root) if one.endswith(".safetensors")
    )
    for shard in shards:
        path = os.path.join(root, shard)
        if _size(path) is None:
            if shard not in missing:
                missing.append(shard)
            continue
        problem, tensors = _header(path)
        if problem:
            cut.append(f"{shard}: {problem}")
        if not indexed:
            names += tensors
    return {
        "missing": missing[:SHOWN],
        "wrong": wrong[:SHOWN],
        "cut": cut[:SHOWN],
        "shards": len(shards),
        "indexed": bool(indexed),
        "tensors": len(names),
        "mtp": any(HEAD_TENSOR.search(name) for name in names) if names else None,
    }


def _listed(root: str) -> list[str]:
    try:
        return os.listdir(root)
    except OSError:
        return []


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _index(root: str) -> tuple[list[str], list[str]]:
    """Names of the tensors, and of the files they stand in; both empty without an index."""
    try:
        with open(os.path.join(root, INDEX), encoding="utf-8") as file:
            table = json.load(file)["weight_map"]
        return [str(name) for name in table], [str(value) for value in table.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [], []


def _header(path: str) -> tuple[str, list[str]]:
    """What is wrong with a safetensors file, '' when its header covers it; its tensors' names."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > HEADER_LIMIT or 8 + length > size:
                return "no safetensors header", []
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((int(one["data_offsets"][1]) for one in header.values()), default=0)
        names = [str(name) for name in header]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        return f"unreadable ({type(error).__name__})", []
    if 8 + length + end != size:
        return f"its header tells of {8 + length + end} bytes, it has {size}", names
    return "", names
