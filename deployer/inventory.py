"""The inventory: what exists. Hosts, their GPUs by PCI address, containers, deployments.

One or more `*.yaml` files in the inventory folder, each with a `hosts:` mapping; merged by name.
The commented sample `inventory/` is the documentation (`deploy help inventory`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployer import names

Name = Annotated[str, Field(pattern=names.HOST_NAME)]
PciAddress = Annotated[str, Field(pattern=names.PCI_ADDRESS)]
Line = Annotated[str, Field(pattern=names.LINE, max_length=1000)]
HttpUrl = Annotated[str, Field(pattern=names.HTTP_URL, max_length=1000)]
Port = Annotated[int, Field(ge=1, le=65535)]
Vmid = Annotated[int, Field(ge=100, le=999_999_999)]


class Strict(BaseModel):
    """Unknown keys are errors; values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Ssh(Strict):
    """How to reach a machine. What is left out comes from ~/.ssh/config."""

    address: Annotated[str, Field(pattern=names.ADDRESS, max_length=253)]
    port: Port | None = None
    user: Annotated[str, Field(pattern=names.USER)] = "root"
    identity_file: Line | None = None
    known_hosts: Line | None = None
    """A file used instead of ~/.ssh/known_hosts (both are read when None)."""
    gateway: Annotated[str, Field(pattern=names.GATEWAY)] | None = None
    """ProxyJump: [user@]host[:port] or a name of ssh_config."""
    connect_timeout_s: Annotated[float, Field(gt=0, le=300)] = 15.0
    peer_address: Annotated[str, Field(pattern=names.ADDRESS, max_length=253)] | None = None
    """How the other hosts reach it (`migrate` copies weights between them); None: `address`."""
    peer_port: Port | None = None
    """None: `port`, or 22 with a peer_address."""


class GuestNet(Strict):
    """The network card of a container that is created (pct's net0)."""

    bridge: Annotated[str, Field(pattern=names.BRIDGE)] = "vmbr0"
    ip: Annotated[str, Field(pattern=names.IP_OR_DHCP)] = "dhcp"
    gateway: Annotated[str, Field(pattern=names.IP)] | None = None
    vlan: Annotated[int, Field(ge=1, le=4094)] | None = None


class Create(Strict):
    """What `pct create` gets when the container does not exist yet."""

    template: Annotated[str, Field(pattern=names.TEMPLATE, max_length=255)]
    storage: Annotated[str, Field(pattern=names.STORAGE, max_length=100)]
    disk_gib: Annotated[int, Field(ge=1, le=1_000_000)]
    cores: Annotated[int, Field(ge=1, le=8192)] | None = None
    """None: all of the host."""
    memory_mib: Annotated[int, Field(ge=16)]
    swap_mib: Annotated[int, Field(ge=0)] = 0
    hostname: Annotated[str, Field(pattern=names.CONTAINER_HOST_NAME, max_length=253)]
    net: GuestNet = Field(default_factory=GuestNet)
    ssh_public_key_file: Line | None = None
    """A file of this machine with the public keys that root of the container accepts."""
    unprivileged: bool = True
    """Cannot be changed afterwards."""
    features: list[Annotated[str, Field(pattern=names.CONTAINER_FEATURE)]] = Field(
        default_factory=lambda: ["nesting=1"]
    )
    onboot: bool = True


class Container(Strict):
    """An LXC guest of a host; the key is its vmid."""

    ssh: Ssh | None = None
    """None: commands go through `pct exec` on the host."""
    gpus: list[PciAddress] | None = None
    """None: all GPUs of the host."""
    restart: Literal["allowed", "never"] = "allowed"
    """May the tool restart the container when a device change needs it?"""
    snapshot: Literal["before-change", "never"] = "before-change"
    """A running container stands still for a moment while its snapshot is taken."""
    create: Create | None = None
    """None: the container must exist."""


class RouterCutover(Strict):
    """Traffic goes through a running `smg` or `sglang-router`."""

    url: HttpUrl
    """As seen from `via`."""
    via: Literal["controller", "host"] = "controller"
    """Who asks it: this machine, or the deployment's host."""
    api_key_env: Annotated[str, Field(pattern=names.ENV_NAME)] | None = None
    """Name of the controller's environment variable with the router's API key."""
    ready_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """How long the router may take to find the new worker healthy."""


