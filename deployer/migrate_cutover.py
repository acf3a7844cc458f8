"""The ways to move the traffic: each looks, decides, acts, looks again, and knows the way back.

All of them may be run twice: what is done already is seen and left. Before `forward` the
destination has passed its gates; before `back` the source serves.
"""

from __future__ import annotations

import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deployer.deployment import Deployment
from deployer.errors import RemoteCommandFailed, StepFailed
from deployer.inventory import AddressCutover, Cutover, HookCutover, RouterCutover
from deployer.migrate_gap import Gap, Meter
from deployer.migrate_side import Side, trouble
from deployer.model import Facts
from deployer.remote.transport import Transport
from deployer.router import HereDoor, Router, ThereDoor, told
from deployer.shell import words
from deployer.state import Migration
from deployer.steps.container_facts import ContainerFacts
from deployer.up import address

PHASE = "cutover"
OUT_S = 30.0
BACK_S = 30.0
"""How long clients may be without an answer after a move before that is said."""
Direction = Literal["forward", "back"]


def worker_url(want: Deployment) -> str:
    """How a router reaches the server."""
    return (want.entry.worker_url or address(want).removesuffix("/v1")).rstrip("/")


def cutover_of(source: Deployment, destination: Deployment) -> Cutover:
    """The destination's entry decides, then the source's."""
    return destination.entry.cutover or source.entry.cutover or Cutover()


@dataclass
class Way(ABC):
    """One way to move the traffic from `source` to `destination`, and back."""

    source: Side
    destination: Side
    rules: Cutover
    record: Migration
    save: Callable[[], None] = field(default=lambda: None)
    """Writes the journal; called when the record has learnt something."""

    @abstractmethod
    def words(self) -> str:
        """What it will do, for a dry run."""

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """(what speaks against it, what to do). Read-only."""
        return []

    @abstractmethod
    def move(self, direction: Direction) -> Gap | None:
        """Moves the traffic; the gap where it is measured. Raises DeployError."""

    def problem(self, direction: Direction) -> str:
        """Why the traffic is not where it should be, as seen now; '' when it is, or not seen."""
        return ""

    def drained(self, direction: Direction, limit_s: float) -> str:
        """Waits for what still runs on the old side; what came of it, '' when it cannot be told."""
        return ""

    def sides(self, direction: Direction) -> tuple[Side, Side]:
        """(who loses the traffic, who gets it)."""
        pair = (self.source, self.destination)
        return pair if direction == "forward" else (pair[1], pair[0])

    def tick(self, side: Side) -> Callable[[str, float, float], None]:
        """Shows a wait, and ends it when the server that is waited for is gone."""
        looked = time.monotonic()

        def tick(what: str, spent: float, limit: float) -> None:
            nonlocal looked
            side.progress(PHASE, what, spent, limit)
            if time.monotonic() - looked >= 5.0:
                looked = time.monotonic()
                if why := trouble(side.want, side.gather()):
                    raise StepFailed(
                        f"it does not serve any more: {why}",
                        where=side.want.id,
                        fix=f"`deploy logs {side.want.id}`",
                    )

        return tick


class NoWay(Way):
    """Clients are told the new endpoint by somebody else."""

    def words(self) -> str:
        """See Way."""
        return f"print the new endpoint, {address(self.destination.want)}; nobody moves the traffic"

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        _, gets = self.sides(direction)
        gets.note(PHASE, f"clients: use {address(gets.want)} from now on")
        return None


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
        side = self.destination if self.destination.want.entry.cutover else self.source
        return Router(ThereDoor(side.host, rules.url, key), rules.url)

    def words(self) -> str:
        """See Way."""
        old, new = worker_url(self.source.want), worker_url(self.destination.want)
        url = self.router_rules.url
        return f"at the router {url}: POST /workers {new}, wait until healthy, DELETE {old}"

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """The router answers, and the source is one of its workers."""
        rules = self.router_rules
        if rules.api_key_env and not self.destination.environ.get(rules.api_key_env):
            return [(f"{rules.api_key_env} (cutover.router.api_key_env) is not set", "export it")]
        old, new = worker_url(self.source.want), worker_url(self.destination.want)
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

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        loses, gets = self.sides(direction)
        old, new = worker_url(loses.want), worker_url(gets.want)
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
        old, new = worker_url(loses.want), worker_url(gets.want)
        workers = {one.url.rstrip("/"): one for one in self.router().workers()}
        there, gone = workers.get(new), workers.get(old)
        if there is None or not there.ready:
            return f"the router finds {new} {'unhealthy' if there else 'not in its list'}"
        if gone is not None and gone.ready:
            return f"the router still sends requests to {old}"
        return ""

    def drained(self, direction: Direction, limit_s: float) -> str:
        """See Way."""
        loses, gets = self.sides(direction)
        old = worker_url(loses.want)
        if self.router().await_out(old, limit_s, self.tick(gets), drained=True):
            return f"the router counts no request on {old}"
        return f"the router still counts requests on {old} after {limit_s:g} s"


