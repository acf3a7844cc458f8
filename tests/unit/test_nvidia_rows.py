"""Rare words about NVIDIA drivers: each is understood, and the common ones keep their meaning."""

from __future__ import annotations

import pytest

from deployer.nvidia_texts import diagnose, standing

ROWS = [
    ("NVRM: BAR1 is 0M @ 0x0 (PCI:0000:21:00.0)", "no-bar"),
    (
        "vfio-pci 0000:21:00.0: Unable to change power state from D3cold to D0, no device",
        "d3cold",
    ),
    ("nvidia 0000:21:00.0: not ready 65535ms after FLR; giving up", "reset-failed"),
    (
        "NVRM: GPU 0000:21:00.0: GPU does not have the necessary power cables connected.",
        "power-cable",
    ),
    (
        "NVRM: Xid (PCI:0000:21:00): 119, pid=1, Timeout after 45s of waiting for RPC response "
        "from GSP0!",
        "gsp-hangs",
    ),
    ("NVRM: Xid (PCI:0000:21:00): 48, pid=1, An uncorrectable double bit error", "memory-error"),
    ("NVRM: Xid (PCI:0000:21:00): 74, pid=1, NVLink: fatal error", "nvlink"),
    ("pcieport 0000:20:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal)", "pcie"),
    (
        "NVRM: The NVIDIA GPU 0000:21:00.0 (PCI ID: 10de:2bb1)\nNVRM: installed in this system is "
        "not supported by the NVIDIA 535.129.03 driver release.",
        "driver-misfit",
    ),
    ("nvidia: version magic '6.8.12-1-pve SMP' should be '6.14.8-2-pve SMP'", "wrong-kernel"),
    ("nvidia: disagrees about version of symbol module_layout", "wrong-kernel"),
    (
        "nvidia 0000:21:00.0: Direct firmware load for nvidia/580.126.09/gsp_ga10x.bin failed with "
        "error -2",
        "no-firmware",
    ),
    ("nvidia: probe of 0000:21:00.0 failed with error -1", "probe-failed"),
    ("nvidia 0000:21:00.0: probe with driver nvidia failed with error -1", "probe-failed"),
    ("NVRM: request_mem_region failed for 256M @ 0xd0000000.", "no-resources"),
    ("CUDA error 802: system not yet initialized", "no-fabric"),
    ("Error in MD5 checksums: 1234 is different from 5678", "broken-file"),
    ("Extraction failed.", "no-unpack"),
    ("ERROR: Unable to find a suitable C compiler", "no-compiler"),
    ("ERROR: You appear to be running an X server; please exit X before installing.", "x-server"),
    ("ERROR: Unable to load the kernel module 'nvidia.ko'.  This happens", "not-loadable"),
    ("E: dpkg was interrupted, you must manually run 'dpkg --configure -a'", "dpkg-cut-off"),
    ("E: Unable to correct problems, you have held broken packages.", "unmet"),
    ("E: Failed to fetch x  Hash Sum mismatch", "apt-mirror"),
    ("Err:1 http://deb.debian.org x Temporary failure resolving 'deb.debian.org'", "no-network"),
    ("E: Release file for x is not valid yet (invalid for another 2h).", "clock"),
    ("W: GPG error: x NO_PUBKEY A4B469963BF863CC", "apt-key"),
]


@pytest.mark.parametrize(("text", "name"), ROWS)
def test_a_text_is_understood(text: str, name: str) -> None:
    cause = diagnose(text)
    assert cause is not None
    assert cause.name == name
    assert cause.cause
    assert "{host}" not in cause.on("kpro5")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVRM: GPU requires use of the NVIDIA open kernel modules.", "needs-open"),
        ("NVRM: Xid (PCI:0000:21:00): 79, GPU has fallen off the bus.", "gpu-lost"),
        ("NVRM: GPU 0000:21:00.0: RmInitAdapter failed! (0x24:0x65:1589)", "init-failed"),
        ("modprobe: ERROR: could not insert 'nvidia': Key was rejected by service", "key-rejected"),
        ("NVRM: GPU 0000:21:00.0 is already bound to vfio-pci.", "other-driver"),
    ],
)
def test_the_common_ones_keep_their_meaning(text: str, name: str) -> None:
    cause = diagnose(text)
    assert cause is not None
    assert cause.name == name


def test_what_the_kernel_said_holds_until_a_reboot_only_where_it_does() -> None:
    lines = [text for text, _ in ROWS]
    held = {cause.name for cause, _ in standing(lines)}
    assert {"no-bar", "d3cold", "gsp-hangs", "memory-error"} <= held
    assert not {"nvlink", "pcie", "no-network", "no-fabric"} & held
