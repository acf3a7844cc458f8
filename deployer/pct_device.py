"""A devN value of a container configuration: its path, its sub-keys, and what pct has against it.

pct keeps a value that it cannot parse in the file and only complains; the container then does not
start, and `pct set` ends with an error after it has written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_BLANK = re.compile(r"^\s*$", re.ASCII)
_PAIR = re.compile(r"^([^=]+)=(.+)$", re.DOTALL)
_INTEGER = re.compile(r"^[+-]?[0-9]+$")
_BOOLEAN = re.compile(r"^(1|on|yes|true|0|off|no|false)$", re.IGNORECASE)
_MODE = re.compile(r"^0[0-7]{3}$")
_DOTS = re.compile(r"/\.\.?(/|$)")
_TRUE = ("1", "on", "yes", "true")
_OPTIONS = ("mode", "uid", "gid", "deny-write")


@dataclass(frozen=True)
class DeviceEntry:
    """A devN value. `path`: '' when it names none. `fault`: what pct says of it; '' when nothing.

    With a fault, path and options are what can be made out.
    """

    path: str
    options: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""

    @property
    def denies_write(self) -> bool:
        """Whether the container may only read it."""
        return self.options.get("deny-write", "0").lower() in _TRUE


def parse_device(value: str) -> DeviceEntry:
    """The path stands alone or as `path=`, in any place among the sub-keys; empty parts count not.

    Texts are those of PVE::JSONSchema (pve-common 9.2.1).
    """
    found: dict[str, str] = {}
    faults = []
    bare = False
    for part in value.split(","):
        if _BLANK.match(part):
            continue
        if pair := _PAIR.match(part):
            key, rest = pair.group(1), pair.group(2)
        elif "=" in part:
            faults.append("missing key in comma-separated list property")
            continue
        else:
            key, rest = "path", part
            if bare:
                faults.append("duplicate key in comma-separated list property: path")
                continue
            bare = True
        if key in found:
            faults.append(f"duplicate key in comma-separated list property: {key}")
            continue
        found[key] = rest
    path = found.pop("path", "")
    faults += [text for key, rest in found.items() if (text := _option_fault(key, rest))]
    if not path:
        faults.append("Path has to be defined")
    elif not path.startswith("/dev/") or _DOTS.search(path):
        faults.append(f"{path} is not a valid device path")
    return DeviceEntry(path, found, "; ".join(faults))


def _option_fault(key: str, value: str) -> str:
    if key not in _OPTIONS:
        return f"{key}: property is not defined in schema"
    if key == "mode":
        return "" if _MODE.match(value) else "mode: value does not match the regex pattern"
    if key == "deny-write":
        good = _BOOLEAN.match(value)
        return "" if good else f"{key}: type check ('boolean') failed - got '{value}'"
    if not _INTEGER.match(value):
        return f"{key}: type check ('integer') failed - got '{value}'"
    return "" if int(value) >= 0 else f"{key}: value must have a minimum value of 0"
