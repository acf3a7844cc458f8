"""Really reads the model folder: which shards are there, every header, every size."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEADER_LIMIT = 100_000_000


class SafetensorError(Exception):
    """As raised by the safetensors library."""

    __module__ = "safetensors._safetensors_rust"


@dataclass(frozen=True)
class Found:
    """The shards on disk, and the names of those that the index wants but the folder lacks."""

    files: list[Path]
    missing: list[str]


def prepare_weights(folder: str) -> Found:
    """Like the real loader: what lies there is loaded; a missing shard is no error."""
    root = Path(folder)
    files = sorted(root.glob("*.safetensors"))
    wanted: set[str] = set()
    index = root / "model.safetensors.index.json"
    if index.exists():
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [f for f in files if f.name in wanted]
    if not files:
        raise RuntimeError(f"Cannot find any model weights with `{folder}`")
    return Found(files, sorted(wanted - {f.name for f in files}))


def load(found: Found) -> Iterator[int]:
    """Yields the tensor bytes of one shard after another. Raises SafetensorError."""
    for path in found.files:
        yield load_file(path)


def load_file(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(8)
        if len(head) < 8:
            raise SafetensorError("Error while deserializing header: header too small")
        (length,) = struct.unpack("<Q", head)
        if length > HEADER_LIMIT:
            raise SafetensorError("Error while deserializing header: header too large")
        if 8 + length > size:
            raise SafetensorError("Error while deserializing header: invalid header length")
        try:
            header = json.loads(f.read(length))
        except ValueError as e:
            raise SafetensorError(
                f"Error while deserializing header: invalid JSON in header: {e}"
            ) from None
        header.pop("__metadata__", None)
        data = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
        if 8 + length + data != size:
            raise SafetensorError(
                "Error while deserializing header: incomplete metadata, file not fully covered"
            )
        # A file that is mostly holes stands for a large model: nothing is there to be read.
        while path.stat().st_blocks * 512 > size // 2 and f.read(1 << 20):
            continue
    return data
