"""What lies in the model's folder on the target: stats only, no hashing, one small exec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import quote, words
from deployer.state import ManifestFile

PROBE = "shards"

_LOOK = r"""
import json, os, sys
root = sys.argv[1]
out = {"exists": os.path.isdir(root), "files": {}, "parts": {}, "bad": [], "record": None,
       "record_error": "", "running": 0, "elsewhere": []}
for base, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f not in (".cache", ".deployer", ".git")]
    for name in names:
        path = os.path.join(base, name)
        try:
            st = os.stat(path)
        except OSError:
            continue
        rel = os.path.relpath(path, root)
        if rel.endswith(".part"):
            out["parts"][rel[:-5]] = st.st_size
        elif rel.endswith(".bad"):
            out["bad"].append(rel)
        else:
            out["files"][rel] = [st.st_size, st.st_mtime_ns]
    if len(out["files"]) > 20000:
        break
try:
    with open(os.path.join(root, ".deployer", "verified.json")) as f:
        out["record"] = json.load(f)["files"]
except FileNotFoundError:
    pass
except Exception as e:
    out["record_error"] = "%s: %s" % (type(e).__name__, e)
try:
    with open(os.path.join(root, ".deployer", "lock")) as f:
        who = json.load(f)
    with open("/proc/%d/stat" % who["pid"]) as f:
        row = f.read().rpartition(")")[2].split()
    if row[0] not in "ZX" and int(row[19]) == who["start"]:
        out["running"] = who["pid"]
except (OSError, ValueError, KeyError, TypeError, IndexError):
    pass
near = os.path.abspath(root)
while not os.path.isdir(near):
    near = os.path.dirname(near)
fs = os.statvfs(near)
out.update(near=near, writable=os.access(near, os.W_OK | os.X_OK), free=fs.f_bavail * fs.f_frsize,
           inodes=fs.f_favail, inodes_total=fs.f_files)
seen = {os.stat(near).st_dev}
for other in ("/", "/srv", "/mnt", "/data", "/home", "/var/lib"):
    try:
        dev = os.stat(other).st_dev
        if dev not in seen:
            seen.add(dev)
            fs = os.statvfs(other)
            out["elsewhere"].append([other, fs.f_bavail * fs.f_frsize])
    except OSError:
        continue
print(json.dumps(out))
"""


@dataclass(frozen=True)
class Verified:
    """A line of the hash record: how the file looked when its bytes were judged right."""

    size: int
    mtime_ns: int
    sha256: str
    blob_id: str


@dataclass(frozen=True)
class ShardsFact:
    """The folder as it is now. Sizes and free space in bytes.

    `files`: path -> (size, mtime_ns); `parts`: path -> bytes of the prefix; `running`: pid of a
    live download; `problem`: why the folder could not be examined, '' when it was.
    """

    python: bool = True
    problem: str = ""
    exists: bool = False
    near: str = "/"
    """The folder itself, or its nearest ancestor that exists: where space is measured."""
    writable: bool = True
    free: int = 0
    inodes: int = 0
    inodes_total: int = 0
    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    parts: Mapping[str, int] = field(default_factory=dict)
    bad: tuple[str, ...] = ()
    record: Mapping[str, Verified] = field(default_factory=dict)
    record_error: str = ""
    running: int = 0
    elsewhere: tuple[tuple[str, int], ...] = ()

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
        """Bytes of `file` that need no further space: a prefix, or a file still to be judged."""
        there = self.files.get(file.path)
        if there is not None and there[0] <= file.size:
            return there[0]
        return min(self.parts.get(file.path, 0), file.size)


def find_python(venv: str) -> str:
    """sh lines that set `py` to a Python of the target, or to nothing."""
    return (
        "py=$(command -v python3 2>/dev/null) || py=\n"
        f'[ -n "$py" ] || ! [ -x {quote(venv + "/bin/python")} ] || '
        f"py={quote(venv + '/bin/python')}\n"
    )


def shards_probe(path: str, venv: str, where: Where) -> Probe:
    """The probe of one model folder."""
    script = (
        find_python(venv)
        + "if [ -z \"$py\" ]; then printf 'no python\\n'; exit 0; fi\n"
        + f'exec "$py" -I -S -c {words([_LOOK, path])}\n'
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
        row = json.loads(text)
        record = {
            str(path): Verified(
                int(v["size"]), int(v["mtime_ns"]), str(v["sha256"]), str(v.get("blob_id", ""))
            )
            for path, v in (row["record"] or {}).items()
        }
        return ShardsFact(
            exists=bool(row["exists"]),
            near=str(row["near"]),
            writable=bool(row["writable"]),
            free=int(row["free"]),
            inodes=int(row["inodes"]),
            inodes_total=int(row["inodes_total"]),
            files={str(k): (int(v[0]), int(v[1])) for k, v in row["files"].items()},
            parts={str(k): int(v) for k, v in row["parts"].items()},
            bad=tuple(str(name) for name in row["bad"]),
            record=record,
            record_error=str(row["record_error"]),
            running=int(row["running"]),
            elsewhere=tuple((str(p), int(free)) for p, free in row["elsewhere"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        lines = (output.error_text.strip() or text or str(error)).splitlines()
        return ShardsFact(problem=f"the model folder could not be examined: {lines[-1][:200]}")
