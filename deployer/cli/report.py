"""How an error looks: one line what, then the evidence, then what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import click

from deployer.cli.plain import printable
from deployer.errors import AGAIN, CommandOverdue, DeployError, UsageError

EVIDENCE_LINES = 12


def error_lines(error: DeployError) -> list[str]:
    """The lines of an error, the action last."""
    head = f"{error.where}: {error.what}" if error.where else error.what
    lines = [f"deploy: {head}"]
    lines += [f"  | {line}" for line in error.evidence[-EVIDENCE_LINES:]]
    lines.append(f"  -> {error.fix or _way(error)}")
    return [printable(line) for line in lines]


def _way(error: DeployError) -> str:
    """What to do about an error that does not know itself."""
    if error.exit_code == UsageError.exit_code:
        return "correct it, then run the same command again"
    if error.evidence:
        return "correct what the lines above say, then run the same command again"
    return AGAIN


def print_error(error: DeployError) -> None:
    """On stderr; red on a terminal that wants colour."""
    lines = error_lines(error)
    click.secho(lines[0], fg="red", err=True, color=None if sys.stderr.isatty() else False)
    for line in lines[1:]:
        click.echo(line, err=True)


def each(words: Iterable[str], work: Callable[[str], None]) -> int:
    """`work` for one word after the other, whatever becomes of those before; the exit code.

    Each error is printed when it comes up; an interrupt and the command's deadline end it.
    """
    # Only now: who merely tells of an error has no need of all that it brings along.
    from deployer.fleet import exit_code

    errors: list[DeployError] = []
    for word in dict.fromkeys(words):
        try:
            work(word)
        except CommandOverdue:
            raise
        except DeployError as error:
            print_error(error)
            errors.append(error)
    return exit_code(errors)


def error_dict(error: DeployError) -> dict[str, object]:
    """The JSON form."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "fix": error.fix or _way(error),
        "evidence": list(error.evidence),
        "exit_code": error.exit_code,
    }
