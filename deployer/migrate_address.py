"""The cut-over of an address: its network entry moves from container to container, by `pct set`.

A port forward is no such thing: Proxmox has none in a container's configuration. It is a rule of
some host's firewall, which this tool does not touch; a hook changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployer.address_place import default_routes, holds, moved, of_container
from deployer.deployment import Deployment
from deployer.errors import DeployError, RemoteCommandFailed, StepFailed
from deployer.inventory import AddressCutover
from deployer.migrate_gap import Gap, Meter
from deployer.migrate_side import Side
from deployer.migrate_way import BACK_S, PHASE, Direction, Way, answered_at, unmeasured
from deployer.model import Facts
from deployer.names import plain_host
from deployer.pct_net import host_part, net_options
from deployer.remote.transport import Transport
from deployer.shell import words
from deployer.steps.container_facts import ContainerFacts
from deployer.steps.shards_facts import find_python

SEEN_S = 5
"""How long an interface may take to appear in the guest."""

# Argument: the address. Waits until the kernel has it, then tells the neighbours (RFC 5227: an ARP
# announcement is a request for one's own address), so that none keeps the old way for minutes.
_ANNOUNCE = r"""
import fcntl, socket, struct, sys, time
text, name, limit = sys.argv[1], sys.argv[2], float(sys.argv[3])
family = socket.AF_INET6 if ":" in text else socket.AF_INET
end = time.monotonic() + limit
while True:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((text, 0))
        break
    except OSError as error:
        if time.monotonic() >= end:
            sys.exit("the guest does not have %s: %s" % (text, error.strerror))
    time.sleep(0.1)
if family == socket.AF_INET:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806)) as raw:
        raw.bind((name, 0x0806))
        mac = fcntl.ioctl(raw, 0x8927, struct.pack("256s", name.encode()))[18:24]
        ip = socket.inet_aton(text)
        arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1) + mac + ip + bytes(6) + ip
        for _ in range(3):
            raw.send(b"\xff" * 6 + mac + struct.pack("!H", 0x0806) + arp)
            time.sleep(0.1)
