"""What a launch was made from, kept so that it can be made again: lock, model, arguments. Pure.

`rollback` takes from it what the server is: model, engine, serve, variants, lock, weights. How it
is fetched, stopped and judged, and the driver and GPUs below it, are as the playbook says now; as
it said then when it cannot be read now.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pydantic import Field, ValidationError

from deployer.deployment import Deployment
from deployer.errors import DeployError
from deployer.playbook import ArgValue, Playbook, Variant
from deployer.state import Launch, Manifest, StateModel

KEPT_NOW = {
    "engine": ("index_url", "find_links", "ca_bundle", "uv_version", "build_timeout_s"),
    "serve": ("api_key_env", "keep_launches", "log_max_bytes"),
}
"""Keys of sections that come from the recipe which are as now all the same: how a package is
fetched, and who may ask the server."""

SERVER = ("model", "engine", "serve", "variants")
"""Sections that say what the server is."""


class Recipe(StateModel):
    """The content of one file of `.deploy/kept/`, which is named by its sha256."""

    schema_version: int = 1
    playbook_name: str
    model: dict[str, Any]
    engine: dict[str, Any]
    serve: dict[str, Any]
    variants: list[dict[str, Any]] = Field(default_factory=list)
    """Sections of the playbook, less KEPT_NOW."""
    lock: str
    """sha256 of the lock's text, which lies beside it."""
    port: int
    vmid: int | None
    gpus: list[str]
    manifest: Manifest
    rest: dict[str, Any] = Field(default_factory=dict)
    """The other sections, and KEPT_NOW, less an address with a user in it: it may hold a password,
    and none is kept. Empty in a recipe of an older version."""

    def text(self) -> str:
        """The same recipe has the same text."""
        # Not sorted: the order of arguments is the order on the command line.
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    @property
    def key(self) -> str:
        """sha256 of the text."""
        return hashlib.sha256(self.text().encode()).hexdigest()


def recipe_of(want: Deployment, manifest: Manifest) -> Recipe:
    """What a launch of `want` with these weights is made from."""
    whole = want.playbook.model_dump(mode="json")
    rest: dict[str, Any] = {
        section: {name: whole[section].pop(name) for name in keys}
        for section, keys in KEPT_NOW.items()
    }
    if "@" in (rest["engine"]["index_url"] or ""):
        del rest["engine"]["index_url"]
    rest |= {name: part for name, part in whole.items() if name not in SERVER}
    return Recipe(
        playbook_name=want.playbook_name,
        model=whole["model"],
        engine=whole["engine"],
        serve=whole["serve"],
        variants=whole["variants"],
        lock=hashlib.sha256(want.lock_text.encode()).hexdigest(),
        port=want.port,
        vmid=want.vmid,
        gpus=list(want.gpus),
        manifest=manifest,
        rest={name: part for name, part in rest.items() if part is not None},
    )


def playbook_of(recipe: Recipe, here: str) -> Playbook:
    """The whole playbook of that time. Raises DeployError when it cannot be had from the recipe.

    `here`: HOST/NAME, for messages.
    """
    if not recipe.rest:
        raise DeployError(
            "what is kept of its launches is of an older version, which kept no whole playbook",
            where=here,
            fix="correct the playbook; its launches from then on are kept whole",
        )
    whole = {**recipe.rest, "model": recipe.model, "variants": recipe.variants}
    for section in KEPT_NOW:
        whole[section] = {**getattr(recipe, section), **recipe.rest.get(section, {})}
    try:
        return Playbook.model_validate(whole)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DeployError(
            f"its kept playbook is one that this version cannot read: {key}: {first['msg']}",
            where=here,
            fix="correct the playbook, or use the version of deploy that kept it",
        ) from None


def as_made(now: Deployment, recipe: Recipe, lock_text: str, launch: Launch) -> Deployment:
    """The deployment of `launch`: exactly its rung, and no other to fall down to.

    Raises DeployError when this version of the tool does not know what the recipe says.
    """
    whole = now.playbook.model_dump(mode="json")
    for section in ("model", "engine", "serve"):
        kept = getattr(recipe, section)
        held = {name: whole[section][name] for name in KEPT_NOW.get(section, ())}
        whole[section] = {**kept, **held}
    whole["serve"]["memory_step"] = "never"
    whole["gates"] |= {"ab_on_failure": False, "on_failure": "leave"}
    base = launch.variant.partition("~")[0]
    whole["variants"] = [one for one in recipe.variants if one["name"] == base]
    try:
        playbook = Playbook.model_validate(whole)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DeployError(
            f"launch {launch.id} was made from a playbook that this version cannot read: "
            f"{key}: {first['msg']}",
            where=now.id,
            fix="name another launch, or use the version of deploy that made it",
        ) from None
    if launch.changes:
        playbook = _with_changes(playbook, launch)
    entry = now.entry.model_copy(update={"port": recipe.port, "variant": launch.variant})
    node = now.node
    if node is not None:
        # Where rank 0 is met is as now; at which port, as then.
        address = node.init.rpartition(":")[0]
        node = dataclasses.replace(node, init=f"{address}:{playbook.serve.dist_port}")
    return dataclasses.replace(
        now,
        entry=entry,
        playbook=playbook,
        playbook_name=recipe.playbook_name,
        lock_text=lock_text,
        variant=launch.variant,
        node=node,
    )


def _with_changes(playbook: Playbook, launch: Launch) -> Playbook:
    """The derived variant, `mtp~mem-0.02`, as one of the playbook: its name is not for users."""
    own: dict[str, ArgValue] = playbook.variants[0].args if playbook.variants else {}
    made = Variant.model_construct(name=launch.variant, args={**own, **launch.changes})
    return playbook.model_copy(update={"variants": [made]})
