"""`deploy verify`: the gates again."""

from __future__ import annotations

import dataclasses

import click

from deployer.cli.options import Options, common, in_parallel, targets
from deployer.cli.up import run_up
from deployer.engine import Selection
from deployer.reverify import verify_steps


@click.command("verify")
@targets
@in_parallel
@common
def command(options: Options, words: tuple[str, ...], all_: bool) -> int:
    """Run the gates again on a running server; exit code 5 when it is not good."""
    # A node that follows answers nothing: its verdict is that of rank 0.
    deployments = [want for want in options.select(words, all_) if not want.follows]
    return run_up(
        dataclasses.replace(options, yes=True),
        deployments,
        Selection(),
        dry_run=False,
        name="verify",
        steps=verify_steps,
    )
