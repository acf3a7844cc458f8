"""One of several replicas behind a router: out before its server stops, in when it has passed.

What serves is seen at the router, as clients do: a replica is taken out only while all the others
get requests, so that of N never fewer than N-1 serve. It gets requests again only when its server
has passed its gates, or when the known-good one that it replaced serves in its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from deployer.deployment import Deployment
from deployer.errors import DeployError, StepBlocked, StepFailed, Unreachable
from deployer.events import Bus, Note, Progress
from deployer.inventory import Replica
from deployer.model import Facts
from deployer.remote.transport import Transport
from deployer.router import EVERY_S, Router
from deployer.router_door import Door, doors, key_for, secret
from deployer.router_worker import Worker, at, told
from deployer.steps.server_facts import ServerFact

INTERRUPTS = ("driver", "gpus", "container", "stop", "launch")
"""Steps that end a server, or may."""
SUDDENLY = ("driver", "gpus", "container")
"""Those of them that do not wait for its requests themselves."""
UNPROVEN = ("launch", "verify")
"""Steps before which nobody may send it requests, where it was out before them."""
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
        self.environ = environ
        if door is None:
            door = doors(rules.router, key_for(rules.router, environ), [host])
        self.router = Router(door, rules.router.url)

    def serves(self) -> bool:
        """Does it get requests now?"""
        worker = self.router.find(self.want.worker_url)
        return worker is not None and worker.ready

    def lacking(self) -> list[str]:
        """Ids of the other replicas that get no requests now."""
        return list(self._missing())

    def before(self, step: str, empty: Callable[[], str]) -> None:
        """Called before a step acts. Raises StepBlocked when too few others serve.

        `empty` waits until no request runs on the server, and says what came of it.
        """
        if self.out and step in UNPROVEN:
            self._hold_back()
        if step not in INTERRUPTS or self.out:
            return
        self.leave()
        if step in SUDDENLY and (came := empty()):
            self._note(came)

    def _hold_back(self) -> None:
        """A router whose command line names it takes it in by itself, before its gates."""
        url = self.want.worker_url
        if self.router.find(url) is not None and self.router.take_out(url, OUT_S, self._tick):
            self._note(f"taken out of {self.rules.router.url} until it has passed")

    def leave(self) -> None:
        """Out of the router, as far as it is in. Raises StepBlocked, StepFailed, Unreachable."""
        url = self.want.worker_url
        try:
            there = self.router.find(url)
        except Unreachable as error:
            error.fix += "; if it is gone for good, take `replica` out of the inventory"
            raise
        if there is None:
            # Perhaps taken out by a run that was killed: a failure of this one must put it back.
            self.out = True
            return
        if there.kind != "regular":
            raise StepBlocked(
                f"{url} is a {there.kind} worker: it would come back as a whole one",
                where=f"{self.want.id} {STEP}",
                fix="a part of a disaggregated server is no replica: take `replica` away",
            )
        if there.ready and not self.leaves_for_good:
            self._await_others()
        # From here on a failure must put it back, also one of the request itself: it may have come.
        self.out = True
        self.router.remove(url)
        if there.ready and not self.leaves_for_good:
            # Another controller may have taken another one out in the same moment.
            try:
                self._refuse_without_others()
            except DeployError:
                self.join()
                raise
        self.router.take_out(url, OUT_S, self._tick)
        self._note(
            f"taken out of {self.rules.router.url}; its requests have "
            f"{self.want.playbook.stop.drain_s:g} s to end"
        )

    def join(self) -> None:
        """In the router, healthy. Raises StepFailed, Unreachable."""
        url = self.want.worker_url
        there = self.router.find(url)
        if there is not None and there.ready:
            self.out = False
            return
        # A router that knows no key, or another one, sends requests there that are all refused.
        name = self.want.playbook.serve.api_key_env
        key = secret(self.environ, name, "serve.api_key_env")
        taken = self.router.take_in(url, self.rules.router.ready_s, self._tick, api_key=key)
        self._is_known(taken)
        self.out = False
        self._note(f"in {self.rules.router.url}, and healthy there")

    def _is_known(self, worker: Worker) -> None:
        """Raises StepFailed, with the worker out again, when the router could not ask it.

        With a key that the server does not know, all that is sent there is refused.
        """
        others = [at(self.router.workers(), peer.url) for peer in self.want.peers]
        if worker.models or not any(one is not None and one.models for one in others):
            return
        self.router.take_out(self.want.worker_url, OUT_S, self._tick)
        self.out = True
        raise StepFailed(
            f"the router could not ask {worker.url} for its model, as it could the others",
            where=f"{self.want.id} {STEP}",
            fix="is serve.api_key_env the key that this server was started with? `deploy restart`",
        )

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
        seen = {peer.id: at(workers, peer.url) for peer in self.want.peers}
        return {
            name: one is not None and not one.draining
            for name, one in seen.items()
            if one is None or not one.ready
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
