"""The network entries (`netN`) of a container's configuration. Pure.

`name=eth1,bridge=vmbr1,hwaddr=BC:24:11:00:00:50,ip=192.0.2.50/24,gw=..,tag=7,type=veth`: sub-keys
in any order, `type` written by pct itself (pct(1), man page of pve-container 6).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

NET = re.compile(r"^net\d+$")


def net_options(value: str) -> list[tuple[str, str]]:
    """`name=eth1,bridge=vmbr0,...` as pairs, in order."""
    pairs = [part.partition("=") for part in value.split(",") if part]
    return [(key, text) for key, _, text in pairs]


def has_address(value: str | None, cidr: str) -> bool:
    """Does the entry hold this address, with this prefix length, as `ip` or `ip6`?"""
    options = dict(net_options(value or ""))
    return cidr in (options.get("ip"), options.get("ip6"))


def host_part(cidr: str) -> str:
    """The address without its prefix length."""
    return cidr.partition("/")[0]


def where_address(keys: Mapping[str, str], cidr: str) -> tuple[str, str] | None:
    """(key, its `ip` or `ip6`) of the entry that has the same address, whatever the prefix."""
    wanted = _number(cidr)
    for key, value in sorted(keys.items()):
        if not NET.match(key):
            continue
        for name, text in net_options(value):
            if name in ("ip", "ip6") and wanted is not None and _number(text) == wanted:
                return key, text
    return None


def _number(cidr: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host_part(cidr))
    except ValueError:
        return None


def for_container(value: str, keys: Mapping[str, str]) -> str:
    """The entry as another container gets it: an interface name that is free there.

    The MAC address goes along: neighbours and switches know the address by it.
    """
    kept = [(key, text) for key, text in net_options(value) if key not in ("name", "type")]
    names = {dict(net_options(one)).get("name") for key, one in keys.items() if NET.match(key)}
    wanted = dict(net_options(value)).get("name", "eth0")
    free = (f"eth{n}" for n in range(len(names) + 1))
    name = wanted if wanted not in names else next(one for one in free if one not in names)
    return ",".join(f"{key}={text}" for key, text in [("name", name), *kept])
