"""`deploy trust HOST`: fetch the key that a host offers, and record it once a person agreed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployer import errors
from deployer.inventory import Ssh
from deployer.remote import hostkeys
from deployer.remote.hostkeys import HostKey
from deployer.remote.ssh import SshTransport
from deployer.remote.sshconfig import Endpoint, resolve
from deployer.remote.transport import Transport


@dataclass(frozen=True)
class Offered:
    """A host key that was offered. `known`: it is recorded already, nothing to do."""

    name: str
    """The inventory name; or `NAME (gateway ADDRESS)`, whose key must be recorded first."""
    place: str
    """host:port."""
    key_name: str
    """How known_hosts will list it."""
    key: HostKey
    path: Path
    """The known_hosts file that `record` writes."""
    known: bool

    @property
    def fingerprint(self) -> str:
        """`SHA256:...`."""
        return self.key.fingerprint

    @property
    def key_type(self) -> str:
        """`ssh-ed25519`."""
        return self.key.type


def fetch(name: str, ssh: Ssh, base: Path) -> Offered:
    """The first key on the way to `name` that is not recorded (a gateway's comes first).

    Call it again after `record` until `known` is true. Raises HostKeyChanged when the offered key
    contradicts a recorded one, and Unreachable.
    """
    return _fetch(resolve(name, ssh, base))


def _fetch(endpoint: Endpoint) -> Offered:
    if endpoint.gateway is None:
        return _offered(endpoint, hostkeys.fetch_key(*_where(endpoint), name=endpoint.name))
    gateway = endpoint.gateway
    first = _fetch(gateway)
    if not first.known:
        return first
    hop = SshTransport(gateway.name, lambda: gateway)
    try:
        sock = hop.tunnel(endpoint.address, endpoint.port, endpoint.connect_timeout_s)
        return _offered(endpoint, hostkeys.fetch_key(*_where(endpoint), sock, name=endpoint.name))
    finally:
        hop.close()


def _where(endpoint: Endpoint) -> tuple[str, int, float]:
    return endpoint.address, endpoint.port, endpoint.connect_timeout_s


def _offered(endpoint: Endpoint, key: HostKey) -> Offered:
    known = True
    try:
        hostkeys.check(
            endpoint.known_hosts,
            endpoint.key_name,
            key,
            host=endpoint.name,
            place=endpoint.place,
        )
    except errors.HostKeyUnknown:
        known = False
    return Offered(
        endpoint.name, endpoint.place, endpoint.key_name, key, endpoint.known_hosts[0], known
    )


# The guest's own files, seen by its host: whoever stands between us and its address is not asked.
_INSIDE = r"""
pct exec "$1" -- sh -c 'cat /etc/ssh/ssh_host_*_key.pub' </dev/null
"""


def seen_by_host(host: Transport, vmid: int) -> tuple[HostKey, ...]:
    """The host keys of a container as its host reads them; () when it does not run there.

    Raises Unreachable.
    """
    answer = host.run(_INSIDE, args=[str(vmid)], timeout_s=30.0)
    keys = (hostkeys.parse_public(line) for line in answer.text.splitlines())
    return tuple(key for key in keys if key is not None)


def record(offered: Offered) -> None:
    """Adds the key to its known_hosts file. Raises HostKeyChanged, DocumentError."""
    try:
        hostkeys.append_key(offered.path, offered.key_name, offered.key)
    except OSError as error:
        raise errors.DocumentError(
            f"the known_hosts file cannot be written: {error.strerror}", where=str(offered.path)
        ) from error
