"""`deploy rollback`: back to a launch that has passed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from deployer.cli.deadline import deadline
from deployer.cli.figures import short_figures
from deployer.cli.options import Options, common, complete_target
from deployer.cli.output import print_json
from deployer.cli.plain import printable
from deployer.crosscheck_nodes import refuse_nodes
from deployer.errors import DeployError, Unreachable, UsageError
from deployer.rollback import RollBack, made_of, then
from deployer.rollback_choice import choices, choose
from deployer.rollback_sight import Choice, There, described, look, present_words
from deployer.rollback_steps import rollback_steps

if TYPE_CHECKING:
    from deployer.deployment import Deployment
    from deployer.kept import Kept
    from deployer.rollback_choice import Chosen
    from deployer.state import DeploymentState, Launch

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
    """
    from deployer.cli.up import run_up
    from deployer.engine import Selection
    from deployer.kept import Kept
    from deployer.state import DeploymentState
    from deployer.state_file import StateFile
    from deployer.up_options import UpOptions

    now = _one(options, word)
    folder = UpOptions(base=options.inventory).deploy_dir
    kept = Kept(folder / "kept")
    state = StateFile(folder / "state", now.host_name).load()
    own = state.deployments.get(now.name, DeploymentState())
    chosen = choose(own, launch, now.id)
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (options.as_json or options.jsonl)
    acts = chosen.launch is not None and (options.yes or dry_run or asks)
    there = There()
    if not acts or asks:
        with deadline(options.timeout):
            there = _look(options, now, own, chosen, kept)
    if chosen.launch is None and options.yes and not chosen.done and not there.problem:
        raise DeployError(
            f"nothing to go back to: {chosen.why}",
            where=f"{now.id} rollback",
            fix=f"`deploy history {now.id}` lists what was launched, `deploy up {now.id}` launches "
            "the playbook",
        )
    if options.as_json and not acts:
        found = described(_listed(own, chosen), kept, there)
        print_json(_document(now, own, chosen, found, there))
        return 3 if there.problem else 0
    if not options.as_json:
        for line in _lines(now, own, chosen, described(_listed(own, chosen), kept, there), there):
            click.echo(printable(line), err=options.jsonl or acts)
    if chosen.launch is None or not acts:
        if chosen.launch is not None:
            click.echo("nothing was changed: add --yes to go back", err=True)
        return 3 if there.problem else 0
    recipe, lock_text = made_of(kept, chosen.launch, now.id)
    want = then(now, recipe, lock_text, chosen.launch)
    target = chosen.launch
    return run_up(
        options,
        [want],
        Selection(),
        dry_run=dry_run,
        name="rollback",
        steps=lambda: rollback_steps(target),
        aim=RollBack(now, target, recipe, kept),
    )


def _one(options: Options, word: str) -> Deployment:
    found = options.select([word], False)
    refuse_nodes(found, "rollback")
    if len(found) != 1:
        raise UsageError(
            f"{word} has {len(found)} deployments",
            where="rollback",
            fix=f"name one of them: {', '.join(one.id for one in found)}",
        )
    return found[0]


def _listed(own: DeploymentState, chosen: Chosen) -> list[Launch]:
    found = choices(own)[:SHOWN]
    if chosen.launch is not None and chosen.launch not in found:
        found.insert(0, chosen.launch)
    return found


def _look(
    options: Options, now: Deployment, own: DeploymentState, chosen: Chosen, kept: Kept
) -> There:
    """What of the choices is on the target; a target that does not answer is told, not raised."""
    from deployer.session import HostSession

    session = HostSession(now.host_name, now.host, options.inventory)
    try:
        return look(now, session.transports(now)[now.guest], _listed(own, chosen), kept)
    except Unreachable as error:
        return There(problem=str(error))
    finally:
        session.close(lambda text: click.echo(text, err=True))


def _lines(
    now: Deployment, own: DeploymentState, chosen: Chosen, found: list[Choice], there: There
) -> list[str]:
    if chosen.launch is None:
        head = f"{now.id}: nothing to go back to: {chosen.why}"
    else:
        head = f"{now.id}: goes back to launch {chosen.launch.id}: {chosen.why}"
    lines = [head, f"  now: {present_words(own)}"]
    if there.problem:
        lines.append(f"  what of it is still there is not known: {there.problem}")
    for choice in found:
        lines += _choice(choice, choice.launch is chosen.launch, own.known_good)
    return lines


def _choice(choice: Choice, first: bool, known_good: str) -> list[str]:
    launch, recipe = choice.launch, choice.recipe
    began = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(launch.started))
    mark = ">" if first else "*" if launch.id == known_good else " "
    lines = [f"{mark} {launch.id:<22} {began}  {launch.variant:<10} {launch.verdict}"]
    if recipe is not None:
        lines.append(
            f"    {recipe.manifest.repo}@{recipe.manifest.commit[:12]}, engine "
            f"{recipe.engine.get('version', '?')}; venv: {choice.venv}; weights: {choice.weights}"
        )
    else:
        lines.append("    cannot be gone back to: what it was made from was not kept")
    if figures := short_figures(launch.figures):
        lines.append(f"    measured: {figures}")
    return lines


def _document(
    now: Deployment, own: DeploymentState, chosen: Chosen, found: list[Choice], there: There
) -> dict[str, object]:
    return {
        "id": now.id,
        "now": own.launches[-1].id if own.launches else None,
        "known_good": own.known_good,
        "to": chosen.launch.id if chosen.launch is not None else None,
        "why": chosen.why,
        "problem": there.problem,
        "choices": [choice.to_dict() for choice in found],
    }
