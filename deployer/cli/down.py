"""`deploy down`: stop, and prove it."""

from __future__ import annotations

import click

from deployer.as_running import running
from deployer.cli.options import Options, common, in_parallel, targets
from deployer.cli.up import run_up
from deployer.down import down_steps
from deployer.engine import Selection
from deployer.errors import UsageError
from deployer.up_options import UpOptions


@click.command("down")
@targets
@in_parallel
@click.option("--dry-run", is_flag=True, help="Show what would be stopped.")
@common
def command(options: Options, words: tuple[str, ...], all_: bool, dry_run: bool) -> int:
    """Stop the deployment's server, and prove that it is gone.

    Only a launch of this tool is stopped; a server that somebody else started is left alone.
    """
    if options.as_json and not options.yes and not dry_run:
        raise UsageError("--json never applies without --yes", fix="add --yes, or --dry-run")
    # Its port may be another one than the playbook's by now, and its place at a router too.
    folder = UpOptions(options.inventory).deploy_dir
    deployments = running(options.select(words, all_), folder)
    return run_up(
        options,
        deployments,
        Selection(),
        dry_run=dry_run,
        name="down",
        steps=down_steps,
        serves=False,
    )
