"""Who claims a PCI function, whose a process is, what takes a GPU back at boot."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployer import proxmox

FIXTURES = Path(__file__).parents[1] / "fixtures" / "host"


def test_versions() -> None:
    assert proxmox.package_version("5.0.7-1~bpo\n") == (5, 0, 7)
    assert proxmox.package_version("6.1.10") > proxmox.HOTPLUG_SINCE
    assert proxmox.package_version("") == ()


@pytest.mark.parametrize(
    ("text", "vmid"),
    [
        ("0::/lxc/129/ns/init.scope", 129),
        ("0::/lxc.payload.129/x", 129),
        ("0::/system.slice/ssh.service", None),
        ("0::/lxc.monitor/129", None),
    ],
)
def test_container_of_a_process(text: str, vmid: int | None) -> None:
    assert proxmox.container_of(text) == vmid


def test_vm_of_a_process() -> None:
    assert proxmox.vm_of("/usr/bin/kvm -id 101 -name win,debug-threads=on") == 101
    assert proxmox.vm_of("python3 -id 101") is None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("0000:21:00,pcie=1", ("0000:21:00",)),
        ("host=21:00.0;21:00.1,x-vga=1", ("0000:21:00.0", "0000:21:00.1")),
        ("mapping=pci-gpu,pcie=1", ("0000:21:00.0", "0000:21:00.1")),
        ("mapping=gone", ()),
    ],
)
def test_hostpci(value: str, found: tuple[str, ...]) -> None:
    mappings = proxmox.parse_mappings((FIXTURES / "pci.cfg").read_text(), "kpro5")
    assert proxmox.hostpci_functions(value, mappings) == found


def test_a_mapping_of_another_node_is_not_ours() -> None:
    mappings = proxmox.parse_mappings((FIXTURES / "pci.cfg").read_text(), "kpro5")
    assert mappings["other"] == ()


def test_claims() -> None:
    lines = [(101, "name: win"), (101, "hostpci0: 21:00"), (101, "onboot: 1"), (102, "name: x")]
    (claim,) = proxmox.parse_claims(lines, {}, [101])
    assert claim.running and claim.onboot
    assert claim.title() == "VM 101 (win)"
    assert claim.covers("0000:21:00.0") and claim.covers("0000:21:00.1")
    assert not claim.covers("0000:22:00.0")


def test_a_vm_that_is_starting_has_reserved_its_functions() -> None:
    lines = [
        ("0000:21:00.0", "101", "pid:77", "+"),
        ("0000:21:00.1", "101", "pid:78", "-"),
        ("0000:41:00.0", "102", "time:1000", "-"),
        ("0000:41:00.1", "103", "time:999", "-"),
        ("nonsense", "104", "pid:1", "+"),
    ]
    reserved = proxmox.parse_reservations(lines, 999)
    assert reserved == [("0000:21:00.0", 101), ("0000:41:00.0", 102)]
    claims = proxmox.parse_claims([(101, "name: win")], {}, [], reserved)
    assert [(one.title(), one.running, one.functions) for one in claims] == [
        ("VM 101 (win)", True, ("0000:21:00.0",)),
        ("VM 102", True, ("0000:41:00.0",)),
    ]
