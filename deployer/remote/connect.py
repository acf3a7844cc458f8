"""From inventory entries to transports. Nothing is opened before the first `run`."""

from __future__ import annotations

from pathlib import Path

from deployer.inventory import Container, Ssh
from deployer.remote.pct import PctTransport
from deployer.remote.ssh import SshTransport
from deployer.remote.sshconfig import resolve
from deployer.remote.transport import Transport


def open_host(host_name: str, ssh: Ssh, base: Path) -> Transport:
    """The transport of a host. Relative paths of `ssh` are relative to `base` (the inventory)."""
    return SshTransport(host_name, lambda: resolve(host_name, ssh, base))


def open_guest(
    host: Transport, host_name: str, vmid: int, container: Container, base: Path
) -> Transport:
    """The transport of a container: its own SSH if the inventory has one, else `pct exec`."""
    name = f"{host_name}/{vmid}"
    ssh = container.ssh
    if ssh is None:
        return PctTransport(host, vmid, name)
    return SshTransport(name, lambda: resolve(name, ssh, base))
