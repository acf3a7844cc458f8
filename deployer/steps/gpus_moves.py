"""Moves of PCI functions between drivers as arguments of the script; the unit that boots them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployer.shell import assignments, words
from deployer.steps.gpus_script import SCRIPT

BOOT_SCRIPT = "/usr/local/sbin/deployer-gpus"
UNIT_FOLDER = "/etc/systemd/system"


@dataclass(frozen=True)
class Move:
    """One function: `source` is where it may be taken from ('' none), `target` '' is none."""

    address: str
    target: str
    source: str
    override: str | None = None
    """Written at the end, '' for none; None: it stays the target's name."""

    def word(self) -> str:
        """As the script takes it."""
        parts = [self.address, self.target or "-", self.source or "-"]
        if self.override is not None:
            parts.append(self.override or "(null)")
        return ",".join(parts)


def to_nvidia(addresses: Sequence[str]) -> tuple[Move, ...]:
    """Of GPUs, from vfio-pci."""
    return tuple(Move(address, "nvidia", "vfio-pci") for address in addresses)


def arguments(
    moves: Sequence[Move], limit_s: float, *, daemon: bool = False, unload: Sequence[str] = ()
) -> list[str]:
    """Of the script; `limit_s` is rounded to whole seconds, at least one."""
    found = [str(max(1, round(limit_s)))]
    found += ["-p"] if daemon else []
    found += ["-u", " ".join(unload)] if unload else []
    return found + [move.word() for move in moves]


def apply_script(
    moves: Sequence[Move],
    limit_s: float,
    root: str = "",
    *,
    daemon: bool = False,
    unload: Sequence[str] = (),
) -> str:
    """SCRIPT with its arguments, for a transport."""
    line = words(arguments(moves, limit_s, daemon=daemon, unload=unload))
    return assignments({"DEPLOYER_ROOT": root}) + f"set -- {line}\n" + SCRIPT


def budget_s(moves: Sequence[Move], limit_s: float) -> float:
    """The longest time that the script may take: each function needs a few guarded writes, and the
    modules may take minutes."""
    return 600.0 + 8 * limit_s * max(1, len(moves))


def unit_name(deployment: str) -> str:
    """The boot unit of one deployment; the name is validated by the inventory."""
    return f"deployer-gpus-{deployment}.service"


def unit_text(deployment: str, addresses: Sequence[str], limit_s: float) -> str:
    """The boot unit: before guests start, since a container with a missing node does not start."""
    line = " ".join(arguments(to_nvidia(addresses), limit_s))
    return (
        "# Written by deployer; `persist: report` in the playbook stops that.\n"
        "[Unit]\n"
        f"Description=GPUs of deployment {deployment} on the nvidia driver\n"
        "After=systemd-modules-load.service\n"
        "Before=pve-guests.service\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        "RemainAfterExit=yes\n"
        f"ExecStart=/bin/sh {BOOT_SCRIPT} {line}\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def enable_script(unit: str) -> str:
    """Enables the unit as `systemctl enable` does; works before systemd has read the file."""
    return assignments({"UNIT": unit, "FOLDER": UNIT_FOLDER}) + (
        'mkdir -p "$FOLDER/multi-user.target.wants" || exit 1\n'
        'ln -sfn "$FOLDER/$UNIT" "$FOLDER/multi-user.target.wants/$UNIT" || exit 1\n'
        "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n"
    )


def disable_script(unit: str) -> str:
    """Removes the unit and its link; the shared script goes with the last unit."""
    return assignments({"UNIT": unit, "FOLDER": UNIT_FOLDER, "SCRIPT": BOOT_SCRIPT}) + (
        'rm -f "$FOLDER/multi-user.target.wants/$UNIT" "$FOLDER/$UNIT" || exit 1\n'
        'for other in "$FOLDER"/deployer-gpus-*.service; do [ ! -e "$other" ] || kept=yes; done\n'
        '[ -n "${kept-}" ] || rm -f "$SCRIPT" || exit 1\n'
        "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n"
    )
