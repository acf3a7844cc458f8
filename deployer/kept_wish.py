"""What a rollback starts from when the playbook cannot be read: the playbook as it was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deployer.catalog import Catalog, LoadedPlaybook
from deployer.deployment import Deployment
from deployer.document import Document
from deployer.errors import DeployError, DocumentError
from deployer.kept import Kept
from deployer.place import place_of
from deployer.recipe import playbook_of
from deployer.rollback_choice import part_of
from deployer.state import DeploymentState, Launch
from deployer.state_file import StateFile


def select(
    catalog: Catalog, word: str, deploy_dir: Path, told: Callable[[str], None]
) -> list[Deployment]:
    """As Catalog.select; a playbook or lock that is missing or wrong is taken from what is kept.

    `told` gets a line about each that is. Raises UsageError; DocumentError when the inventory is
    wrong, or nothing is kept of the deployment.
    """
    try:
        return catalog.select([word], launches=False)
    except DocumentError:
        # Whose fault it is shows below: a playbook's alone can be helped.
        for host, name in catalog.named([word]):
            _as_kept(catalog, host, name, deploy_dir, told)
    return catalog.select([word], launches=False)


def _as_kept(
    catalog: Catalog, host: str, name: str, deploy_dir: Path, told: Callable[[str], None]
) -> None:
    """Puts the kept playbook of a deployment in the place of one that cannot be read."""
    playbook = catalog.host(host).deployments[name].playbook
    at = ("hosts", host, "deployments", name, "playbook")
    try:
        catalog.playbook(playbook, catalog.documents[host], at)
    except DocumentError as broken:
        state = StateFile(deploy_dir / "state", host).load()
        own = state.deployments.get(name) or DeploymentState()
        try:
            launch, loaded = _newest(catalog, own, Kept(deploy_dir / "kept"), f"{host}/{name}")
            if place_of(launch)[0] > 1:
                nodes = _nodes(catalog, name, launch, deploy_dir)
                whole = loaded.playbook.model_copy(update={"nodes": nodes})
                loaded = LoadedPlaybook(loaded.document, whole, loaded.lock_text)
        except DeployError as second:
            broken.add(f"and in its place: {second.what}")
            raise broken from None
        catalog.take(playbook, loaded)
        told(
            f"playbook {playbook} cannot be used ({broken}); in its place: what is kept of launch "
            f"{launch.id}"
        )


def _nodes(catalog: Catalog, name: str, launch: Launch, deploy_dir: Path) -> list[str]:
    """The hosts of a launch in rank order, by their records of it. Raises DeployError."""
    ranks: dict[int, str] = {}
    for host, entry in catalog.hosts.items():
        if name in entry.deployments:
            state = StateFile(deploy_dir / "state", host).load()
            part = part_of(state.deployments.get(name) or DeploymentState(), launch.id)
            if part is not None:
                ranks[place_of(part)[1]] = host
    count = place_of(launch)[0]
    if sorted(ranks) != list(range(count)):
        raise DeployError(f"launch {launch.id} ran on {count} nodes, and not all of them are known")
    return [ranks[rank] for rank in range(count)]


def _newest(
    catalog: Catalog, own: DeploymentState, kept: Kept, here: str
) -> tuple[Launch, LoadedPlaybook]:
    """Of the newest launch of the playbook; of one that only repeats an earlier one, for want of
    another. Raises DeployError.
    """
    problem = DeployError("nothing is kept of its launches", where=here)
    for launch in sorted(reversed(own.launches), key=lambda one: one.back is not None):
        try:
            if not launch.recipe:
                continue
            recipe, lock_text = kept.load(launch.recipe)
            document = Document(catalog.playbook_dir / f"{recipe.playbook_name}.yaml", {}, {}, {})
            return launch, LoadedPlaybook(document, playbook_of(recipe, here), lock_text)
        except DeployError as error:
            problem = error
    raise problem
