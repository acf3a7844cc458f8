"""Has a checkpoint a head of its own that drafts (MTP, NextN)? Pure.

SGLang does not ask: without one NEXTN loads a dense model a second time as its own draft, or drafts
with weights that were never filled in. Both start and say they are ready (seen on real servers).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from deployer.playbook import ArgValue
from deployer.sglang.compat import Problem

ALGORITHM_FLAGS = ("speculative-algorithm", "speculative-algo")
DRAFT_FLAGS = ("speculative-draft-model-path", "speculative-draft-model")
OWN_HEAD = frozenset({"NEXTN", "EAGLE"})
"""Algorithms that draft with the checkpoint's own head unless a draft model is named."""
NAMED = re.compile(r"(?:^|_)(?:mtp|nextn)(?:_|$)")
UNNAMED = ("qwen3_next", "qwen3_5")
"""Families whose config may be silent about the head that they ship."""


def has_head(config_text: str, tensors: bool | None) -> bool | None:
    """From config.json and from the tensors' names (`tensors`, None: not read); None: not known.

    The names decide: a config may promise a head that a repacked checkpoint has lost.
    """
    if tensors is not None:
        return tensors
    try:
        config = json.loads(config_text)
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    parts: list[dict[str, Any]] = [config]
    parts += [one for one in (config.get("text_config"), config.get("llm_config")) if one]
    told = [
        value
        for part in parts
        if isinstance(part, dict)
        for key, value in part.items()
        if NAMED.search(str(key)) and isinstance(value, int) and not isinstance(value, bool)
    ]
    if told:
        return any(value > 0 for value in told)
    kind = str(config.get("model_type", ""))
    return None if not kind or kind.startswith(UNNAMED) else False


def drafts_itself(args: Mapping[str, ArgValue]) -> bool:
    """Do these arguments make the checkpoint draft with a head of its own?"""
    algorithm = next((str(args[flag]) for flag in ALGORITHM_FLAGS if flag in args), "")
    if args.get("load-format") == "dummy":
        # Made-up weights, those of the head too: nothing is read from the checkpoint.
        return False
    return algorithm.upper() in OWN_HEAD and not any(args.get(flag) for flag in DRAFT_FLAGS)


def headless(args: Mapping[str, ArgValue], head: bool | None) -> list[Problem]:
    """The reason not to launch a checkpoint without a head so that it drafts with it."""
    if head is not False or not drafts_itself(args):
        return []
    return [
        Problem(
            "no-mtp-head",
            "this checkpoint has no MTP head to draft with: SGLang starts all the same, with the "
            "whole model loaded a second time as its draft, or with a head that was never filled",
            "leave out the speculative-* arguments (another variant), or name a draft model with "
            "speculative-draft-model-path",
            "real starts without MTP tensors: ready, and not a word of it",
        )
    ]
