"""Looks at a machine that no inventory names; changes nothing there.

The probes are those of the steps: host and driver first, then the GPUs that were found and the
containers, then each running container from within, then its sshd from here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from deployer import names
from deployer.cancel import Cancel
from deployer.errors import DeployError
from deployer.inventory import Ssh
from deployer.model import Probe
from deployer.pct_net import net_options
from deployer.remote.batch import ProbeFailed, batch_script, new_nonce, parse_outputs
from deployer.remote.connect import open_host
from deployer.remote.sshtry import Door, Tried, try_login
from deployer.remote.sudo import SudoTransport, sudo_works
from deployer.remote.transport import Transport
from deployer.steps import boot_facts, container_facts, driver_probes, gpus_facts
from deployer.steps.boot_facts import BootFacts
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.driver_facts import HostDriver, HostKernels, HostSmi
from deployer.steps.gpus_facts import GpuFacts, Overrides, PciFunction
from deployer.survey_facts import GuestLook, Machine, guest_probe, machine_probe, usable

AT_ONCE = 12
"""Containers that are asked in one exec: each `pct` is half a second of one core."""
LOGIN_S = 5.0
"""How long the sshd of a container may take to answer."""

T = TypeVar("T")


@dataclass(frozen=True)
class Guest:
    """A container. `look` is None when it does not run; `tried` when no address is known."""

    vmid: int
    seen: ContainerFacts
    look: GuestLook | None = None
    tried: Tried | None = None

    @property
    def hostname(self) -> str:
        """As its configuration says; '' when it says none."""
        return self.seen.config().current.keys.get("hostname", "")

    @property
    def template(self) -> bool:
        """It cannot run."""
        return self.seen.config().current.flag("template")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The likeliest first: of its configured interfaces in order, IPv4 before IPv6."""
        return addresses(self.seen, self.look)

    @property
    def port(self) -> int:
        """Where its sshd listens."""
        return self.look.port if self.look else 22

    @property
    def by_ssh(self) -> bool:
        """Its own sshd takes our key; else it is reached through `pct exec`."""
        return self.tried is not None and self.tried.door is Door.OPEN


@dataclass(frozen=True)
class Survey:
    """All that was seen of one machine. `user` is who logged in."""

    machine: Machine
    user: str
    eyes: Literal["root", "sudo", "user"]
    """With whose eyes: of root, of root through sudo, or of a plain user, who sees less."""
    driver: HostDriver
    smi: HostSmi
    kernels: HostKernels
    boot: BootFacts
    gpus: GpuFacts
    overrides: Overrides
    guests: tuple[Guest, ...] = ()

    @property
    def kind(self) -> str:
        """`proxmox` or `plain`."""
        return "proxmox" if self.machine.is_proxmox else "plain"

    def gpu_name(self, one: PciFunction) -> str:
        """Of nvidia-smi where it answers, else of the files of the host."""
        told = next((row.name for row in self.smi.gpus if row.address == one.address), "")
        known = told.removeprefix("NVIDIA ")
        return known or self.machine.gpu_name(one.address, one.device.removeprefix("0x"))


def addresses(seen: ContainerFacts, look: GuestLook | None) -> tuple[str, ...]:
    """What a container may be reached by: seen within it when it runs, else as configured."""
    keys = seen.config().current.keys
    nets = [key for key in keys if re.fullmatch(names.NET_KEY.strip("^$"), key)]
    cards = [dict(net_options(keys[key])) for key in sorted(nets, key=lambda key: int(key[3:]))]
    if look is None or look.problem:
        static = [usable(card.get(kind, "")) for card in cards for kind in ("ip", "ip6")]
        found = [address for address in static if address]
    else:
        order = {card.get("name", ""): index for index, card in enumerate(cards)}
        last = len(order)
        ranked = sorted(look.addresses, key=lambda pair: order.get(pair[0], last))
        # An interface that Proxmox did not give (docker0 inside it) is not reached from outside.
        given = [address for name, address in ranked if name in order or name == "-"]
        found = given or [address for _, address in ranked]
    return tuple(dict.fromkeys(sorted(found, key=lambda address: ":" in address)))


