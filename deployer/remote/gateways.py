"""One connection a gateway, shared by all targets behind it: sshd limits logins, not tunnels."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from deployer.remote.sshconfig import Endpoint


class Closable(Protocol):
    """What the pool keeps."""

    def close(self) -> None:
        """Ends it."""


T = TypeVar("T", bound=Closable)


@dataclass
class _Shared(Generic[T]):
    connection: T
    users: int = 0


class Pool(Generic[T]):
    """Counts the users of each connection; the last one to give it back closes it."""

    def __init__(self, make: Callable[[Endpoint], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._shared: dict[Endpoint, _Shared[T]] = {}

    def borrow(self, endpoint: Endpoint) -> T:
        """The connection to `endpoint`; it is made at the first call. Give it back once."""
        with self._lock:
            key = same_machine(endpoint)
            if key not in self._shared:
                self._shared[key] = _Shared(self._make(endpoint))
            shared = self._shared[key]
            shared.users += 1
            return shared.connection

    def give_back(self, endpoint: Endpoint) -> None:
        """Ends one use."""
        with self._lock:
            shared = self._shared[same_machine(endpoint)]
            shared.users -= 1
            if shared.users > 0:
                return
            del self._shared[same_machine(endpoint)]
        shared.connection.close()


def same_machine(endpoint: Endpoint) -> Endpoint:
    """The same machine under the same terms, whoever is behind it."""
    gateway = endpoint.gateway
    return replace(endpoint, name="", gateway=None if gateway is None else same_machine(gateway))