class HookWay(Way):
    """A command of the user on this machine."""

    @property
    def hook(self) -> HookCutover:
        """Its part of the inventory."""
        if self.rules.hook is None:
            raise TypeError("no hook is configured")
        return self.rules.hook

    def words(self) -> str:
        """See Way."""
        rules = self.hook
        names = " ".join(f"{k}={v}" for k, v in self.variables("forward").items())
        probe = f"; the gap is measured at {rules.probe_url}" if rules.probe_url else ""
        return (
            f"run here: {words(rules.command)} (at most {rules.timeout_s:g} s) with {names}{probe}"
        )

    def variables(self, direction: Direction) -> dict[str, str]:
        """What the command finds in its environment besides ours."""
        loses, gets = self.sides(direction)
        return {
            "DEPLOY_DIRECTION": direction,
            "DEPLOY_FROM": loses.want.id,
            "DEPLOY_TO": gets.want.id,
            "DEPLOY_FROM_URL": worker_url(loses.want),
            "DEPLOY_TO_URL": worker_url(gets.want),
            "DEPLOY_MODEL": gets.want.playbook.model.served_name,
            "DEPLOY_MIGRATION": self.record.id,
        }

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        _, gets = self.sides(direction)
        with Meter(self.hook.probe_url or "") as meter:
            lines = run_hook(self.hook, self.variables(direction), gets.environ)
            for line in lines:
                gets.note(PHASE, f"hook: {line}")
            gap = meter.settled(BACK_S)
        return gap if self.hook.probe_url else None


