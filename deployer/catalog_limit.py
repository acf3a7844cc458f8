"""What `--limit` leaves of the hosts and deployments that are meant. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deployer.errors import UsageError
from deployer.inventory import DeploymentEntry, Host
from deployer.names import did_you_mean, like, listed, parts_of, shown


def check_limit(limit: Sequence[str], hosts: Mapping[str, Host], inventory_dir: Path) -> None:
    """Each pattern of it must be like something: one misspelt leaves out, or in, what it named.

    Raises UsageError.
    """
    known = [*hosts]
    known += [f"{host}/{name}" for host, one in hosts.items() for name in one.deployments]
    parts = parts_of(limit)
    if not parts:
        # As of a variable that is not set: it must not mean all of them.
        raise UsageError("--limit is empty", fix="name hosts, or leave it out")
    for part in parts:
        name = part.removeprefix("!")
        if name[:1] in ("", "!") or not like([name], known):
            raise UsageError(
                f"--limit: nothing of the inventory is like `{part}`{did_you_mean(name, known)}",
                where=shown(inventory_dir),
                fix=f"hosts: {listed(hosts)}",
            )


def limited(
    chosen: Mapping[tuple[str, str], DeploymentEntry], patterns: Sequence[str], *, bare: bool
) -> dict[tuple[str, str], DeploymentEntry]:
    """Those that `--limit` leaves. Raises UsageError when that is none, unless `bare`."""
    left = {
        key: entry
        for key, entry in chosen.items()
        if like(patterns, (key[0], f"{key[0]}/{key[1]}"))
    }
    if not left and not bare:
        raise UsageError(
            f"--limit {' '.join(patterns)} leaves nothing",
            fix=f"without it: {listed(f'{host}/{name}' for host, name in chosen)}",
        )
    return left
