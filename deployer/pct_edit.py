"""Edits of a container configuration that pct itself would keep, and only these.

A line counts only in the current part: text after the first section header belongs to that section.
pct sorts, moves comments and drops what it cannot read at its next write, so lines are owned by
their content, never by a marker comment.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from deployer.gpu import Node
from deployer.pct_config import Section, is_header, parse_conf

ALLOW = "lxc.cgroup2.devices.allow"
DENY = "lxc.cgroup2.devices.deny"
MOUNT = "lxc.mount.entry"
DYNAMIC_MAJORS = frozenset((*range(234, 255), *range(384, 512)))
"""Character majors that the kernel gives out while it runs (Linux, fs/char_dev.c)."""

_RULE = re.compile(r"^c\s+(\d+):(\d+|\*)(\s+[rwm]+)?$", re.ASCII)
_ANY = re.compile(r"^(?:a(?:\s.*)?|c\s+\*:(\d+|\*)(\s+[rwm]+)?)$", re.ASCII)


@dataclass(frozen=True)
class RawDevice:
    """A device for versions of pct without devN."""

    path: str
    major: int
    minor: int

    def lines(self, *, unprivileged: bool = False) -> tuple[str, ...]:
        """The mount, and in a privileged container the allow line.

        Unprivileged containers of Proxmox allow every device; there the file's mode decides.
        Without `create=file` the container has no mount point and does not start. A node that is
        missing on the host then leaves a regular file, so nodes are judged by type, not by name.
        """
        mount = f"{MOUNT}: {self.path} {self.path[1:]} none bind,optional,create=file"
        if unprivileged:
            return (mount,)
        return (f"{ALLOW}: c {self.major}:{self.minor} rwm", mount)


@dataclass(frozen=True)
class Edit:
    """What changes in the current part: lines to add, and lines that become other lines."""

    add: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.replace)

    def reverse(self) -> Edit:
        """The edit that takes this one back; `apply` ignores what is no longer there."""
        return Edit(
            replace=tuple((new, old) for old, new in self.replace)
            + tuple((line, "") for line in self.add)
        )


def apply(text: str, edit: Edit) -> str:
    """`text` with `edit` made in its current part; the rest keeps every byte.

    A line is found by its key and value, whatever blanks, `=` or line end it has. A replacement by
    '' takes the line out. Lines that the current part already has are not added again.
    """
    lines = re.split(r"(?<=\n)", text)
    if lines and not lines[-1]:
        lines.pop()
    cut = next((at for at, line in enumerate(lines) if is_header(line)), len(lines))
    wanted = {_meaning(old): new for old, new in edit.replace}
    head = []
    for line in lines[:cut]:
        new = wanted.get(_meaning(line))
        if new is None or _meaning(line) is None:
            head.append(line)
        elif new:
            head.append(new + _end(line))
    have = {_meaning(line) for line in head}
    added = [line for line in dict.fromkeys(edit.add) if _meaning(line) not in have]
    if added:
        at = len(head)
        while at and not head[at - 1].strip():
            at -= 1
        if at and not head[at - 1].endswith("\n"):
            head[at - 1] += "\n"
        head[at:at] = [f"{line}\n" for line in added]
    return "".join(head) + "".join(lines[cut:])


def _end(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


def _meaning(line: str) -> tuple[str, str] | None:
    """Key and value of a line as pct reads it; None for comments and lines of no form."""
    part = parse_conf(line.rstrip("\n")).current
    return next(iter((*part.raw, *part.keys.items())), None)


def diff(before: str, after: str, path: str) -> list[str]:
    """Unified, without line ends; for people, so that odd bytes are shown as such."""
    old, new = (
        text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").split("\n")
        for text in (before, after)
    )
    return list(difflib.unified_diff(old, new, f"a{path}", f"b{path}", n=2, lineterm=""))


def allowed(section: Section, major: int, minor: int) -> bool:
    """Whether the raw rules let a privileged container open this character device."""
    verdict = False
    for key, value in section.raw:
        access = _access(value, major, minor) if key in (ALLOW, DENY) else set()
        if key == ALLOW and access >= {"r", "w"}:
            verdict = True
        elif key == DENY and access & {"r", "w"}:
            verdict = False
    return verdict


def _access(value: str, major: int, minor: int) -> set[str]:
    """What a rule is about for this device, of r, w and m; empty when not about it.

    A driver's node is opened for reading and writing: to allow one alone does not let it be opened.
    """
    if wide := _ANY.match(value):
        of_minor, access = wide[1] or "*", wide[2]
    elif (rule := _RULE.match(value)) and int(rule[1]) == major:
        of_minor, access = rule[2], rule[3]
    else:
        return set()
    if of_minor not in ("*", str(minor)):
        return set()
    return {*"rwm"} if access is None else {*access.strip()}


def stale_rules(section: Section, majors: AbstractSet[int]) -> dict[int, tuple[str, ...]]:
    """Allow rules for majors that are given out at run time and that no driver has now.

    `majors`: the character majors of /proc/devices. By old major, the values of the lines.
    """
    found: dict[int, tuple[str, ...]] = {}
    for key, value in section.raw:
        rule = _RULE.match(value) if key == ALLOW else None
        if rule and (major := int(rule[1])) in DYNAMIC_MAJORS - majors:
            found[major] = (*found.get(major, ()), value)
    return found


def mend(
    section: Section,
    nodes: Iterable[Node],
    majors: AbstractSet[int],
) -> Edit:
    """What lets a privileged container open `nodes`, which it mounts by raw lines.

    One old major that nothing has any more is the one that these nodes had: its lines get the new
    major. With several it cannot be told whose each was: rules are added, and the old ones stay.
    """
    shut = [node for node in nodes if not allowed(section, node.major, node.minor)]
    if not shut:
        return Edit()
    stale = stale_rules(section, majors)
    new = {node.major for node in shut}
    if len(stale) == 1 and len(new) == 1:
        (old, values), major = next(iter(stale.items())), next(iter(new))
        replace = tuple(
            (f"{ALLOW}: {value}", f"{ALLOW}: " + value.replace(f"{old}:", f"{major}:", 1))
            for value in dict.fromkeys(values)
        )
        section = Section(raw=tuple(_renamed(section.raw, dict(replace))))
        rest = [node for node in shut if not allowed(section, node.major, node.minor)]
        return Edit(tuple(f"{ALLOW}: c {n.major}:{n.minor} rwm" for n in rest), replace)
    return Edit(tuple(f"{ALLOW}: c {node.major}:{node.minor} rwm" for node in shut))


def _renamed(
    raw: Sequence[tuple[str, str]], replace: Mapping[str, str]
) -> Iterable[tuple[str, str]]:
    for key, value in raw:
        line = replace.get(f"{key}: {value}", f"{key}: {value}")
        yield key, line.partition(": ")[2]


def raw_edit(section: Section, devices: Iterable[RawDevice], *, unprivileged: bool) -> Edit:
    """The raw lines that bring `devices` in, without those that are there."""
    have = {f"{key}: {value}" for key, value in section.raw}
    lines = [line for one in devices for line in one.lines(unprivileged=unprivileged)]
    return Edit(tuple(line for line in dict.fromkeys(lines) if line not in have))
