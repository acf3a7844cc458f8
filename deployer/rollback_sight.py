"""What can be gone back to, and what of it is still on the target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployer.deployment import Deployment
from deployer.errors import DeployError
from deployer.kept import Kept
from deployer.model import Probe, ProbeOutput, Where
from deployer.recipe import Recipe
from deployer.remote.batch import gather
from deployer.remote.transport import Transport
from deployer.rollback import then
from deployer.rollback_choice import Place, part_of, unfit
from deployer.shell import quote
from deployer.state import DeploymentState, Launch
from deployer.steps.server_wanted import degraded
from deployer.steps.shards_facts import ShardsFact, shards_probe
from deployer.steps.shards_figures import size_text


@dataclass(frozen=True)
class Builds:
    """Build folder -> sha256 of the lock that it was proven with; those that are whole."""

    locks: Mapping[str, str] = field(default_factory=dict)


def builds_probe(paths: Sequence[str], where: Where) -> Probe:
    """Which of these builds are there and proven."""
    lines = [
        f'b={quote(path)}; [ -e "$b/complete" ] && [ -x "$b/bin/python" ] && '
        '[ -r "$b/deployer.json" ] && printf \'%s\\t%s\\n\' "$b" '
        '"$(tr -d \'\\n\\r\' <"$b/deployer.json")"'
        for path in paths
    ]
    return Probe("builds", where, "\n".join([*lines, "exit 0"]) + "\n", parse_builds, 15.0)


def parse_builds(output: ProbeOutput) -> Builds:
    """Any output gives a fact; what is not understood is not there."""
    locks = {}
    for line in output.text.splitlines():
        path, _, text = line.partition("\t")
        try:
            locks[path] = str(json.loads(text)["lock"])
        except (ValueError, KeyError, TypeError):
            continue
    return Builds(locks)


@dataclass(frozen=True)
class Choice:
    """One launch to go back to. `venv` and `weights`: what is there of it, in words."""

    launch: Launch
    recipe: Recipe | None
    venv: str
    weights: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        launch, recipe = self.launch, self.recipe
        return {
            "launch": launch.id,
            "started": launch.started,
            "variant": launch.variant,
            "degraded": degraded(launch.variant, launch.instead_of),
            "verdict": launch.verdict,
            "verified": launch.verified,
            "figures": launch.figures,
            "model": f"{recipe.manifest.repo}@{recipe.manifest.commit}" if recipe else "",
            "engine": str(recipe.engine.get("version", "")) if recipe else "",
            "venv": self.venv,
            "weights": self.weights,
        }


@dataclass(frozen=True)
class There:
    """What a look at the target has shown; empty with `problem` when it did not answer.

    `asked` False: there was no look.
    """

    builds: Builds = field(default_factory=Builds)
    folders: Mapping[str, ShardsFact] = field(default_factory=dict)
    problem: str = ""
    asked: bool = True


def look(now: Deployment, transport: Transport, launches: Sequence[Launch], kept: Kept) -> There:
    """One exec for the builds, and one for each model folder. Raises Unreachable."""
    builds = sorted({one.venv for one in launches if one.venv})
    folders = set()
    for launch in launches:
        recipe = recipe_or_none(kept, launch)
        if recipe is not None:
            folders.add(str(recipe.model["path"]))
    found = gather(transport, [builds_probe(builds, now.guest)])[Builds] if builds else Builds()
    seen = {}
    for path in sorted(folders):
        fact = gather(transport, [shards_probe(path, now.playbook.engine.venv, now.guest)])
        seen[path] = fact[ShardsFact]
    return There(
        found if isinstance(found, Builds) else Builds(),
        {path: fact for path, fact in seen.items() if isinstance(fact, ShardsFact)},
    )


def recipe_or_none(kept: Kept, launch: Launch) -> Recipe | None:
    """Its recipe, where it is kept and can be read."""
    made = kept.load_or_none(launch.recipe)
    return made[0] if made is not None else None


def unable(kept: Kept, places: Sequence[Place], launch_id: str) -> str:
    """Why this launch cannot be made again here; '' when it can."""
    if why := unfit(places, launch_id):
        return why
    for now, own in places:
        part = part_of(own, launch_id)
        if part is None or recipe_or_none(kept, part) is None:
            return "what it was made from is not kept, or cannot be read"
        try:
            then(now, *kept.load(part.recipe), part)
        except DeployError as error:
            return error.what
    return ""


def described(launches: Sequence[Launch], kept: Kept, there: There) -> list[Choice]:
    """Pure but for the kept recipes."""
    found = []
    for launch in launches:
        recipe = recipe_or_none(kept, launch)
        found.append(
            Choice(launch, recipe, venv_words(launch, recipe, there), weights_words(recipe, there))
        )
    return found


def venv_words(launch: Launch, recipe: Recipe | None, there: There) -> str:
    """Is its build there?"""
    if recipe is None:
        return "not known"
    if there.problem or not there.asked:
        return "not asked"
    if there.builds.locks.get(launch.venv) == recipe.lock:
        return "there"
    return "is built from its lock"


def weights_words(recipe: Recipe | None, there: There) -> str:
    """Are its weights there, by the hash record?"""
    if recipe is None:
        return "not known"
    fact = there.folders.get(str(recipe.model["path"]))
    if there.problem or fact is None or fact.problem or not fact.python:
        return "not asked" if fact is None else (fact.problem or "no python3 to look with")
    left = [file for file in recipe.manifest.files if not fact.verified(file)]
    if not left:
        return "there"
    return f"{len(left)} files to fetch ({size_text(sum(file.size for file in left))})"


def present_words(own: DeploymentState) -> str:
    """What serves, or served last, by the records."""
    if not own.launches:
        return "nothing was launched here"
    last = own.launches[-1]
    return f"launch {last.id} (variant {last.variant}), verdict: {last.verdict}"
