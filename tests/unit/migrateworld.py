"""Two hosts, a router and a hook as one small world: every effect is counted, any may be the last.

The procedure, its journal and the state files are the real ones; steps and transports are doubles
whose effects stand here. `Killed` at the n-th effect is a kill -9 before or after it; `cut` makes a
host unreachable from there on.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import serverworld as world

from deployer import (
    migrate,
    migrate_back,
    migrate_fetch,
    migrate_hook,
    migrate_pair,
    migrate_retire,
    migrate_router,
)
from deployer.deployment import Deployment
from deployer.errors import GateFailed, LockHeld, Unreachable
from deployer.events import Bus, Event
from deployer.inventory import Cutover, Host
from deployer.migrate import MigrateOptions, MigrateResult
from deployer.migrate_mark import Marked, parse_mark
from deployer.migrate_weights import Rate
from deployer.model import Change, Facts, Plan, ProbeOutput, Procedure, Where
from deployer.playbook import Peer
from deployer.remote.jobs import JobIdentity
from deployer.remote.transport import Answer
from deployer.router_door import Reply
from deployer.state import DeploymentState, HostState, Launch, Migration
from deployer.state_file import StateFile
from deployer.steps.base import Step, StepContext
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.server_facts import PortOwner, ServerFact, ServerJob
from deployer.steps.server_wanted import LaunchNote, fingerprint
from deployer.steps.serving_fact import ServingFact

SRC, DST = "kpro6", "kpro5"
MANIFEST = world.MANIFEST
OLD = """arch: amd64
features: nesting=1,keyctl=1
mp0: /mnt/models,mp=/srv/models
mp1: local-lvm:vm-129-disk-1,mp=/data
net0: name=eth0,bridge=vmbr0,hwaddr=AA:BB:CC:DD:EE:FF,ip=192.0.2.129/24
net1: name=eth1,bridge=vmbr1,hwaddr=AA:BB:CC:DD:EE:01,ip=192.0.2.50/24,tag=7,type=veth
unprivileged: 1
lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file
lxc.apparmor.profile: unconfined
"""
"""The configuration of a container that moves."""


def conf(text: str) -> ContainerFacts:
    """A running container with this configuration."""
    return ContainerFacts(status="running", conf=text, version=(8, 2))


class Killed(BaseException):
    """kill -9 of the controller: nothing that would clean up counts."""


@dataclass
class Machine:
    """A host with its guest: which steps are done, and the server."""

    name: str
    done: set[str] = field(default_factory=set)
    serving: bool = False
    good: bool = False
    container: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    launches: int = 0
    mark: str = ""
    """Fingerprint of what runs; '' for the wish as it was at first."""


class World:
    """Everything that outlives the controller."""

    def __init__(self, folder: Path, cutover: dict[str, Any]) -> None:
        self.folder = folder
        self.machines = {SRC: Machine(SRC), DST: Machine(DST)}
        self.machines[SRC].done = {"driver", "gpus", "container", "venv", "shards"}
        self.machines[SRC].serving = self.machines[SRC].good = True
        self.workers: dict[str, bool] = {url(SRC): True}
        self.keys: set[str] = set()
        self.hook_at = SRC
        self.rates = {"peer": Rate(3e8), "hub": Rate(1e8)}
        self.gates_fail = False
        self.bad: set[str] = set()
        """Hosts whose server cannot be proven any more."""
        self.blocked: dict[tuple[str, str], Plan] = {}
        """What a step of a host refuses."""
        self.locked: set[str] = set()
        """Hosts whose lock another run has taken since the look."""
        self.edits: dict[str, dict[str, Any]] = {}
        """What of a host's playbook was changed meanwhile."""
        self.settle_fails = False
        self.effects: list[str] = []
        self.stop_at: tuple[int, str] | None = None
        self.dark: set[str] = set()
        self.cut_at: tuple[int, str] | None = None
        self.mute: set[str] = set()
        """Hosts that answer while their guest does not."""
        self.stopped: set[str] = set()
        """Hosts whose container is stopped."""
        self.clock = 0.0
        self.rules = {"settle_s": 1, "drain_s": 0, **cutover}
        state = HostState(host=SRC)
        own = DeploymentState(manifest=MANIFEST, known_good="l-old")
        own.launches.append(Launch(id="l-old", variant="mtp", started=1.0, verdict="good"))
        state.deployments["qwen"] = own
        StateFile(folder / ".deploy" / "state", SRC).save(state)

    # ---- effects
    @contextmanager
    def effect(self, host: str, what: str) -> Any:
        """One change of the world; the controller may die right before or right after it."""
        self.reach(host)
        number = len(self.effects)
        self.effects.append(f"{host}:{what}")
        if self.stop_at == (number, "before"):
            raise Killed
        yield
        self.check()
        if self.stop_at == (number, "after"):
            raise Killed
        if self.cut_at is not None and self.cut_at[0] == number:
            self.dark.add(self.cut_at[1])

    def reach(self, host: str) -> None:
        """Raises Unreachable while the network to it is cut."""
        if host in self.dark:
            raise Unreachable("no route to host", where=host, fix="mend it")

    def check(self) -> None:
        """What holds at every moment: clients have a server, and it has passed its gates."""
        if "hook" in self.rules:
            assert self.machines[self.hook_at].serving and self.machines[self.hook_at].good
            return
        ready = [one for one in self.workers if self.workers[one]]
        assert ready, f"no worker at the router after {self.effects[-3:]}"
        for one in ready:
            machine = next(m for m in self.machines.values() if url(m.name) == one)
            assert machine.good, f"{machine.name} gets traffic unproven after {self.effects[-3:]}"
        live = [one for one in ready if self.machine_of(one).serving]
        assert live, f"all traffic goes to a stopped server after {self.effects[-3:]}"

    def machine_of(self, worker: str) -> Machine:
        """Whose URL it is."""
        return next(m for m in self.machines.values() if url(m.name) == worker)

    # ---- the router
    def ask(self, method: str, path: str, body: Any = None) -> Reply:
        """The door of RouterWay."""
        if (method, path) == ("GET", "/workers"):
            rows = [
                {"id": one, "url": one, "is_healthy": healthy and self.machine_of(one).serving}
                for one, healthy in self.workers.items()
            ]
            return Reply(200, {"workers": rows})
        if method == "POST":
            with self.effect("router", f"add {body['url']}"):
                self.workers[body["url"]] = True
            return Reply(202, {"worker_id": body["url"]})
        if method == "DELETE":
            one = path.removeprefix("/workers/").replace("%3A", ":").replace("%2F", "/")
            with self.effect("router", f"remove {one}"):
                self.workers.pop(one, None)
            return Reply(202, {})
        return Reply(404, None)

    # ---- facts
    def facts(self, want: Deployment) -> Facts:
        """As the probes would see it."""
        machine = self.machines[want.host_name]
        self.reach(machine.name)
        raw = machine.files.get(f"/var/lib/deployer/migrations/{want.name}.json")
        marked = parse_mark(ProbeOutput(0, raw or b"", b""))
        job = None
        launch = f"l-{machine.name}-{machine.launches}"
        if machine.serving:
            identity = JobIdentity("server-qwen", launch, 42, 1000, world.BOOT, 40)
            mark = machine.mark or fingerprint(world.deployment(), MANIFEST, "mtp")
            job = ServerJob(identity, True, "", mark, LaunchNote("mtp"), "", (42,), ())
        owners = (PortOwner(42, 1000, 40, 1, "", "python -m sglang.launch_server"),)
        server = ServerFact(
            boot=world.BOOT,
            job=job,
            listening=machine.serving,
            owners=owners if machine.serving else (),
        )
        verdict = "good" if machine.good and machine.serving else ""
        serving = ServingFact(launch if verdict else "", verdict, 1.0, {}, "")
        if machine.name == DST and self.settle_fails and url(DST) in self.workers:
            serving = dataclasses.replace(serving, problem="a short request failed: 500")
        values: dict[type, object] = {ServerFact: server, ServingFact: serving, Marked: marked}
        if machine.name in self.stopped:
            values = {Marked: marked, ContainerFacts: ContainerFacts("stopped", conf="")}
        if machine.name in self.mute:
            return Facts({Marked: marked}, {want.guest: "connection refused"})
        return Facts(values)

    def migrate(self, **words: Any) -> MigrateResult:
        """Runs the command. Raises Killed where it is told to."""
        source, destination = self.wanted(SRC), self.wanted(DST)
        options = MigrateOptions(
            base=self.folder / "inventory",
            environ={},
            now=lambda: self.clock,
            sleep=lambda seconds: self.sleep(seconds),
            **words,
        )
        self.events: list[Event] = []
        return migrate.migrate(source, destination, options, Bus(self.events.append))

    def wanted(self, host: str) -> Deployment:
        """As inventory and playbook say now."""
        return deployment(host, self.rules, **self.edits.get(host, {}))

    def sleep(self, seconds: float) -> None:
        """Of the controller."""
        self.clock += seconds

    def migration(self, host: str) -> Migration | None:
        """The journal in the state of a host."""
        state = StateFile(self.folder / ".deploy" / "state", host).load()
        own = state.deployments.get("qwen")
        return own.migration if own is not None else None


