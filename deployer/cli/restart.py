"""`deploy restart`: as `up`, but the launch that runs is stopped in any case."""

from __future__ import annotations

import click

from deployer.cli.options import Options, common, in_parallel, rolls_out, targets
from deployer.cli.up import run_up
from deployer.engine import Selection
from deployer.errors import UsageError
from deployer.restart import restart_steps


@click.command("restart")
@targets
@in_parallel
@rolls_out
@click.option("--variant", metavar="NAME", help="Launch this variant of the playbook.")
@common
def command(
    options: Options,
    words: tuple[str, ...],
    all_: bool,
    variant: str | None,
    canary: bool | None,
    max_failures: int | None,
) -> int:
    """Stop the server, launch it again, and run the gates.

    Nothing is stopped when the new launch would be refused: by the rules, by the engine's own
    parser, or by its memory arithmetic.
    """
    if options.as_json and not options.yes:
        raise UsageError("--json never applies without --yes", fix="add --yes")
    deployments = options.select(words, all_, variant)
    return run_up(
        options,
        deployments,
        Selection(),
        dry_run=False,
        name="restart",
        steps=restart_steps,
        canary=canary,
        max_failures=max_failures,
    )
