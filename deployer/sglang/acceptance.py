"""How often drafts are accepted, in one definition for all versions. Pure.

The length is (accepted drafts + 1 bonus token) a verify step, in every version. The rate changed:
0.5.9 counts the bonus on both sides (length / draft tokens), 0.5.11 and newer do not
(accepted / proposed). Here the rate is always that of 0.5.11, worked out from the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployer.sglang.compat import parse_version

BONUS_COUNTED_BEFORE = (0, 5, 10)
AGREE = 0.03
"""Difference of rates within which two figures say the same."""


@dataclass(frozen=True)
class Drafts:
    """What the server proposes a step, as it resolved its own arguments."""

    steps: int
    """Longest chain of drafts that a step may accept."""
    tokens: int
    """speculative_num_draft_tokens: the drafts and the token before them."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Drafts | None:
        """From /server_info or serve arguments; None where nothing is proposed."""
        tokens = _whole(info.get("speculative_num_draft_tokens"))
        steps = _whole(info.get("speculative_num_steps"))
        topk = _whole(info.get("speculative_eagle_topk"))
        if tokens is None and steps is None:
            return None
        if steps is None or topk == 1:
            # With one branch SGLang itself makes the tokens steps + 1.
            steps = (tokens - 1) if tokens is not None else steps
        if steps is None or steps < 1:
            return None
        return cls(steps, tokens if tokens is not None else steps + 1)


@dataclass(frozen=True)
class Acceptance:
    """One measurement. `told_rate` is the server's own figure, `agrees` whether it fits."""

    length: float
    rate: float
    source: str
    told_rate: float | None = None
    agrees: bool = True


def acceptance(
    length: float | None, told_rate: float | None, drafts: Drafts, version: str, source: str
) -> Acceptance | None:
    """The measurement behind a length; None for a server that has not drafted yet."""
    if length is None or length < 1:
        return None
    rate = min(1.0, (length - 1) / drafts.steps)
    agrees = True
    if told_rate is not None:
        with_bonus, without = length / drafts.tokens, rate
        parsed = parse_version(version)
        known = [with_bonus, without]
        if parsed is not None and parsed < BONUS_COUNTED_BEFORE:
            known = [with_bonus]
        elif parsed is not None and parsed >= (0, 5, 11):
            known = [without]
        agrees = any(abs(told_rate - one) <= AGREE for one in known)
    return Acceptance(round(length, 3), round(rate, 4), source, told_rate, agrees)


def of_meta(meta: Mapping[str, Any], drafts: Drafts, version: str) -> Acceptance | None:
    """From the meta_info of one answer of /generate."""
    steps = _number(meta.get("spec_verify_ct"))
    made = _number(meta.get("completion_tokens"))
    length = _number(meta.get("spec_accept_length"))
    if length is None and steps and made:
        length = made / steps
    if length is None or steps == 0:
        return None
    return acceptance(length, _number(meta.get("spec_accept_rate")), drafts, version, "meta")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
