"""`deploy unlock HOST`: takes the host lock away from a run that is surely dead."""

from __future__ import annotations

import sys

import click

from deployer.catalog import Catalog
from deployer.cli.options import Options, common
from deployer.errors import UsageError
from deployer.remote.connect import open_host
from deployer.remote.hostlock import read_lock, unlock


@click.command("unlock")
@click.argument("words", nargs=-1, required=True, metavar="HOST...")
@common
def command(options: Options, words: tuple[str, ...]) -> int:
    """Release a host lock that a dead run left behind.

    A lock of a run that died on this machine is taken over by itself. This is for the others: it
    shows who holds the lock, and asks.
    """
    catalog = Catalog.load(options.inventory)
    for word in words:
        transport = open_host(word, catalog.host(word).ssh, options.inventory)
        try:
            held = read_lock(transport)
            if held is None:
                click.echo(f"{word}: the lock is free", err=True)
                continue
            who = held.record.describe() if held.record else f"run {held.run_id}"
            click.echo(f"{word}: held by {who}", err=True)
            if not options.yes:
                if not sys.stdin.isatty():
                    raise UsageError(
                        "unlock asks, and there is no terminal to ask on",
                        where=word,
                        fix="make sure that this run is dead, then use --yes",
                    )
                if not click.confirm("Is that run surely dead?", err=True):
                    continue
            unlock(transport)
            click.echo(f"{word}: unlocked", err=True)
        finally:
            transport.close()
    return 0
