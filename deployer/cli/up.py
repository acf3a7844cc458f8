"""`deploy up`: to a proven endpoint."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import click

from deployer.catalog import Catalog
from deployer.cli.deadline import deadline
from deployer.cli.hosts import Cancel, by_host, exit_code, run_hosts
from deployer.cli.options import Options, common, repins, targets
from deployer.cli.output import open_bus, print_json
from deployer.cli.plan import plan_document, print_results
from deployer.cli.report import error_dict, print_error
from deployer.deployment import Deployment
from deployer.engine import Outcome, Selection
from deployer.errors import UsageError
from deployer.steps.base import Step
from deployer.steps.order import NAMES, all_steps
from deployer.up import Confirm, DeploymentResult, UpOptions, up_host

_ASKING = threading.Lock()
"""Hosts run in parallel; questions come one after the other."""


@click.command("up")
@targets
@click.option("--dry-run", is_flag=True, help="Show the plan, change nothing (same as `plan`).")
@click.option("--from", "first", type=click.Choice(NAMES), metavar="STEP", help="Start at STEP.")
@click.option("--only", type=click.Choice(NAMES), metavar="STEP", help="Run STEP alone.")
@click.option("--variant", metavar="NAME", help="Launch this variant of the playbook.")
@repins
@common
def command(
    options: Options,
    words: tuple[str, ...],
    all_: bool,
    dry_run: bool,
    first: str | None,
    only: str | None,
    variant: str | None,
    repin: bool,
) -> int:
    """Bring hosts or deployments to a proven endpoint.

    Steps: driver, gpus, container, venv, shards, stop, launch, verify. Each looks at the machine,
    does what is missing, and looks again. Killed at any moment, the same command continues.
    """
    if first and only:
        raise UsageError("--from and --only exclude each other", fix="give one of them")
    if repin and not Selection(first, only).acts(NAMES, "shards"):
        raise UsageError(
            "--repin is of no use without the shards step",
            fix="leave out --from/--only, or --repin",
        )
    if options.as_json and not options.yes and not dry_run:
        raise UsageError("--json never applies without --yes", fix="add --yes, or --dry-run")
    deployments = Catalog.load(options.inventory).select(list(words), all_, variant)
    selection = Selection(first, only)
    return run_up(options, deployments, selection, dry_run=dry_run, name="up", repin=repin)


def run_up(
    options: Options,
    deployments: Sequence[Deployment],
    selection: Selection,
    *,
    dry_run: bool,
    name: str,
    exit_on_changes: bool = False,
    steps: Callable[[], list[Step]] = all_steps,
    serves: bool = True,
    repin: bool = False,
    ask: Confirm | None = None,
) -> int:
    """Runs `up` or `plan` on the deployments, prints the results, returns the exit code."""
    bus, end = open_bus(options, show_plan=dry_run)
    cancel = Cancel()
    bus.subscribe(cancel)
    asks = not options.yes and not options.jsonl and sys.stdin.isatty() and sys.stderr.isatty()
    how = UpOptions(
        base=options.inventory,
        command=f"{name} {' '.join(want.id for want in deployments)}",
        dry_run=dry_run,
        selection=selection,
        confirm=_one_by_one(ask or _asked) if asks and not dry_run else None,
        steps=steps,
        serves=serves,
        repin=repin,
    )
    try:
        groups = by_host(deployments)
        with deadline(options.timeout):
            done = run_hosts(groups, lambda host, group: up_host(host, group, how, bus), cancel)
    finally:
        end()
    results = [result for host in done.values() for result in host]
    code = exit_code([result.error for result in results])
    if options.as_json:
        print_json(_document(results, dry_run, code))
        for result in results:
            if result.error is not None:
                print_error(result.error)
    else:
        print_results(results, dry_run)
    if code == 0 and exit_on_changes and any(r.outcome and r.outcome.pending for r in results):
        return 6
    return code


def _one_by_one(ask: Confirm) -> Confirm:
    def asked(want: Deployment, outcome: Outcome) -> bool:
        with _ASKING:
            return ask(want, outcome)

    return asked


def _asked(want: Deployment, outcome: Outcome) -> bool:
    for name, plan in outcome.plans.items():
        titles = "; ".join(change.title for change in plan.changes)
        click.echo(f"  {name:<10} {plan.state.value:<8} {titles or plan.reason}", err=True)
    try:
        return click.confirm(f"Apply this to {want.id}?", default=False, err=True)
    except click.Abort:
        raise KeyboardInterrupt from None


def _document(results: Sequence[DeploymentResult], dry_run: bool, code: int) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "exit_code": code,
        "deployments": [
            {
                "id": result.id,
                "exit_code": result.exit_code,
                "steps": plan_document(result.outcome),
                "changed": result.outcome.changed if result.outcome else [],
                "left": result.left,
                "error": error_dict(result.error) if result.error else None,
                **result.result,
            }
            for result in results
        ],
    }
