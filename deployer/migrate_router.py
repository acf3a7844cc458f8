"""The cut-over at a running router: the new worker in, healthy there, then the old one out."""

from __future__ import annotations

import dataclasses

from deployer.errors import DeployError, StepBlocked, StepFailed
from deployer.inventory import RouterCutover
from deployer.migrate_gap import Gap
from deployer.migrate_side import Side, trouble
from deployer.migrate_way import OUT_S, PHASE, Direction, Way
from deployer.model import Facts
from deployer.router import Router
from deployer.router_door import doors, key_for, secret
from deployer.router_worker import Worker, at, told


class RouterWay(Way):
    """A running router: the new worker in, healthy there, then the old one out."""

    @property
    def router_rules(self) -> RouterCutover:
        """Its part of the inventory."""
        if self.rules.router is None:
            raise TypeError("no router is configured")
        return self.rules.router

    def router(self) -> Router:
        """The client. With `via: host` the side whose entry names the router is asked first.

        Raises StepBlocked when its API key is not set.
        """
        rules = self.router_rules
        entry = self.destination.want.entry
        own = entry.cutover is not None and entry.cutover.router is not None
        first = self.destination if own or entry.replica is not None else self.source
        other = self.source if first is self.destination else self.destination
        key = key_for(rules, self.destination.environ)
        hosts = [] if rules.via == "controller" else [first.host, other.host]
        return Router(doors(rules, key, hosts), rules.url)

    def words(self) -> str:
        """See Way."""
        old, new = self.source.want.worker_url, self.destination.want.worker_url
        url = self.router_rules.url
        return f"at the router {url}: POST /workers {new}, wait until healthy, DELETE {old}"

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """The router answers, the source is one of its workers, and the destination not yet."""
        rules = self.router_rules
        found = []
        for side in (self.source, self.destination):
            try:
                server_key(side)
            except StepBlocked as error:
                if (error.what, error.fix) not in found:
                    found.append((error.what, error.fix))
        old, new = self.source.want.worker_url, self.destination.want.worker_url
        if old == new:
            fix = "give each deployment its own worker_url"
            return [*found, (f"source and destination are both {old} to the router", fix)]
        workers = self.router().workers()
        there = at(workers, old)
        if there is None and not self.record.cut:
            name = self.source.want.id
            fix = f"set worker_url of {name} to how the router knows it"
            if at(workers, new) is not None:
                fix += f"; or, if its traffic has moved already, stop it: `deploy down {name}`"
            found.append(
                (f"the router {rules.url} has no worker {old}; it has {told(workers)}", fix)
            )
        gets = at(workers, new)
        unproven = destination is not None and trouble(self.destination.want, destination)
        if gets is not None and gets.ready and unproven and not self.record.started:
            what = (
                f"{rules.url} sends requests to {new}, which does not serve as proven: {unproven}"
            )
            fix = f"`deploy verify {self.destination.want.id}`, or take it out of the router"
            found.append((what, fix))
        if there is not None and there.kind != "regular":
            what = f"{old} is a {there.kind} worker of {rules.url}"
            fix = "one part of a disaggregated server is not moved by itself; use cutover.hook"
            found.append((what, fix))
        return found

    def remember(self) -> None:
        """Was the destination a worker before? Then it stays one."""
        self.record.routed_before = self.router().find(self.destination.want.worker_url) is not None

    def hold_back(self) -> None:
        """A list of workers that names the destination already sends it requests unproven."""
        if self.record.served_before or self.record.cut:
            return
        url, side, router = self.destination.want.worker_url, self.destination, self.router()
        if router.find(url) is None:
            return
        router.take_out(url, OUT_S, self.tick(None))
        side.note("launch", f"{url} is taken out of {self.router_rules.url} until it has passed")

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        loses, gets = self.sides(direction)
        old, new = loses.want.worker_url, gets.want.worker_url
        router, tick = self.router(), self.tick(gets)
        workers = router.workers()
        before, there = at(workers, old), at(workers, new)
        if there is None or not there.ready:
            there = router.take_in(
                new,
                self.router_rules.ready_s,
                tick,
                api_key=server_key(gets),
                like=self._like(before, loses),
                noted=lambda worker_id: self._added(direction, worker_id),
            )
        if direction == "forward":
            self._same_names(router, before, there)
        gets.note(PHASE, f"the router has {new} and finds it healthy")
        if direction == "back" and self._stays():
            loses.note(PHASE, f"{old} was a worker before the migration and stays one")
            return None
        added = self.record.worker if direction == "back" else ""
        if router.take_out(old, OUT_S, tick, added):
            gets.note(PHASE, f"the router has let {old} go; its requests end by themselves")
        if direction == "forward":
            text = "a router keeps its workers in memory: what starts it is to name"
            gets.note(PHASE, f"{text} {new} from now on, and no longer {old}")
        if direction == "forward" and loses.want.peers:
            text = f"take `replica` out of the entry of {loses.want.id}: `up` of the other replicas"
            gets.note(PHASE, f"{text} waits for it as long as it is one")
        return None

    def _stays(self) -> bool:
        """Was the destination a worker before, with a server that is still as good as then?"""
        record, side = self.record, self.destination
        if not (record.routed_before and record.served_before):
            return False
        try:
            return not trouble(side.want, side.gather())
        except DeployError:
            return False

    def _added(self, direction: Direction, worker_id: str) -> None:
        if direction == "forward":
            self.record.worker = worker_id
            self.save()

    def _like(self, worker: Worker | None, side: Side) -> Worker | None:
        """The worker whose place is taken; its names where they are not the server's own."""
        if worker is None:
            return None
        own = side.want.playbook.model.served_name
        return dataclasses.replace(worker, models=()) if own in worker.models else worker

    def _same_names(self, router: Router, old: Worker | None, new: Worker) -> None:
        """Who asks for the model by a name that the router knows still gets an answer.

        Raises StepFailed, with the new worker out again.
        """
        lost = set(old.models) - set(new.models) if old is not None else set()
        if not lost:
            return
        url = self.destination.want.worker_url
        has = ", ".join(new.models) or "none: could it not ask, is the server's API key another?"
        error = StepFailed(
            f"the router does not know {', '.join(sorted(lost))} of worker {url}; it has {has}",
            where=self.router_rules.url,
            fix="`deploy logs`; correct it, then run the same command again, or --abort",
        )
        if not self.record.routed_before:
            try:
                router.take_out(url, OUT_S, self.tick(None), self.record.worker)
            except DeployError as other:
                error.add(f"and it was not taken out again: {other.what}")
        raise error

    def problem(self, direction: Direction) -> str:
        """See Way."""
        loses, gets = self.sides(direction)
        old, new = loses.want.worker_url, gets.want.worker_url
        workers = self.router().workers()
        there, gone = at(workers, new), at(workers, old)
        if there is None or not there.ready:
            return f"the router finds {new} {'unhealthy' if there else 'not in its list'}"
        if gone is not None and gone.ready and not (direction == "back" and self._stays()):
            return f"the router still sends requests to {old}"
        return ""

    def lost(self, direction: Direction) -> bool:
        """See Way: a router that was started again has the list of its command line, or none."""
        loses, gets = self.sides(direction)
        workers = self.router().workers()
        there, gone = at(workers, gets.want.worker_url), at(workers, loses.want.worker_url)
        return there is None or (there.ready and gone is not None and gone.ready)

    def seen_by_clients(self, direction: Direction) -> str:
        """See Way. A router that is asked from the dark host tells nothing."""
        try:
            return self.problem(direction)
        except DeployError:
            return ""


def server_key(side: Side) -> str:
    """The API key of a side's server, which the router sends it. Raises StepBlocked."""
    return secret(side.environ, side.want.playbook.serve.api_key_env, "serve.api_key_env")
