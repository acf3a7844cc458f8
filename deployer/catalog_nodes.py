"""A server of several nodes, as the playbook's list and the inventory's entries describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployer.deployment import Node
from deployer.document import Document
from deployer.inventory import DeploymentEntry, Host, Ssh
from deployer.names import did_you_mean, listed
from deployer.playbook import Playbook


@dataclass(frozen=True)
class Nodes:
    """The deployments `name` of the hosts that `playbook` names in `nodes`."""

    name: str
    document: Document
    """The playbook's file."""
    playbook: Playbook
    hosts: Mapping[str, Host]
    """All of the inventory."""
    documents: Mapping[str, Document]
    """Host name -> the file that describes it."""

    def place_of(self, host_name: str) -> Node:
        """The node of this host. Raises DocumentError when the nodes do not fit together."""
        names = tuple(self.playbook.nodes or ())
        mine = self._entry(host_name)
        if host_name not in names:
            raise self.documents[host_name].error(
                (*self._at(host_name), "playbook"),
                f"{host_name}/{self.name}: playbook {mine.playbook} is for the nodes "
                f"{listed(names)}",
                fix=f"add {host_name} to `nodes:` of the playbook, or name another playbook",
            )
        for index, other in enumerate(names):
            self._check(host_name, index, other)
        init = f"{self._address(names[0])}:{self.playbook.serve.dist_port}"
        return Node(names.index(host_name), names, init)

    def _check(self, host_name: str, index: int, other: str) -> None:
        """Whether host `other`, the node of this index, serves the same as `host_name`."""
        mine, place = self._entry(host_name), ("nodes", index)
        if other not in self.hosts:
            raise self.document.error(
                place,
                f"nodes: no host `{other}` in the inventory{did_you_mean(other, self.hosts)}",
                fix=f"hosts: {listed(self.hosts)}",
            )
        entry = self.hosts[other].deployments.get(self.name)
        if entry is None or entry.playbook != mine.playbook:
            raise self.document.error(
                place,
                f"nodes: host `{other}` has no deployment `{self.name}` of this playbook",
                fix=f"add it to the inventory: deployments, {self.name}, playbook: {mine.playbook}",
            )
        if entry.variant != mine.variant:
            raise self.documents[host_name].error(
                self._at(host_name),
                f"{host_name}/{self.name} and {other}/{self.name} are one server of two variants",
                fix="write the same `variant:` in both",
                key=True,
            )

    def _address(self, first: str) -> str:
        """Where the others meet the node of this host."""
        host, entry = self.hosts[first], self._entry(first)
        container = host.containers.get(entry.container or 0)
        if entry.node_address is None and container is not None and container.ssh is None:
            raise self.documents[first].error(
                self._at(first),
                f"{first}/{self.name} is the first of its nodes, and how the others reach its "
                "container is not known",
                fix="add `node_address:` with the container's own address",
                key=True,
            )
        address = entry.node_address or _guest_ssh(host, entry).address
        return f"[{address}]" if ":" in address and address[0] != "[" else address

    def _entry(self, host_name: str) -> DeploymentEntry:
        return self.hosts[host_name].deployments[self.name]

    def _at(self, host_name: str) -> tuple[str, ...]:
        return ("hosts", host_name, "deployments", self.name)


def _guest_ssh(host: Host, entry: DeploymentEntry) -> Ssh:
    """How the machine that the model runs on is reached; the host's, without one of its own."""
    container = None if entry.container is None else host.containers.get(entry.container)
    return container.ssh if container is not None and container.ssh is not None else host.ssh
