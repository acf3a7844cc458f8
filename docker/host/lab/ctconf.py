"""The lab's reader and writer of /etc/pve/lxc/VMID.conf: sections, pending, raw lxc.* lines.

Follows what recorded runs of the real `pct` show (field notes, pct-cases); it shares no code.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

CONF = "/etc/pve/lxc"
LOCKS = "/run/lock/lxc"
LOCK_WAIT_S = 10.0
RAW_LINE = re.compile(r"(lxc\.[a-z0-9_.\-]+)\s*[:=]\s*(.*?)\s*$")
KEY_LINE = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*$")
SECTION_LINE = re.compile(r"\[([A-Za-z][\w:-]+)\]\s*$")
PENDING = "pve:pending"


def die(text: str, code: int = 255) -> NoReturn:
    """One line on stderr, then the end."""
    sys.stderr.write(text + "\n")
    sys.exit(code)


@dataclass
class Section:
    """One section: the description, `key: value`, then raw lxc.* lines in file order."""

    keys: dict[str, str] = field(default_factory=dict)
    raw: list[tuple[str, str]] = field(default_factory=list)
    description: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As pct rewrites it: description first, keys sorted, raw lines last."""
        lines = [f"#{line}" for line in self.description]
        lines += [f"{key}: {value}" for key, value in sorted(self.keys.items())]
        lines += [f"{key}: {value}" for key, value in self.raw]
        return "".join(line + "\n" for line in lines)

    def copy(self) -> Section:
        """An independent copy."""
        return Section(dict(self.keys), list(self.raw), list(self.description))


@dataclass
class Conf:
    """A whole file."""

    vmid: str
    current: Section = field(default_factory=Section)
    pending: Section = field(default_factory=Section)
    snapshots: dict[str, Section] = field(default_factory=dict)

    @property
    def deletes(self) -> list[str]:
        """Keys whose deletion waits for a restart."""
        return [key for key in self.pending.keys.get("delete", "").split(",") if key]

    def set_deletes(self, keys: list[str]) -> None:
        """Writes the pending deletions."""
        if keys:
            self.pending.keys["delete"] = ",".join(keys)
        else:
            self.pending.keys.pop("delete", None)

    def merged(self) -> Section:
        """What will be after the next start."""
        view = self.current.copy()
        for key in self.deletes:
            view.keys.pop(key, None)
        view.keys.update({k: v for k, v in self.pending.keys.items() if k != "delete"})
        return view

    def text(self) -> str:
        """The file."""
        parts = [self.current.text()]
        if self.pending.keys:
            parts.append(f"[{PENDING}]\n{self.pending.text()}")
        for name in sorted(self.snapshots):
            parts.append(f"[{name}]\n{self.snapshots[name].text()}")
        return "\n".join(parts)


def path(vmid: str) -> str:
    """Where the file lies."""
    return f"{CONF}/{vmid}.conf"


def parse(vmid: str, text: str, warn: bool = True) -> Conf:
    """The file as data; lines it cannot parse are reported and dropped, as pct does."""
    conf = Conf(vmid)
    section = conf.current
    for line in text.split("\n"):
        if not line.strip():
            continue
        if head := SECTION_LINE.match(line):
            if head[1] == PENDING:
                section = conf.pending
            else:
                section = conf.snapshots.setdefault(head[1], Section())
        elif line.startswith("#"):
            section.description.append(line[1:])
        elif raw := RAW_LINE.match(line):
            section.raw.append((raw[1], raw[2]))
        elif key := KEY_LINE.match(line):
            section.keys[key[1]] = key[2]
        elif warn:
            sys.stderr.write(f"vm {vmid} - unable to parse config: {line}\n")
    return conf


def load(vmid: str, warn: bool = True) -> Conf:
    """Reads the file, or ends as pct does when there is none."""
    try:
        with open(path(vmid)) as file:
            return parse(vmid, file.read(), warn)
    except FileNotFoundError:
        node = os.uname().nodename
        die(f"Configuration file 'nodes/{node}/lxc/{vmid}.conf' does not exist", 2)


def save(conf: Conf) -> None:
    """Temp file and rename, as pmxcfs users do."""
    temp = f"{path(conf.vmid)}.tmp.{os.getpid()}"
    with open(temp, "w") as file:
        file.write(conf.text())
    os.chmod(temp, 0o640)
    os.replace(temp, path(conf.vmid))


@contextmanager
def locked(vmid: str) -> Iterator[None]:
    """The flock that pct takes while it changes the file."""
    os.makedirs(LOCKS, exist_ok=True)
    name = f"{LOCKS}/pve-config-{vmid}.lock"
    with open(name, "a") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    sys.stderr.write("trying to acquire lock...\n")
                    told = True
                if time.monotonic() > deadline:
                    die(f"can't lock file '{name}' - got timeout", 4)
                time.sleep(0.1)
        if told:
            sys.stderr.write(" OK\n")
        yield


def refuse_lock(conf: Conf) -> None:
    """Ends when the container is locked by an operation."""
    if lock := conf.current.keys.get("lock"):
        die(f"CT is locked ({lock})")
