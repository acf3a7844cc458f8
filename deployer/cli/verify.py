"""`deploy verify`: the gates again."""

from __future__ import annotations

import dataclasses

import click

from deployer.as_running import running
from deployer.cli.options import Options, common, in_parallel, targets
from deployer.cli.up import run_up
from deployer.engine import Selection
from deployer.multinode_reverify import verify_nodes
from deployer.reverify import verify_steps
from deployer.up_options import UpOptions


@click.command("verify")
@targets
@in_parallel
@common
def command(options: Options, words: tuple[str, ...], all_: bool) -> int:
    """Run the gates again on a running server; exit code 5 when it is not good.

    What is asked is the server that runs, also where the playbook wants another one by now.
    """
    asked = options.select(words, all_)
    deployments = running(asked, UpOptions(options.inventory).deploy_dir)
    return run_up(
        dataclasses.replace(options, yes=True),
        deployments,
        Selection(),
        dry_run=False,
        name="verify",
        steps=verify_steps,
        up_server=verify_nodes,
    )
