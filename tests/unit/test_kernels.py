"""Which kernel boots next, and what dkms has built."""

from __future__ import annotations

import pytest

from deployer.kernels import (
    BootChoice,
    DkmsBuild,
    Kernel,
    kernel_key,
    next_boot,
    parse_dkms,
)

OLD, NEW, NEWEST = "6.8.4-2-pve", "6.8.12-9-pve", "6.8.12-10-pve"
KERNELS = [Kernel(NEW), Kernel(NEWEST), Kernel(OLD), Kernel("6.99.0-1-pve", bootable=False)]
GRUB_TITLE = (
    "gnulinux-advanced-1f2e>gnulinux-6.8.12-9-pve-advanced-1f2e4a3b-0000-4000-8000-0123456789ab"
)


def test_releases_sort_as_people_count() -> None:
    names = ["6.8.12-9-pve", "6.17.1-1-pve", "6.8.12-10-pve", "6.8.4-2-pve", "6.17.0-rc3-pve"]
    assert sorted(names, key=kernel_key) == [
        "6.8.4-2-pve",
        "6.8.12-9-pve",
        "6.8.12-10-pve",
        "6.17.0-rc3-pve",
        "6.17.1-1-pve",
    ]


@pytest.mark.parametrize(
    ("choice", "kernel", "why"),
    [
        (BootChoice(), NEWEST, "newest"),
        (BootChoice(grub_default="0"), NEWEST, "newest"),
        (BootChoice(pin=OLD), OLD, "proxmox-boot-pin"),
        (BootChoice(pin=OLD, next_pin=NEW), NEW, "for one boot"),
        (BootChoice(pin="5.1.1-gone"), NEWEST, "newest"),
        (BootChoice(pin=OLD, grub_default="0"), OLD, "proxmox-boot-pin"),
        (BootChoice(grub_default="1>2"), NEW, "GRUB_DEFAULT"),
        (BootChoice(grub_default="1>4"), OLD, "GRUB_DEFAULT"),
        (BootChoice(grub_default="1>8"), "", "GRUB_DEFAULT"),
        (BootChoice(grub_default=GRUB_TITLE), NEW, "GRUB_DEFAULT"),
        (BootChoice(grub_default="Advanced>Proxmox VE, with Linux 6.8.12-10-pve"), NEWEST, "GRUB"),
        (BootChoice(grub_default="3"), "", "GRUB_DEFAULT of /etc/default/grub: 3"),
        (BootChoice(grub_default="saved", saved_entry=GRUB_TITLE), NEW, "saved_entry"),
        (BootChoice(grub_default="saved"), NEWEST, "newest"),
        (BootChoice(next_entry="x>Linux 6.8.4-2-pve"), OLD, "next_entry"),
    ],
)
def test_next_boot(choice: BootChoice, kernel: str, why: str) -> None:
    found = next_boot(KERNELS, choice, NEW)
    assert found.kernel == kernel
    assert why in found.why


def test_a_name_is_no_part_of_a_longer_one() -> None:
    kernels = [Kernel("6.8.12-1-pve"), Kernel("6.8.12-11-pve")]
    choice = BootChoice(grub_default="x>Linux 6.8.12-11-pve")
    assert next_boot(kernels, choice, "").kernel == "6.8.12-11-pve"


def test_without_an_image_the_running_one_stays() -> None:
    assert next_boot([Kernel(OLD, bootable=False)], BootChoice(), OLD).kernel == OLD


def test_dkms_old_and_new_form() -> None:
    text = """\
nvidia/580.126.09, 6.8.12-9-pve, x86_64: installed
nvidia, 535.129.03, 5.15.0-1-pve, x86_64: installed (WARNING! Diff between built and installed)
nvidia/580.126.09: added
nvidia-current/550.163.01, 6.8.12-10-pve, x86_64: built
Error! something
"""
    assert parse_dkms(text) == (
        DkmsBuild("nvidia", "580.126.09", "6.8.12-9-pve", "installed"),
        DkmsBuild(
            "nvidia",
            "535.129.03",
            "5.15.0-1-pve",
            "installed (WARNING! Diff between built and installed)",
        ),
        DkmsBuild("nvidia", "580.126.09", "", "added"),
        DkmsBuild("nvidia-current", "550.163.01", "6.8.12-10-pve", "built"),
    )
