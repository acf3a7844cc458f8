"""The parsers of 0.5.9, 0.5.11 and 0.5.23: every flag with its names, type, choices and default.

`flags_*.json` was read out of the argparse of each release; other versions use the parser of the
newest one that is not newer than they are.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Callable
from importlib import resources
from typing import Any

from sglang.version import RELEASE

FILES = (((0, 5, 20), "0523"), ((0, 5, 10), "0511"), ((0,), "0509"))
ATTRIBUTES = {
    "tensor_parallel_size": "tp_size",
    "data_parallel_size": "dp_size",
    "pipeline_parallel_size": "pp_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}
"""Names that 0.5.9 and 0.5.11 change between argparse and ServerArgs."""


def human_readable_int(text: str) -> int:
    """4096, 32k, 1M or 1Ki; case matters."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g|M|G|Ki|Mi|Gi)?", text)
    units = {None: 1, "k": 1000, "m": 10**6, "M": 10**6, "g": 10**9, "G": 10**9}
    units |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    if not m or m[2] not in units:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return int(float(m[1]) * units[m[2]])


def nullable_str(text: str) -> str | None:
    return text or None


def json_list_type(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"Invalid JSON list: {text}. Please provide a valid JSON list."
        ) from None


TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "loads": json.loads,
    "human_readable_int": human_readable_int,
    "nullable_str": nullable_str,
    "json_list_type": json_list_type,
}


class Deprecated(argparse.Action):
    """Says so and does nothing else."""

    def __init__(self, option_strings: Any, dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        warnings.warn(
            f"The command line argument '{option}' is deprecated and will be removed in future "
            "versions.",
            stacklevel=1,
        )


def recorded() -> list[dict[str, Any]]:
    """The flags of this version."""
    name = next(name for first, name in FILES if first <= RELEASE)
    text = resources.files("sglang.srt").joinpath(f"flags_{name}.json").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(text)
    return found


def add_all(parser: argparse.ArgumentParser) -> None:
    """Every flag of this version."""
    for row in recorded():
        options: dict[str, Any] = {"dest": row["dest"], "default": row.get("default")}
        kind = row["kind"]
        if kind == "true":
            options["action"] = "store_true"
        elif kind == "yesno":
            options["action"] = argparse.BooleanOptionalAction
        elif kind == "deprecated":
            options["action"] = Deprecated
        elif kind == "value":
            for key in ("nargs", "choices"):
                if key in row:
                    options[key] = row[key]
            if "type" in row:
                options["type"] = TYPES[row["type"]]
            options["required"] = row.get("required", False)
        else:
            options |= {"choices": row.get("choices"), "required": False}
        parser.add_argument(*row["flags"], **options)


def attribute(dest: str) -> str:
    """The name in ServerArgs."""
    return ATTRIBUTES.get(dest, dest)
