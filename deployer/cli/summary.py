"""The end of a run on several hosts: how many are done, and every failure with what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click

from deployer.cli.plain import printable
from deployer.cli.report import error_lines
from deployer.errors import CommandOverdue, DeployError, Interrupted, NotStarted
from deployer.names import listed
from deployer.up_result import DeploymentResult

TOLD_TOGETHER = (NotStarted, Interrupted, CommandOverdue)
"""What befalls many at once and for one reason."""


def print_summary(results: Sequence[DeploymentResult], dry_run: bool, *, err: bool = True) -> None:
    """Failures last, each with its evidence and its next action, on stderr.

    `err`: the rest goes there too; else to stdout, behind the plan.
    """
    lines = list(summary_lines(results, dry_run))
    failing = False
    for number, (line, red) in enumerate(lines, start=1):
        failing = failing or red
        # The last line counts them all.
        to_err = err or (failing and number < len(lines))
        stream = sys.stderr if to_err else sys.stdout
        click.echo(click.style(line, fg="red") if red and stream.isatty() else line, err=to_err)


def summary_lines(results: Sequence[DeploymentResult], dry_run: bool) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is the head of a failure."""
    for result in results:
        if result.error is None:
            yield printable(_done(result, dry_run)), False
    told: dict[str, None] = {}
    together: dict[tuple[str, str], list[str]] = {}
    for result in results:
        error = result.error
        if isinstance(error, TOLD_TOGETHER):
            together.setdefault((error.what, error.fix), []).append(result.id)
        elif error is not None:
            # The deployments of a host that cannot be reached fail alike: said once.
            for number, line in enumerate(error_lines(_placed(error, result.id))):
                if number == 0 and line in told:
                    break
                told[line] = None
                yield line, number == 0
    for (what, fix), ids in together.items():
        yield printable(f"deploy: {listed(ids)}: {what}"), True
        if fix:
            yield printable(f"  -> {fix}"), False
    yield _count(results, dry_run), False


def _placed(error: DeployError, id_: str) -> DeployError:
    """With the host's name in its place, whatever the error says of it."""
    host = id_.partition("/")[0]
    if host in error.where:
        return error
    where = f"{id_}: {error.where}" if error.where else id_
    return DeployError(error.what, where=where, fix=error.fix, evidence=error.evidence)


def _done(result: DeploymentResult, dry_run: bool) -> str:
    outcome = result.outcome
    if dry_run:
        left = (
            [name for name, plan in outcome.plans.items() if plan.state.value != "nothing"]
            if outcome
            else []
        )
        return f"{result.id}: {'to do: ' + ', '.join(left) if left else 'nothing to do'}"
    if result.declined:
        return f"{result.id}: declined; nothing was changed"
    changed = ", ".join(outcome.changed) if outcome and outcome.changed else "nothing"
    words = [f"changed: {changed}"]
    if result.left:
        words.append(f"left to do: {', '.join(result.left)}")
    if result.result:
        what = result.result
        words.insert(0, f"{what['model']} at {what['endpoint']}")
        if what.get("degraded"):
            words.append(str(what["degraded"]))
    return f"{result.id}: {'; '.join(words)}"


def _count(results: Sequence[DeploymentResult], dry_run: bool) -> str:
    failed = [r for r in results if r.error is not None and not isinstance(r.error, TOLD_TOGETHER)]
    not_done = [r for r in results if isinstance(r.error, TOLD_TOGETHER)]
    fine = len(results) - len(failed) - len(not_done)
    text = f"{fine} of {len(results)} deployments {'looked at' if dry_run else 'done'}"
    if failed:
        text += f", {len(failed)} failed"
    if not_done:
        text += f", {len(not_done)} not done"
    return text + ("; nothing was changed" if dry_run else "")
