"""What the texts of `pct` mean and what to do: match on text, its exit codes are errno residue.

Texts of pve-container 6.1.10. The same numbers (2, 4, 255) come for many causes, and ssh has its
own 255.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deployer import pct_start_errors, pct_storage_errors


@dataclass(frozen=True)
class Meaning:
    """One cause in plain words, and the next action."""

    cause: str
    fix: str


_TABLE: tuple[tuple[str, str, str], ...] = (
    (
        r"Configuration file '\S*?/(?:lxc/)?(\d+)\.conf' does not exist",
        "there is no container {0} on this node",
        "`pct list` shows what is there; correct the vmid, or add `create:` in the inventory",
    ),
    (
        r"container '(\d+)' not running!",
        "container {0} does not run",
        "see why it stopped: journalctl -u pve-container@{0}",
    ),
    (r"(?:CT|VM) (\d+) not running", "container {0} does not run", "start it: pct start {0}"),
    (r"CT (\d+) already running", "container {0} runs already", "run again"),
    (
        r"CT is locked \(([\w-]+)\)",
        "a task holds the container ({0})",
        "run again when it has ended; if none works on it any more: pct unlock",
    ),
    (
        r"can't lock file '(\S+)' - got timeout",
        "another process holds {0}",
        "run again; `fuser {0}` shows who holds it",
    ),
    (
        r"Device (/\S+) does not exist",
        "{0} is not on the host, and a container with such an entry does not start",
        "load the driver (nvidia-modprobe -u -c 0), or take the devN entry out",
    ),
    (r"(/\S+) is not a device", "{0} is a file and no device", "remove it and load the driver"),
    (r"(\S+) is not a valid device path", "{0} does not lie below /dev", "correct the devN entry"),
    (r"Path has to be defined", "a devN entry names no path", "correct the devN entry"),
    (
        r"detected modified configuration",
        "somebody else changed the configuration meanwhile",
        "run again to plan with what it holds now",
    ),
    (r"snapshot feature is not available", "a volume of it cannot be snapshotted", "go without"),
    (r"snapshot name '(\S+)' already used", "snapshot {0} is there already", "run again"),
    (r"snapshot '(\S+)' does not exist", "there is no snapshot {0}", "run again"),
    (
        r"cluster not ready - no quorum\?",
        "the cluster has no quorum: no guest starts, and /etc/pve is read-only",
        "bring the other nodes back (`pvecm status`)",
    ),
    (
        r"/etc/pve/\S*.*: (?:Permission denied|Read-only file system)",
        "/etc/pve cannot be written: no quorum",
        "bring the other nodes back (`pvecm status`)",
    ),
    (
        r"protection mode enabled",
        "the container is protected",
        "pct set ID --protection 0, if that is meant",
    ),
    (
        r"unable to (?:create|restore) CT (\d+) - (.*already exists on node \S+)",
        "id {0} is taken: {1}",
        "choose another id in the inventory",
    ),
    (r"storage '(\S+)' does not exist", "there is no storage {0}", "see `pvesm status`"),
    (r"volume '(\S+)' does not exist", "there is no {0}", "fetch it: pveam download"),
    (r"bridge '(\S+)' does not exist", "there is no bridge {0}", "correct `net:`; see `ip link`"),
    (
        r"missing '(\w+)' configuration",
        "the configuration has no {0}",
        "it is not whole: restore it from a backup",
    ),
    (r"no options specified", "pct was given nothing to set", "report it with the lines shown"),
    (r"unknown command 'pct", "this pct lacks a command", "compare `pveversion`"),
    (r"please run as root", "pct needs root", "set `user: root` in the host's `ssh`"),
    (
        r"ipcc_send_rec|Unable to load access control list: Connection refused",
        "pve-cluster does not run on this node",
        "systemctl status pve-cluster",
    ),
    (
        r"no lock found trying to remove any lock",
        "the container is not locked any more",
        "run again",
    ),
    (
        r"can only pu(?:sh|ll) files (?:to|from) a running",
        "the container does not run",
        "start it: pct start",
    ),
    (r"missing command at", "pct exec was given no command", "report it with the lines shown"),
)


_BELOW = (*pct_start_errors.ROWS, *pct_storage_errors.ROWS)


def explain(lines: Iterable[str]) -> Meaning | None:
    """The meaning of what pct said, the most telling line first; None when no text is known."""
    text = "\n".join(lines)
    for pattern, cause, fix in (*_TABLE, *_BELOW, *pct_storage_errors.LAST):
        if found := re.search(pattern, text, re.MULTILINE):
            words = tuple(word or "" for word in found.groups())
            return Meaning(cause.format(*words), fix.format(*words))
    return None
