"""Rules about flags that a release has or has not. Pure."""

from __future__ import annotations

from deployer.sglang.compat_case import Case, Check, Problem
from deployer.sglang.compat_machine import dotted
from deployer.sglang.parsers import PARSERS, known_parsers


def parsers(case: Case) -> list[Problem]:
    """The names of reasoning and tool parsers are argparse choices."""
    found = []
    for flag in PARSERS:
        name = case.text(flag)
        known = known_parsers(case.version, flag)
        if name and known and name not in known and name != "auto":
            found.append(
                Problem(
                    "unknown-parser",
                    f"SGLang {dotted(case.version)} has no {flag} `{name}`: argparse refuses it",
                    f"one of {', '.join(sorted(known))}",
                    "parser/reasoning_parser.py and function_call/function_call_parser.py",
                )
            )
    return found


CHECKS: tuple[Check, ...] = (parsers,)
