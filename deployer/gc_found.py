"""What a look of `deploy gc` has found on the target. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["venv", "weights", "launch", "job", "cache", "trash"]


@dataclass(frozen=True)
class Found:
    """One folder on the target. `size` in bytes on disk, `changed` Unix seconds of the target.

    `ours`: it holds our record or mark. `foreign`: files in a model's folder that are not in our
    hash record. `job` and `alive`: of a folder of jobs; `current`: the newest one of its name.
    `shared`: bytes of `size` that have another name elsewhere (hard links) and would stay. `real`:
    its path without symlinks. `mounted`: a file system is mounted at or in it, or a part of
    it at another place. `user`: number of
    another user who has files in it.
    """

    kind: Kind
    path: str
    size: int
    changed: int = 0
    ours: bool = True
    foreign: int = 0
    job: str = ""
    alive: bool = False
    current: bool = False
    shared: int = 0
    real: str = ""
    mounted: bool = False
    user: str = ""

    @property
    def id(self) -> str:
        """The folder's own name."""
        return self.path.rpartition("/")[2]

    @property
    def freed(self) -> int:
        """Bytes that its removal gives back."""
        return max(0, self.size - self.shared)

    def holds(self, path: str) -> bool:
        """Is `path` this folder, or below it, by either of its names?"""
        return inside(path, self.path) or (bool(self.real) and inside(path, self.real))


@dataclass(frozen=True)
class Through:
    """A process that was started by a name behind `link`, and shows nothing of the build that it
    runs from. `job`: NAME/ID of the job of ours that it belongs to, '' when none.
    """

    link: str
    pid: int
    job: str = ""


@dataclass(frozen=True)
class GcFact:
    """What a look has found. `used`: paths below the looked-at folders that processes hold, by an
    open file, their program, a mapping, their working directory or their command line. `named`:
    model folder -> jobs whose script names it. `free`: folder -> free bytes of its file system.
    `building`: jobs that build a venv now.
    """

    problem: str = ""
    found: tuple[Found, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    """engine.venv -> the build that it points to."""
    used: tuple[str, ...] = ()
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    disks: dict[str, str] = field(default_factory=dict)
    """Folder of `free` -> its file system."""
    through: tuple[Through, ...] = ()
    building: tuple[str, ...] = ()
    real: dict[str, str] = field(default_factory=dict)
    """A path that was asked for -> without symlinks."""

    def room(self, path: str) -> int | None:
        """Free bytes where `path` lies; None when that was not seen."""
        at = self._seen(path)
        return None if at is None else self.free[at]

    def disk(self, path: str) -> str:
        """Its file system; '' when that was not seen."""
        at = self._seen(path)
        return "" if at is None else self.disks.get(at, at)

    def _seen(self, path: str) -> str | None:
        return next((at for at in self.free if inside(path, at)), None)


@dataclass(frozen=True)
class HostUsed:
    """The same paths held by processes as the host sees them: other containers' among them."""

    problem: str = ""
    used: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """What becomes of a folder: `why` says why it is kept, or may go."""

    found: Found
    goes: bool
    why: str


def inside(path: str, folder: str) -> bool:
    """Is `path` the folder, or below it?"""
    return path == folder or path.startswith(f"{folder}/")