def candidates(driver: HostDriver, machine: Machine) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(addresses that an inventory can name, display functions of NVIDIA that it cannot)."""
    found = [one.address for one in driver.gpus if one.address not in machine.virtual]
    good = tuple(
        address
        for address in found
        if re.fullmatch(names.PCI_ADDRESS.strip("^$"), address) and address.endswith(".0")
    )
    return good, tuple(one.address for one in driver.gpus if one.address not in good)


def survey(name: str, ssh: Ssh, base: Path, cancel: Cancel | None = None) -> Survey:
    """Looks at the machine behind `ssh`; relative paths in it are relative to `base`.

    Raises Unreachable and its subclasses, ProbeFailed.
    """
    opened = open_host(name, ssh, base)
    transport: Transport = opened
    with (cancel or Cancel()).waking(opened.close), contextlib.closing(opened):
        first = _host(transport)
        me = _of(first, Machine)
        eyes: Literal["root", "sudo", "user"] = "root" if me.uid == 0 else "user"
        if eyes == "user" and sudo_works(transport):
            transport, eyes = SudoTransport(transport), "sudo"
            first = _host(transport)
        seen = _gpus_and_guests(name, transport, ssh, base, first)
        return Survey(
            machine=_of(first, Machine),
            user=me.user or ssh.user,
            eyes=eyes,
            driver=_of(first, HostDriver),
            smi=_of(first, HostSmi),
            kernels=_of(first, HostKernels),
            boot=_of(first, BootFacts),
            gpus=seen[0],
            overrides=seen[1],
            guests=seen[2],
        )


def _host(transport: Transport) -> list[object]:
    probes = [machine_probe(), *driver_probes.host_probes(), boot_facts.probe()]
    return list(ask(transport, probes).values())


def _gpus_and_guests(
    name: str, transport: Transport, ssh: Ssh, base: Path, first: Sequence[object]
) -> tuple[GpuFacts, Overrides, tuple[Guest, ...]]:
    machine = _of(first, Machine)
    wanted, _ = candidates(_of(first, HostDriver), machine)
    probes = gpus_facts.probes(wanted)
    facts = dict(ask(transport, probes))
    vmids = machine.containers if machine.pct else ()
    confs: dict[int, ContainerFacts] = {}
    for part in _parts(vmids):
        asked = {f"container.{vmid}": vmid for vmid in part}
        answers = ask(transport, [_container_probe(vmid) for vmid in part])
        confs.update((asked[key], _of([answers[key]], ContainerFacts)) for key in asked)
    running = [vmid for vmid, seen in confs.items() if seen.status == "running"]
    looks: dict[int, GuestLook] = {}
    for part in _parts(running):
        answers = ask(transport, [guest_probe(vmid) for vmid in part])
        looks.update((vmid, _of([answers[f"survey.{vmid}"]], GuestLook)) for vmid in part)
    guests = [Guest(vmid, confs[vmid], looks.get(vmid)) for vmid in vmids]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        tried = list(pool.map(lambda guest: _try(name, guest, ssh, base), guests))
    shown = tuple(
        Guest(guest.vmid, guest.seen, guest.look, one)
        for guest, one in zip(guests, tried, strict=True)
    )
    seen = list(facts.values())
    return _of(seen, GpuFacts), _of(seen, Overrides), shown


def guest_ssh(guest: Guest, address: str, host: Ssh) -> Ssh:
    """How the container would be reached: by the keys and through the gateway of its host."""
    kept = {key: getattr(host, key) for key in ("identity_file", "known_hosts", "gateway")}
    port = guest.port if guest.port != 22 else None
    return Ssh.model_validate({"address": address, "port": port, "user": "root", **kept})


def _try(name: str, guest: Guest, host: Ssh, base: Path) -> Tried | None:
    """The first of its addresses whose sshd takes our key, else what became of the first."""
    if guest.look is None or guest.look.problem or not guest.look.keys:
        return None
    first: Tried | None = None
    for address in guest.addresses[:3]:
        ssh = guest_ssh(guest, address, host).model_copy(update={"connect_timeout_s": LOGIN_S})
        tried = try_login(f"{name}/{guest.vmid}", ssh, base, guest.look.keys)
        if tried.door is Door.OPEN:
            return Tried(Door.OPEN, address)
        first = first or tried
    return first


def ask(transport: Transport, probes: Sequence[Probe]) -> dict[str, object]:
    """Runs all probes in one exec; facts by the probe's name. Raises Unreachable, ProbeFailed."""
    if not probes:
        return {}
    nonce = new_nonce()
    slowest = max(probe.timeout_s for probe in probes)
    answer = transport.run(batch_script(probes, nonce), timeout_s=slowest + 20.0)
    try:
        outputs = parse_outputs(probes, answer.stdout, nonce)
    except DeployError as error:
        error.where = error.where or transport.name
        raise
    return {probe.name: probe.parse(outputs[probe.name]) for probe in probes}


def _container_probe(vmid: int) -> Probe:
    """pct's view of it, under a name of its own."""
    probe = container_facts.probes(vmid)[0]
    return Probe(f"container.{vmid}", probe.where, probe.script, probe.parse, probe.timeout_s)


def _parts(vmids: Sequence[int]) -> list[Sequence[int]]:
    return [vmids[at : at + AT_ONCE] for at in range(0, len(vmids), AT_ONCE)]


def _of(facts: Sequence[object], kind: type[T]) -> T:
    for fact in facts:
        if isinstance(fact, kind):
            return fact
    raise ProbeFailed(f"no answer of kind {kind.__name__}", fix="this is a defect of deploy")
