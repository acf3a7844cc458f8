"""Proxmox container configuration (/etc/pve/lxc/ID.conf) as `pct` itself reads it.

The grammar is line by line: `key: value`, raw `lxc.key: value` or `lxc.key = value`, `#` lines are
the description wherever they stand, `[pve:pending]` and `[snapshot]` sections run to the next
header or to the end of the file. A line of no form is ignored by pct and dropped when it next
writes. Byte order marks, indentation and a blank before the colon make a line one of those.

pct reads bytes: text here is `decode(bytes)`, which keeps bytes that are no UTF-8, so that
`encode` gives back exactly the file. Learned from recorded runs of pve-container 6.1.10.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from deployer.pct_device import DeviceEntry, parse_device
from deployer.pct_keys import ENVIRONMENT, NO_KEYS, is_raw_key, typed

MAX_DEVICES = 256
LOCK_FOLDER = "/run/lock/lxc"
MAX_BYTES = 1024 * 1024
"""The largest file that pmxcfs takes."""

_PENDING = re.compile(r"^\[pve:pending\]\s*$", re.ASCII | re.IGNORECASE)
_SNAPSHOT = re.compile(r"^\[([a-z][a-z0-9_-]+)\]\s*$", re.ASCII | re.IGNORECASE)
_BLANK = re.compile(r"^\s*$", re.ASCII)
_RAW = re.compile(r"^(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*$", re.ASCII | re.DOTALL)
_DESCRIPTION = re.compile(r"^description:\s*(.*\S)\s*$", re.ASCII)
_SNAPSTATE = re.compile(r"snapstate:\s*(prepare|delete)\s*$", re.ASCII)
_DELETE = re.compile(r"^delete:\s*(.*\S)\s*$", re.ASCII)
_KEY = re.compile(r"^([a-z][a-z_]*\d*):\s*(.+?)\s*$", re.ASCII)
_DEVICE_KEY = re.compile(r"^dev\d+$", re.ASCII)


def decode(raw: bytes) -> str:
    """The file as text; bytes that are no UTF-8 are kept for `encode`."""
    return raw.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """Exactly the bytes that `decode` was given."""
    return text.encode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """A value of the file for people: bytes that are no text, and controls, as U+FFFD."""
    shown = encode(text).decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "\ufffd" for char in shown)


@dataclass(frozen=True)
class Section:
    """One part of the file. `keys` by name (the last of equal keys counts), `raw` in file order."""

    keys: Mapping[str, str] = field(default_factory=dict)
    raw: tuple[tuple[str, str], ...] = ()
    description: str = ""

    def devices(self) -> dict[str, DeviceEntry]:
        """The devN entries by their keys.

        pct reports `dev01` and `dev256` as unknown settings, keeps them, and passes the device on.
        """
        return {
            key: parse_device(value) for key, value in self.keys.items() if _DEVICE_KEY.match(key)
        }

    def flag(self, key: str) -> bool:
        """A boolean key, as Perl takes it: what is no `0`, empty or absent is true."""
        return self.keys.get(key, "0") not in ("", "0")


@dataclass(frozen=True)
class PctConfig:
    """A whole file. `delete`: keys that go at the next start; `ignored`: lines of no form."""

    current: Section
    pending: Section
    delete: tuple[str, ...]
    snapshots: Mapping[str, Section]
    ignored: tuple[str, ...]

    @property
    def lock(self) -> str:
        """`backup`, `migrate`, ... while a task owns the container; '' when none does."""
        lock = self.current.keys.get("lock", "")
        return "" if lock == "0" else lock  # to Perl the text `0` is none

    @property
    def has_pending(self) -> bool:
        """Whether something waits for the next start."""
        return bool(self.pending.keys or self.delete)

    @property
    def unprivileged(self) -> bool:
        """Whether its ids are mapped: by the key (without it it is privileged) or by raw lines."""
        own = any(key == "lxc.idmap" for key, _ in self.current.raw)
        return own or self.current.flag("unprivileged")

    def after_restart(self) -> Section:
        """The current part with everything that is pending: deletions first, then new values."""
        kept = {key: value for key, value in self.current.keys.items() if key not in self.delete}
        old = "" if "description" in self.delete else self.current.description
        description = self.pending.description or old
        return Section({**kept, **self.pending.keys}, self.current.raw, description)

    def shown(self) -> Section:
        """What `pct config` prints: new values first, then deletions, but never of a value `0`.

        Where a key is in both lists this is not what the next start makes of it.
        """
        keys = {**self.current.keys, **self.pending.keys}
        for key in self.delete:
            if keys.get(key, "0") != "0":
                del keys[key]
        description = self.pending.description or self.current.description
        return Section(keys, self.current.raw, "" if "description" in self.delete else description)


class _Open:
    """A section while it is read."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.raw: list[tuple[str, str]] = []
        self.description = ""

    def closed(self) -> Section:
        # An empty `description:` is a key as others are; and Perl takes the text `0` for none.
        keys = dict(self.keys)
        blank = keys.pop("description", "")
        description = blank if self.description in ("", "0") else self.description
        return Section(keys, tuple(self.raw), description)


