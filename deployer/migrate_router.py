"""The cut-over at a running router: the new worker in, healthy there, then the old one out."""

from __future__ import annotations

from deployer.errors import DeployError, StepFailed
from deployer.inventory import RouterCutover
from deployer.migrate_gap import Gap
from deployer.migrate_way import OUT_S, PHASE, Direction, Way
from deployer.model import Facts
from deployer.router import HereDoor, Router, ThereDoor, told


class RouterWay(Way):
    """A running router: the new worker in, healthy there, then the old one out."""

    @property
    def router_rules(self) -> RouterCutover:
        """Its part of the inventory."""
        if self.rules.router is None:
            raise TypeError("no router is configured")
        return self.rules.router

    def router(self) -> Router:
        """The client."""
        rules = self.router_rules
        environ = self.destination.environ
        key = environ.get(rules.api_key_env, "") if rules.api_key_env else ""
        if rules.via == "controller":
            return Router(HereDoor(rules.url, key), rules.url)
        names = self.destination.want.entry
        side = self.destination if names.cutover or names.replica else self.source
        return Router(ThereDoor(side.host, rules.url, key), rules.url)

    def words(self) -> str:
        """See Way."""
        old, new = self.source.want.worker_url, self.destination.want.worker_url
        url = self.router_rules.url
        return f"at the router {url}: POST /workers {new}, wait until healthy, DELETE {old}"

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """The router answers, and the source is one of its workers."""
        rules = self.router_rules
        if rules.api_key_env and not self.destination.environ.get(rules.api_key_env):
            return [(f"{rules.api_key_env} (cutover.router.api_key_env) is not set", "export it")]
        old, new = self.source.want.worker_url, self.destination.want.worker_url
        if old == new:
            fix = "give each deployment its own worker_url"
            return [(f"source and destination are both {old} to the router", fix)]
        router = self.router()
        workers = router.workers()
        if not self.record.cut and router.find(old) is None:
            return [
                (
                    f"the router {rules.url} has no worker {old}; it has {told(workers)}",
                    f"set worker_url of {self.source.want.id} to how the router knows it",
                )
            ]
        return []

    def remember(self) -> None:
        """Was the destination a worker before? Then it stays one."""
        self.record.routed_before = self.router().find(self.destination.want.worker_url) is not None

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        loses, gets = self.sides(direction)
        old, new = loses.want.worker_url, gets.want.worker_url
        router = self.router()
        there = router.find(new)
        worker = there.id if there is not None else ""
        if there is None or not there.ready:
            name = gets.want.playbook.serve.api_key_env
            worker = router.add(new, api_key=gets.environ.get(name, "") if name else "")
            if direction == "forward":
                self.record.worker = worker
                self.save()
        router.await_ready(new, worker, self.router_rules.ready_s, self.tick(gets))
        gets.note(PHASE, f"the router has {new} and finds it healthy")
        if direction == "back" and self.record.routed_before:
            loses.note(PHASE, f"{old} was a worker before the migration and stays one")
            return None
        if router.remove(old, self.record.worker if direction == "back" else ""):
            if not router.await_out(old, OUT_S, self.tick(gets), drained=False):
                raise StepFailed(
                    f"the router still lists {old} {OUT_S:g} s after it was taken out",
                    where=self.router_rules.url,
                    fix="look at the router's log; then run the same command again",
                )
            gets.note(PHASE, f"the router has let {old} go; its requests end by themselves")
        return None

    def problem(self, direction: Direction) -> str:
        """See Way."""
        loses, gets = self.sides(direction)
        old, new = loses.want.worker_url, gets.want.worker_url
        workers = {one.url.rstrip("/"): one for one in self.router().workers()}
        there, gone = workers.get(new), workers.get(old)
        if there is None or not there.ready:
            return f"the router finds {new} {'unhealthy' if there else 'not in its list'}"
        stays = direction == "back" and self.record.routed_before
        if gone is not None and gone.ready and not stays:
            return f"the router still sends requests to {old}"
        return ""

    def seen_by_clients(self, direction: Direction) -> str:
        """See Way. A router that is asked from the dark host tells nothing."""
        try:
            return self.problem(direction)
        except DeployError:
            return ""

    def drained(self, direction: Direction, limit_s: float) -> str:
        """See Way."""
        loses, gets = self.sides(direction)
        old = loses.want.worker_url
        if self.router().await_out(old, limit_s, self.tick(gets), drained=True):
            return f"the router counts no request on {old}"
        return f"the router still counts requests on {old} after {limit_s:g} s"
