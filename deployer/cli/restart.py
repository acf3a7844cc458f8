"""`deploy restart`: down, then up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import click

from deployer.catalog import Catalog
from deployer.cli.deadline import deadline
from deployer.cli.options import Options, common, targets
from deployer.cli.up import run_up
from deployer.deployment import Deployment
from deployer.down import down_steps
from deployer.engine import Selection
from deployer.errors import UsageError


@click.command("restart")
@targets
@click.option("--variant", metavar="NAME", help="Launch this variant of the playbook.")
@common
def command(options: Options, words: tuple[str, ...], all_: bool, variant: str | None) -> int:
    """Stop the server, launch it again, and run the gates."""
    if options.as_json:
        raise UsageError("restart has no --json", fix="use --jsonl, or `up --json --yes`")
    deployments = Catalog.load(options.inventory).select(list(words), all_, variant)
    with deadline(options.timeout):
        return _restart(dataclasses.replace(options, timeout=None), deployments)


def _restart(options: Options, deployments: Sequence[Deployment]) -> int:
    """One deadline over both."""
    code = run_up(
        options,
        deployments,
        Selection(),
        dry_run=False,
        name="restart",
        steps=down_steps,
        serves=False,
    )
    if code != 0:
        return code
    return run_up(options, deployments, Selection(), dry_run=False, name="restart")
