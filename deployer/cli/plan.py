"""`deploy plan`: what `up` would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from deployer.cli.figures import figure_lines
from deployer.cli.options import Options, common, in_parallel, repins, targets
from deployer.cli.report import print_error
from deployer.model import PlanState

if TYPE_CHECKING:
    from deployer.engine import Outcome
    from deployer.up_result import DeploymentResult


@click.command("plan")
@targets
@in_parallel
@click.option(
    "--exit-code",
    is_flag=True,
    help="Tell by the exit code: 6 when changes are pending, that of `up` when it would refuse.",
)
@click.option("--variant", metavar="NAME", help="Plan for this variant of the playbook.")
@repins
@common
def command(
    options: Options,
    words: tuple[str, ...],
    all_: bool,
    exit_code: bool,
    variant: str | None,
    repin: bool,
) -> int:
    """Show what `up` would do; change nothing (same as `up --dry-run`).

    Exit code 0 when it could look, whatever it shows, a blocked step too: nothing has failed.
    `--exit-code` tells by the code; `deploy doctor` exits with 1 when something is blocked.
    """
    from deployer.cli.up import run_up
    from deployer.engine import Selection

    deployments = options.select(words, all_, variant)
    return run_up(
        options,
        deployments,
        Selection(),
        dry_run=True,
        name="plan",
        exit_on_changes=exit_code,
        repin=repin,
    )


def plan_document(outcome: Outcome | None) -> list[dict[str, Any]]:
    """The plans of all steps as JSON data."""
    if outcome is None:
        return []
    return [
        {
            "step": name,
            "state": plan.state.value,
            "reason": plan.reason,
            "fix": plan.fix,
            "notes": list(plan.notes),
            "changes": [change.to_dict() for change in plan.changes],
        }
        for name, plan in outcome.plans.items()
    ]


def print_results(
    results: Sequence[DeploymentResult], dry_run: bool, *, plan_err: bool = True
) -> None:
    """The last lines a person reads: the endpoint, or the cause and the next action.

    `plan_err`: the end of a plan goes to stderr, not behind the plan on stdout.
    """
    for result in results:
        if result.error is not None:
            print_error(result.error)
        elif result.declined:
            click.echo(f"{result.id}: declined; nothing was changed", err=True)
        elif dry_run and result.outcome is not None:
            told = f"{result.id}: {_counts(result.outcome)}; nothing was changed"
            click.echo(told, err=plan_err)
        elif result.result:
            print_endpoint(result)
        elif result.outcome is not None:
            did = ", ".join(result.outcome.changed)
            if result.left:
                left = ", ".join(result.left)
                click.echo(
                    f"{result.id}: changed: {did or 'nothing'}; left to do: {left} "
                    f"(`deploy up {result.id}`)",
                    err=True,
                )
                continue
            reasons = "; ".join(plan.reason for plan in result.outcome.plans.values())
            click.echo(f"{result.id}: {did or 'nothing to do'}: {reasons}", err=True)


def print_endpoint(result: DeploymentResult) -> None:
    """What is served, where, and what was proven."""
    what = result.result
    changed = result.outcome.changed if result.outcome else []
    click.echo(f"{result.id}: {what['model']} at {what['endpoint']}", err=True)
    verdict = what["verdict"] or "not judged yet"
    click.echo(
        f"  launch {what['launch'] or '-'}, variant {what['variant'] or '-'}, verdict: {verdict}",
        err=True,
    )
    if what.get("degraded"):
        click.echo(f"  {what['degraded']}", err=True)
    for line in figure_lines(what["figures"]):
        click.echo(f"  {line}", err=True)
    click.echo(f"  changed: {', '.join(changed) if changed else 'nothing'}", err=True)


def _counts(outcome: Outcome) -> str:
    states = [plan.state for plan in outcome.plans.values()]
    changes = sum(len(plan.changes) for plan in outcome.plans.values())
    words = []
    if changing := states.count(PlanState.CHANGES):
        words.append(f"{_count(changes, 'change')} in {_count(changing, 'step')}")
    if unknown := states.count(PlanState.UNKNOWN):
        words.append(f"{_count(unknown, 'step')} not knowable yet")
    if blocked := states.count(PlanState.BLOCKED):
        words.append(f"{_count(blocked, 'step')} blocked")
    return ", ".join(words) or "nothing to do"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
