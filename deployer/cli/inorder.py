"""Puts the events of hosts that are looked at at once into the order of the inventory."""

from __future__ import annotations

from collections.abc import Sequence

from deployer.events import Event, RunFinished, Subscriber


class InOrder:
    """Hands one host's events on as they come; those of later hosts wait until it has ended.

    A host has ended when each of its deployments has (`RunFinished`). `close` hands on what waits.
    """

    def __init__(self, names: Sequence[str], inner: Subscriber) -> None:
        """`names`: HOST/NAME of every deployment, in the order to show them in."""
        self.inner = inner
        self._left: dict[str, set[str]] = {}
        for name in names:
            self._left.setdefault(name.partition("/")[0], set()).add(name)
        self._waiting: dict[str, list[Event]] = {host: [] for host in self._left}

    def __call__(self, event: Event) -> None:
        """One event."""
        host = event.host
        if host not in self._waiting:
            self.inner(event)
            return
        self._waiting[host].append(event)
        if isinstance(event, RunFinished) and event.deployment:
            self._left[host].discard(event.deployment)
        elif isinstance(event, RunFinished):
            # The host could not be asked at all.
            self._left[host].clear()
        self._hand_on()

    def close(self) -> None:
        """Hands on what still waits, in order."""
        for host in list(self._waiting):
            self._release(host)

    def _hand_on(self) -> None:
        for host in list(self._waiting):
            self._release(host)
            if self._left[host]:
                return
            del self._waiting[host]

    def _release(self, host: str) -> None:
        events, self._waiting[host] = self._waiting[host], []
        for event in events:
            self.inner(event)
