"""`deploy unlock HOST`: takes the host lock away from a run that is surely dead."""

from __future__ import annotations

import click

from deployer.catalog import Catalog
from deployer.cli.ask import agreed
from deployer.cli.deadline import deadline
from deployer.cli.options import Options, common, complete_target
from deployer.cli.plain import printable
from deployer.cli.report import each
from deployer.inventory import Host
from deployer.remote.connect import open_host
from deployer.remote.hostlock import read_lock, unlock


@click.command("unlock")
@click.argument("words", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_target)
@common
def command(options: Options, words: tuple[str, ...]) -> int:
    """Release a host lock that a dead run left behind.

    A lock of a run that died on this machine is taken over by itself. This is for the others: it
    shows who holds the lock, and asks.
    """
    options.only_talks("unlock")
    catalog = Catalog.load(options.inventory)
    hosts = {word: catalog.host(word) for word in words}
    with deadline(options.timeout):
        return each(words, lambda word: _unlock(word, hosts[word], options))


def _unlock(word: str, host: Host, options: Options) -> None:
    transport = open_host(word, host.ssh, options.inventory)
    try:
        seen = read_lock(transport)
        if seen is None:
            click.echo(f"{word}: the lock is free", err=True)
            return
        click.echo(printable(f"{word}: held by {seen.held.describe()}"), err=True)
        if not agreed(
            "Is that run surely dead?",
            command="unlock",
            where=word,
            yes=options.yes,
            fix="make sure that this run is dead, then use --yes",
        ):
            return
        done = unlock(transport, seen)
        click.echo(f"{word}: {'unlocked' if done else 'the lock is free'}", err=True)
    finally:
        transport.close()
