"""What lies in a model's folder: files, partial files of every client, who works there, and room.

Standard library only: the controller sends the texts of `partials`, `holders` and this file to the
target as one probe. It reads and changes nothing. It does not know which files are wanted: it tells
what is there, and `claims` judges.
"""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH100, PTH112, PTH114, PTH116, PTH118, PTH120, PTH123

from __future__ import annotations

import json
import os
import stat
from typing import Any

from deployer.agents.fetch.holders import Inode, command_of, holders
from deployer.agents.fetch.partials import HF_PLACE, MOST_CONTROL, OWN_HF, below, partials, walk

HIDDEN = (".cache", ".deployer", ".git")
OWN_SUFFIXES = (".part", ".part.map", ".bad")
MOST_FILES = 50000


def valid_bytes(row: Any, size: int) -> int:
    """Bytes of NAME.part that NAME.part.map calls valid: its prefix and the pieces beyond.

    Of a map that makes no sense nothing is believed.
    """
    runs = [(0, int(row["prefix"]))] + [(int(a), int(b)) for a, b in row["pieces"]]
    end = valid = 0
    for start, stop in runs:
        if start < end or stop < start:
            return 0
        valid += max(0, min(stop, size) - start)
        end = stop
    return valid


def look(root: str) -> dict[str, Any]:
    """Everything about the folder, ready for JSON. Keys: see `ShardsFact` of the shards step."""
    out: dict[str, Any] = {"exists": os.path.isdir(root), "problems": {}}
    files, inodes, folders, out["links"] = files_below(root, out["problems"])
    out["files"] = files
    out["outside"] = _leading_out(root, out["links"])
    found = partials(root, [name for name in files if name.endswith(".aria2")])
    out["partials"] = found
    out["maps"] = _maps(root, files)
    out.update(_record(root))
    for place in (HF_PLACE, OWN_HF + "/" + HF_PLACE):
        for rel, path in walk(root, place):
            if rel.endswith(".lock"):
                _remember(inodes, path, place + "/" + rel)
    for one in found:
        _remember(inodes, os.path.join(root, one.path), one.path)
    _remember(inodes, os.path.join(root, ".deployer", "lock"), ".deployer/lock")
    out["holders"] = holders(inodes)
    out["running"] = _running(root)
    out["running_command"] = command_of(out["running"]) if out["running"] else ""
    out.update(_room(root, folders))
    return out


def _leading_out(root: str, links: list[str]) -> dict[str, str]:
    """Symlinked folder -> where it leads, of those that lead out of `root`: none is written to."""
    top = os.path.realpath(root)
    found = {}
    for link in links:
        real = os.path.realpath(os.path.join(root, link))
        if os.path.isdir(real) and os.path.commonpath([real, top]) != top:
            found[link] = real
    return found


def _remember(inodes: dict[Inode, str], path: str, name: str) -> None:
    try:
        facts = os.lstat(path)
    except OSError:
        return
    if stat.S_ISREG(facts.st_mode):
        inodes[facts.st_dev, facts.st_ino] = name


