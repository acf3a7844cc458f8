"""The address of a cut-over as containers' configurations have it. Pure: facts in, words out."""

from __future__ import annotations

from collections.abc import Mapping

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.inventory import AddressCutover
from deployer.pct_net import NET, for_container, has_address, net_options, where_address
from deployer.steps.container_facts import ContainerFacts

Row = tuple[str, str]
"""What speaks against it, and what to do."""


def holds(seen: ContainerFacts, rule: AddressCutover) -> str | None:
    """The network entry of the container that has the address; None when it has it not."""
    value = seen.config().current.keys.get(rule.interface)
    return value if has_address(value, rule.ip) else None


def moved(old: str, rule: AddressCutover, seen: ContainerFacts) -> str:
    """The entry for the other container.

    Raises StepFailed when the key is taken there by another address, or when there is no entry.
    """
    if not old:
        raise StepFailed(
            f"no container has {rule.ip} on {rule.interface}", fix="correct it by hand"
        )
    keys: Mapping[str, str] = seen.config().current.keys
    if rule.interface in keys:
        raise StepFailed(
            f"{rule.interface} of the other container is in use: {keys[rule.interface]}",
            fix="choose another cutover.address.interface, free in both containers",
        )
    return for_container(old, keys)


def of_container(
    rule: AddressCutover, want: Deployment, seen: ContainerFacts, *, loses: bool
) -> list[Row]:
    """Of one container; `loses`: it must have the address, else there must be room for it."""
    config = seen.config()
    keys = config.current.keys
    value = keys.get(rule.interface)
    name = f"container {want.vmid} on {want.host_name}"
    found: list[Row] = []
    if config.lock:
        found.append((f"{name} is locked ({config.lock})", "wait for that task to end"))
    if rule.interface in config.pending.keys or rule.interface in config.delete:
        what = f"{rule.interface} of {name} has a change that waits for its next start"
        fix = f"`pct set {want.vmid} --revert {rule.interface}`, or restart the container"
        found.append((what, fix))
    if has_address(value, rule.ip):
        return found
    there = where_address(keys, rule.ip)
    if not loses:
        if there is not None and there[0] != rule.interface:
            what = f"{name} has that address already: {there[1]} on {there[0]}"
            found.append((what, f"`pct set {want.vmid} --delete {there[0]}`, or another ip"))
        if value is not None:
            what = f"{rule.interface} of {name} is in use: {value}"
            fix = "choose another cutover.address.interface, free in both containers"
            found.append((what, fix))
    elif there is not None:
        key, text = there
        found.append(
            (
                f"{name} has it as {text} on {key}, not as {rule.ip} on {rule.interface}",
                f"set cutover.address to interface {key}, ip {text}",
            )
        )
    else:
        has = f"; that is {value}" if value else ""
        what = f"{name} does not have {rule.ip} on {rule.interface}{has}"
        found.append((what, "correct cutover.address"))
    return found


def default_routes(
    rule: AddressCutover,
    want: Deployment,
    source: ContainerFacts | None,
    destination: ContainerFacts | None,
) -> list[Row]:
    """A gateway in the entry goes along: there would be two, or none where it was.

    `want`: the source, which still has to be reached afterwards.
    """
    old, new = _keys(source), _keys(destination)
    value, found = old.get(rule.interface), []
    for key in ("gw", "gw6") if has_address(value, rule.ip) else ():
        gateway = dict(net_options(value or "")).get(key)
        if gateway is None:
            continue
        where = f"{rule.interface} has the gateway {gateway}, which would go along; "
        fix = f"take {key}= out of {rule.interface}, or use cutover.hook"
        if others := gateways(new, key, rule.interface):
            what = f"the other container has one on {', '.join(others)} already"
            found.append((where + what, fix))
        by_ssh = want.container is not None and want.container.ssh is not None
        if by_ssh and not gateways(old, key, rule.interface):
            found.append((f"{where}SSH to container {want.vmid} may need it", fix))
    return found


def _keys(seen: ContainerFacts | None) -> Mapping[str, str]:
    return seen.config().current.keys if seen is not None and seen.exists else {}


def gateways(keys: Mapping[str, str], key: str, but: str) -> list[str]:
    """The network entries with a gateway (`gw` or `gw6`), other than `but`."""
    return [
        name
        for name, value in sorted(keys.items())
        if NET.match(name) and name != but and key in dict(net_options(value))
    ]
