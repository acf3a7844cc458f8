"""`deploy rollback`: back to a launch that has passed."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import click

from deployer.cli.deadline import deadline
from deployer.cli.figures import short_figures
from deployer.cli.options import Options, common, complete_target
from deployer.cli.output import print_json
from deployer.cli.plain import printable
from deployer.errors import DeployError, StepBlocked, Unreachable, UsageError
from deployer.rollback import RollBack, made_of, then
from deployer.rollback_choice import Place, choices, choose, part_of, unfit
from deployer.rollback_sight import Choice, There, described, look, present_words, unable
from deployer.rollback_steps import rollback_steps

if TYPE_CHECKING:
    from pathlib import Path

    from deployer.deployment import Deployment
    from deployer.kept import Kept
    from deployer.rollback_choice import Chosen
    from deployer.state import DeploymentState, HostState, Launch

SHOWN = 10


@click.command("rollback")
@click.argument("word", metavar="HOST[/NAME]", shell_complete=complete_target)
@click.argument("launch", metavar="[LAUNCH]", default="")
@click.option("--dry-run", is_flag=True, help="Show the steps that it would take, touch nothing.")
@common
def command(options: Options, word: str, launch: str, dry_run: bool) -> int:
    """Go back to the last known-good launch, or to LAUNCH (an id of `deploy history`).

    Says what it would go back to, and what else there is; goes there with --yes, or when asked on a
    terminal. Same lock, weights, variant, arguments, port and name; then the gates run. When it
    fails, what served before serves again. `up` does not undo it until the playbook changes.
    A server of several nodes goes back on all of them, as one launch.
    """
    from deployer.cli.up import run_up
    from deployer.engine import Selection
    from deployer.kept import Kept
    from deployer.multinode import up_nodes
    from deployer.multinode_back import NodesBack
    from deployer.state_file import StateFile
    from deployer.up_options import UpOptions

    folder = UpOptions(base=options.inventory).deploy_dir
    warnings: list[str] = []
    kept = Kept(folder / "kept")
    places = [
        (one, _own(StateFile(folder / "state", one.host_name).load(), one.name))
        for one in _meant(options, word, folder, warnings.append)
    ]
    for line in warnings:
        click.echo(printable(f"warning: {line}"), err=True)
    now, own = places[0]
    chosen = choose(own, launch, now.id, lambda one: not unable(kept, places, one.id))
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (options.as_json or options.jsonl)
    acts = chosen.launch is not None and (options.yes or dry_run or asks)
    there = [There(asked=False) for _ in places]
    if not acts or asks:
        with deadline(options.timeout):
            there = _look(options, places, chosen, kept)
    problem = "; ".join(one.problem for one in there if one.problem)
    if chosen.launch is None and options.yes and not chosen.done and not problem:
        raise DeployError(
            f"nothing to go back to: {chosen.why}",
            where=f"{now.id} rollback",
            fix=f"`deploy history {now.id}` lists what was launched, `deploy up {now.id}` launches "
            "the playbook",
        )
    no_way = "" if chosen.launch is None else unable(kept, places, chosen.launch.id)
    if options.as_json and not acts:
        print_json({**_document(places, chosen, kept, there), "warnings": warnings})
        return 3 if problem else int(bool(no_way))
    if not options.as_json:
        for line in _lines(places, chosen, kept, there):
            click.echo(printable(line), err=options.jsonl or acts)
    if chosen.launch is None or not acts:
        if chosen.launch is not None and not no_way:
            click.echo("nothing was changed: add --yes to go back", err=True)
        return 3 if problem else int(bool(no_way))
    _no_migration(places)
    parts, wants = _parts(places, chosen.launch, kept)
    return run_up(
        options,
        wants,
        Selection(),
        dry_run=dry_run,
        name="rollback",
        steps=lambda: rollback_steps(parts[0].launch),
        aim=parts[0] if now.node is None else None,
        up_server=functools.partial(up_nodes, back=NodesBack(parts)),
    )


def _meant(
    options: Options, word: str, folder: Path, told: Callable[[str], None]
) -> list[Deployment]:
    """One deployment, or all nodes of one server in rank order.

    `told` gets a line when a playbook that cannot be used is replaced by what is kept in `folder`.
    """
    from deployer.catalog import Catalog
    from deployer.kept_wish import select

    found = select(Catalog.load(options.inventory), word, folder, told)
    servers = {(one.name, one.node.hosts) if one.node else (one.id, ()) for one in found}
    if len(servers) != 1:
        host = word.partition("/")[0]
        raise UsageError(
            f"{word} has {len(servers)} deployments",
            where="rollback",
            fix=f"name one of them: {', '.join(o.id for o in found if o.host_name == host)}",
        )
    return found


def _no_migration(places: Sequence[Place]) -> None:
    """Raises StepBlocked: half-way through one, the way back is another."""
    for now, own in places:
        one = own.migration
        if one is not None and not one.outcome:
            pair = f"{one.source} {one.destination}"
            raise StepBlocked(
                f"a migration of it is under way: {one.source} to {one.destination}, phase "
                f"{one.phase}",
                where=f"{now.id} rollback",
                fix=f"`deploy migrate {pair}` finishes it, `deploy migrate {pair} --abort` takes "
                "it back",
            )


def _own(state: HostState, name: str) -> DeploymentState:
    from deployer.state import DeploymentState

    return state.deployments.get(name) or DeploymentState()


def _parts(
    places: Sequence[Place], launch: Launch, kept: Kept
) -> tuple[list[RollBack], list[Deployment]]:
    """Of each node: its aim, and the deployment of that time. Raises DeployError."""
    if len(places) > 1 and (why := unfit(places, launch.id)):
        raise DeployError(
            f"launch {launch.id} cannot be gone back to: {why}",
            where=f"{places[0][0].id} rollback",
            fix="name another launch, or write `nodes` in the playbook as it was",
        )
    parts, wants = [], []
    for now, own in places:
        part = part_of(own, launch.id) or launch
        recipe, lock_text = made_of(kept, part, now.id)
        wants.append(then(now, recipe, lock_text, part))
        parts.append(RollBack(now, part, recipe, kept))
    if len({(one.recipe.manifest.commit, one.recipe.lock) for one in parts}) != 1:
        raise DeployError(
            f"launch {launch.id} has other weights or another lock on each of its nodes",
            where=f"{places[0][0].id} rollback",
            fix="name another launch",
        )
    return parts, wants


def _listed(places: Sequence[Place], chosen: Chosen) -> list[Launch]:
    found = choices(places[0][1])[:SHOWN]
    if chosen.launch is not None and chosen.launch not in found:
        found.insert(0, chosen.launch)
    return found


def _look(options: Options, places: Sequence[Place], chosen: Chosen, kept: Kept) -> list[There]:
    """What of the choices is on each target; one that does not answer is told, not raised."""
    ids = [one.id for one in _listed(places, chosen)]

    def one(place: Place) -> There:
        from deployer.session import HostSession

        now, own = place
        session = HostSession(now.host_name, now.host, options.inventory)
        try:
            parts = [part for part in (part_of(own, id_) for id_ in ids) if part is not None]
            return look(now, session.transports(now)[now.guest], parts, kept)
        except Unreachable as error:
            return There(problem=str(error))
        finally:
            session.close(lambda text: click.echo(text, err=True))

    if len(places) == 1:
        return [one(places[0])]
    with ThreadPoolExecutor(max_workers=len(places)) as pool:
        return list(pool.map(one, places))


def _lines(
    places: Sequence[Place], chosen: Chosen, kept: Kept, there: Sequence[There]
) -> list[str]:
    now, own = places[0]
    if chosen.launch is None:
        head = f"{now.id}: nothing to go back to: {chosen.why}"
    elif why := unable(kept, places, chosen.launch.id):
        head = f"{now.id}: cannot go back to launch {chosen.launch.id}: {why}"
    else:
        head = f"{now.id}: goes back to launch {chosen.launch.id}: {chosen.why}"
    lines = [head]
    if len(places) > 1:
        lines.append(f"  one server of the nodes {', '.join(one.id for one, _ in places)}")
    lines.append(f"  now: {present_words(own)}")
    for one in there:
        if one.problem:
            lines.append(f"  what of it is still there is not known: {one.problem}")
    for launch in _listed(places, chosen):
        lines += _choice(places, launch, launch is chosen.launch, kept, there)
    return lines


def _choice(
    places: Sequence[Place], launch: Launch, first: bool, kept: Kept, there: Sequence[There]
) -> list[str]:
    began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(launch.started))
    mark = ">" if first else "*" if launch.id == places[0][1].known_good else " "
    lines = [f"{mark} {launch.id:<22} {began}  {launch.variant:<10} {launch.verdict}"]
    found = _described(places, launch, kept, there)
    recipe, why = found[0].recipe, unable(kept, places, launch.id)
    if why or recipe is None:
        lines.append(f"    cannot be gone back to: {why}")
    else:
        what = f"{recipe.manifest.repo}@{recipe.manifest.commit[:12]}, engine "
        what += f"{recipe.engine.get('version', '?')}"
        has = [
            f"venv: {one.venv}; weights: {one.weights}" if seen.asked else "not looked at"
            for one, seen in zip(found, there, strict=True)
        ]
        if len(places) == 1:
            lines.append(f"    {what}; {has[0]}")
        else:
            lines.append(f"    {what}")
            lines += [
                f"    {one.host_name}: {said}" for (one, _), said in zip(places, has, strict=True)
            ]
    if figures := short_figures(launch.figures):
        lines.append(f"    measured: {figures}")
    return lines


def _described(
    places: Sequence[Place], launch: Launch, kept: Kept, there: Sequence[There]
) -> list[Choice]:
    """Of each node."""
    return [
        described([part_of(own, launch.id) or launch], kept, seen)[0]
        for (_, own), seen in zip(places, there, strict=True)
    ]


def _document(
    places: Sequence[Place], chosen: Chosen, kept: Kept, there: Sequence[There]
) -> dict[str, object]:
    now, own = places[0]
    choices = []
    for launch in _listed(places, chosen):
        found = _described(places, launch, kept, there)
        one = {**found[0].to_dict(), "problem": unable(kept, places, launch.id)}
        if len(places) > 1:
            one["nodes"] = {
                node.host_name: {"venv": each.venv, "weights": each.weights}
                for (node, _), each in zip(places, found, strict=True)
            }
        choices.append(one)
    return {
        "id": now.id,
        "nodes": [one.id for one, _ in places] if len(places) > 1 else [],
        "now": own.launches[-1].id if own.launches else None,
        "known_good": own.known_good,
        "to": chosen.launch.id if chosen.launch is not None else None,
        "why": chosen.why,
        "problem": "; ".join(one.problem for one in there if one.problem),
        "choices": choices,
    }
