"""What one key says about another: GPUs and containers that exist, ports that do not clash.

Pure: a parsed file and its model in, DocumentError out. A model alone cannot see these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deployer.crosscheck_twin import refuse_twin
from deployer.deployment import Deployment
from deployer.document import Document
from deployer.inventory import Container, Cutover, Host
from deployer.names import did_you_mean, listed
from deployer.yamltree import At


def check_host(document: Document, name: str, host: Host) -> None:
    """The references within one host. Raises DocumentError for the first that is wrong."""
    at: At = ("hosts", name)
    if host.kind == "plain" and host.containers:
        raise document.error(
            (*at, "containers"),
            f"hosts.{name} is a plain host and has no containers",
            fix="remove `containers:`, or write `kind: proxmox`",
            key=True,
        )
    addresses = [gpu.address for gpu in host.gpus]
    for index, address in enumerate(addresses):
        place = (*at, "gpus", index, "address")
        if not address.endswith(".0"):
            raise document.error(
                place,
                f"{document.name(place)}: expected function 0 of a GPU, found {address}",
                fix=f"write {address[:-1]}0; its other functions are found on the host",
            )
        refuse_twin(document, (*at, "gpus"), addresses, index, (*at, "gpus", index, "address"))
    for vmid, container in host.containers.items():
        _check_gpus(
            document, (*at, "containers", vmid, "gpus"), container.gpus, addresses, f"host {name}"
        )
        _check_create(document, (*at, "containers", vmid), container)
    for label, entry in host.deployments.items():
        place = (*at, "deployments", label)
        wanted = addresses
        owner = f"host {name}"
        if entry.container is not None:
            container_entry = host.containers.get(entry.container)
            if container_entry is None:
                near = did_you_mean(str(entry.container), host.containers)
                raise document.error(
                    (*place, "container"),
                    f"{document.name(place)} names container {entry.container}, which hosts.{name} "
                    f"does not have{near}",
                    fix=f"containers of {name}: {listed(host.containers)}",
                )
            if container_entry.gpus is not None:
                wanted, owner = container_entry.gpus, f"container {entry.container}"
        _check_gpus(document, (*place, "gpus"), entry.gpus, wanted, owner)
        if entry.cutover is not None:
            _check_one_way(document, (*place, "cutover"), entry.cutover)
    check_ports(
        document,
        name,
        ((label, d.container, d.port) for label, d in host.deployments.items() if d.port),
    )


def _check_create(document: Document, at: At, container: Container) -> None:
    create = container.create
    if create is None:
        return
    if container.ssh is not None and create.ssh_public_key_file is None:
        raise document.error(
            (*at, "create"),
            f"{document.name(at)} is reached by ssh, but its `create` names no key for it",
            fix="add `ssh_public_key_file:`, or leave out `ssh` to go through `pct exec`",
            key=True,
        )
    net = create.net
    if net.gateway is not None and net.ip == "dhcp":
        raise document.error(
            (*at, "create", "net", "gateway"),
            f"{document.name((*at, 'create', 'net'))} has a gateway, but its address is dhcp",
            fix="remove `gateway:`, or write `ip:` with a prefix",
        )


def _check_one_way(document: Document, at: At, rules: Cutover) -> None:
    """The traffic moves in one way; none of two is chosen in silence."""
    ways = [key for key in ("router", "hook", "address") if getattr(rules, key) is not None]
    if len(ways) > 1:
        raise document.error(
            (*at, ways[1]),
            f"{document.name(at)} has {' and '.join(ways)}: the traffic moves in one way",
            fix="leave one of them",
            key=True,
        )


def check_ports(document: Document, host: str, used: Iterable[tuple[str, int | None, int]]) -> None:
    """`used` is (deployment, container, port); two of one container on a port are an error."""
    first: dict[tuple[int | None, int], str] = {}
    for label, vmid, port in used:
        other = first.setdefault((vmid, port), label)
        if other != label:
            at: At = ("hosts", host, "deployments", label)
            place = f"container {vmid}" if vmid is not None else f"host {host}"
            raise document.error(
                (*at, "port"),
                f"{document.name(at)} and {other} both listen on port {port} of {place}",
                fix=f"give {label} a `port:` of its own",
            )


def check_variant(deployment: Deployment, document: Document) -> None:
    """The variant that the inventory names must be one of the playbook's."""
    names = [variant.name for variant in deployment.playbook.variants]
    variant = deployment.entry.variant
    if variant is not None and variant not in names:
        raise document.error(
            ("hosts", deployment.host_name, "deployments", deployment.name, "variant"),
            f"{deployment.id}: playbook {deployment.playbook_name} has no variant "
            f"`{variant}`{did_you_mean(variant, names)}",
            fix=f"variants of {deployment.playbook_name}: {listed(names)}",
        )


def _check_gpus(
    document: Document, at: At, gpus: Sequence[str] | None, known: Sequence[str], owner: str
) -> None:
    """Each GPU is one of the owner's, and listed once; an empty list is a mistake."""
    if gpus is None:
        return
    if not gpus:
        raise document.error(
            at,
            f"{document.name(at)} is an empty list",
            fix=f"name GPUs, or leave the key out for all of {owner}",
        )
    for index, address in enumerate(gpus):
        if address not in known:
            raise document.error(
                (*at, index),
                f"{document.name((*at, index))}: {owner} has no GPU {address}"
                f"{did_you_mean(address, known)}",
                fix=f"GPUs of {owner}: {listed(known)}",
            )
        refuse_twin(document, at, gpus, index, (*at, index))
