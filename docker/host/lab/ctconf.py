"""The lab's reader and writer of /etc/pve/lxc/VMID.conf: sections, pending, raw lxc.* lines.

Follows what recorded runs of the real `pct` show (tests/unit/test_pct_cases.py runs them against
it); it shares no code with it. The file is bytes: text here is latin-1, one character a byte.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NoReturn

import ctformat
import ctraw
import ctschema

CONF = "/etc/pve/lxc"
LOCKS = "/run/lock/lxc"
LOCK_WAIT_S = 10.0
PENDING = "pve:pending"
ENV = "lxc.environment.runtime"

_BLANK = re.compile(r"^\s*$", re.ASCII)
_PENDING = re.compile(r"^\[pve:pending\]\s*$", re.ASCII | re.IGNORECASE)
_SNAPSHOT = re.compile(r"^\[([a-z][a-z0-9_\-]+)\]\s*$", re.ASCII | re.IGNORECASE)
_RAW = re.compile(r"^(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*$", re.ASCII)
_DESCRIPTION = re.compile(r"^description:\s*(.*\S)\s*$", re.ASCII)
_SNAPSTATE = re.compile(r"snapstate:\s*(prepare|delete)\s*$", re.ASCII)
_DELETE = re.compile(r"^delete:\s*(.*\S)\s*$", re.ASCII)
_KEY = re.compile(r"^([a-z][a-z_]*\d*):\s*(.+?)\s*$", re.ASCII)
_NEVER_WRITTEN = ("digest", "env", "lxc", "pending", "snapname", "snapshots")


_ON_STDOUT = [False]


class Ended(SystemExit):
    """pct ends here; the text is on stderr already."""


def warn(text: str) -> None:
    """One line on stderr, as bytes of the file where it quotes them."""
    data = text.encode("utf-8") if any(ord(c) > 255 for c in text) else text.encode("latin-1")
    out = sys.stdout if _ON_STDOUT[0] else sys.stderr
    stream = getattr(out, "buffer", None)
    if stream is None:
        out.write(text + "\n")
        return
    out.flush()
    stream.write(data + b"\n")
    stream.flush()


@contextmanager
def warnings_on_stdout() -> Iterator[None]:
    """Inside a task, warnings are part of its output; its error is not."""
    _ON_STDOUT[0] = True
    try:
        yield
    finally:
        _ON_STDOUT[0] = False


def die(text: str, code: int = 255) -> NoReturn:
    """One line on stderr, then the end."""
    _ON_STDOUT[0] = False
    warn(text)
    raise Ended(code)


@dataclass
class Section:
    """One section: the description, `key: value`, then raw lxc.* lines in file order."""

    keys: dict[str, str] = field(default_factory=dict)
    raw: list[tuple[str, str]] = field(default_factory=list)
    description: str = ""
    """Decoded text (not latin-1), each line with its end."""

    def text(self) -> str:
        """As pct writes it: description first, keys sorted, raw lines last."""
        lines = [f"#{ctformat.encoded(line)}" for line in self.description.split("\n")]
        while lines and lines[-1] == "#":
            lines.pop()
        lines += [f"{k}: {v}" for k, v in sorted(self.keys.items()) if k not in _NEVER_WRITTEN]
        if "env" in self.keys:
            lines += [f"{ENV}: {one}" for one in self.keys["env"].split("\0")]
        lines += [f"{key}: {value}" for key, value in self.raw]
        return "".join(line + "\n" for line in lines)

    def copy(self) -> Section:
        """An independent copy."""
        return Section(dict(self.keys), list(self.raw), self.description)

    def volumes(self) -> set[str]:
        """The volumes of storages that the rootfs and mpN values name; broken values name none."""
        found = set()
        for key, value in self.keys.items():
            if re.fullmatch(r"rootfs|mp\d+", key) and ctformat.known(key):
                with suppress(ctschema.Refused):
                    found.add(ctformat.mount(key, value)[0])
        return {volume for volume in found if re.match(r"[A-Za-z][\w.-]*[A-Za-z0-9]:.", volume)}

    def add_unused(self, volume: str) -> None:
        """The lowest free `unusedN`, unless one has it already."""
        have = {k: v for k, v in self.keys.items() if k.startswith("unused")}
        if volume not in have.values():
            free = next(n for n in range(256) if f"unused{n}" not in have)
            self.keys[f"unused{free}"] = volume

    def drop_used(self) -> None:
        """`unusedN` of a volume that is in use after all."""
        used = self.volumes()
        for key in [k for k, v in self.keys.items() if k.startswith("unused") and v in used]:
            del self.keys[key]


@dataclass
class Conf:
    """A whole file."""

    vmid: str
    current: Section = field(default_factory=Section)
    pending: Section = field(default_factory=Section)
    snapshots: dict[str, Section] = field(default_factory=dict)

    @property
    def deletes(self) -> list[str]:
        """Keys whose deletion waits for a restart; a `!` before one (by force) is not of its name.

        As in Perl, where a comma at the begin makes no key but one in the middle of blanks does.
        """
        text = re.sub("[,;]", " ", self.pending.keys.get("delete", ""))
        return [word.removeprefix("!") for word in text.split()]

    def set_deletes(self, keys: list[str]) -> None:
        """Writes the pending deletions, sorted; what was to go by force still is."""
        text = re.sub("[,;]", " ", self.pending.keys.get("delete", ""))
        forced = {word[1:] for word in text.split() if word.startswith("!")}
        if keys:
            marked = [f"!{key}" if key in forced else key for key in sorted(set(keys))]
            self.pending.keys["delete"] = ",".join(marked)
        else:
            self.pending.keys.pop("delete", None)

    def clean_pending(self) -> None:
        """What is pending and no different from the current part is forgotten."""
        for key in list(self.pending.keys):
            if key != "delete" and self.current.keys.get(key) == self.pending.keys[key]:
                del self.pending.keys[key]
        self.set_deletes([key for key in self.deletes if key in self.current.keys])

    def shown(self) -> Section:
        """What `pct config` shows: the current part with what is pending.

        New values first, then deletions, but a value that Perl takes for false stays.
        """
        view = self.current.copy()
        view.keys.update({k: v for k, v in self.pending.keys.items() if k != "delete"})
        view.description = self.pending.description or view.description
        for key in self.deletes:
            if view.keys.get(key) not in (None, "0"):
                del view.keys[key]
            view.description = "" if key == "description" else view.description
        return view

    def merged(self) -> Section:
        """What will be after the next start: deletions first, then new values."""
        view = self.current.copy()
        for key in self.deletes:
            view.keys.pop(key, None)
            view.description = "" if key == "description" else view.description
        view.keys.update({k: v for k, v in self.pending.keys.items() if k != "delete"})
        view.description = self.pending.description or view.description
        return view

    def text(self) -> str:
        """The file."""
        self.current.keys.pop("snapstate", None)
        self.current.drop_used()
        parts = [self.current.text()]
        if self.pending.keys or self.pending.raw or self.pending.description:
            parts.append(f"[{PENDING}]\n{self.pending.text()}")
        for name in sorted(self.snapshots):
            parts.append(f"[{name}]\n{self.snapshots[name].text()}")
        return "\n".join(parts)


def path(vmid: str) -> str:
    """Where the file lies."""
    return f"{CONF}/{vmid}.conf"


def parse(vmid: str, text: str, told: bool = True) -> Conf:
    """The file as data; lines it cannot parse are reported and dropped, as pct does."""
    conf = Conf(vmid)
    section, name = conf.current, ""

    def tell(words: str) -> None:
        if told:
            warn(f"vm {vmid} - {words}")

    for line in text.split("\n"):
        if _BLANK.match(line):
            continue
        if _PENDING.match(line):
            section, name = Section(), "pending"
            conf.pending = section
        elif head := _SNAPSHOT.match(line):
            section, name = Section(), head[1]
            conf.snapshots[head[1]] = section
        elif line.startswith("#"):
            section.description += ctformat.decoded(line[1:]) + "\n"
        elif raw := _RAW.match(line):
            verdict = ctraw.verdict(raw[1])
            if verdict.warning:
                tell(verdict.warning)
            elif not verdict.kept:
                tell(f"unable to parse config: {line}")
            if raw[1] == ENV:
                known = [section.keys["env"]] if "env" in section.keys else []
                section.keys["env"] = "\0".join([*known, raw[2]])
            elif verdict.kept:
                section.raw.append((raw[1], raw[2]))
        elif text_of := _DESCRIPTION.match(line):
            section.description += ctformat.decoded(text_of[1])
        elif state := _SNAPSTATE.search(line):
            section.keys["snapstate"] = state[1]
        elif gone := _DELETE.match(line):
            if name == "pending":
                section.keys["delete"] = gone[1]
            else:
                tell("property 'delete' is only allowed in [pve:pending]")
        elif key := _KEY.match(line):
            value, error = ctformat.typed(key[1], key[2])
            if error:
                tell(f"unable to parse value of '{key[1]}' - {error.removesuffix(chr(10))}")
            section.keys[key[1]] = value
        else:
            tell(f"unable to parse config: {line}")
    conf.current.keys.pop("snapstate", None)
    for section in (conf.current, conf.pending, *conf.snapshots.values()):
        # An empty `description:` is a key as others are; and Perl takes the text `0` for none.
        blank = section.keys.pop("description", "")
        section.description = blank if section.description in ("", "0") else section.description
    return conf


def load(vmid: str, told: bool = True) -> Conf:
    """Reads the file, or ends as pct does when there is none."""
    try:
        with open(path(vmid), "rb") as file:
            return parse(vmid, file.read().decode("latin-1"), told)
    except FileNotFoundError:
        node = os.uname().nodename
        die(f"Configuration file 'nodes/{node}/lxc/{vmid}.conf' does not exist", 2)


def digest(vmid: str) -> str:
    """sha1 of the file's bytes."""
    import hashlib

    with open(path(vmid), "rb") as file:
        return hashlib.sha1(file.read(), usedforsecurity=False).hexdigest()


