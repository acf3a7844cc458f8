"""`deploy doctor --rehash` and `--clean-partials`: the files of a model, one by one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from deployer.cancel import Cancel
from deployer.cleaning import clean_steps
from deployer.cli.deadline import deadline
from deployer.cli.options import Options
from deployer.cli.output import open_bus, print_json
from deployer.cli.plain import printable, size_text
from deployer.cli.report import error_dict
from deployer.cli.up import run_up
from deployer.deployment import Deployment
from deployer.engine import Outcome, Selection
from deployer.errors import DeployError
from deployer.findings import Finding, Level, of_error, of_rehash
from deployer.fleet import Slots, by_host, exit_code, run_hosts
from deployer.rehash import Rehashed, rehash_host
from deployer.up_options import UpOptions

CHANGES_PENDING = 6


def clean_partials(options: Options, deployments: Sequence[Deployment]) -> int:
    """Lists the useless partial files, asks, removes them.

    Where nobody can be asked and `--yes` is not given, it lists only.
    """
    watched = sys.stdin.isatty() and sys.stderr.isatty() and not options.as_json
    lists_only = not options.yes and not (watched and not options.jsonl)
    code = run_up(
        options,
        deployments,
        Selection(),
        dry_run=lists_only,
        name="doctor --clean-partials",
        steps=clean_steps,
        serves=False,
        exit_on_changes=lists_only,
        ask=_ask,
    )
    if code != CHANGES_PENDING:
        return code
    if not options.as_json:
        click.echo("nothing was removed: add --yes to remove what is listed", err=True)
    return 0


def _ask(want: Deployment, outcome: Outcome) -> str:
    """One line a file, then the question."""
    for plan in outcome.plans.values():
        for change in plan.changes:
            click.echo(printable(f"  {change.title}: {change.reason}"), err=True)
        click.echo(printable(f"{want.id}: {plan.reason}"), err=True)
        if not plan.changes:
            return ""
    return f"Remove these from {want.id}?"


def rehash(options: Options, deployments: Sequence[Deployment]) -> int:
    """Hashes every file again and compares; exit code 1 when one is wrong or missing."""
    bus, end = open_bus(options, show_plan=False)
    cancel = Cancel()
    bus.subscribe(cancel)
    how = UpOptions(options.inventory, command="doctor --rehash", cancel=cancel)
    groups = by_host(deployments)

    def lost(host: str, error: DeployError) -> list[Rehashed]:
        return [Rehashed(want.id, error=error) for want in groups[host]]

    try:
        with deadline(options.timeout):
            done = run_hosts(
                groups,
                lambda host, group: rehash_host(host, group, how, bus),
                lost,
                cancel=cancel,
                slots=Slots(options.parallel),
            )
    finally:
        end()
    results = [result for host in done.values() for result in host]
    wants = {want.id: want for want in deployments}
    found = {result.id: findings(wants[result.id], result) for result in results}
    code = exit_code([result.error for result in results])
    if code == 0 and any(result.wrong for result in results):
        code = 1
    if options.as_json:
        print_json(_document(results, found, code))
        return code
    if options.jsonl:
        click.echo(json.dumps({"event": "rehashed", **_document(results, found, code)}))
        return code
    for result in results:
        _print(result, found[result.id])
    return code


def findings(want: Deployment, result: Rehashed) -> list[Finding]:
    """What the hashes tell, worst first."""
    if result.error is not None:
        return [of_error(result.error, f"{want.id} shards")]
    return of_rehash(want, result.wrong)


def _print(result: Rehashed, found: Sequence[Finding]) -> None:
    size = sum(max(0, one.size) for one in result.files)
    if result.error is None:
        rate = f", {size_text(size / result.seconds)}/s" if result.seconds > 0 else ""
        right = len(result.files) - len(result.wrong)
        click.echo(
            f"{result.id}: {right} of {len(result.files)} files are right, "
            f"{size_text(size)} hashed in {result.seconds:.1f} s{rate}"
        )
    else:
        click.echo(f"{result.id}: not checked")
    for one in found:
        mark = "pending" if one.level is Level.PENDING else one.level.name
        click.echo(printable(f"  {mark:<11} {one.where}  {one.what}"))
        if one.fix:
            click.echo(printable(f"  {'':<11} -> {one.fix}"))


def _document(
    results: Sequence[Rehashed], found: dict[str, list[Finding]], code: int
) -> dict[str, Any]:
    return {
        "time": time.time(),
        "exit_code": code,
        "deployments": [
            {
                "id": result.id,
                "seconds": round(result.seconds, 3),
                "files": [
                    {
                        "path": one.path,
                        "bytes": one.size if one.size >= 0 else None,
                        "ok": one.ok,
                        "expected": one.expected,
                        "got": one.got,
                    }
                    for one in result.files
                ],
                "findings": [one.to_dict() for one in found[result.id]],
                "error": error_dict(result.error) if result.error is not None else None,
            }
            for result in results
        ],
    }