def parse_conf(text: str) -> PctConfig:
    """Reads a conf file, or the output of `pct config` (which has the same form)."""
    current, pending = _Open(), _Open()
    snapshots: dict[str, _Open] = {}
    delete: tuple[str, ...] = ()
    ignored: list[str] = []
    part, name = current, ""
    for line in text.split("\n"):
        if _BLANK.match(line):
            continue
        if _PENDING.match(line):
            part, name = _Open(), ""
            pending, delete = part, ()
        elif header := _SNAPSHOT.match(line):
            part, name = _Open(), header.group(1)
            snapshots[name] = part
        elif line.startswith("#"):
            part.description += _decoded(line[1:]) + "\n"
        elif raw := _RAW.match(line):
            if raw.group(1) == ENVIRONMENT:
                known = [part.keys["env"]] if "env" in part.keys else []
                part.keys["env"] = "\0".join([*known, raw.group(2)])
            elif is_raw_key(raw.group(1)):
                part.raw.append((raw.group(1), raw.group(2)))
            else:
                ignored.append(line)
        elif described := _DESCRIPTION.match(line):
            part.description += _decoded(described.group(1))
        elif snapstate := _SNAPSTATE.search(line):
            part.keys["snapstate"] = snapstate.group(1)
        elif deleted := _DELETE.match(line):
            if part is pending:
                # A `!` before a key means `by force`; containers ignore it.
                words = re.split(r"[,;\s]+", deleted.group(1).strip(",; \t"))
                delete = tuple(word.removeprefix("!") for word in words if word)
            elif name == "pending":  # a snapshot of that name is taken for the other
                part.keys["delete"] = deleted.group(1)
            else:
                ignored.append(line)
        elif (pair := _KEY.match(line)) and pair.group(1) not in NO_KEYS:
            part.keys[pair.group(1)] = typed(pair.group(1), pair.group(2))
        else:
            ignored.append(line)
    current.keys.pop("snapstate", None)  # pct never believes it of the current part
    return PctConfig(
        current.closed(),
        pending.closed(),
        delete,
        {name: section.closed() for name, section in snapshots.items()},
        tuple(ignored),
    )


def _decoded(text: str) -> str:
    # The percent codes and the bytes beside them are one UTF-8 text.
    return unquote_to_bytes(encode(text)).decode("utf-8", "replace")


def is_header(line: str) -> bool:
    """Whether `line` (with or without its end) begins a section."""
    return bool(_PENDING.match(line) or _SNAPSHOT.match(line))


def mounted_devices(section: Section) -> tuple[str, ...]:
    """Host paths below /dev that raw `lxc.mount.entry` lines bring into the container."""
    paths = []
    for key, value in section.raw:
        fields = value.split()
        if key == "lxc.mount.entry" and len(fields) >= 4 and fields[0].startswith("/dev/"):
            paths.append(fields[0])
    return tuple(paths)


def free_indexes(config: PctConfig, count: int) -> tuple[int, ...]:
    """The lowest devN indexes that neither the current nor the pending part uses.

    Raises ValueError when fewer than `count` are left.
    """
    used = {*config.current.keys, *config.pending.keys}
    free = [index for index in range(MAX_DEVICES) if f"dev{index}" not in used]
    if len(free) < count:
        raise ValueError(f"only {len(free)} of the {MAX_DEVICES} devN indexes are free")
    return tuple(free[:count])