def url(host: str) -> str:
    """Of the worker."""
    return f"http://{host}:30000"


def deployment(host: str, rules: Mapping[str, Any], **edits: Any) -> Deployment:
    """HOST/qwen."""
    want = world.deployment(**edits)
    entry = want.entry.model_copy(
        update={"url": url(host), "cutover": Cutover.model_validate(dict(rules))}
    )
    document = want.host.model_dump()
    document["ssh"]["address"] = host
    return dataclasses.replace(
        want, host_name=host, host=Host.model_validate(document), entry=entry
    )


class Fake(Step):
    """A step whose goal is a word in the machine's `done`, or the server itself."""

    def __init__(self, name: str, world_: World) -> None:
        self.name = name  # type: ignore[misc]
        self.world = world_

    def probes(self, want: Deployment) -> list[Any]:
        return []

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        machine = self.world.machines[want.host_name]
        if refusal := self.world.blocked.get((machine.name, self.name)):
            return refusal
        wish = fingerprint(want, MANIFEST, "mtp")
        now = machine.mark or fingerprint(world.deployment(), MANIFEST, "mtp")
        missing = {
            "stop": machine.serving and now != wish,
            "launch": not machine.serving or now != wish,
            "verify": machine.serving and not machine.good,
            "down": machine.serving,
        }.get(self.name, self.name not in machine.done)
        if self.name == "verify" and not machine.serving:
            return Plan.unknown("launch")
        if not missing:
            return Plan.nothing("as wanted")
        return Plan.change("work", Change(self.name, "work", Procedure(Where.HOST, self.name)))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        host = context.want.host_name
        machine = self.world.machines[host]
        bad = self.world.bad | ({DST} if self.world.gates_fail else set())
        if self.name == "verify" and host in bad:
            raise GateFailed("it repeats itself", where=context.want.id)
        with self.world.effect(host, self.name):
            if self.name == "launch":
                assert {"driver", "gpus", "container", "venv", "shards"} <= machine.done
                machine.serving, machine.good = True, False
                machine.launches += 1
                machine.mark = fingerprint(context.want, MANIFEST, "mtp")
            elif self.name == "verify":
                machine.good = True
            elif self.name in ("down", "stop"):
                machine.serving = machine.good = False
            else:
                machine.done.add(self.name)
        context.save()