def save(conf: Conf, told: bool = False) -> None:
    """Temp file and rename, as pmxcfs users do; then pct reads it again, and warns again."""
    temp = f"{path(conf.vmid)}.tmp.{os.getpid()}"
    text = conf.text()
    with open(temp, "wb") as file:
        file.write(text.encode("latin-1"))
    os.chmod(temp, 0o640)
    os.replace(temp, path(conf.vmid))
    if told:
        parse(conf.vmid, text)


@contextmanager
def locked(vmid: str) -> Iterator[None]:
    """The flock that pct takes while it changes the file."""
    os.makedirs(LOCKS, exist_ok=True)
    name = f"{LOCKS}/pve-config-{vmid}.lock"
    with open(name, "a") as file:
        deadline = time.monotonic() + LOCK_WAIT_S
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    warn("trying to acquire lock...")
                    waited = True
                if time.monotonic() > deadline:
                    die(f"can't lock file '{name}' - got timeout", 4)
                time.sleep(0.1)
        if waited:
            warn(" OK")
        yield


def device_value(value: str) -> tuple[str, dict[str, str]]:
    """The path and the sub-keys of a devN value, or the end that pct makes of a broken one."""
    try:
        path, options = ctformat.device(value)
    except ctschema.Refused as refused:
        die(refused.text.removesuffix("\n"))
    if not path:
        die("Path has to be defined")
    return path, options


def refuse_lock(conf: Conf) -> None:
    """Ends when the container is locked by an operation."""
    if (lock := conf.current.keys.get("lock", "0")) != "0":
        die(f"CT is locked ({lock})")