class HookCutover(Strict):
    """A command on this machine moves the traffic."""

    command: list[Line] = Field(min_length=1)
    """Program and arguments, no shell. Its environment has DEPLOY_DIRECTION (`forward`, or `back`
    after --abort), DEPLOY_FROM and DEPLOY_TO (HOST/NAME that loses and that gets the traffic),
    DEPLOY_FROM_URL and DEPLOY_TO_URL, DEPLOY_MODEL, DEPLOY_MIGRATION (its id). It may run twice."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    probe_url: HttpUrl | None = None
    """What clients use; asked all the time for /v1/models to measure the gap. None: not."""


class AddressCutover(Strict):
    """An address of its own moves from container to container."""

    interface: Annotated[str, Field(pattern=names.NET_KEY)] = "net1"
    """The key of `pct config` that holds it; never the one that SSH uses."""
    ip: Annotated[str, Field(pattern=names.CIDR)]
    """With its prefix length: 192.0.2.50/24."""
    probe_url: HttpUrl | None = None
    """As of `hook`."""


class Cutover(Strict):
    """How `migrate` moves the traffic; without router, hook and address it prints the endpoint."""

    router: RouterCutover | None = None
    hook: HookCutover | None = None
    address: AddressCutover | None = None
    settle_s: Annotated[float, Field(ge=0, le=86400)] = 60.0
    """So long the new server must serve through the cut-over before the old one is stopped."""
    drain_s: Annotated[float, Field(ge=0, le=86400)] = 300.0
    """How long the old server may take to end the requests that it has."""

    @property
    def kind(self) -> Literal["router", "hook", "address", "none"]:
        """Which of the ways it is."""
        for kind in ("router", "hook", "address"):
            if getattr(self, kind) is not None:
                return kind
        return "none"


class Replica(Strict):
    """One of several deployments of a model behind a router. They are changed one at a time."""

    router: RouterCutover
    """Those with the same router and playbook are replicas of each other."""
    drain_s: Annotated[float, Field(ge=0, le=86400)] = 300.0
    """How long requests that still run may take before the server is stopped; at least
    stop.drain_s of the playbook."""


class DeploymentEntry(Strict):
    """One served model in one container; the key is its name."""

    container: Vmid | None = None
    """None: the model runs on the host itself."""
    playbook: Annotated[str, Field(pattern=names.PLAYBOOK_NAME)]
    """A file of the playbook folder, without .yaml."""
    variant: Line | None = None
    gpus: list[PciAddress] | None = None
    port: Port | None = None
    """Overrides the playbook's serve.port."""
    url: Line | None = None
    """How clients reach the server, for messages; None: http://ADDRESS:PORT."""
    worker_url: Line | None = None
    """How a router reaches the server; None: `url`."""
    node_address: Annotated[str, Field(pattern=names.ADDRESS)] | None = None
    """With `nodes` of the playbook: how the other nodes reach this one; None: its ssh address."""
    replica: Replica | None = None
    """`up` takes it out of the router before its server stops, and in again when it has passed."""
    cutover: Cutover | None = None
    """How `migrate` moves the traffic to this deployment; None: as the source's entry says."""


class Gpu(Strict):
    """One GPU: its PCI function 0. Other functions of the slot are found on the host."""

    address: PciAddress
    name: Line | None = None
    id: Annotated[str, Field(pattern=names.PCI_ID)] | None = None
    """`vendor:device`; the function must then have it. None: any NVIDIA display function."""


class Host(Strict):
    """A machine with GPUs."""

    kind: Literal["proxmox", "plain"] = "proxmox"
    ssh: Ssh
    gpus: list[Gpu] = Field(min_length=1)
    containers: dict[Vmid, Container] = Field(default_factory=dict)
    deployments: dict[Name, DeploymentEntry] = Field(default_factory=dict)


class InventoryFile(Strict):
    """The content of one file of the inventory folder."""

    hosts: dict[Name, Host] = Field(min_length=1)
