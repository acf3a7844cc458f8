"""A deployment as a step sees it: inventory and playbook joined, nothing looked up any more."""

from __future__ import annotations

from dataclasses import dataclass

from deployer.inventory import Container, DeploymentEntry, Host
from deployer.model import Where
from deployer.names import in_url
from deployer.playbook import ArgValue, Playbook


@dataclass(frozen=True)
class Peer:
    """Another replica of the same model. `url`: how the router knows it."""

    id: str
    url: str


@dataclass(frozen=True)
class Node:
    """One place of a server that runs on several hosts. Rank 0 answers requests."""

    rank: int
    hosts: tuple[str, ...]
    """All of them, in rank order."""
    init: str
    """ADDRESS:PORT at which rank 0 is met."""

    @property
    def args(self) -> dict[str, ArgValue]:
        """What the server is told of it."""
        return {"nnodes": len(self.hosts), "node-rank": self.rank, "dist-init-addr": self.init}


@dataclass(frozen=True)
class Deployment:
    """What `deploy up HOST/NAME` works on."""

    host_name: str
    name: str
    host: Host
    entry: DeploymentEntry
    playbook: Playbook
    playbook_name: str
    lock_text: str
    """The content of the engine lock."""
    variant: str | None = None
    """The variant asked for (`--variant`, inventory), None: the first of the ladder."""
    guest_keys: str | None = None
    """The public keys for a container that is created; None: their file is not there."""
    peers: tuple[Peer, ...] = ()
    """The other replicas behind the same router."""
    node: Node | None = None
    """Its place among the playbook's nodes; None: a server of its own."""

    @property
    def id(self) -> str:
        """`kpro5/qwen`."""
        return f"{self.host_name}/{self.name}"

    @property
    def vmid(self) -> int | None:
        """The container, or None when the model runs on the host itself."""
        return self.entry.container

    @property
    def container(self) -> Container | None:
        """The container's inventory entry."""
        return None if self.vmid is None else self.host.containers.get(self.vmid)

    @property
    def guest(self) -> Where:
        """Where the model runs."""
        return Where.HOST if self.vmid is None else Where.GUEST

    @property
    def gpus(self) -> tuple[str, ...]:
        """PCI addresses: the deployment's, else the container's, else all of the host."""
        listed = self.entry.gpus or (self.container.gpus if self.container else None)
        return tuple(listed or [gpu.address for gpu in self.host.gpus])

    @property
    def gpu_ids(self) -> dict[str, str]:
        """Address -> `10de:2230` of the GPUs whose id the inventory names."""
        return {gpu.address: gpu.id for gpu in self.host.gpus if gpu.id is not None}

    @property
    def port(self) -> int:
        """The port that the server listens on, in the guest."""
        return self.entry.port or self.playbook.serve.port

    @property
    def follows(self) -> bool:
        """Is it a node that answers no requests itself?"""
        return self.node is not None and self.node.rank > 0

    @property
    def worker_url(self) -> str:
        """How a router reaches the server."""
        return worker_url(self.host, self.entry, self.playbook)

    @property
    def variant_name(self) -> str:
        """The variant that is launched; `base` when the playbook has none."""
        if self.variant:
            return self.variant
        return self.playbook.variants[0].name if self.playbook.variants else "base"

    def serve_args(self, variant: str | None = None) -> dict[str, ArgValue]:
        """serve.args with the variant's changes; False removes a flag."""
        name = variant or self.variant_name
        args = dict(self.playbook.serve.args)
        for rung in self.playbook.variants:
            if rung.name == name:
                args.update(rung.args)
        if self.node is not None:
            args.update(self.node.args)
        return {flag: value for flag, value in args.items() if value is not False}


def worker_url(host: Host, entry: DeploymentEntry, playbook: Playbook) -> str:
    """How a router reaches the server of `entry`, without a slash at the end."""
    container = None if entry.container is None else host.containers.get(entry.container)
    ssh = container.ssh if container is not None and container.ssh is not None else host.ssh
    port = entry.port or playbook.serve.port
    return (entry.worker_url or entry.url or f"http://{in_url(ssh.address)}:{port}").rstrip("/")
