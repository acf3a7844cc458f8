"""`deploy gc`: what old launches, builds and weights take up, and which of it may go. Pure.

Nothing goes that is in use, that `up` or `rollback` would miss first, or that is not provably ours.
Beyond that so many of a kind are kept as the playbook's `keep` says; with less free space than
`keep.floor_bytes`, those that are kept only by this count may go too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deployer.deployment import Deployment
from deployer.recipe import Recipe
from deployer.state import DeploymentState, Launch
from deployer.steps.server_wanted import server_job_name
from deployer.steps.shards_download import job_name
from deployer.steps.shards_figures import size_text

Kind = Literal["venv", "weights", "launch", "job", "trash"]

INTERRUPTED = "left by a gc that was interrupted"


@dataclass(frozen=True)
class Found:
    """One folder on the target. `size` in bytes on disk, `changed` Unix seconds of the target.

    `ours`: it holds our record or mark. `foreign`: files in a model's folder that are not in our
    hash record. `job` and `alive`: of a folder of jobs; `current`: the newest one of its name.
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

    @property
    def id(self) -> str:
        """The folder's own name."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class GcFact:
    """What a look has found. `used`: paths below the looked-at folders that processes hold, by an
    open file, their program, a mapping or their working directory. `named`: model folder -> jobs
    whose script names it. `free`: folder -> free bytes of its file system.
    """

    problem: str = ""
    found: tuple[Found, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    """engine.venv -> the build that it points to."""
    used: tuple[str, ...] = ()
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """What becomes of a folder: `why` says why it is kept, or may go."""

    found: Found
    goes: bool
    why: str


@dataclass(frozen=True)
class Known:
    """What the state files and the inventory tell. `others`: what other deployments of the host
    use -> whose it is: model folders and builds.
    """

    want: Deployment
    own: DeploymentState
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """Key -> recipe, of this deployment's launches."""
    others: dict[str, str] = field(default_factory=dict)

    @property
    def precious(self) -> list[Launch]:
        """The known-good launch, and what a rollback under way needs."""
        record = self.own.rollback
        ids = {self.own.known_good}
        if record is not None and not record.outcome:
            ids |= {record.to, record.left}
        return [one for one in self.own.launches if one.id in ids]

    def model_of(self, launch: Launch) -> str:
        """The folder of a launch's weights."""
        if (recipe := self.recipes.get(launch.recipe)) is not None:
            return str(recipe.model.get("path", ""))
        flags = dict(zip(launch.argv, launch.argv[1:], strict=False))
        return flags.get("--model-path", "")

    def builds(self) -> list[str]:
        """Folders whose entries are builds of this deployment."""
        roots = {f"{self.want.playbook.engine.venv}.builds"}
        roots |= {f"{one.engine['venv']}.builds" for one in self.recipes.values()}
        return sorted(roots)

    def models(self) -> list[str]:
        """Folders of weights that this deployment has used, and uses; the newest first."""
        used = [self.want.playbook.model.path]
        used += [self.model_of(one) for one in reversed(self.own.launches)]
        return [path for path in dict.fromkeys(used) if path]

    def jobs(self) -> list[str]:
        """The names of this deployment's jobs, the server's first."""
        name = self.want.name
        return [
            server_job_name(self.want),
            f"venv-{name}",
            f"venv-python-{name}",
            job_name(self.want),
        ]


def inside(path: str, folder: str) -> bool:
    """Is `path` the folder, or below it?"""
    return path == folder or path.startswith(f"{folder}/")


def decide(known: Known, fact: GcFact) -> list[Row]:
    """A row for each folder that was found; what may go, and why the rest stays."""
    rows = [Row(one, True, INTERRUPTED) for one in fact.found if one.kind == "trash"]
    kinds = sorted({(KINDS.index(one.kind), one.job) for one in fact.found if one.kind != "trash"})
    for number, job in kinds:
        group = [one for one in fact.found if (one.kind, one.job) == (KINDS[number], job)]
        rows += _group(known, fact, KINDS[number], group)
    return rows


KINDS: tuple[Kind, ...] = ("venv", "weights", "launch", "job")
NOT_OURS = "not known to be ours"