def files_below(
    root: str, problems: dict[str, str]
) -> tuple[dict[str, tuple[int, int]], dict[Inode, str], dict[str, int], list[str]]:
    """(path -> (size, mtime in ns), inode -> path, folder -> device, symlinks).

    `problems`: folder -> why it could not be read, or cannot be written.

    Sub-folders that are symlinks are entered, each real folder once: a model's folder may be
    spread over several disks that way. Of symlinked files only those with a name of ours are told.
    """
    files: dict[str, tuple[int, int]] = {}
    inodes: dict[Inode, str] = {}
    folders: dict[str, int] = {}
    links: list[str] = []
    seen: set[Inode] = set()

    def told(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            folder = os.path.relpath(error.filename, root)
            problems["" if folder == "." else folder] = error.strerror or str(error)

    for base, names, others in os.walk(root, onerror=told, followlinks=True):
        try:
            facts = os.stat(base)
        except OSError as error:
            told(error)
            continue
        key = (facts.st_dev, facts.st_ino)
        if key in seen:
            names[:] = []
            continue
        seen.add(key)
        folder = "" if base == root else os.path.relpath(base, root)
        folders[folder] = facts.st_dev
        if folder and not os.access(base, os.W_OK | os.X_OK):
            problems[folder] = "not writable"
        names[:] = [one for one in names if one not in HIDDEN]
        told_of = names + [one for one in others if one.endswith(OWN_SUFFIXES)]
        lead = f"{folder}/" if folder else ""
        links += [lead + one for one in told_of if os.path.islink(os.path.join(base, one))]
        for name in others:
            path = os.path.join(base, name)
            try:
                facts = os.stat(path)
            except OSError:
                continue
            if not stat.S_ISREG(facts.st_mode):
                continue
            rel = lead + name
            files[rel] = (facts.st_size, facts.st_mtime_ns)
            inodes[facts.st_dev, facts.st_ino] = rel
        if len(files) > MOST_FILES:
            problems[""] = f"more than {MOST_FILES} files, not all were looked at"
            break
    return files, inodes, folders, links


def _maps(root: str, files: dict[str, tuple[int, int]]) -> dict[str, int]:
    """NAME -> valid bytes, for each NAME.part that has a map; an unreadable map: 0 bytes."""
    names = [name[: -len(".part.map")] for name in files if name.endswith(".part.map")]
    return {name: valid_of_part(os.path.join(root, name)) for name in names}


def valid_of_part(path: str) -> int:
    """Valid bytes of `path`.part: all of it, or what its map says; an unreadable map: none."""
    try:
        size = os.lstat(path + ".part").st_size
        with open(path + ".part.map", "rb") as stream:
            return valid_bytes(json.loads(stream.read(MOST_CONTROL)), size)
    except FileNotFoundError as error:
        return size if error.filename == path + ".part.map" else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _record(root: str) -> dict[str, Any]:
    try:
        with open(os.path.join(root, ".deployer", "verified.json"), "rb") as stream:
            return {"record": dict(json.load(stream)["files"]), "record_error": ""}
    except (FileNotFoundError, NotADirectoryError):
        return {"record": {}, "record_error": ""}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"record": {}, "record_error": f"{type(error).__name__}: {error}"}


def _running(root: str) -> int:
    """The pid of our own live download, 0 when there is none."""
    try:
        with open(os.path.join(root, ".deployer", "lock"), "rb") as stream:
            who = json.loads(stream.read(4096))
        with open(f"/proc/{int(who['pid'])}/stat", "rb") as stream:
            row = stream.read().rpartition(b")")[2].split()
        return int(who["pid"]) if row[0] not in b"ZX" and int(row[19]) == who["start"] else 0
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0


def _room(root: str, folders: dict[str, int]) -> dict[str, Any]:
    """Free bytes and inodes of each file system, and which folder lies on which.

    Only folders that are on another one than their parent are told. What has no folder yet lies
    where its nearest ancestor does.
    """
    near = os.path.abspath(root)
    obstacle = ""
    while not os.path.isdir(near):
        if os.path.lexists(near):
            kind = "a symlink that leads nowhere" if os.path.islink(near) else "a file"
            obstacle = f"{near} is {kind}, not a folder"
        near = os.path.dirname(near)
    table: dict[str, Any] = {}
    places: dict[str, str] = {}

    def measure(path: str, device: int) -> str:
        if str(device) not in table:
            room = os.statvfs(path)
            table[str(device)] = {
                "at": path,
                "free": room.f_bavail * room.f_frsize,
                "inodes": room.f_favail,
                "inodes_total": room.f_files,
                "readonly": bool(room.f_flag & os.ST_RDONLY),
            }
        return str(device)

    places[""] = measure(near, os.stat(near).st_dev)
    for folder, device in folders.items():
        if folder and device != folders.get(os.path.dirname(folder), device):
            places[folder] = measure(os.path.join(root, folder), device)
    own = below(root, ".deployer")
    if own and os.stat(own).st_dev != os.stat(near).st_dev:
        places[".deployer"] = measure(own, os.stat(own).st_dev)
    elsewhere = []
    for other in ("/", "/srv", "/mnt", "/data", "/home", "/var/lib"):
        try:
            device = os.stat(other).st_dev
            if str(device) not in table:
                measure(other, device)
                elsewhere.append([other, table[str(device)]["free"]])
        except OSError:
            continue
    writable = os.access(near, os.W_OK | os.X_OK)
    return {
        "near": near,
        "obstacle": obstacle,
        "writable": writable,
        "rooms": table,
        "places": places,
        "elsewhere": elsewhere,
    }
