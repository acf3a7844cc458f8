"""The cut-over of an address: what speaks against it, there and back, and what it is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import serverworld as world
from migrateworld import OLD, conf

from deployer.address_place import holds, moved
from deployer.document import parse
from deployer.errors import DocumentError, RemoteCommandFailed, StepFailed
from deployer.inventory import AddressCutover, Container, Cutover, InventoryFile, Ssh
from deployer.migrate_address import AddressWay, drop_words, give_words
from deployer.model import Facts
from deployer.remote.transport import Answer
from deployer.state import Migration
from deployer.steps.container_facts import ContainerFacts
from deployer.validation import validate

WANT = world.deployment()
RECORD = Migration(id="m1", source="kpro6/qwen", destination="kpro5/qwen", phase="cutover")


RULE = AddressCutover(interface="net1", ip="192.0.2.50/24")


def test_an_address_moves_with_its_network_and_its_mac() -> None:
    old = holds(conf(OLD), RULE)
    assert old is not None and holds(conf("net1: name=eth1,ip=dhcp\n"), RULE) is None
    assert holds(conf(""), RULE) is None
    there = conf("net0: name=eth1,bridge=vmbr0,ip=dhcp\n")
    value = moved(old, RULE, there)
    assert moved(old, RULE, conf("net0: name=eth0,bridge=vmbr0,ip=dhcp\n")).startswith("name=eth1,")
    assert value == "name=eth0,bridge=vmbr1,hwaddr=AA:BB:CC:DD:EE:01,ip=192.0.2.50/24,tag=7"
    assert drop_words(129, RULE) == ("pct", "set", "129", "--delete", "net1")
    assert give_words(130, RULE, value) == ("pct", "set", "130", "--net1", value)
    with pytest.raises(StepFailed, match="is in use"):
        moved(old, RULE, conf("net1: name=eth1,ip=dhcp\n"))
    with pytest.raises(StepFailed, match="no container has"):
        moved("", RULE, there)


PLACE = """hosts:
  kpro5:
    ssh: {address: kpro5}
    gpus: [{address: "0000:21:00.0"}]
    deployments:
      qwen:
        playbook: p
        cutover:
"""


@pytest.mark.parametrize(
    "words", ["          port_forward: 30000\n", "          address: {ip: 192.0.2.5/24, dnat: x}\n"]
)
def test_a_port_forward_is_refused_with_the_way_out(words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        validate(parse(Path("kpro5.yaml"), PLACE + words), InventoryFile)
    assert "unknown key" in caught.value.what
    assert "no rule of yours is changed: use cutover.hook" in caught.value.fix
    # Where it is no cut-over, a name like these says nothing.
    with pytest.raises(DocumentError) as caught:
        validate(
            parse(Path("kpro5.yaml"), PLACE.replace("kpro5:", "kpro5: {}\n  x:\n    nat: 1")),
            InventoryFile,
        )
    assert "cutover.hook" not in caught.value.fix


def address_way(old: str, new: str, **changes: Any) -> tuple[AddressWay, Any, Any]:
    """Between container 129 of two hosts; `old` and `new` are their configurations."""

    def side(name: str, text: str) -> Any:
        ssh = WANT.host.ssh.model_copy(update={"address": name})
        want = dataclasses.replace(
            WANT, host_name=name, host=WANT.host.model_copy(update={"ssh": ssh})
        )
        conf_ = {"text": text}
        made = SimpleNamespace(want=want, told=[], ran=[], conf=conf_, refuses="", pends=False)
        made.gather = lambda: Facts({ContainerFacts: conf(conf_["text"])})
        made.note = lambda phase, text, level="info": made.told.append(text)

        def run(script: str, **words: Any) -> Answer:
            made.ran.append(script.strip())
            if "pct set" not in script:
                return Answer(1, b"", b"the guest does not have it")
            if made.refuses and f"--{RULE.interface} " in script:
                return Answer(255, b"", made.refuses.encode())
            if "--revert" in script or made.pends:
                return Answer(0, b"", b"")
            lines = [line for line in conf_["text"].splitlines() if not line.startswith("net1")]
            if "--delete" not in script:
                lines.append(f"net1: {script.split()[-1]}")
            conf_["text"] = "\n".join(lines) + "\n"
            return Answer(0, b"", b"")

        made.host = made.guest = SimpleNamespace(run=run, name=name)
        return made

    rules = Cutover(address=RULE.model_copy(update=changes))
    source, destination = side("kpro6", old), side("kpro5", new)
    way = AddressWay(source, destination, rules, RECORD.model_copy(), lambda: None)
    return way, source, destination


NEW = "arch: amd64\nnet0: name=eth0,bridge=vmbr0,ip=dhcp\n"


def test_an_address_goes_and_comes_back() -> None:
    way, source, destination = address_way(OLD, NEW)
    assert way.move("forward") is None
    assert "net1: name=eth1,bridge=vmbr1,hwaddr=AA" in destination.conf["text"]
    assert "net1" not in source.conf["text"]
    assert way.problem("forward") == "" and "still has" not in way.problem("back")
    before = len(destination.ran)
    assert way.move("forward") is None, "twice is once"
    assert not any("pct set" in one for one in destination.ran[before:])
    assert "the neighbours were not told" in destination.told[0]
    way.move("back")
    assert "hwaddr=AA:BB:CC:DD:EE:01" in source.conf["text"]
    assert "net1" not in destination.conf["text"]


def test_an_address_that_is_not_taken_goes_back_at_once() -> None:
    way, source, destination = address_way(OLD, NEW)
    destination.refuses = "bridge 'vmbr1' does not exist"
    with pytest.raises(RemoteCommandFailed, match=r"kpro6/qwen has 192.0.2.50.24 again") as caught:
        way.move("forward")
    assert caught.value.evidence == ("bridge 'vmbr1' does not exist",)
    assert "hwaddr=AA:BB:CC:DD:EE:01" in source.conf["text"]


def test_an_address_that_would_stay_until_a_restart_is_never_at_two_places() -> None:
    way, source, destination = address_way(OLD, NEW)
    source.pends = True
    with pytest.raises(StepFailed, match="that change is reverted"):
        way.move("forward")
    assert source.ran[-1] == "pct set 129 --revert net1"
    assert not [one for one in destination.ran if "pct set" in one]


def test_an_address_that_comes_only_with_a_restart_goes_back_at_once() -> None:
    """Else nobody would have it, and both after the restart."""
    way, source, destination = address_way(OLD, NEW)
    destination.pends = True
    with pytest.raises(StepFailed, match="only when it is started again") as caught:
        way.move("forward")
    assert "kpro6/qwen has 192.0.2.50/24 again" in caught.value.what
    assert destination.ran[-1] == "pct set 129 --revert net1"
    assert "hwaddr=AA:BB:CC:DD:EE:01" in source.conf["text"]


GATE = OLD.replace("ip=192.0.2.50/24,", "ip=192.0.2.50/24,gw=192.0.2.1,")
PENDING = "[pve:pending]\n"


@pytest.mark.parametrize(
    ("old", "new", "changes", "said"),
    [
        (OLD, NEW, {}, ""),
        (GATE, NEW, {}, ""),
        (
            GATE.replace("129/24", "129/24,gw=192.0.2.1"),
            NEW.replace("ip=dhcp", "ip=192.0.2.3/24,gw=192.0.2.9"),
            {},
            "the other container has one on net0 already",
        ),
        (OLD, NEW.replace("ip=dhcp", "ip=192.0.2.50/32"), {}, "has that address already"),
        (OLD, NEW + PENDING + "net1: name=eth1,bridge=vmbr9\n", {}, "waits for its next start"),
        (OLD + PENDING + "delete: net1\n", NEW, {}, "pct set 129 --revert net1"),
        (OLD, NEW, {"interface": "net2"}, "has it as 192.0.2.50/24 on net1, not as"),
        (
            OLD,
            NEW,
            {"ip": "192.0.2.50/25"},
            "set cutover.address to interface net1, ip 192.0.2.50/24",
        ),
        (
            OLD,
            NEW,
            {"ip": "192.0.2.77/24"},
            "does not have 192.0.2.77/24 on net1; that is name=eth1",
        ),
        (NEW, NEW, {}, "container 129 on kpro6 does not have 192.0.2.50/24 on net1"),
        (OLD, NEW + "net1: name=eth1,ip=dhcp\n", {}, "net1 of container 129 on kpro5 is in use"),
        (OLD, NEW + "lock: backup\n", {}, "container 129 on kpro5 is locked (backup)"),
    ],
)
def test_what_speaks_against_an_address(
    old: str, new: str, changes: dict[str, Any], said: str
) -> None:
    way, source, destination = address_way(old, new, **changes)
    rows = way.obstacles(source.gather(), destination.gather())
    assert [f"{what} {fix}" for what, fix in rows if said in f"{what} {fix}"] or not said
    assert len(rows) == bool(said)


def test_the_way_to_the_source_is_not_moved_along() -> None:
    """Its sshd may be reached through that gateway, and it still has to be stopped."""
    way, source, destination = address_way(GATE, NEW)
    ssh = Ssh(address="192.0.2.129")
    host = source.want.host.model_copy(update={"containers": {129: Container(ssh=ssh)}})
    source.want = dataclasses.replace(source.want, host=host)
    [(what, fix)] = way.obstacles(source.gather(), destination.gather())
    assert what.endswith("would go along; SSH to container 129 may need it")
    assert fix == "take gw= out of net1, or use cutover.hook"
    source.conf["text"] = GATE.replace("129/24", "129/24,gw=192.0.2.1")
    assert way.obstacles(source.gather(), destination.gather()) == []


def test_the_address_of_ssh_is_not_moved() -> None:
    way, source, destination = address_way(OLD, NEW)
    ssh = WANT.host.ssh.model_copy(update={"address": "192.0.2.50"})
    host = source.want.host.model_copy(update={"ssh": ssh})
    source.want = dataclasses.replace(source.want, host=host)
    [(what, fix)] = way.obstacles(source.gather(), destination.gather())
    assert what == "192.0.2.50 is how SSH reaches kpro6/qwen" and "an address of its own" in fix


def test_an_ipv6_address_moves_too_however_it_is_written_for_ssh() -> None:
    six = OLD.replace("ip=192.0.2.50/24", "ip6=2001:db8::50/64,gw6=fe80::1")
    way, source, destination = address_way(six, NEW, ip="2001:db8::50/64")
    assert way.obstacles(source.gather(), destination.gather()) == []
    way.move("forward")
    assert "ip6=2001:db8::50/64,gw6=fe80::1,tag=7" in destination.conf["text"]
    assert "net1" not in source.conf["text"] and way.problem("forward") == ""
    way.move("back")
    assert "ip6=2001:db8::50/64" in source.conf["text"] and "net1" not in destination.conf["text"]
    ssh = WANT.host.ssh.model_copy(update={"address": "2001:DB8:0::50"})
    host = source.want.host.model_copy(update={"ssh": ssh})
    source.want = dataclasses.replace(source.want, host=host)
    [(what, _)] = way.obstacles(source.gather(), destination.gather())
    assert "is how SSH reaches kpro6/qwen" in what
