"""`deploy migrate SRC DST`: the model moves to another host while it serves."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from deployer.cli.deadline import deadline
from deployer.cli.options import Options, common, complete_target
from deployer.cli.output import Output, print_json
from deployer.cli.report import error_dict, print_error
from deployer.errors import UsageError

if TYPE_CHECKING:
    from deployer.catalog import Catalog
    from deployer.deployment import Deployment


@click.command("migrate")
@click.argument("source", metavar="SRC", shell_complete=complete_target)
@click.argument("destination", metavar="DST", shell_complete=complete_target)
@click.option("--dry-run", is_flag=True, help="Show everything that would happen, touch nothing.")
@click.option(
    "--abort",
    is_flag=True,
    help="Take it back, in any phase: the source serves as before, the destination is stopped.",
)
@click.option(
    "--retire",
    is_flag=True,
    help="At the end stop the source's container and give its GPUs back to vfio-pci.",
)
@click.option("--keep-source", is_flag=True, help="Do not stop the source at the end.")
@common
def command(
    options: Options,
    source: str,
    destination: str,
    dry_run: bool,
    abort: bool,
    retire: bool,
    keep_source: bool,
) -> int:
    """Move a served model from SRC to DST (HOST or HOST/NAME) without a gap.

    DST is prepared, gets the weights, is launched and proven while SRC serves; then the traffic
    moves as the inventory says (`cutover`), and SRC drains and stops. Killed at any moment, the
    same command goes on. `deploy help migrate` tells more.
    """
    if retire and keep_source:
        raise UsageError("--retire and --keep-source exclude each other", fix="give one of them")
    if abort and (retire or keep_source):
        raise UsageError("--abort takes everything back", fix="leave the other flag out")
    if options.as_json and not options.yes and not dry_run:
        raise UsageError("--json never applies without --yes", fix="add --yes, or --dry-run")
    from deployer.catalog import Catalog
    from deployer.migrate import MigrateOptions, migrate

    old, new = pair(Catalog.load(options.inventory), source, destination)
    output = Output(options, show_plan=dry_run)
    asks = not options.yes and not options.jsonl and sys.stdin.isatty() and sys.stderr.isatty()
    word = "Take back" if abort else "Migrate"

    def confirm(lines: list[str]) -> bool:
        with output.question():
            for line in lines:
                click.echo(f"  {line}", err=True)
            try:
                question = f"{word} {old.id} -> {new.id}?"
                return click.confirm(question, default=False, err=True)
            except click.Abort:
                raise KeyboardInterrupt from None

    how = MigrateOptions(
        base=options.inventory,
        environ=dict(os.environ),
        dry_run=dry_run,
        abort=abort,
        retire=retire,
        keep_source=keep_source,
        confirm=confirm if asks and not dry_run else None,
    )
    try:
        with deadline(options.timeout):
            result = migrate(old, new, how, output.bus)
    finally:
        output.close()
    if options.as_json:
        error = error_dict(result.error) if result.error else None
        print_json({**result.document(), "exit_code": result.exit_code, "error": error})
    elif not options.jsonl:
        for line in result.lines if dry_run else ():
            click.echo(f"  then {line}")
        if result.done:
            click.echo(result.done)
    if result.error is not None:
        print_error(result.error)
    return result.exit_code


def pair(catalog: Catalog, source: str, destination: str) -> tuple[Deployment, Deployment]:
    """The two deployments. HOST alone means its only one, or the one named as the source's.

    Raises UsageError, DocumentError.
    """
    old = _one(catalog, source, "")
    return old, _one(catalog, destination, old.name)


def _one(catalog: Catalog, word: str, name: str) -> Deployment:
    from deployer.crosscheck_nodes import refuse_nodes

    host_name, slash, _ = word.partition("/")
    if not slash and name and name in catalog.host(host_name).deployments:
        word = f"{host_name}/{name}"
    found = catalog.select([word])
    refuse_nodes(found, "migrate")
    if len(found) != 1:
        raise UsageError(
            f"{word} has {len(found)} deployments",
            where="migrate",
            fix=f"name one of them: {', '.join(one.id for one in found)}",
        )
    return found[0]