class Door:
    """The transport of a machine: files, and jobs of which there are none."""

    def __init__(self, world_: World, host: str) -> None:
        self.world, self.name = world_, host

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        self.world.reach(self.name)
        files = self.world.machines[self.name].files
        if script.startswith("path=$1"):
            with self.world.effect(self.name, "mark"):
                files[args[0]] = stdin
            return Answer(0, b"", b"")
        if script.startswith("rm -f"):
            with self.world.effect(self.name, "unmark"):
                files.pop(args[0], None)
            return Answer(0, b"", b"")
        return Answer(0, b"none\n", b"")

    def close(self) -> None:
        pass


class Session:
    """The double of HostSession."""

    world: World

    def __init__(self, host: str, entry: object, base: Path, note: object) -> None:
        self.host = host
        self.door = Door(self.world, host)
        self.asked = False

    def transports(self, want: Deployment) -> Mapping[Where, Any]:
        return {Where.HOST: self.door, Where.GUEST: self.door}

    def look(self, want: Deployment, steps: Sequence[Step]) -> Facts:
        return self.world.facts(want)

    def want_lock(self, run_id: str) -> None:
        if self.host in self.world.locked:
            raise LockHeld("another run is at work", where=self.host, fix="wait for it")
        self.asked = True

    def entered(self, step: str) -> None:
        if self.asked:
            self.world.reach(self.host)

    def close(self, on_problem: Callable[[str], None]) -> None:
        pass


