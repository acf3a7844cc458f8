"""Asks the installed engine's own parser before a running server is stopped for new arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.errors import DeadlineExceeded
from deployer.remote.transport import Answer, Transport
from deployer.sglang.argv import server_argv
from deployer.sglang.compat_flags import right_name
from deployer.shell import quote

FLAGS = "DEPLOYER_FLAGS "
TIMEOUT_S = 120.0
"""Importing the engine takes 10 to 20 s on a busy machine."""

PARSE = """\
import argparse, json, sys
from sglang.srt.server_args import ServerArgs


class Parser(argparse.ArgumentParser):
    def error(self, message):
        names = [name for action in self._actions for name in action.option_strings]
        print("DEPLOYER_FLAGS " + json.dumps(names))
        super().error(message)


parser = Parser(prog="sglang")
ServerArgs.add_cli_args(parser)
parser.parse_args(sys.argv[1:])
print("DEPLOYER_ARGV_ACCEPTED")
"""
"""Parses only: nothing is resolved, no GPU is touched. argparse ends with 2 when it refuses."""


@dataclass(frozen=True)
class ArgvVerdict:
    """`refused`: the parser's own words, '' when accepted. `asked` False: it could not be asked.

    `fix`: the names that the parser has for what it does not know.
    """

    asked: bool
    refused: str = ""
    problem: str = ""
    fix: str = ""


def ask_parser(transport: Transport, want: Deployment) -> ArgvVerdict:
    """Does the installed version accept the arguments of the wanted variant?"""
    python = quote(f"{want.playbook.engine.venv}/bin/python")
    try:
        answer = transport.run(
            f'exec {python} -c {quote(PARSE)} "$@"\n',
            args=server_argv(want),
            timeout_s=TIMEOUT_S,
        )
    except DeadlineExceeded as error:
        return ArgvVerdict(False, problem=error.what)
    return parse_verdict(answer)


def parse_verdict(answer: Answer) -> ArgvVerdict:
    """The verdict in the answer."""
    if "DEPLOYER_ARGV_ACCEPTED" in answer.text:
        return ArgvVerdict(True)
    lines = [line for line in answer.error_text.splitlines() if line.strip()]
    last = lines[-1].strip()[:500] if lines else f"exit code {answer.exit}"
    if answer.exit == 2 and "error:" in last:
        return ArgvVerdict(True, refused=last, fix=_fix(last, answer.text))
    return ArgvVerdict(False, problem=last)


def _fix(refused: str, said: str) -> str:
    """The right names for the flags that are refused, by the parser's own list."""
    line = next((one for one in said.splitlines() if one.startswith(FLAGS)), "")
    try:
        names = [str(name).removeprefix("--") for name in json.loads(line.removeprefix(FLAGS))]
    except ValueError:
        return ""
    if "unrecognized arguments" not in refused and "ambiguous option" not in refused:
        return ""
    wrong = [word[2:].partition("=")[0] for word in refused.split() if word.startswith("--")]
    if "ambiguous option" in refused:
        wrong = wrong[:1]
    found = {flag: right_name(flag, names) for flag in wrong}
    return "; ".join(f"{flag}: {name}" for flag, name in found.items() if name)