"""


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
            f"{source.host_name} to container {destination.vmid} on {destination.host_name}; "
            "requests that are under way then end"
        )

    def obstacles(self, source: Facts | None, destination: Facts | None) -> list[tuple[str, str]]:
        """Both are containers, one has the address, the other has room, and SSH does not use it."""
        found = [] if self.record.cut else unmeasured(self.rule.probe_url)
        looks: list[ContainerFacts | None] = []
        for side, facts in ((self.source, source), (self.destination, destination)):
            if side.want.vmid is None:
                found.append((f"{side.want.id} runs in no container", "use cutover.hook"))
                continue
            if plain_host(host_part(self.rule.ip)) in logins(side.want):
                what = f"{host_part(self.rule.ip)} is how SSH reaches {side.want.id}"
                found.append((what, "give the model an address of its own, or use cutover.hook"))
            seen = facts.get(ContainerFacts) if facts is not None else None
            looks.append(seen)
            if seen is not None and seen.exists:
                loses = side is self.source and not self.record.cut
                found += of_container(self.rule, side.want, seen, loses=loses)
        if not self.record.cut and len(looks) == 2:
            found += default_routes(self.rule, self.source.want, looks[0], looks[1])
        return found

    def move(self, direction: Direction) -> Gap | None:
        """See Way. When the new container does not take it, the old one gets it back."""
        loses, gets = self.sides(direction)
        with Meter(self.rule.probe_url or "") as meter:
            old = holds(loses.gather().need(ContainerFacts), self.rule)
            there = gets.gather().need(ContainerFacts)
            if old is not None and direction == "forward":
                self.record.net = old
                self.save()
            if holds(there, self.rule) is None:
                value = moved(old or self.record.net, self.rule, there)
                if old is not None:
                    self._drop(loses)
                try:
                    self._give(gets, value)
                except DeployError as error:
                    self._give_back(loses, old, error)
                    raise
            elif old is not None:
                self._drop(loses)
            if why := self.problem(direction):
                raise StepFailed(why, where=gets.want.id, fix="look at `pct config` on both hosts")
            self._announce(gets)
            gap = meter.settled(BACK_S)
        return gap if self.rule.probe_url else None

    def _drop(self, side: Side) -> None:
        """Takes it from the container now; two that have it at once would both be wrong.

        Raises StepFailed when it would only go at the container's next start.
        """
        vmid = side.want.vmid or 0
        run_pct(side.host, drop_words(vmid, self.rule))
        if holds(side.gather().need(ContainerFacts), self.rule) is None:
            return
        raise self._reverted(side, f"would keep {self.rule.ip} until it is")

    def _give(self, side: Side, value: str) -> None:
        """The container has it now. Raises StepFailed when it would only take it at its next start.

        Then it does not take it at all, so that it cannot come up with it later.
        """
        vmid = side.want.vmid or 0
        run_pct(side.host, give_words(vmid, self.rule, value))
        if holds(side.gather().need(ContainerFacts), self.rule) is not None:
            return
        raise self._reverted(side, f"would take {self.rule.ip} only when it is")

    def _reverted(self, side: Side, would: str) -> StepFailed:
        """The error that tells it, once a change that waits for the next start is taken back."""
        vmid = side.want.vmid or 0
        run_pct(side.host, revert_words(vmid, self.rule))
        return StepFailed(
            f"container {vmid} on {side.want.host_name} {would} started again; that change is "
            "reverted",
            where=side.want.id,
            fix="use cutover.hook, then run the same command again; or --abort",
        )

    def _give_back(self, side: Side, value: str | None, error: DeployError) -> None:
        """Clients are not left without anybody."""
        if value is None:
            return
        try:
            run_pct(side.host, give_words(side.want.vmid or 0, self.rule, value))
        except DeployError as other:
            error.add(f"and {side.want.id} did not take {self.rule.ip} back: {other.what}")
        else:
            error.add(f"{side.want.id} has {self.rule.ip} again")

    def _announce(self, side: Side) -> None:
        """Tells the neighbours where the address is; what it could not do is told."""
        value = holds(side.gather().need(ContainerFacts), self.rule) or ""
        name = dict(net_options(value)).get("name", "")
        script = find_python(side.want.playbook.engine.venv)
        script += '[ -n "$py" ] || { echo "no python3" >&2; exit 1; }\n'
        script += 'exec "$py" -I -S -c "$@"\n'
        args = (_ANNOUNCE, host_part(self.rule.ip), name, str(SEEN_S))
        answer = side.guest.run(script, args=args, timeout_s=SEEN_S + 15.0)
        if answer.exit != 0:
            said = (answer.error_text.strip() or f"exit {answer.exit}").splitlines()[-1]
            side.note(PHASE, f"the neighbours were not told: {said}", "warning")
            if not self.rule.probe_url:
                text = "whether clients get answers there is not known: give cutover.address a "
                side.note(PHASE, text + "probe_url, and the address goes back when not", "warning")

    def problem(self, direction: Direction) -> str:
        """See Way."""
        loses, gets = self.sides(direction)
        if holds(gets.gather().need(ContainerFacts), self.rule) is None:
            return f"container {gets.want.vmid} on {gets.want.host_name} lacks {self.rule.ip}"
        if holds(loses.gather().need(ContainerFacts), self.rule) is not None:
            return f"container {loses.want.vmid} on {loses.want.host_name} still has {self.rule.ip}"
        return ""

    def seen_by_clients(self, direction: Direction) -> str:
        """See Way."""
        return answered_at(self.rule.probe_url)


def logins(want: Deployment) -> set[str]:
    """The addresses by which SSH reaches the host and the container."""
    guest = want.container.ssh if want.container is not None else None
    return {plain_host(ssh.address) for ssh in (want.host.ssh, guest) if ssh is not None}


def drop_words(vmid: int, rule: AddressCutover) -> Sequence[str]:
    """Takes the interface out, at once."""
    return ("pct", "set", str(vmid), "--delete", rule.interface)


def revert_words(vmid: int, rule: AddressCutover) -> Sequence[str]:
    """Forgets a change that is pending."""
    return ("pct", "set", str(vmid), "--revert", rule.interface)


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
            fix="correct it, then run the same command again; or --abort",
            evidence=tuple(answer.error_text.splitlines()[-5:]),
        )
