"""What a launch leaves behind in /dev/shm and /tmp, and the proof that it is its own.

A file is removed only when it belongs to the launch's user, was made while the launch ran, was
held by a process of the launch or has a name that its libraries give, and when no living process
maps it, has it open, or is bound to it. Where that cannot be seen, it stays.
"""

# Plain paths and no pathlib: the names are the kernel's own.
# ruff: noqa: PTH108, PTH115, PTH116, PTH118, PTH123, PTH208

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from typing import Any

from deployer.agents.serve.processes import boot_id, is_running, processes

Record = dict[str, Any]
Key = tuple[int, int]
"""Device and inode."""

SHM = "/dev/shm"
SHM_NAME = re.compile(r"^(?:nccl-|torch_|sglang|shm_broadcast)")
"""Names that the engine's own libraries give. Others (`sem.*`, `psm_*`) may be those of a program
that opens them again later: they go only when the launch was seen to hold them.
"""
SOCKET_NAME = re.compile(r"^(?:tmp[a-z0-9_]{8}|sglang[\w.-]*|[0-9a-f]{8}-[0-9a-f-]{27})$")
"""What Python's tempfile and uuid name the ZeroMQ sockets of SGLang."""
SLACK_S = 2.0
"""File systems round their times."""


def launch_pids(command: Record) -> set[int]:
    """Running processes of the launch: its session, and the descendants of its main process."""
    if boot_id() != command["boot"]:
        return set()
    table = processes()
    pid, start = int(command["pid"]), int(command["start"])
    session = int(command.get("session") or 0)
    main = table.get(pid)
    found = {pid} if main is not None and main["start"] == start else set()
    found |= {
        one["pid"]
        for one in table.values()
        if session and one["session"] == session and one["start"] >= start
    }
    added = True
    while added:
        more = {one["pid"] for one in table.values() if one["ppid"] in found} - found
        found |= more
        added = bool(more)
    return {one for one in found if is_running(table[one])}


def held(command: Record) -> Record:
    """Files of /dev/shm and bound sockets below /tmp that processes of the launch use now."""
    files: dict[str, Key] = {}
    for pid in launch_pids(command):
        try:
            for key, path in mapped(pid):
                if path.startswith(SHM + "/") and not path.endswith(" (deleted)"):
                    files[path] = key
            sockets = bound(pid)
            for target, key in opened(pid):
                path = sockets.get(target, target)
                if path.startswith((SHM + "/", tempfile.gettempdir() + "/")):
                    files[path] = key_of(path) or key
        except OSError:
            continue
    return {"files": [{"path": p, "device": k[0], "inode": k[1]} for p, k in files.items()]}


def clear(command: Record) -> Record:
    """Removes what is proven to be left of the launch: `removed`, and `kept` with the reason."""
    removed: list[Record] = []
    kept: list[Record] = []
    if boot_id() != command["boot"]:
        return {"removed": removed, "kept": kept}
    if launch_pids(command):
        return {"removed": removed, "kept": [{"path": "", "why": "the launch still runs"}]}
    owner, began, ended = window(str(command["folder"]))
    known = {one["path"]: (one["device"], one["inode"]) for one in command.get("files", [])}
    seen = {path for path in known if key_of(path) == known[path]}
    candidates = seen | set(named())
    if not candidates:
        return {"removed": removed, "kept": kept}
    used, sockets, unseen = in_use()
    for path in sorted(candidates):
        try:
            info = os.lstat(path)
        except OSError:
            continue
        born = min(info.st_ctime, info.st_mtime)
        if info.st_uid != owner or born < began - SLACK_S:
            continue
        if path not in seen and born > ended + SLACK_S:
            continue
        why = ""
        if (info.st_dev, info.st_ino) in used or path in sockets:
            if path not in seen:
                # Only its name is like ours: it is another program's, which lives.
                continue
            why = "a living process uses it"
        elif unseen:
            why = f"processes that cannot be looked into: {unseen}"
        if not why:
            try:
                os.unlink(path)
            except OSError as error:
                why = str(error)
        size = 0 if stat.S_ISSOCK(info.st_mode) else info.st_size
        if why:
            kept.append({"path": path, "why": why, "bytes": size})
        else:
            removed.append({"path": path, "bytes": size})
    return {"removed": removed, "kept": kept}


def window(folder: str) -> tuple[int, float, float]:
    """(user id, begin, end) of a launch, by the files that its job wrote; Unix seconds."""
    began = os.stat(os.path.join(folder, "pid"))
    ended = began.st_mtime
    # Without a written end it lived at least as long as it wrote.
    for name in ("exit", "log"):
        try:
            ended = os.stat(os.path.join(folder, name)).st_mtime
            break
        except OSError:
            continue
    return began.st_uid, began.st_mtime, ended


def named() -> Iterator[str]:
    """Files whose names are those that the server's libraries give."""
    for folder, pattern, kind in (
        (SHM, SHM_NAME, stat.S_ISREG),
        (tempfile.gettempdir(), SOCKET_NAME, stat.S_ISSOCK),
    ):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            try:
                if pattern.match(name) and kind(os.lstat(path).st_mode):
                    yield path
            except OSError:
                continue


def in_use() -> tuple[set[Key], set[str], int]:
    """Files that living processes map or have open, bound socket paths, processes not seen."""
    used: set[Key] = set()
    sockets: set[str] = set()
    networks: set[str] = set()
    unseen = 0
    for pid, one in processes().items():
        if not is_running(one):
            continue
        try:
            used.update(key for key, _ in mapped(pid))
            used.update(key for _, key in opened(pid))
            network = os.readlink(f"/proc/{pid}/ns/net")
            if network not in networks:
                networks.add(network)
                sockets.update(bound(pid).values())
        except FileNotFoundError:
            continue
        except ProcessLookupError:
            continue
        except OSError:
            # Some machines hide their init; it uses no server's memory.
            unseen += pid != 1
    return used, sockets, unseen


def mapped(pid: int) -> Iterator[tuple[Key, str]]:
    """Files that the process maps."""
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[4] != "0":
                major, _, minor = fields[3].partition(":")
                yield (os.makedev(int(major, 16), int(minor, 16)), int(fields[4])), fields[5]


def opened(pid: int) -> Iterator[tuple[str, Key]]:
    """Files that the process has open: the link's text and the file itself."""
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
            info = os.stat(f"{folder}/{name}")
        except OSError:
            continue
        yield target, (info.st_dev, info.st_ino)


def bound(pid: int) -> dict[str, str]:
    """`socket:[inode]` -> path of the sockets bound in the process's network."""
    found = {}
    with open(f"/proc/{pid}/net/unix", errors="surrogateescape") as file:
        for line in file.read().splitlines()[1:]:
            fields = line.split(None, 7)
            if len(fields) == 8 and fields[7].startswith("/"):
                found[f"socket:[{fields[6]}]"] = fields[7]
    return found


def key_of(path: str) -> Key | None:
    """Device and inode; None when there is no such file."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino
