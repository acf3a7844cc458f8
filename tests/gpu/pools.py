"""The figures that a launch's own log states, and how far the plan was from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LINES = {
    "free_gib": r"Load weight begin\. avail mem=([\d.]+) GB",
    "weights_gib": r"Load weight end\..*?mem usage=(-?[\d.]+) GB",
    "slots": r"max_mamba_cache_size: (\d+)",
    "conv_gib": r"conv_state size: ([\d.]+)GB",
    "ssm_gib": r"ssm_state size: ([\d.]+)GB",
    "draft_ssm_gib": r"intermediate_ssm_state_cache size: ([\d.]+)GB",
    "draft_conv_gib": r"intermediate_conv_window_cache size: ([\d.]+)GB",
    "k_gib": r"KV Cache is allocated\. #tokens: \d+, K size: ([\d.]+) GB",
    "tokens": r"\] max_total_num_tokens=(\d+),",
    "running": r"max_running_requests=(\d+), context_len",
    "graphs_gib": r"Capture (?:\w+ )*cuda graph end\..*?mem usage=(-?[\d.]+) GB",
}
PLAN = {"slots": "slots", "tokens": "max_total_num_tokens", "running": "max_running_requests"}


def measured(log: str) -> dict[str, float]:
    """What is in the log; the first line of a kind is the target's, the second the draft's."""
    found: dict[str, float] = {}
    for name, pattern in LINES.items():
        hits = re.findall(pattern, log)
        if hits:
            found[name] = float(hits[0])
        if name in ("weights_gib", "graphs_gib") and len(hits) > 1:
            found[f"draft_{name}"] = round(sum(float(hit) for hit in hits[1:]), 3)
    if "draft_ssm_gib" in found:
        both = found["draft_ssm_gib"] + found.get("draft_conv_gib", 0.0)
        found["draft_states_gib"] = round(both, 3)
    return found


def planned(fit: Mapping[str, Any]) -> dict[str, float]:
    """The same figures out of `deploy fit --json`; {} when it says that nothing starts."""
    effective = fit.get("effective")
    if not effective:
        return {}
    out = {name: float(effective[key]) for name, key in PLAN.items() if effective[key] is not None}
    out["free_gib"] = round(fit["gpu"]["free_gib"], 3)
    out["weights_gib"] = round(fit["weights_gib"]["target"], 3)
    out["draft_states_gib"] = round(fit["memory_gib"]["draft_states"], 3)
    return out


def errors(plan: Mapping[str, float], actual: Mapping[str, float]) -> dict[str, float]:
    """(plan - actual) in percent of the actual value, where both are known and it is not 0."""
    return {
        name: round(100 * (plan[name] - actual[name]) / actual[name], 3)
        for name in plan
        if actual.get(name)
    }
