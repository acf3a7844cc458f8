"""What is known not to work together: SGLang version, model, arguments, GPUs, driver, lock.

The rules stand in compat_rules (a version and its flags), compat_model (a model's shape) and
compat_machine (what it is installed on); `check` applies them all. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deployer.playbook import ArgValue
from deployer.sglang import compat_flags, compat_machine, compat_model
from deployer.sglang.compat_case import Case, Check, Problem
from deployer.sglang.compat_rules import RULES
from deployer.sglang.modelshape import ModelShape
from deployer.sglang.releases import Version

__all__ = ["RULES", "Problem", "check", "parse_version"]

CHECKS: tuple[Check, ...] = (
    *compat_machine.CHECKS,
    *compat_model.CHECKS,
    *compat_flags.CHECKS,
)


def parse_version(text: str) -> Version | None:
    """`0.5.10.post1` -> (0, 5, 10, 1); None when it does not begin with a number."""
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    if not match:
        return None
    parts = [int(part) for part in match.group().split(".")]
    post = re.search(r"post(\d+)", text)
    return (*parts, int(post.group(1))) if post else tuple(parts)


def check(
    version: str,
    args: Mapping[str, ArgValue],
    model_type: str | None,
    driver: str | None,
    *,
    shape: ModelShape | None = None,
    capabilities: Sequence[str] = (),
    glibc: str | None = None,
    python: str | None = None,
    pins: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Problem]:
    """All rules that speak against this launch; an unreadable version matches none.

    What is None or empty is not known, and no rule about it applies. `capabilities`: of the GPUs,
    `8.6`; `python`: of the engine; `pins`: the engine lock, normalised name -> version.
    """
    parsed = parse_version(version)
    if parsed is None:
        return []
    case = Case(
        parsed,
        args,
        model_type or (shape.model_type if shape is not None else None) or None,
        parse_version(driver) if driver else None,
        shape,
        tuple(found for text in capabilities if (found := parse_version(text))),
        parse_version(glibc) if glibc else None,
        parse_version(python) if python else None,
        pins or {},
        env or {},
    )
    problems = [
        Problem(rule.name, rule.reason, rule.change, rule.source)
        for rule in RULES
        if rule.first <= parsed <= rule.last and rule.applies(case)
    ]
    return problems + [problem for one in CHECKS for problem in one(case)]
