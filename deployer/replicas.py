"""One of several replicas behind a router: out before its server stops, in when it has passed.

What serves is seen at the router, as clients do: a replica is taken out only while all the others
get requests, so that of N never fewer than N-1 serve. It gets requests again only when its server
has passed its gates, or when the known-good one that it replaced serves in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepBlocked, StepFailed
from deployer.events import Bus, Note, Progress
from deployer.inventory import Replica
from deployer.model import Facts
from deployer.remote.transport import Transport
from deployer.router import Door, HereDoor, Router, ThereDoor, same_url
from deployer.steps.server_facts import ServerFact

INTERRUPTS = ("driver", "gpus", "container", "stop", "launch")
"""Steps that end a server, or may."""

OUT_S = 30.0
STEP = "router"


class Membership:
    """A deployment's place in its router. `leaves_for_good`: it is asked to stop (`down`)."""

    def __init__(
        self,
        want: Deployment,
        rules: Replica,
        host: Transport,
        environ: Mapping[str, str],
        bus: Bus,
        *,
        leaves_for_good: bool = False,
        door: Door | None = None,
    ) -> None:
        self.want = want
        self.rules = rules
        self.bus = bus
        self.leaves_for_good = leaves_for_good
        self.out = False
        """Taken out by this run."""
        key = environ.get(rules.router.api_key_env, "") if rules.router.api_key_env else ""
        url = rules.router.url
        if door is None:
            via_here = rules.router.via == "controller"
            door = HereDoor(url, key) if via_here else ThereDoor(host, url, key)
        self.router = Router(door, url)
        name = want.playbook.serve.api_key_env
        self._server_key = environ.get(name, "") if name else ""

    def serves(self) -> bool:
        """Does it get requests now?"""
        worker = self.router.find(self.want.worker_url)
        return worker is not None and worker.ready

    def before(self, step: str) -> None:
        """Called before a step acts. Raises StepBlocked when too few others serve."""
        if step in INTERRUPTS and not self.out:
            self.leave()

    def leave(self) -> None:
        """Out of the router, as far as it is in. Raises StepBlocked, StepFailed, Unreachable."""
        url = self.want.worker_url
        there = self.router.find(url)
        if there is None:
            return
        if there.ready and not self.leaves_for_good:
            self._refuse_without_others()
        self.router.remove(url)
        self.out = True
        if there.ready and not self.leaves_for_good:
            # Another controller may have taken another one out in the same moment.
            try:
                self._refuse_without_others()
            except DeployError:
                self.join()
                raise
        if not self.router.await_out(url, OUT_S, self._tick, drained=False):
            raise StepFailed(
                f"the router still lists {url} {OUT_S:g} s after it was taken out",
                where=f"{self.want.id} {STEP}",
                fix="look at the router's log; then run the same command again",
            )
        self._note(
            f"taken out of {self.rules.router.url}; its requests have "
            f"{self.want.playbook.stop.drain_s:g} s to end"
        )
        self.router.await_out(url, self.want.playbook.stop.drain_s, self._tick, drained=True)

    def join(self) -> None:
        """In the router, healthy. Raises StepFailed, Unreachable."""
        url = self.want.worker_url
        there = self.router.find(url)
        if there is not None and there.ready:
            self.out = False
            return
        worker = self.router.add(url, api_key=self._server_key)
        self.router.await_ready(url, worker, self.rules.router.ready_s, self._tick)
        self.out = False
        self._note(f"in {self.rules.router.url} again, and healthy there")

    def settle(self, look: Callable[[], Facts]) -> None:
        """After a failure: in again when a known-good server serves; what came of it is said."""
        if not self.out:
            return
        try:
            if known_good_serves(look().get(ServerFact)):
                self.join()
            else:
                self._note("stays out of the router: no server that has passed serves here", True)
        except DeployError as error:
            self._note(f"it is not known whether the router sends requests here: {error}", True)

    def _refuse_without_others(self) -> None:
        ready = [one for one in self.router.workers() if one.ready]
        missing = [
            peer.id
            for peer in self.want.peers
            if not any(same_url(one.url, peer.url) for one in ready)
        ]
        if missing:
            count = len(self.want.peers) + 1
            raise StepBlocked(
                f"{', '.join(missing)} gets no requests from the router: without this one, fewer "
                f"than {count - 1} of {count} replicas would serve",
                where=f"{self.want.id} {STEP}",
                fix=f"`deploy up {' '.join(missing)}` first",
            )

    def _tick(self, what: str, spent: float, limit: float) -> None:
        place = (self.want.host_name, self.want.id, STEP)
        self.bus.emit(Progress(*place, what, round(spent, 1), limit, "s"))

    def _note(self, text: str, warning: bool = False) -> None:
        level = "warning" if warning else "info"
        self.bus.emit(Note(self.want.host_name, self.want.id, STEP, level, text))


def known_good_serves(server: ServerFact | None) -> bool:
    """Does our launch serve, and is the verdict on this very launch good?"""
    if server is None or not server.serving or server.job is None:
        return False
    try:
        record = json.loads(server.job.verdict)
        return bool(record["launch"] == server.job.identity.id and record["verdict"] == "good")
    except (ValueError, KeyError, TypeError):
        return False