def _group(known: Known, fact: GcFact, kind: Kind, found: Sequence[Found]) -> list[Row]:
    """Of one kind, and of one name of jobs."""
    judge = {"venv": _venv, "weights": _weights, "launch": _launch, "job": _job}[kind]
    keep, rows = _count(known, kind), []
    least = [(one, _in_use(one, fact) or judge(known, one, fact)) for one in found]
    # What stays in any case counts too: two builds are kept, not two besides.
    kept = sum(bool(why) and not why.startswith(NOT_OURS) for _, why in least)
    stays = {one.path: why for one, why in least}
    for one in _order(known, found):
        if stays[one.path]:
            rows.append(Row(one, False, stays[one.path]))
        elif kept >= keep:
            rows.append(Row(one, True, f"older than the newest {keep}{_setting(kind)}"))
        else:
            kept += 1
            low = _low(known, one, fact) if kind in ("venv", "weights") else ""
            why = low or f"one of the newest {keep}{_setting(kind)}"
            rows.append(Row(one, bool(low), why))
    return rows


def _order(known: Known, found: Sequence[Found]) -> list[Found]:
    """The newest first; weights by their last launch."""
    if found[0].kind == "weights":
        models = known.models()
        return sorted(found, key=lambda one: models.index(one.path) if one.path in models else 999)
    return sorted(found, key=lambda one: (-one.changed, one.id))


def _count(known: Known, kind: str) -> int:
    keep, serve = known.want.playbook.keep, known.want.playbook.serve
    counts = {"venv": keep.venvs, "weights": keep.models, "launch": serve.keep_launches}
    return counts.get(kind, keep.jobs)


def _setting(kind: str) -> str:
    names = {"venv": "keep.venvs", "weights": "keep.models", "launch": "serve.keep_launches"}
    return f" ({names.get(kind, 'keep.jobs')})"


def _low(known: Known, one: Found, fact: GcFact) -> str:
    floor = known.want.playbook.keep.floor_bytes
    free = next((free for at, free in fact.free.items() if inside(one.path, at)), None)
    if free is None or free >= floor:
        return ""
    return f"{size_text(free)} are free, less than keep.floor_bytes ({size_text(floor)})"


def _in_use(one: Found, fact: GcFact) -> str:
    if any(inside(path, one.path) for path in fact.used):
        return "a process uses it"
    return "its job runs" if one.alive else ""


def _venv(known: Known, one: Found, fact: GcFact) -> str:
    for link, target in fact.links.items():
        if inside(target, one.path):
            return f"{link} points to it"
    if any(launch.venv and inside(launch.venv, one.path) for launch in known.precious):
        return "the known-good launch ran in it"
    if whose := known.others.get(one.path):
        return f"{whose} uses it"
    if any(job.alive and job.job == f"venv-{known.want.name}" for job in fact.found):
        return "a build is at work"
    return "" if one.ours else f"{NOT_OURS}: it has no record of a build"


def _weights(known: Known, one: Found, fact: GcFact) -> str:
    if one.path == known.want.playbook.model.path:
        return "the playbook's model"
    if any(known.model_of(launch) == one.path for launch in known.precious):
        return "the known-good launch's model"
    if whose := _whose(known.others, one.path):
        return f"{whose} uses it"
    ours = set(known.jobs())
    strangers = [job for job in fact.named.get(one.path, ()) if job not in ours]
    if strangers:
        return f"{strangers[0]}, of another deployment, names it"
    if not one.ours:
        return f"{NOT_OURS}: it has no hash record"
    if one.foreign:
        return f"{NOT_OURS}: {one.foreign} files in it are not in the hash record"
    return ""


def _whose(others: dict[str, str], path: str) -> str:
    found = (who for used, who in others.items() if inside(used, path) or inside(path, used))
    return next(found, "")


def _launch(known: Known, one: Found, fact: GcFact) -> str:
    if one.current:
        return "the newest launch"
    if one.id in {launch.id for launch in known.precious}:
        return "the known-good launch"
    return "" if one.ours else f"{NOT_OURS}: it is no folder of a job"


def _job(known: Known, one: Found, fact: GcFact) -> str:
    if one.current:
        return f"the newest job {one.job}"
    return "" if one.ours else f"{NOT_OURS}: it is no folder of a job"


def freeable(rows: Sequence[Row]) -> int:
    """Bytes."""
    return sum(row.found.size for row in rows if row.goes)


def used_by(
    deployments: Collection[Deployment], states: dict[str, DeploymentState]
) -> dict[str, str]:
    """Model folders and builds of `deployments` -> whose; `states`: id -> recorded state.

    A deployment of another container counts too: folders may be mounted in both.
    """
    found: dict[str, str] = {}
    for want in deployments:
        found[want.playbook.model.path] = want.id
        known = Known(want, states.get(want.id, DeploymentState()))
        for launch in known.precious:
            found |= {path: want.id for path in (launch.venv, known.model_of(launch)) if path}
    return found
