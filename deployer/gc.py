"""`deploy gc`: what old launches, builds and weights take up, and which of it may go. Pure.

Nothing goes that is in use, that `up` or `rollback` would miss first, or that is not provably ours.
Beyond that so many of a kind are kept as the playbook's `keep` says. Where less than
`keep.floor_bytes` would be free even then, what is kept only by this count goes too, one by one
until it is: uv's cache first, then the oldest build, then the oldest weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from deployer.deployment import Deployment
from deployer.gc_found import Found, GcFact, Kind, Row, inside
from deployer.recipe import Recipe
from deployer.rollback_choice import any_launch, choose
from deployer.state import DeploymentState, Launch
from deployer.steps.server_wanted import server_job_name
from deployer.steps.shards_download import job_name
from deployer.steps.shards_figures import size_text

LOSS: tuple[Kind, ...] = ("cache", "venv", "weights")
"""What goes for want of room, the least loss first."""
INTERRUPTED = "left by a gc that was interrupted"
KINDS: tuple[Kind, ...] = ("venv", "weights", "launch", "job", "cache")
NOT_OURS = "not known to be ours"
MOUNTED = "something is mounted in it, or it elsewhere"
CACHE = "uv's cache: with it, the next build fetches less"


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
    def precious(self) -> dict[str, tuple[Launch, str]]:
        """Id -> launch, and why: the known-good one, what a rollback under way needs, and what
        `rollback` would go back to.
        """
        own, record = self.own, self.own.rollback
        ids = {}
        # Also one whose recipe is not here: it may lie on another machine.
        for able in (any_launch, lambda one: one.recipe in self.recipes):
            if (target := choose(own, "", self.want.id, able).launch) is not None:
                ids[target.id] = "`deploy rollback` goes back to it"
        if record is not None and not record.outcome:
            ids |= dict.fromkeys((record.to, record.left), "the rollback under way needs it")
        ids[own.known_good] = "the known-good launch"
        return {one.id: (one, ids[one.id]) for one in own.launches if one.id in ids}

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

    def names(self) -> list[str]:
        """Paths that may be other names of what is looked at."""
        launches = [one for one, _ in self.precious.values()]
        own = [self.want.playbook.model.path, *(one.venv for one in launches)]
        own += [self.model_of(one) for one in launches]
        return sorted({path for path in [*own, *self.others] if path})

    def jobs(self) -> list[str]:
        """The names of this deployment's jobs, the server's first."""
        name = self.want.name
        return [
            server_job_name(self.want),
            f"venv-{name}",
            f"venv-python-{name}",
            job_name(self.want),
        ]


def decide(known: Known, fact: GcFact) -> list[Row]:
    """A row for each folder that was found; what may go, and why the rest stays."""
    rows = []
    for one in fact.found:
        if one.kind == "trash":
            why = MOUNTED if one.mounted else f"files of user {one.user} are in it" * bool(one.user)
            rows.append(Row(one, not why, why or INTERRUPTED))
    kinds = sorted({(KINDS.index(one.kind), one.job) for one in fact.found if one.kind != "trash"})
    spare: list[Found] = []
    for number, job in kinds:
        group = [one for one in fact.found if (one.kind, one.job) == (KINDS[number], job)]
        rows += _group(known, fact, KINDS[number], group, spare)
    return _for_room(known, fact, rows, spare)


def _for_room(known: Known, fact: GcFact, rows: Sequence[Row], spare: Sequence[Found]) -> list[Row]:
    """The rows, of which as many of `spare` go as their file system needs to reach the floor."""
    floor, gained, goes = known.want.playbook.keep.floor_bytes, dict[str, int](), dict[str, str]()
    for row in rows:
        if row.goes and (disk := fact.disk(row.found.path)):
            gained[disk] = gained.get(disk, 0) + row.found.freed
    for one in sorted(spare, key=lambda one: LOSS.index(one.kind)):
        disk, free = fact.disk(one.path), fact.room(one.path)
        if free is None or free + gained.get(disk, 0) >= floor:
            continue
        goes[one.path] = (
            f"{size_text(free)} are free, less than keep.floor_bytes ({size_text(floor)})"
        )
        gained[disk] = gained.get(disk, 0) + one.freed
    return [
        Row(row.found, True, goes[row.found.path]) if row.found.path in goes else row
        for row in rows
    ]


def _group(
    known: Known, fact: GcFact, kind: Kind, found: Sequence[Found], spare: list[Found]
) -> list[Row]:
    """Of one kind and one name of jobs. `spare` gets what is kept for its number, oldest first."""
    judge = {
        **{"venv": _venv, "weights": _weights, "launch": _launch},
        **{"job": _job, "cache": _cache},
    }[kind]
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
            why = CACHE if kind == "cache" else f"one of the newest {keep}{_setting(kind)}"
            rows.append(Row(one, False, why))
            if kind in LOSS:
                spare.insert(0, one)
    return rows


def _order(known: Known, found: Sequence[Found]) -> list[Found]:
    """The newest first; weights by their last launch."""
    if found[0].kind == "weights":
        models = known.models()
        return sorted(found, key=lambda one: models.index(one.path) if one.path in models else 999)
    return sorted(found, key=lambda one: (-one.changed, one.id))


def _count(known: Known, kind: str) -> int:
    keep, serve = known.want.playbook.keep, known.want.playbook.serve
    counts = {"venv": keep.venvs, "weights": keep.models, "launch": serve.keep_launches, "cache": 1}
    return counts.get(kind, keep.jobs)


def _setting(kind: str) -> str:
    names = {"venv": "keep.venvs", "weights": "keep.models", "launch": "serve.keep_launches"}
    return f" ({names.get(kind, 'keep.jobs')})"


def _in_use(one: Found, fact: GcFact) -> str:
    if one.mounted:
        return MOUNTED
    if any(one.holds(path) for path in fact.used):
        return "a process uses it"
    if one.alive:
        return "its job runs"
    return f"{NOT_OURS}: files of user {one.user} are in it" if one.user else ""


def _venv(known: Known, one: Found, fact: GcFact) -> str:
    for link, target in fact.links.items():
        if one.holds(target):
            return f"{link} points to it"
    for launch, why in known.precious.values():
        if launch.venv and _touches(launch.venv, one, fact):
            return f"launch {launch.id} ran in it: {why}"
    for path, whose in known.others.items():
        if _touches(path, one, fact):
            return f"{whose} uses it"
    if why := _through(known, one, fact):
        return why
    if fact.building:
        return f"a build is at work ({fact.building[0]})"
    return "" if one.ours else f"{NOT_OURS}: it has no record of a build"


def _through(known: Known, one: Found, fact: GcFact) -> str:
    """A process that was started through engine.venv, which may have pointed here then."""
    launches = {launch.id: launch for launch in known.own.launches}
    for process in fact.through:
        if not inside(one.path, f"{process.link}.builds"):
            continue
        launch = launches.get(process.job.rpartition("/")[2])
        if launch is None or not launch.venv:
            return (
                f"pid {process.pid} was started through {process.link}, and shows no build that it "
                "runs from"
            )
        if _touches(launch.venv, one, fact):
            return f"launch {launch.id} runs in it"
    return ""


def _weights(known: Known, one: Found, fact: GcFact) -> str:
    if _touches(known.want.playbook.model.path, one, fact):
        return "the playbook's model"
    for launch, why in known.precious.values():
        if (model := known.model_of(launch)) and _touches(model, one, fact):
            return f"launch {launch.id} had these weights: {why}"
    for path, whose in known.others.items():
        if _touches(path, one, fact):
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


def _touches(path: str, one: Found, fact: GcFact) -> bool:
    """Is `path` this folder, in it, or around it, by any name?"""
    names = {path, fact.real.get(path, path)}
    mine = {one.path, one.real or one.path}
    return any(inside(name, own) or inside(own, name) for name in names for own in mine)


def _launch(known: Known, one: Found, fact: GcFact) -> str:
    if one.current:
        return "the newest launch"
    if one.id in known.precious:
        return known.precious[one.id][1]
    return "" if one.ours else f"{NOT_OURS}: it is no folder of a job"


def _job(known: Known, one: Found, fact: GcFact) -> str:
    if one.current:
        return f"the newest job {one.job}"
    return "" if one.ours else f"{NOT_OURS}: it is no folder of a job"


def _cache(known: Known, one: Found, fact: GcFact) -> str:
    if fact.building:
        return f"a build is at work ({fact.building[0]})"
    return "" if one.ours else f"{NOT_OURS}: uv has not marked it as a cache"


def freeable(rows: Sequence[Row]) -> int:
    """Bytes."""
    return sum(row.found.freed for row in rows if row.goes)


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
        for launch, _ in known.precious.values():
            found |= {path: want.id for path in (launch.venv, known.model_of(launch)) if path}
    return found
