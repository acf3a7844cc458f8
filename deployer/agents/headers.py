"""Sums up the safetensors headers of a model's folder. Runs on the target: Python 3.9+, stdlib.

    python3 -I -S headers.py FOLDER [KNOWN [FILE...]]

prints one JSON object: {"files": N, "groups": {"target"|"draft"|"vision": {DTYPE: BYTES}},
"signature": TEXT, "read": N}, or {"problem": TEXT}. Only headers are read, and no more than LIMIT
bytes of them; none when KNOWN, or the text of a FILE, is an earlier answer and every file still has
the size, time, inode and device of then.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

LIMIT = 256 * 1024 * 1024
"""Of all headers together; the largest models have a tenth of it."""
DRAFT = re.compile(r"(^|\.)(mtp|nextn|eagle)(\.|_|$)")
VISION = re.compile(r"(^|\.)(visual|vision_tower|vision_model|vision_encoder|mm_projector)(\.|$)")
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def group_of(name: str, layers: int) -> str:
    """The part of the model that a tensor belongs to; layers beyond `layers` are a draft head."""
    if DRAFT.search(name):
        return "draft"
    if VISION.search(name):
        return "vision"
    place = LAYER.search(name)
    if layers and place and int(place.group(2)) >= layers:
        return "draft"
    return "target"


def layers_of(folder: Path) -> int:
    """`num_hidden_layers` of the text model; 0 when config.json does not say it."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return 0
    if not isinstance(config, dict):
        return 0
    text = config.get("text_config") or config
    count = text.get("num_hidden_layers") if isinstance(text, dict) else 0
    return count if isinstance(count, int) else 0


def read_header(path: Path, room: int) -> tuple[dict[str, Any], int]:
    """The header of one file and its length. Raises OSError and ValueError."""
    with path.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise ValueError(f"{path} is too short")
        length = int(struct.unpack("<Q", start)[0])
        if length > room:
            raise ValueError(f"the header of {path} is too long")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {path} is no object")
    return header, length


def names_in(folder: Path) -> list[str]:
    """The files that the index names, else all safetensors files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    return sorted(path.name for path in folder.glob("*.safetensors"))


def summary(folder: Path) -> dict[str, Any]:
    """What the tensors of a model's folder weigh. Raises OSError and ValueError."""
    layers, room = layers_of(folder), LIMIT
    groups: dict[str, dict[str, int]] = {}
    names = names_in(folder)
    for name in names:
        header, length = read_header(folder / name, room)
        room -= length
        for tensor, told in header.items():
            if tensor == "__metadata__":
                continue
            begin, end = told["data_offsets"]
            kinds = groups.setdefault(group_of(tensor, layers), {})
            kinds[told["dtype"]] = kinds.get(told["dtype"], 0) + end - begin
    return {"files": len(names), "groups": groups}


def signature(folder: Path) -> str:
    """Over name, size, time in ns, inode and device of all files that the summary depends on."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        try:
            info = path.stat()
        except OSError:
            # A link to nothing: it is one of its names, and cannot be read either.
            digest.update(f"{path.name}\n".encode("utf-8", "surrogateescape"))
            continue
        told = f"{path.name} {info.st_size} {info.st_mtime_ns} {info.st_ino} {info.st_dev}\n"
        digest.update(told.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def known(words: list[str], mark: str) -> dict[str, Any] | None:
    """The earlier answer that still holds: of the text, else of the files."""
    for text in [words[0], *map(text_of, words[1:])] if words else []:
        try:
            told = json.loads(text)
        except ValueError:
            continue
        if isinstance(told, dict) and told.get("signature") == mark and "groups" in told:
            return told
    return None


def text_of(path: str) -> str:
    """The text of a small file, '' when there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(65536)
    except OSError:
        return ""


def main(argv: list[str]) -> int:
    """Prints the summary, or the problem; always ends with 0."""
    try:
        folder = Path(argv[1])
        mark = signature(folder)
        told = known(argv[2:], mark)
        if told is None:
            # The files are looked at first: one that changes while it is read is read again.
            told = {**summary(folder), "signature": mark}
            told["read"] = told["files"]
        else:
            told["read"] = 0
        print(json.dumps(told))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(json.dumps({"problem": f"{type(error).__name__}: {error}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