class Key:
    """The double of Lending: what opens it is on the destination, what it opens on the source."""

    world: World

    def __init__(self, source: Any, destination: Any, ident: str) -> None:
        self.ident = ident

    def open(self, manifest: object) -> Peer:
        for host in (DST, SRC):
            with self.world.effect(host, "key"):
                self.world.keys.add(host)
        return Peer(address="kpro6", path="/srv/models/tiny")

    def drop(self) -> None:
        with self.world.effect(DST, "no key"):
            self.world.keys.discard(DST)

    def close(self, *, borrower: bool = True) -> None:
        for host in (SRC, DST) if borrower else (SRC,):
            with self.world.effect(host, "no key"):
                self.world.keys.discard(host)


def hook(world_: World) -> Callable[..., list[str]]:
    """The double of run_hook."""

    def run(
        rules: object, variables: Mapping[str, str], environ: object, **more: object
    ) -> list[str]:
        with world_.effect("hook", variables["DEPLOY_DIRECTION"]):
            world_.hook_at = variables["DEPLOY_TO"].partition("/")[0]
        return ["moved"]

    return run


def build(monkeypatch: pytest.MonkeyPatch, folder: Path, cutover: dict[str, Any]) -> World:
    """A world whose source serves, and the procedure bound to it."""
    made = World(folder, cutover)
    monkeypatch.setattr(Session, "world", made, raising=False)
    monkeypatch.setattr(Key, "world", made, raising=False)
    names = ("driver", "gpus", "container", "venv", "shards", "stop", "launch", "verify")
    # What is on the disk after a power cut is tested elsewhere; here it is time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(migrate, "HostSession", Session)
    monkeypatch.setattr(
        migrate, "all_steps", lambda retry=False: [Fake(name, made) for name in names]
    )
    monkeypatch.setattr(migrate_pair, "down_steps", lambda: [Fake("down", made)])
    monkeypatch.setattr(migrate_back, "Lending", Key)
    monkeypatch.setattr(migrate_fetch, "Lending", Key)
    monkeypatch.setattr(
        migrate_fetch, "measure", lambda side, want, manifest, source: made.rates[source]
    )
    monkeypatch.setattr(migrate_router, "doors", lambda rules, key, hosts: made)
    monkeypatch.setattr(migrate_hook, "run_hook", hook(made))

    def retire(side: Any) -> None:
        machine = made.machines[side.want.host_name]
        with made.effect(machine.name, "retire"):
            machine.container = False
            machine.done -= {"gpus", "container"}

    monkeypatch.setattr(migrate_retire, "retire", retire)
    return made
