"""Partial files that other clients left behind: taken over, or named for cleaning."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH105, PTH106, PTH108, PTH110, PTH114, PTH116, PTH118, PTH119, PTH120

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence

from deployer.agents.fetch.claims import claim, foreign, plain
from deployer.agents.fetch.common import (
    BLOCK,
    LOCKED,
    Fatal,
    disk,
    log,
    make_folder,
    only_one,
    warn,
)
from deployer.agents.fetch.holders import Holder, Inode, holders
from deployer.agents.fetch.look import OWN_SUFFIXES, files_below, valid_of_part
from deployer.agents.fetch.manifest import File
from deployer.agents.fetch.partials import (
    HF_PLACE,
    OWN_HF,
    OWN_INCOMING,
    Partial,
    below,
    dense,
    partials,
    walk,
)
from deployer.agents.fetch.pieces import Journal
from deployer.agents.fetch.record import Record

Row = tuple[str, int, str]
"""Path below the model's folder, bytes on the disk, why it may go."""


def adopt(root: str, file: File) -> int:
    """Makes the longest partial of `file` its NAME.part; the bytes that gained, 0 for none."""
    return _adopt(root, [file])[0]


def adopt_all(root: str, files: Sequence[File]) -> int:
    """Takes over what helps: for each file the longest prefix, when it is longer than NAME.part.

    Call it before NAME itself is judged: aria2 writes there, and its file has its full length from
    the beginning. What a live process holds is left alone. What our own children left and nobody
    needs is removed; what others left stays for `clean`. Returns the bytes that were gained.
    Raises Fatal for an error of the disk.
    """
    gained, left = _adopt(root, files)
    mine = [one for one, _ in left if one.client in ("hf-xet", "rsync")]
    held = {one.path for one in _holders(root, mine)} if mine else set()
    done = [one for one in mine if one.path not in held]
    for one in done:
        _remove(root, one.path)
    if done:
        log(f"removed {len(done)} partial files of our own, {sum(o.used for o in done)} bytes")
    return gained


def _adopt(root: str, files: Sequence[File]) -> tuple[int, list[tuple[Partial, str]]]:
    """(bytes gained, what is left over and why)."""
    found = partials(root, [file.path + ".aria2" for file in files])
    if not found:
        return 0, []
    there = _there(root, Record(root), found)
    chosen, left = claim(found, files, there)
    by_path = {file.path: file for file in files}
    held = {one.path: one for one in _holders(root, list(chosen.values()))}
    gained = 0
    for path, one in chosen.items():
        if holder := held.get(one.path) or held.get(one.path + ".aria2"):
            by = f"pid {holder.pid} writes it ({holder.command})"
            warn(f"{path}: {plain(one.path)} is left alone: {by}")
            continue
        had = there(by_path[path])
        if took := _take(root, by_path[path], one):
            gained += took - had
            log(f"{path}: took over {took} bytes of {plain(one.path)} ({one.client})")
    return gained, left


def cleanable(root: str, files: Sequence[File]) -> list[Row]:
    """What lies there for nothing: useless partials of all clients, our own of files that the list
    does not name or that are verified, and quarantined files that have been replaced since.
    """
    names, _, _, _ = files_below(root, {})
    found = partials(root, [name for name in names if name.endswith(".aria2")])
    record = Record(root)
    verified = {file.path for file in files if _verified(root, record, file)}
    _, left = claim(found, files, _there(root, record, found))
    rows: list[Row] = []
    for one, why in left:
        if one.client == "aria2" and one.name in verified:
            rows.append((one.name + ".aria2", 0, why))
        else:
            rows.append((one.path, 0, why))
    listed = {file.path for file in files}
    for name in sorted(set(names) - listed - {row[0] for row in rows}):
        if why := _stray(name, listed, verified):
            rows.append((name, 0, why))
    # What is reached through a symlink is not ours to remove.
    return [(path, used, why) for path, _, why in rows for used in _blocks(root, path)]


def clean(root: str, files: Sequence[File], agreed: set[str]) -> list[Row]:
    """Removes what is cleanable still and stands in `agreed`. Returns what it removed.

    Raises Fatal(LOCKED) while a download, ours or another's, is alive in the folder.
    """
    with only_one(root):
        rows = [row for row in cleanable(root, files) if row[0] in agreed]
        names = {file.path for file in files} | {row[0] for row in rows}
        busy = [one for one in holders_below(root) if foreign(one, names, ours=False)]
        if busy:
            who = "; ".join(f"pid {one.pid}: {one.command} ({plain(one.path)})" for one in busy)
            raise Fatal(LOCKED, f"{root}: somebody downloads there: {who}")
        for path, _, _ in rows:
            _remove(root, path)
            if os.path.lexists(os.path.join(root, path + ".aria2")):
                _remove(root, path + ".aria2")
        _dead_locks(root)
        return rows


def holders_below(root: str) -> list[Holder]:
    """Who writes any file of the folder or holds a lock of huggingface_hub there."""
    _, inodes, _, _ = files_below(root, {})
    for place in (HF_PLACE, OWN_HF, OWN_INCOMING):
        for rel, path in walk(root, place):
            with contextlib.suppress(OSError):
                facts = os.lstat(path)
                inodes[facts.st_dev, facts.st_ino] = f"{place}/{rel}"
    return holders(inodes)