def run_hook(
    rules: HookCutover, variables: Mapping[str, str], environ: Mapping[str, str]
) -> list[str]:
    """Runs the command to its end and returns its output. Raises StepFailed with it as evidence.

    At the deadline its whole process group is killed.
    """
    shown = words(rules.command)
    try:
        process = subprocess.Popen(
            rules.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ, **variables},
            start_new_session=True,
        )
    except OSError as error:
        raise StepFailed(
            f"the hook cannot be run: {error.strerror or error}",
            where=shown,
            fix="correct cutover.hook.command",
        ) from error
    try:
        raw, _ = process.communicate(timeout=rules.timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raw, _ = process.communicate()
        raise StepFailed(
            f"the hook still ran after {rules.timeout_s:g} s and was killed",
            where=shown,
            fix="correct it, or raise cutover.hook.timeout_s; it will be run again",
            evidence=_lines(raw),
        ) from None
    except BaseException:
        os.killpg(process.pid, 15)
        process.wait()
        raise
    if process.returncode != 0:
        raise StepFailed(
            f"the hook ended with status {process.returncode}",
            where=shown,
            fix="correct it, then run the same command again; or --abort",
            evidence=_lines(raw),
        )
    return list(_lines(raw))


def _lines(raw: bytes) -> tuple[str, ...]:
    return tuple(raw.decode("utf-8", "replace").splitlines()[-40:])


class AddressWay(Way):
    """An address that belongs to no machine moves from container to container."""

    @property
    def rule(self) -> AddressCutover:
        """Its part of the inventory."""
        if self.rules.address is None:
            raise TypeError("no address is configured")
        return self.rules.address

    def words(self) -> str:
        """See Way."""
        rule, source, destination = self.rule, self.source.want, self.destination.want
        return (
            f"move {rule.ip} from {rule.interface} of container {source.vmid} on "
            f"{source.host_name} to container {destination.vmid} on {destination.host_name}"
        )

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """Both run in containers, and one of them has the address."""
        found = []
        for side in (self.source, self.destination):
            if side.want.vmid is None:
                found.append((f"{side.want.id} runs in no container", "use cutover.hook"))
        seen = source.get(ContainerFacts) if source is not None else None
        if not found and not self.record.cut and seen is not None:
            value = holds(seen, self.rule)
            if value is None:
                found.append(
                    (
                        f"container {self.source.want.vmid} on {self.source.want.host_name} does "
                        f"not have {self.rule.ip} on {self.rule.interface}",
                        "correct cutover.address",
                    )
                )
        return found

    def move(self, direction: Direction) -> Gap | None:
        """See Way."""
        loses, gets = self.sides(direction)
        with Meter(self.rule.probe_url or "") as meter:
            old = holds(loses.gather().need(ContainerFacts), self.rule)
            new = holds(gets.gather().need(ContainerFacts), self.rule)
            if old is not None and direction == "forward":
                self.record.net = old
                self.save()
            if new is None:
                value = moved(old or self.record.net, self.rule, gets.gather().need(ContainerFacts))
                if old is not None:
                    run_pct(loses.host, drop_words(loses.want.vmid or 0, self.rule))
                run_pct(gets.host, give_words(gets.want.vmid or 0, self.rule, value))
            elif old is not None:
                run_pct(loses.host, drop_words(loses.want.vmid or 0, self.rule))
            if why := self.problem(direction):
                raise StepFailed(why, where=gets.want.id, fix="look at `pct config` on both hosts")
            gap = meter.settled(BACK_S)
        return gap if self.rule.probe_url else None

    def problem(self, direction: Direction) -> str:
        """See Way."""
        loses, gets = self.sides(direction)
        if holds(gets.gather().need(ContainerFacts), self.rule) is None:
            return f"container {gets.want.vmid} on {gets.want.host_name} lacks {self.rule.ip}"
        if holds(loses.gather().need(ContainerFacts), self.rule) is not None:
            return f"container {loses.want.vmid} on {loses.want.host_name} still has {self.rule.ip}"
        return ""


def holds(seen: ContainerFacts, rule: AddressCutover) -> str | None:
    """The network entry of the container that has the address; None when it has it not."""
    value = seen.config().current.keys.get(rule.interface)
    if value is None or dict(net_options(value)).get("ip", "") != rule.ip:
        return None
    return value


def net_options(value: str) -> list[tuple[str, str]]:
    """`name=eth1,bridge=vmbr0,...` as pairs, in order."""
    pairs = [part.partition("=") for part in value.split(",") if part]
    return [(key, text) for key, _, text in pairs]


def moved(old: str, rule: AddressCutover, seen: ContainerFacts) -> str:
    """The entry for the other container: another MAC address, and an interface name that is free.

    Raises StepFailed when the key is taken there by another address, or when there is no entry.
    """
    if not old:
        raise StepFailed(
            f"no container has {rule.ip} on {rule.interface}", fix="correct it by hand"
        )
    there = seen.config().current
    if rule.interface in there.keys:
        raise StepFailed(
            f"{rule.interface} of the other container is in use: {there.keys[rule.interface]}",
            fix="choose another cutover.address.interface, free in both containers",
        )
    pairs = net_options(old)
    kept = [(key, text) for key, text in pairs if key not in ("hwaddr", "name", "type")]
    names = {
        dict(net_options(value)).get("name", "")
        for key, value in there.keys.items()
        if key.startswith("net")
    }
    name = next(f"eth{n}" for n in range(len(names) + 1) if f"eth{n}" not in names)
    return ",".join(f"{key}={text}" for key, text in [("name", name), *kept])


def drop_words(vmid: int, rule: AddressCutover) -> Sequence[str]:
    """Takes the interface out, at once."""
    return ("pct", "set", str(vmid), "--delete", rule.interface)


def give_words(vmid: int, rule: AddressCutover, value: str) -> Sequence[str]:
    """Adds it, at once."""
    return ("pct", "set", str(vmid), f"--{rule.interface}", value)


def run_pct(host: Transport, argv: Sequence[str]) -> None:
    """Raises RemoteCommandFailed."""
    answer = host.run(words(argv) + "\n", timeout_s=60)
    if answer.exit != 0:
        raise RemoteCommandFailed(
            f"{words(argv)}: status {answer.exit}",
            where=host.name,
            evidence=tuple(answer.error_text.splitlines()[-5:]),
        )


def way_of(source: Side, destination: Side, record: Migration, save: Callable[[], None]) -> Way:
    """The one that the inventory names."""
    rules = cutover_of(source.want, destination.want)
    kinds: dict[str, type[Way]] = {
        "router": RouterWay,
        "hook": HookWay,
        "address": AddressWay,
        "none": NoWay,
    }
    return kinds[rules.kind](source, destination, rules, record, save)
