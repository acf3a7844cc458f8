"""The one question of a command that must not be answered by a script that nobody watches."""

from __future__ import annotations

import sys

import click

from deployer.errors import UsageError


def agreed(question: str, *, command: str, where: str, yes: bool, fix: str) -> bool:
    """The person's answer; True with `--yes`. Raises UsageError when nobody can be asked."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            f"{command} asks, and there is no terminal to ask on", where=where, fix=fix
        )
    return click.confirm(question, err=True)
