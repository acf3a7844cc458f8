"""One run's connections to a host and its guests, the host lock, and the batched look.

A no-op run costs one connection and one exec channel a target. The host lock is taken only to act:
in the same exec as the second look, so that what is acted upon was seen under the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deployer.deployment import Deployment
from deployer.errors import REFUSALS, DeployError, Unreachable
from deployer.inventory import Host
from deployer.model import Facts, Probe, Where
from deployer.remote import machine
from deployer.remote.batch import gather
from deployer.remote.connect import open_guest, open_host
from deployer.remote.hostlock import HostLock
from deployer.remote.lock_record import LockRecord
from deployer.remote.transport import Transport
from deployer.steps.base import Step

__all__ = ["REFUSALS", "HostSession"]


LOOK = "look"
"""The step that a lock's record names before the first one."""


class HostSession:
    """Connections are made on first use; `close` releases the lock and ends them."""

    def __init__(
        self,
        host_name: str,
        host: Host,
        base: Path,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recognise = False
        """Whether every look has the fact Machine too."""
        self.host_name = host_name
        self.host = host
        self.base = base
        self.on_note = on_note
        self.host_transport: Transport = open_host(host_name, host.ssh, base)
        self._guests: dict[int, Transport] = {}
        self._lock: HostLock | None = None
        self.locked = False
        self._asked_for_lock = False
        self._ending = threading.Lock()
        self._closing = False

    def transports(self, want: Deployment) -> Mapping[Where, Transport]:
        """Of the host and of the deployment's guest (the host itself when it has none)."""
        if want.vmid is None or want.container is None:
            return {Where.HOST: self.host_transport, Where.GUEST: self.host_transport}
        guest = self._guests.get(want.vmid)
        if guest is None:
            guest = open_guest(
                self.host_transport, self.host_name, want.vmid, want.container, self.base
            )
            self._guests[want.vmid] = guest
        return {Where.HOST: self.host_transport, Where.GUEST: guest}

    def want_lock(self, run_id: str) -> None:
        """The next look takes the host lock first, in the same exec."""
        if self._lock is None:
            record = LockRecord.mine(self.host_name, run_id, LOOK)
            self._lock = HostLock(record, on_note=self.on_note)

    def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
        """Runs the probes of all steps, one exec a target; targets with a connection each at once.

        Raises Unreachable when the host does not answer, or when the guest refuses us; a guest
        that is merely down leaves its facts silent.
        """
        probes = [probe for step in steps for probe in step.probes(want)]
        here = [probe for probe in probes if probe.where is Where.HOST]
        here += [machine.PROBE] if self.recognise else []
        there = [probe for probe in probes if probe.where is Where.GUEST]
        transports = self.transports(want)
        if transports[Where.GUEST] is self.host_transport:
            here, there = here + there, []
        values: dict[type, object] = {}
        silent: dict[Where, str] = {}
        through_host = want.container is not None and want.container.ssh is None
        if through_host or (self._lock is not None and not self.locked):
            # Through the host: both would share one connection, which serves one thread. With the
            # lock still to take: what the guest says must be seen under it as well.
            values.update(self._ask_host(here))
            answer = self._ask_guest(transports[Where.GUEST], there)
        else:
            with ThreadPoolExecutor(max_workers=1) as pool:
                guest = pool.submit(self._ask_guest, transports[Where.GUEST], there)
                values.update(self._ask_host(here))
                answer = guest.result()
        if isinstance(answer, str):
            silent[Where.GUEST] = answer
        else:
            values.update(answer)
        return Facts(values, silent)

    def _ask_host(self, probes: Sequence[Probe]) -> Mapping[type, object]:
        if self._lock is None or self.locked:
            return gather(self.host_transport, probes)
        self._asked_for_lock = True
        facts = self._lock.acquire_and_gather(self.host_transport, probes)
        self.locked = True
        return facts

    def _ask_guest(
        self, transport: Transport, probes: Sequence[Probe]
    ) -> Mapping[type, object] | str:
        if not probes:
            return {}
        try:
            return gather(transport, probes)
        except REFUSALS:
            raise
        except Unreachable as error:
            return error.what

    def entered(self, step: str) -> None:
        """Tells the lock's record which step runs now."""
        if self._lock is not None and self.locked:
            self._lock.enter(self.host_transport, step)

    def rest(self) -> None:
        """Ends the connections; the next look makes new ones."""
        for transport in [*self._guests.values(), self.host_transport]:
            transport.close()

    def wake(self) -> None:
        """From another thread: what waits on a connection ends with ConnectionLost."""
        with self._ending:
            # Once it gives the lock back, it is left to do so.
            if not self._closing:
                self.rest()

    def close(self, on_problem: Callable[[str], None]) -> None:
        """Releases the host lock and ends the connections; what failed is told, not raised."""
        with self._ending:
            self._closing = True
        try:
            # Interrupted while asking, we may hold it without knowing; another's is left alone.
            if self._lock is not None and self._asked_for_lock:
                self._lock.release(self.host_transport)
                self.locked = self._asked_for_lock = False
        except DeployError as error:
            on_problem(f"the host lock could not be released: {error}; `deploy unlock` does it")
        finally:
            self.rest()
