"""What two entries of the inventory say of one machine. Pure."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator, Mapping

from deployer.document import Document
from deployer.inventory import Host, Ssh
from deployer.names import listed
from deployer.yamltree import At

ONCE = "describe the machine once, with all its containers and deployments"

_Place = tuple[str, int | None, str | None]


def check_machines(hosts: Mapping[str, Host], documents: Mapping[str, Document]) -> None:
    """Two names at one address may share nothing. Raises DocumentError for the first that do."""
    first: dict[_Place, list[str]] = {}
    for name, host in hosts.items():
        twins = first.setdefault(_place(host.ssh), [])
        for other in twins:
            if claimed := claimed_twice(hosts[other], host):
                raise documents[name].error(
                    ("hosts", name, "ssh"),
                    f"hosts.{name} is reached at the address of hosts.{other}, and both claim "
                    f"{listed(claimed)}",
                    fix=f"correct the address, or {ONCE}",
                    key=True,
                )
        twins.append(name)
    _check_guests(hosts, documents)


def _check_guests(hosts: Mapping[str, Host], documents: Mapping[str, Document]) -> None:
    """No container is reached at the address of another one, or of a host."""
    first = {(_place(host.ssh), host.ssh.user): f"hosts.{name}" for name, host in hosts.items()}
    for name, at, ssh in _guests(hosts):
        label = documents[name].name(at)
        other = first.setdefault((_place(ssh), ssh.user), label)
        if other != label:
            raise documents[name].error(
                (*at, "ssh"),
                f"{label} is reached at the address of {other}",
                fix="correct the address of one of the two, or leave out `ssh` to go through "
                "`pct exec`",
                key=True,
            )


def _guests(hosts: Mapping[str, Host]) -> Iterator[tuple[str, At, Ssh]]:
    for name, host in hosts.items():
        for vmid, container in host.containers.items():
            if container.ssh is not None:
                yield name, ("hosts", name, "containers", vmid), container.ssh


def claimed_twice(one: Host, other: Host) -> list[str]:
    """What both would change if they were one machine: containers, GPUs, ports of the host."""
    gpus = {gpu.address for gpu in one.gpus} & {gpu.address for gpu in other.gpus}
    return [
        *(f"container {vmid}" for vmid in sorted(one.containers.keys() & other.containers)),
        *(f"GPU {address}" for address in sorted(gpus)),
        *(f"port {port}" for port in sorted(_ports(one) & _ports(other))),
    ]


def _ports(host: Host) -> set[int]:
    """Of the host itself, as far as the inventory names them."""
    return {d.port for d in host.deployments.values() if d.container is None and d.port}


def _place(ssh: Ssh) -> _Place:
    """Two entries with the same place lead to one sshd; others may as well."""
    address = ssh.address.lower().rstrip(".").removeprefix("[").removesuffix("]")
    with contextlib.suppress(ValueError):
        address = str(ipaddress.ip_address(address))
    return address, ssh.port, ssh.gateway
