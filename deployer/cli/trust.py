"""`deploy trust HOST`: record a host key after its fingerprint was compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import click

from deployer import names
from deployer.catalog import Catalog
from deployer.cli.ask import agreed
from deployer.cli.deadline import deadline
from deployer.cli.direct import Way, direct, retold, ssh_of
from deployer.cli.options import Options, common, complete_target
from deployer.cli.report import each
from deployer.errors import Unreachable, UsageError
from deployer.inventory import Ssh
from deployer.remote.connect import open_host
from deployer.remote.hostkeys import HostKey
from deployer.remote.trust import Offered, fetch, record, seen_by_host


@click.command("trust")
@click.argument(
    "words", nargs=-1, required=True, metavar="HOST[/VMID]...", shell_complete=complete_target
)
@direct
@common
def command(options: Options, words: tuple[str, ...], way: Way) -> int:
    """Record a host's SSH key after you have compared its fingerprint.

    Shows the key that the host (and each of its containers with an SSH of its own) offers now, and
    asks. `--yes` records it unseen: only sensible where nobody can stand in between. A key that
    *changed* is never replaced: remove the old line yourself, once you know why. What a container
    offers is compared with what its host reads in it, where the host can be asked.
    HOST/VMID is one container alone.

    USER@HOST is a machine that no inventory names yet; --port and the like are for it.
    """
    options.only_talks("trust")
    named = [word for word in words if "@" not in word]
    if named and way.given:
        raise UsageError(
            f"how {names.listed(named)} is reached stands in the inventory",
            fix="leave out --port, --identity-file, --known-hosts and --gateway",
        )
    catalog = Catalog.load(options.inventory) if named else None
    machines = {word: [*_machines(catalog, word)] for word in named} if catalog else {}

    def work(word: str) -> None:
        if catalog is None or word not in machines:
            _direct(word, way, options)
        else:
            _trust(word, machines[word], catalog, options)

    with deadline(options.timeout):
        return each(words, work)


def _trust(
    word: str, machines: Sequence[tuple[str, Ssh, int | None]], catalog: Catalog, options: Options
) -> None:
    """A host and its containers, or one of them."""
    for name, ssh, vmid in machines:
        host = word.partition("/")[0]
        inside = partial(_inside, catalog, host, vmid, options) if vmid is not None else None
        while not _recorded(fetch(name, ssh, options.inventory), options, inside):
            continue


def _direct(word: str, way: Way, options: Options) -> None:
    """Of a machine that no inventory names."""
    ssh = ssh_of(word, way)
    try:
        while not _recorded(fetch(word, ssh, Path.cwd()), options):
            continue
    except Unreachable as error:
        raise retold(error, word, way) from error


def _inside(catalog: Catalog, word: str, vmid: int, options: Options) -> tuple[HostKey, ...]:
    """The container's keys as its host reads them; () when the host cannot be asked."""
    host = open_host(word, catalog.host(word).ssh, options.inventory)
    try:
        return seen_by_host(host, vmid)
    except Unreachable:
        return ()
    finally:
        host.close()


def _recorded(
    offered: Offered, options: Options, inside: Callable[[], tuple[HostKey, ...]] | None = None
) -> bool:
    """Shows and records one key. True when nothing is left to record on the way to the machine."""
    name = f"{offered.name} ({offered.place})"
    click.echo(f"{name}: {offered.key_type} {offered.fingerprint}", err=True)
    if offered.known:
        click.echo(f"{name}: recorded in {offered.path}", err=True)
        return True
    if inside is not None and "(gateway " not in offered.name:
        _compare(offered, inside())
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


def _compare(offered: Offered, keys: tuple[HostKey, ...]) -> None:
    """Tells whether the host reads the same key in the container. Raises UsageError when not."""
    name = f"{offered.name} ({offered.place})"
    if offered.key in keys:
        click.echo(f"{name}: its host reads the same key in the container", err=True)
    elif any(key.type == offered.key.type for key in keys):
        shown = ", ".join(key.fingerprint for key in keys if key.type == offered.key.type)
        raise UsageError(
            f"another machine answers there: in the container its host reads {shown}",
            where=name,
            fix="correct the address of the container in the inventory",
        )


def _machines(catalog: Catalog, word: str) -> Iterator[tuple[str, Ssh, int | None]]:
    """The host and its containers with an sshd; of HOST/VMID that container alone."""
    name, _, only = word.partition("/")
    host = catalog.host(name)
    inside = {str(vmid): one for vmid, one in host.containers.items() if one.ssh is not None}
    if only and only not in inside:
        raise UsageError(
            f"no container `{only}` of {name} has an SSH of its own in the inventory",
            fix=f"containers of {name} that have: {names.listed(inside)}",
        )
    if not only:
        yield name, host.ssh, None
    for vmid, container in inside.items():
        if container.ssh is not None and only in ("", vmid):
            yield f"{name}/{vmid}", container.ssh, int(vmid)