@contextlib.contextmanager
def _flock(path: str) -> Iterator[bool]:
    """Holds the flock of `path` meanwhile; False when somebody else has it. No file: no lock."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:  # a symlink, a folder: nobody's lock that we could read
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(handle)


def _holders(root: str, some: Sequence[Partial]) -> list[Holder]:
    inodes: dict[Inode, str] = {}
    for one in some:
        for path in (one.path, one.path + ".aria2"):
            with contextlib.suppress(OSError):
                facts = os.lstat(os.path.join(root, path))
                inodes[facts.st_dev, facts.st_ino] = path
    return holders(inodes)


def _verified(root: str, record: Record, file: File) -> bool:
    try:
        return record.holds(file, os.stat(os.path.join(root, file.path)))
    except OSError:
        return False


def _there(root: str, record: Record, found: Sequence[Partial]) -> Callable[[File], int]:
    """Valid bytes that a file has under its own names, whatever the partials bring."""
    aria2 = {one.name for one in found if one.client == "aria2"}

    def count(file: File) -> int:
        path = os.path.join(root, file.path)
        if _verified(root, record, file):
            return file.size
        part = valid_of_part(path)
        try:
            size = 0 if file.path in aria2 else os.stat(path).st_size
        except OSError:
            size = 0
        return max(part, size if size <= file.size else 0)

    return count


def _take(root: str, file: File, one: Partial) -> int:
    """Moves the partial to NAME.part; its length, or 0 when it is not what it was any more.

    Whatever ends this process on the way, NAME.part and its map say nothing that is not so.
    """
    path, part = os.path.join(root, one.path), os.path.join(root, file.path + ".part")
    place = {"hf": HF_PLACE, "hf-xet": f"{OWN_HF}/{HF_PLACE}"}.get(one.client, "")
    lock = os.path.join(root, place, file.path + ".lock") if place else ""
    with _flock(lock) if lock else contextlib.nullcontext(True) as free, disk(part):
        if not free:
            warn(f"{file.path}: {plain(one.path)} is left alone: its lock is held")
            return 0
        try:
            prefix, size, _ = dense(path)
            if prefix < one.prefix:
                return 0
            if size > one.prefix:
                os.truncate(path, one.prefix)
        except FileNotFoundError:  # another worker took it: files of the same content
            return 0
        make_folder(root, os.path.dirname(part))
        _drop_pieces(part)
        _move(path, part)
        _unlink(path + ".aria2")
        if lock:
            _unlink(lock)
    return one.prefix


def _drop_pieces(part: str) -> None:
    """Cuts NAME.part to its prefix and removes its map, which must not speak for other bytes.

    Neither may be lost for the other: at each moment what is there is what the map says, or all of
    it where there is none.
    """
    journal = Journal(part)
    runs = journal.read()
    if runs is None:
        return
    if os.path.islink(part):
        os.unlink(part)
    elif os.path.exists(part):
        os.truncate(part, min(runs[0][1] if runs else 0, os.lstat(part).st_size))
    journal.forget()


def _move(path: str, part: str) -> None:
    """A rename, or a copy where they lie on different file systems."""
    try:
        os.replace(path, part)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            target = os.open(part, flags, 0o644)
            try:
                while data := os.read(source, BLOCK):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(target, view) :]
            finally:
                os.close(target)
        finally:
            os.close(source)
        os.unlink(path)


def _remove(root: str, name: str) -> None:
    """One regular file below real folders, the folders that this empties, and hf's dead lock."""
    folder = below(root, os.path.dirname(name)) if os.path.dirname(name) else root
    path = os.path.join(folder, os.path.basename(name))
    if not folder:
        return
    with disk(path):
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return
            os.unlink(path)
        except FileNotFoundError:
            return
    while os.path.relpath(folder, root).startswith(".deployer/"):
        try:
            os.rmdir(folder)
        except OSError:  # not empty
            return
        folder = os.path.dirname(folder)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _dead_locks(root: str) -> None:
    """Removes the lock files of huggingface_hub that nobody holds: they only mark the past."""
    for place in (HF_PLACE, f"{OWN_HF}/{HF_PLACE}"):
        for rel, path in walk(root, place):
            if rel.endswith(".lock"):
                with _flock(path) as free:
                    if free:
                        _unlink(path)


def _blocks(root: str, name: str) -> list[int]:
    """[bytes on disk] of a regular file below real folders, else []."""
    folder = os.path.dirname(name)
    if folder and not below(root, folder):
        return []
    try:
        facts = os.lstat(os.path.join(root, name))
    except OSError:
        return []
    return [facts.st_blocks * 512] if stat.S_ISREG(facts.st_mode) else []


def _stray(name: str, listed: set[str], verified: set[str]) -> str:
    """Why a NAME.part, NAME.part.map or NAME.bad may go; '' for any other file."""
    for suffix in OWN_SUFFIXES:
        if not name.endswith(suffix) or name == suffix:
            continue
        base = name[: -len(suffix)]
        if base not in listed:
            return "the list does not name its file"
        if base in verified:
            return f"{base} is verified"
    return ""
