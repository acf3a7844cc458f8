"""Installed kernels and the one that boots next. Pure.

Sources: proxmox-boot-tool keeps its pins in /etc/kernel/proxmox-boot-pin and, for one boot,
/etc/kernel/next-boot-pin; GRUB's own choice is GRUB_DEFAULT of /etc/default/grub (`0`, `saved`, a
title, `1>N`) and saved_entry / next_entry of /boot/grub/grubenv; without any the newest boots.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

GRUB_PLACE = "GRUB_DEFAULT of /etc/default/grub"


@dataclass(frozen=True)
class Kernel:
    """A folder of /lib/modules. `module`: version of its nvidia.ko, '' when it has none.

    `bootable`: it has an image; `headers`: what a module build needs is there.
    """

    name: str
    bootable: bool = True
    headers: bool = True
    module: str = ""
    flavour: str = ""
    """open|proprietary|'' of the module."""


@dataclass(frozen=True)
class BootChoice:
    """What says which kernel boots next; '' where nothing is said."""

    next_pin: str = ""
    pin: str = ""
    grub_default: str = ""
    saved_entry: str = ""
    next_entry: str = ""


@dataclass(frozen=True)
class NextBoot:
    """`kernel` '' means that it is not known; `why` names the source."""

    kernel: str
    why: str


@dataclass(frozen=True)
class DkmsBuild:
    """A line of `dkms status`. `kernel` '' for a module that is only added."""

    module: str
    version: str
    kernel: str
    state: str


def kernel_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts kernel releases as people count: 6.8.12-10-pve after 6.8.12-9-pve, -rc before none."""
    parts = re.findall(r"\d+|[a-z]+", name.lower())
    return tuple(
        (1, int(part), "") if part.isdigit() else (-1 if part == "rc" else 0, 0, part)
        for part in parts
    )


def next_boot(kernels: Sequence[Kernel], choice: BootChoice, running: str) -> NextBoot:
    """Which kernel a reboot starts. A pin of a kernel that is not there counts for nothing."""
    names = [one.name for one in kernels if one.bootable]
    if not names:
        return NextBoot(running, "no other kernel is installed")
    for pin, why in (
        (choice.next_pin, "pinned for one boot (/etc/kernel/next-boot-pin)"),
        (choice.pin, "pinned (/etc/kernel/proxmox-boot-pin)"),
    ):
        if pin in names:
            return NextBoot(pin, why)
    if choice.next_entry:
        return _entry(choice.next_entry, names, "next_entry of /boot/grub/grubenv")
    if choice.grub_default == "saved":
        return _entry(choice.saved_entry or "0", names, "saved_entry of /boot/grub/grubenv")
    return _entry(choice.grub_default or "0", names, GRUB_PLACE)


def _entry(entry: str, names: Sequence[str], why: str) -> NextBoot:
    """The kernel of a GRUB menu entry: a number, `1>N` of the submenu, a title or an id."""
    order = sorted(names, key=kernel_key, reverse=True)
    if entry == "0":
        return NextBoot(order[0], "the newest")
    if found := re.fullmatch(r"1>(\d+)", entry):
        # The submenu lists every kernel and then its recovery mode.
        place = int(found[1]) // 2
        return NextBoot(order[place] if place < len(order) else "", why)
    inside = [one for one in names if re.search(rf"(?<![\d.]){re.escape(one)}(?![\w.])", entry)]
    if inside:
        return NextBoot(max(inside, key=len), why)
    return NextBoot("", f"{why}: {entry}")


_DKMS = re.compile(
    r"^(?P<module>[\w.+-]+)(?:/|, )(?P<version>[\w.+~-]+)"
    r"(?:, (?P<kernel>[\w.+~-]+), (?P<arch>\w+))?: (?P<state>.+)$"
)


def parse_dkms(text: str) -> tuple[DkmsBuild, ...]:
    """`dkms status`, the old form (`nvidia, 580.1, KERNEL, x86_64: installed`) and the new one."""
    found = (_DKMS.match(line.strip()) for line in text.splitlines())
    return tuple(
        DkmsBuild(one["module"], one["version"], one["kernel"] or "", one["state"])
        for one in found
        if one is not None
    )
