"""`deploy help TOPIC`: the sample files are the documentation."""

from __future__ import annotations

import click

from deployer.cli.options import Options, common

EXIT_CODES = """\
0    done, or nothing to do
1    a step failed
2    usage, or a bad file
3    unreachable (dark, refused, wrong key, unknown or changed host key)
4    the lock is held by another run
5    a gate failed: the server answers but is not good
6    changes pending (plan --exit-code)
130  interrupted
"""


@click.command("help")
@click.argument("topic", required=False, type=click.Choice(["inventory", "playbook", "exit-codes"]))
@common
@click.pass_context
def command(ctx: click.Context, /, options: Options, topic: str | None) -> int:
    """Explain a topic: inventory, playbook, exit-codes."""
    if topic is None:
        click.echo(ctx.find_root().get_help())
    elif topic == "exit-codes":
        click.echo(EXIT_CODES, nl=False)
    else:
        from deployer.names import help_text

        click.echo(help_text("inventory" if topic == "inventory" else "playbook"), nl=False)
    return 0
