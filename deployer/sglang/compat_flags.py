"""Rules about flags: what a release's own parser would refuse. Pure.

The parser that is installed on the target is asked too before a server is stopped
(steps/stop_argv.py); this says it before anything is installed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from deployer.sglang.compat_case import Case, Check, Problem
from deployer.sglang.compat_machine import dotted
from deployer.sglang.flagtable import RENAMED, flags_of
from deployer.sglang.parsers import PARSERS, known_parsers

OWN_RULE = frozenset(
    {
        *("mamba-scheduler-strategy", "mamba-radix-cache-strategy"),
        *("cuda-graph-max-bs", "cuda-graph-bs"),
    }
)
"""Flags that have a rule with more words in compat_rules."""


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


def flags(case: Case) -> list[Problem]:
    """Every flag must be one of the release's, or an unambiguous beginning of one."""
    known = flags_of(case.version)
    found = []
    for flag, value in case.args.items():
        if not known or value is False or flag in known or flag in OWN_RULE:
            continue
        longer = sorted(name for name in known if name.startswith(flag))
        if len(longer) == 1:
            continue
        reason = f"SGLang {dotted(case.version)} has no flag --{flag}: argparse refuses it"
        if longer:
            reason = f"--{flag} is ambiguous in SGLang {dotted(case.version)}"
        found.append(
            Problem(
                "ambiguous-flag" if longer else "unknown-flag",
                reason,
                right_name(flag, known) or f"take {flag} out of serve.args",
                "argparse of the release was run (deployer/sglang/flagtable.py)",
            )
        )
    return found


def right_name(flag: str, known: Iterable[str]) -> str:
    """What to write instead of a flag that is not known: renamed, completed, or close; '' if none.

    `known`: the parser's own flags, without dashes.
    """
    names = sorted(set(known))
    dashed = flag.replace("_", "-")
    if dashed != flag and dashed in names:
        return f"serve.args {dashed} (dashes)"
    renamed = RENAMED.get(dashed)
    if renamed in names:
        return f"serve.args {renamed} (its name there)"
    longer = [name for name in names if name.startswith(dashed)]
    near = longer or difflib.get_close_matches(dashed, names, n=3, cutoff=0.75)
    return f"one of serve.args {', '.join(near[:6])}" if near else ""


CHECKS: tuple[Check, ...] = (parsers, flags)
