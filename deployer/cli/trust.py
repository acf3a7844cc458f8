"""`deploy trust HOST`: record a host key after its fingerprint was compared."""

from __future__ import annotations

from collections.abc import Iterator

import click

from deployer.catalog import Catalog
from deployer.cli.ask import agreed
from deployer.cli.options import Options, common
from deployer.errors import UsageError
from deployer.inventory import Ssh
from deployer.remote.trust import Offered, fetch, record


@click.command("trust")
@click.argument("words", nargs=-1, required=True, metavar="HOST...")
@common
def command(options: Options, words: tuple[str, ...]) -> int:
    """Record a host's SSH key after you have compared its fingerprint.

    Shows the key that the host (and each of its containers with an SSH of its own) offers now, and
    asks. `--yes` records it unseen: only sensible where nobody can stand in between. A key that
    *changed* is never replaced: remove the old line yourself, once you know why.
    """
    catalog = Catalog.load(options.inventory)
    for word in words:
        for name, ssh in _machines(catalog, word):
            while not _recorded(fetch(name, ssh, options.inventory), options):
                continue
    return 0


def _recorded(offered: Offered, options: Options) -> bool:
    """Shows and records one key. True when nothing is left to record on the way to the machine."""
    name = f"{offered.name} ({offered.place})"
    click.echo(f"{name}: {offered.key_type} {offered.fingerprint}", err=True)
    if offered.known:
        click.echo(f"{name}: recorded in {offered.path}", err=True)
        return True
    if not agreed(
        "Is this the fingerprint that the host itself shows?",
        command="trust",
        where=name,
        yes=options.yes,
        fix="compare the fingerprint, then run it with --yes",
    ):
        raise UsageError("not recorded", where=name, fix="find out whose key it is")
    record(offered)
    return False


def _machines(catalog: Catalog, word: str) -> Iterator[tuple[str, Ssh]]:
    host = catalog.host(word)
    yield word, host.ssh
    for vmid, container in host.containers.items():
        if container.ssh is not None:
            yield f"{word}/{vmid}", container.ssh
