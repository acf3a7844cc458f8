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
from deployer.names import same_url
from deployer.remote.transport import Transport
from deployer.router import EVERY_S, Door, HereDoor, Router, ThereDoor, told
from deployer.steps.server_facts import ServerFact

INTERRUPTS = ("driver", "gpus", "container", "stop", "launch")
"""Steps that end a server, or may."""

OUT_S = 30.0
IN_S = 30.0
"""How long a replica that is listed may take to be healthy before another one is taken out; a dead
one stays listed too."""
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
        """Gets no requests: taken out by this run, or found so."""
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

    def lacking(self) -> list[str]:
        """Ids of the other replicas that get no requests now."""
        return list(self._missing())

    def before(self, step: str) -> None:
        """Called before a step acts. Raises StepBlocked when too few others serve."""
        if step in INTERRUPTS and not self.out:
            self.leave()

    def leave(self) -> None:
        """Out of the router, as far as it is in. Raises StepBlocked, StepFailed, Unreachable."""
        url = self.want.worker_url
        there = self.router.find(url)
        if there is None:
            # Perhaps taken out by a run that was killed: a failure of this one must put it back.
            self.out = True
            return
        if there.ready and not self.leaves_for_good:
            self._await_others()
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
        self._note(f"in {self.rules.router.url}, and healthy there")

    def settle(self, look: Callable[[], Facts], known_good: str) -> None:
        """After a failure: in again when a known-good server serves; what came of it is said.

        `known_good`: the id of the launch that passed last.
        """
        if not self.out:
            return
        try:
            if known_good_serves(look().get(ServerFact), known_good):
                self.join()
            else:
                self._note("stays out of the router: no server that has passed serves here", True)
        except DeployError as error:
            self._note(f"it is not known whether the router sends requests here: {error}", True)

    def _missing(self) -> dict[str, bool]:
        """The others that get no requests, and whether the router is still taking them in."""
        workers = self.router.workers()
        ready = [one for one in workers if one.ready]
        coming = [one for one in workers if not one.ready and not one.draining]
        return {
            peer.id: any(same_url(one.url, peer.url) for one in coming)
            for peer in self.want.peers
            if not any(same_url(one.url, peer.url) for one in ready)
        }

    def _await_others(self) -> None:
        """Another replica may have passed a moment ago: its first health checks are waited for."""
        now, began = self.router.now, self.router.now()
        limit = min(self.rules.router.ready_s, IN_S)
        while (missing := self._missing()) and all(missing.values()):
            spent = now() - began
            if spent >= limit:
                break
            self._tick(f"the router takes {', '.join(missing)} in", spent, limit)
            self.router.sleep(EVERY_S)
        self._refuse_without_others()

    def _refuse_without_others(self) -> None:
        if missing := self._missing():
            count = len(self.want.peers) + 1
            raise StepBlocked(
                f"{', '.join(missing)} gets no requests from the router: without this one, fewer "
                f"than {count - 1} of {count} replicas would serve",
                where=f"{self.want.id} {STEP}",
                fix=f"`deploy up {' '.join(missing)}` first; or is its `worker_url` another?",
                evidence=(f"the router lists {told(self.router.workers())}",),
            )

    def _tick(self, what: str, spent: float, limit: float) -> None:
        place = (self.want.host_name, self.want.id, STEP)
        self.bus.emit(Progress(*place, what, round(spent, 1), limit, "s"))

    def _note(self, text: str, warning: bool = False) -> None:
        level = "warning" if warning else "info"
        self.bus.emit(Note(self.want.host_name, self.want.id, STEP, level, text))


def known_good_serves(server: ServerFact | None, known_good: str) -> bool:
    """Does our launch serve that passed its gates, or one that repeats launch `known_good`?"""
    if server is None or not server.serving or server.job is None:
        return False
    back = server.job.launch.back
    if back is not None and known_good and back.to == known_good:
        return True
    try:
        record = json.loads(server.job.verdict)
        return bool(record["launch"] == server.job.identity.id and record["verdict"] == "good")
    except (ValueError, KeyError, TypeError):
        return False
