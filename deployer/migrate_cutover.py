"""Which way the traffic moves: what the inventory names."""

from __future__ import annotations

from collections.abc import Callable

from deployer.migrate_address import AddressWay
from deployer.migrate_hook import HookWay
from deployer.migrate_router import RouterWay
from deployer.migrate_side import Side
from deployer.migrate_way import NoWay, Way, cutover_of
from deployer.state import Migration

KINDS: dict[str, type[Way]] = {
    "router": RouterWay,
    "hook": HookWay,
    "address": AddressWay,
    "none": NoWay,
}


def way_of(source: Side, destination: Side, record: Migration, save: Callable[[], None]) -> Way:
    """The one of the inventory. `save` writes the journal."""
    rules = cutover_of(source.want, destination.want)
    return KINDS[rules.kind](source, destination, rules, record, save)
