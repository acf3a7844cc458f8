"""`deploy gc`: what old builds, weights and launches take up, and freeing it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from deployer.cli.options import Options, common, in_parallel, targets
from deployer.cli.output import print_json
from deployer.cli.plain import printable, size_text
from deployer.cli.report import error_dict, print_error
from deployer.errors import DeployError

if TYPE_CHECKING:
    from pathlib import Path

    from deployer.deployment import Deployment
    from deployer.engine import Outcome
    from deployer.gc import Known
    from deployer.gc_found import Row
    from deployer.gc_here import Local
    from deployer.state import DeploymentState
    from deployer.up_result import DeploymentResult


@click.command("gc")
@targets
@in_parallel
@click.option("--dry-run", is_flag=True, help="Show the table, free nothing.")
@common
def command(options: Options, words: tuple[str, ...], all_: bool, dry_run: bool) -> int:
    """Show what old builds, weights, launches and jobs take up, and free it.

    Frees with --yes, or when asked on a terminal. What is in use, the known-good launch's, another
    deployment's, or not provably ours is never freed; of the rest so much stays as `keep` in the
    playbook says. Records of this machine (.deploy/) that nothing needs go too.
    """
    if options.as_json and not options.yes:
        dry_run = True
    from deployer.catalog import Catalog
    from deployer.cli.up import run_up
    from deployer.collecting import gc_steps
    from deployer.engine import Selection
    from deployer.gc_here import free_here, look_here
    from deployer.up_options import UpOptions

    deployments = options.select(words, all_, looks=True)
    # A folder may be mounted in several containers of a host.
    hosts = list(dict.fromkeys(want.host_name for want in deployments))
    everywhere = Catalog.load(options.inventory).select(hosts, launches=False)
    deploy_dir = UpOptions(base=options.inventory).deploy_dir
    known = _Knowing(deploy_dir, everywhere)
    local: list[Local] = []
    problem: DeployError | None = None
    try:
        local = look_here(deploy_dir)
    except DeployError as error:
        # One host's state cannot be read: then nothing here is known to be needless.
        problem = error
    watched = sys.stdin.isatty() and sys.stderr.isatty() and not options.jsonl
    shows = dry_run or not (options.yes or watched)
    found: dict[str, list[Row]] = {}
    became: dict[tuple[str, str], str] = {}

    def ask(want: Deployment, outcome: Outcome) -> str:
        for line in table(want.id, found.get(want.id, [])):
            click.echo(printable(line), err=True)
        plans = outcome.plans.values()
        return f"Free this on {want.id}?" if any(plan.changes for plan in plans) else ""

    ended: list[DeploymentResult] = []
    code = run_up(
        options,
        deployments,
        Selection(),
        dry_run=shows,
        name="gc",
        steps=lambda: gc_steps(known, found, became),
        serves=False,
        ask=ask,
        quiet=True,
        ended=ended,
    )
    if options.as_json:
        print_json(
            {
                "exit_code": code,
                "freed": not shows and any(one.error is None for one in ended),
                "errors": {one.id: error_dict(one.error) for one in ended if one.error},
                "deployments": {
                    name: [_row(one, became.get((name, one.found.path))) for one in rows]
                    for name, rows in found.items()
                },
                "here": [
                    {
                        "path": str(one.path),
                        "bytes": one.size,
                        "goes": one.goes,
                        "why": one.why,
                    }
                    for one in local
                ],
            }
        )
    elif not options.jsonl:
        if shows or options.yes:
            for name, rows in found.items():
                told = {path: said for (of, path), said in became.items() if of == name}
                for line in table(name, rows, None if shows else told):
                    click.echo(printable(line))
        for line in _here(local):
            click.echo(printable(line))
    goes = [one for one in local if one.goes]
    if shows and not options.as_json and (goes or any(r.goes for rs in found.values() for r in rs)):
        click.echo("nothing was freed: add --yes to free what is marked", err=True)
    if not shows and goes and code == 0 and (options.yes or _agreed(len(goes))):
        free_here(goes)
    if problem is not None:
        print_error(problem)
        return code or problem.exit_code
    return code


def _agreed(files: int) -> bool:
    try:
        return click.confirm(f"Free {files} files on this machine?", default=False, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None


class _Knowing:
    """What the state files and the inventory tell of each deployment."""

    def __init__(self, folder: Path, everywhere: Sequence[Deployment]) -> None:
        from deployer.kept import Kept

        self.kept = Kept(folder / "kept")
        self.everywhere = everywhere
        self.folder = folder / "state"

    def states(self, host: str) -> dict[str, DeploymentState]:
        """HOST/NAME -> as recorded. Raises StateUnreadable."""
        from deployer.state_file import StateFile

        state = StateFile(self.folder, host).load()
        return {f"{host}/{name}": own for name, own in state.deployments.items()}

    def __call__(self, want: Deployment, own: DeploymentState | None) -> Known:
        from deployer.gc import Known, used_by
        from deployer.rollback_sight import recipe_or_none
        from deployer.state import DeploymentState

        states = self.states(want.host_name)
        own = own or states.get(want.id) or DeploymentState()
        recipes = {one.recipe: recipe_or_none(self.kept, one) for one in own.launches}
        others = [
            one for one in self.everywhere if one.host_name == want.host_name and one.id != want.id
        ]
        return Known(
            want,
            own,
            {key: recipe for key, recipe in recipes.items() if recipe is not None},
            used_by(others, states),
        )


def table(name: str, rows: Sequence[Row], became: Mapping[str, str] | None = None) -> list[str]:
    """What, how large, whether it goes, and why; what may go last. `became`: of a run that has
    freed, path -> `freed`, or why it is still there.
    """
    if not rows:
        return [f"{name}: nothing was found"]
    gone = [row for row in rows if row.goes and (became is None or _freed(row, became))]
    total = sum(row.found.size for row in rows)
    free = sum(row.found.freed for row in gone)
    what = "may go" if became is None else "freed"
    lines = [f"{name}: {size_text(total)} in {len(rows)} folders, {size_text(free)} {what}"]
    for row in sorted(rows, key=lambda one: one.goes):
        word, why = "goes" if row.goes else "kept", row.why
        if row.goes and became is not None:
            word = "freed" if _freed(row, became) else "left"
            why = why if word == "freed" else became.get(row.found.path, "the run ended before")
        one = row.found
        line = f"  {word:<5} {one.kind:<8} {size_text(one.size):>10}  {one.path}: {why}"
        if one.shared:
            line += f"; {size_text(one.shared)} of it have other names and stay"
        lines.append(line)
    return lines


def _freed(row: Row, became: Mapping[str, str]) -> bool:
    return became.get(row.found.path) == "freed"


def _here(local: Sequence[Local]) -> list[str]:
    if not local:
        return []
    why = {one.why: [each for each in local if each.why == one.why] for one in local}
    lines = ["on this machine:"]
    for reason, files in sorted(why.items(), key=lambda one: one[1][0].goes):
        size, word = size_text(sum(one.size for one in files)), "goes" if files[0].goes else "kept"
        at = files[0].path.parent
        lines.append(f"  {word:<5} files    {size:>10}  {at}: {len(files)}, {reason}")
    return lines


def _row(row: Row, became: str | None) -> dict[str, object]:
    one = row.found
    return {
        "kind": one.kind,
        "path": one.path,
        "bytes": one.size,
        "frees": one.freed,
        "goes": row.goes,
        "why": row.why,
        "freed": became == "freed",
        "left": became if became not in (None, "freed") else "",
    }
