"""Which kernel module flavour a GPU can have, by its PCI device id. Pure.

Device ids of a generation lie in ranges (pci.ids, Debian 0.0~2023.04.11; of Blackwell 2b85, 2bb1,
2c05 and 2c31 stand in public logs). Rules: NVIDIA's driver installation guide ("Kernel Modules"):
open modules need Turing or newer, exist since driver 515, are the default since 560 and the only
ones since 620; Blackwell and Grace Hopper run with the open ones only (the kernel log says so); 580
is the last branch with Maxwell, Pascal and Volta.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deployer.gpu import version_key

FLAVOURS = ("open", "proprietary")
FIRST_OPEN = (515,)
OPEN_BY_DEFAULT = (560,)
MODULE_TYPE_OPTION = (560,)
"""`.run` installers that know --kernel-module-type; before, the modules' folder was named."""
ONLY_OPEN = (620,)
LAST_PRE_TURING = 580
"""Branch."""
BLACKWELL_DRIVER = (570,)

_TURING = 0x1E00
_BLACKWELL = 0x2900
_GRACE_HOPPER = frozenset({0x2342, 0x2345, 0x2348})
_RANGES = (
    (0x1E00, 0x1FFF, "Turing"),
    (0x2000, 0x217F, "Ampere"),
    (0x2180, 0x21FF, "Turing"),
    (0x2200, 0x22FF, "Ampere"),
    (0x2300, 0x23FF, "Hopper"),
    (0x2400, 0x25FF, "Ampere"),
    (0x2600, 0x28FF, "Ada"),
)


@dataclass(frozen=True)
class Flavour:
    """What the GPUs of a host allow. `wanted`: open|proprietary, '' when nothing fits (`problem`).

    `forced`: the other flavour does not drive one of them.
    """

    wanted: str
    forced: bool = False
    reason: str = ""
    problem: str = ""


def generation(device: str) -> str:
    """`Ampere` for `0x2230` or `2230`; '' when it is no device id."""
    number = _number(device)
    if number is None:
        return ""
    if number < _TURING:
        return "before Turing"
    if number >= _BLACKWELL:
        return "Blackwell or newer"
    return next((name for first, last, name in _RANGES if first <= number <= last), "Turing")


def only_open(device: str) -> bool:
    """Must this GPU have the open module?"""
    number = _number(device)
    return number is not None and (number >= _BLACKWELL or number in _GRACE_HOPPER)


def only_proprietary(device: str) -> bool:
    """Must this GPU have the proprietary module?"""
    number = _number(device)
    return number is not None and number < _TURING


def flavour_for(devices: Iterable[str], version: str, asked: str = "auto") -> Flavour:
    """The flavour of driver `version` for GPUs with these device ids; `asked` by the playbook."""
    seen = sorted(set(devices))
    new = [device for device in seen if only_open(device)]
    old = [device for device in seen if only_proprietary(device)]
    key = version_key(version)
    if new and old:
        return Flavour(
            "",
            problem=f"{_named(new)} runs with the open module only, {_named(old)} with the "
            "proprietary one only: no one driver serves both",
        )
    if (
        new
        and key < BLACKWELL_DRIVER
        and any(generation(one).startswith("Blackwell") for one in new)
    ):
        return Flavour("", problem=f"{_named(new)} needs driver 570 or newer, not {version}")
    if old and key[:1] > (LAST_PRE_TURING,):
        return Flavour(
            "",
            problem=f"{_named(old)} needs a driver of branch {LAST_PRE_TURING} or older, "
            f"not {version}",
        )
    able = [
        one
        for one in FLAVOURS
        if (one == "open" and key >= FIRST_OPEN) or (one == "proprietary" and key < ONLY_OPEN)
    ]
    must = "open" if new else "proprietary" if old else ""
    reason = f"{_named(new or old)} runs with the {must} module only" if must else ""
    if must and must not in able:
        return Flavour("", problem=f"{reason}, and driver {version} has none")
    if asked != "auto":
        if must and asked != must:
            return Flavour("", problem=f"{reason}, driver.flavour asks for {asked}")
        if asked not in able:
            return Flavour("", problem=f"driver {version} has no {asked} module")
        return Flavour(asked, bool(must), reason or "driver.flavour of the playbook")
    if must:
        return Flavour(must, True, reason)
    default = "open" if key >= OPEN_BY_DEFAULT else "proprietary"
    return Flavour(default, False, f"the default of driver {version}")


def wrong_flavour(devices: Iterable[str], flavour: str) -> str:
    """Why a module of this flavour cannot drive these GPUs; '' when it can or nothing is known."""
    if flavour == "proprietary" and (new := [one for one in devices if only_open(one)]):
        return f"{_named(new)} needs the open module, the proprietary one is there"
    if flavour == "open" and (old := [one for one in devices if only_proprietary(one)]):
        return f"{_named(old)} needs the proprietary module, the open one is there"
    return ""


def _number(device: str) -> int | None:
    try:
        return int(device, 16)
    except ValueError:
        return None


def _named(devices: list[str]) -> str:
    text = ", ".join(f"10de:{one.removeprefix('0x')}" for one in dict.fromkeys(devices))
    return f"the GPU {text} ({generation(devices[0])})"
