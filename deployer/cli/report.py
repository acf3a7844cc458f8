"""How an error looks: one line what, then the evidence, then what to do."""

from __future__ import annotations

import sys

import click

from deployer.cli.plain import printable
from deployer.errors import DeployError

EVIDENCE_LINES = 12


def error_lines(error: DeployError) -> list[str]:
    """The lines of an error, the action last."""
    head = f"{error.where}: {error.what}" if error.where else error.what
    lines = [f"deploy: {head}"]
    lines += [f"  | {line}" for line in error.evidence[-EVIDENCE_LINES:]]
    if error.fix:
        lines.append(f"  -> {error.fix}")
    return [printable(line) for line in lines]


def print_error(error: DeployError) -> None:
    """On stderr; red on a terminal that wants colour."""
    lines = error_lines(error)
    click.secho(lines[0], fg="red", err=True, color=None if sys.stderr.isatty() else False)
    for line in lines[1:]:
        click.echo(line, err=True)


def error_dict(error: DeployError) -> dict[str, object]:
    """The JSON form."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "fix": error.fix,
        "evidence": list(error.evidence),
        "exit_code": error.exit_code,
    }
