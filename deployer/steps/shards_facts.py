"""What lies in the model's folder on the target: stats only, no hashing, one small exec."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from deployer.agents.fetch.holders import Holder
from deployer.agents.fetch.look import OWN_SUFFIXES
from deployer.agents.fetch.partials import Partial
from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import quote, words
from deployer.state import ManifestFile

PROBE = "shards"
_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 9))"


@dataclass(frozen=True)
class Verified:
    """A line of the hash record: how the file looked when its bytes were judged right."""

    size: int
    mtime_ns: int
    sha256: str
    blob_id: str


@dataclass(frozen=True)
class Room:
    """One file system. `at`: a folder on it. `inodes_total` is 0 where there is no such limit."""

    at: str
    free: int
    inodes: int
    inodes_total: int
    readonly: bool = False


@dataclass(frozen=True)
class ShardsFact:
    """The folder as it is now. Sizes and free space in bytes. Nothing here is judged.

    `files`: path -> (size, mtime_ns), of whatever lies there; `parts`: path of the file that a
    NAME.part becomes -> its valid bytes; `problem`: why the folder could not be examined, '' when
    it was; `problems`: sub-folder -> why it could not be read, or cannot be written.
    """

    python: bool = True
    problem: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)
    exists: bool = False
    near: str = "/"
    """The folder itself, or its nearest ancestor that exists."""
    obstacle: str = ""
    """What stands where the folder, or one above it, should be."""
    writable: bool = True
    rooms: Mapping[str, Room] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """Sub-folder -> key of its file system, where that is not its parent's; '' is the folder."""
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    """Sub-folders that are symlinks, and symlinks with a name of ours."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Those of them that are folders and lead out of the model's -> where they lead."""
    bad: tuple[str, ...] = ()
    partials: tuple[Partial, ...] = ()
    """Of other clients, and of our own children."""
    record: Mapping[str, Verified] = field(default_factory=dict)
    record_error: str = ""
    running: int = 0
    """pid of our own live download, 0 when there is none."""
    running_command: str = ""
    holders: tuple[Holder, ...] = ()
    """Live processes that write to a file of the folder, or hold a lock there."""
    elsewhere: tuple[tuple[str, int], ...] = ()

    @property
    def finished(self) -> tuple[str, ...]:
        """The files that are none of our partial or quarantined ones."""
        return tuple(name for name in self.files if not name.endswith(OWN_SUFFIXES))

    def verified(self, file: ManifestFile) -> bool:
        """True when size, mtime and recorded hash all say that the right bytes are there."""
        there, row = self.files.get(file.path), self.record.get(file.path)
        if there is None or row is None or there != (row.size, row.mtime_ns):
            return False
        if there[0] != file.size:
            return False
        if file.sha256:
            return row.sha256 == file.sha256
        return bool(file.blob_id) and row.blob_id == file.blob_id

    def present(self, file: ManifestFile) -> int:
        """Bytes of `file` under its own names: a prefix, or a whole file still to be judged."""
        size = self.files.get(file.path, (0, 0))[0]
        # aria2 gives its file the whole length from the beginning.
        if size > file.size or f"{file.path}.aria2" in self.files:
            size = 0
        return max(size, min(self.parts.get(file.path, 0), file.size))

    def room_of(self, path: str) -> str:
        """Key of the file system that `path`, below the folder, lies on or will lie on."""
        while path and path not in self.places:
            path = path.rpartition("/")[0]
        return self.places.get(path, "")


def find_python(venv: str) -> str:
    """sh lines that set `py` to a Python of the target that runs the agent, or to nothing."""
    return (
        "py=\n"
        f'for one in "$(command -v python3 2>/dev/null)" {quote(venv + "/bin/python")}; do\n'
        f'  [ -x "$one" ] && "$one" -I -S -c {quote(_NEW_ENOUGH)} 2>/dev/null || continue\n'
        "  py=$one; break\n"
        "done\n"
    )


@functools.cache
def look_script() -> str:
    """The agent's own look at a folder as one Python text, so that both sides see the same."""
    folder = resources.files("deployer.agents").joinpath("fetch")
    texts = [folder.joinpath(f"{name}.py").read_text("utf-8") for name in ("partials", "holders")]
    texts.append(folder.joinpath("look.py").read_text("utf-8"))
    ours = re.compile(r"^from (?:__future__|deployer)\b.*? import (?:\([^)]*\)|.*)\n", re.MULTILINE)
    head = "from __future__ import annotations\n"
    return head + "".join(ours.sub("", text) for text in texts) + _MAIN


_MAIN = "\nprint(json.dumps(look(sys.argv[1])))\n"


def shards_probe(path: str, venv: str, where: Where) -> Probe:
    """The probe of one model folder."""
    script = (
        find_python(venv)
        + "if [ -z \"$py\" ]; then printf 'no python\\n'; exit 0; fi\n"
        + f'exec "$py" -I -S -c {words([look_script(), path])}\n'
    )
    return Probe(PROBE, where, script, parse_shards, timeout_s=15.0)


def parse_shards(output: ProbeOutput) -> ShardsFact:
    """Any output gives a fact; what cannot be read is a `problem`."""
    if output.timed_out:
        return ShardsFact(problem="looking at the model folder timed out (a hung mount?)")
    text = output.text.strip()
    if text == "no python":
        return ShardsFact(python=False)
    try:
        if output.exit != 0:
            raise ValueError(f"exit {output.exit}")
        return _fact(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        lines = (output.error_text.strip() or text or str(error)).splitlines()
        return ShardsFact(problem=f"the model folder could not be examined: {lines[-1][:200]}")


def _fact(row: Mapping[str, Any]) -> ShardsFact:
    """Raises ValueError, KeyError, TypeError, AttributeError for a row that is not as it should."""
    files = {str(k): (int(v[0]), int(v[1])) for k, v in row["files"].items()}
    parts = {name[: -len(".part")]: files[name][0] for name in files if name.endswith(".part")}
    parts.update((str(name), int(valid)) for name, valid in row["maps"].items())
    record = {
        str(path): Verified(
            int(v["size"]), int(v["mtime_ns"]), str(v["sha256"]), str(v.get("blob_id", ""))
        )
        for path, v in row["record"].items()
    }
    rooms = {
        str(key): Room(
            str(v["at"]),
            int(v["free"]),
            int(v["inodes"]),
            int(v["inodes_total"]),
            bool(v["readonly"]),
        )
        for key, v in row["rooms"].items()
    }
    return ShardsFact(
        problems={str(folder): str(text) for folder, text in row["problems"].items()},
        exists=bool(row["exists"]),
        near=str(row["near"]),
        obstacle=str(row["obstacle"]),
        writable=bool(row["writable"]),
        rooms=rooms,
        places={str(k): str(v) for k, v in row["places"].items()},
        files=files,
        parts=parts,
        links=tuple(str(name) for name in row["links"]),
        outside={str(link): str(real) for link, real in row["outside"].items()},
        bad=tuple(name for name in files if name.endswith(".bad")),
        partials=tuple(
            Partial(str(c), str(p), int(used), int(prefix), str(n), str(e), int(total))
            for c, p, used, prefix, n, e, total in row["partials"]
        ),
        record=record,
        record_error=str(row["record_error"]),
        running=int(row["running"]),
        running_command=str(row["running_command"]),
        holders=tuple(Holder(int(pid), str(cmd), str(at)) for pid, cmd, at in row["holders"]),
        elsewhere=tuple((str(p), int(free)) for p, free in row["elsewhere"]),
    )
