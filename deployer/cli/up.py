"""`deploy up`: to a proven endpoint."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from deployer.cancel import Cancel
from deployer.cli.deadline import deadline
from deployer.cli.options import Options, common, in_parallel, repins, rolls_out, targets
from deployer.cli.output import Output, print_json
from deployer.cli.plan import plan_document, print_results
from deployer.cli.report import error_dict, print_error
from deployer.cli.summary import print_summary
from deployer.crosscheck_nodes import refuse_nodes
from deployer.deployment import Deployment
from deployer.engine import Outcome, Selection
from deployer.errors import DeployError, UsageError
from deployer.events import Bus
from deployer.fleet import Slots, by_host, exit_code, run_hosts
from deployer.multinode import up_nodes
from deployer.names import listed
from deployer.rollout import Rollout
from deployer.steps.base import Step
from deployer.steps.order import NAMES, all_steps
from deployer.twins import Twins
from deployer.up import up_host
from deployer.up_options import Aim, UpOptions
from deployer.up_result import DeploymentResult

Question = Callable[[Deployment, Outcome], str]
"""Prints what would be done and returns the question; '' when there is nothing to ask."""

UpServer = Callable[[Sequence[Deployment], UpOptions, Bus], list[DeploymentResult]]


@click.command("up")
@targets
@in_parallel
@rolls_out
@click.option("--dry-run", is_flag=True, help="Show the plan, change nothing (same as `plan`).")
@click.option("--from", "first", type=click.Choice(NAMES), metavar="STEP", help="Start at STEP.")
@click.option("--only", type=click.Choice(NAMES), metavar="STEP", help="Run STEP alone.")
@click.option("--variant", metavar="NAME", help="Launch this variant of the playbook.")
@click.option(
    "--retry",
    is_flag=True,
    help="Try again what has failed before or was rolled back from, also where a good server "
    "must stop for it.",
)
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
    retry: bool,
    repin: bool,
    canary: bool | None,
    max_failures: int | None,
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
    deployments = options.select(words, all_, variant)
    selection = Selection(first, only)
    return run_up(
        options,
        deployments,
        selection,
        dry_run=dry_run,
        name="up",
        steps=functools.partial(all_steps, retry=retry),
        repin=repin,
        canary=canary,
        max_failures=max_failures,
    )


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
    ask: Question | None = None,
    canary: bool | None = None,
    max_failures: int | None = None,
    aim: Aim | None = None,
    up_server: UpServer = up_nodes,
    quiet: bool = False,
    ended: list[DeploymentResult] | None = None,
) -> int:
    """Runs `up` or `plan` on the deployments, prints the results, returns the exit code.

    `canary` and `max_failures`: see Rollout. `up_server` brings one of several nodes up. `quiet`:
    the caller shows plans and document. `ended` gets how each ended.
    """
    as_one = up_server is not up_nodes or _starts(steps, serves)
    alone, servers = _by_server(deployments) if as_one else (deployments, [])
    if aim is not None:
        refuse_nodes(deployments, name)
    groups, after = _units(by_host(alone), servers)
    many = len(groups) > 1 or bool(servers)
    output = Output(
        options,
        show_plan=dry_run and not quiet,
        names=[want.id for want in deployments] if many else (),
    )
    cancel, slots = Cancel(), Slots(options.parallel)
    output.bus.subscribe(cancel)
    if not (serves and selection.acts(NAMES, "verify")):
        # No gates, nothing for a canary to prove.
        canary = False
    rollout = Rollout(
        [*alone, *(server[0] for server in servers)],
        canary=canary,
        max_failures=max_failures,
        serves=serves,
        slots=slots,
        cancel=cancel,
    )
    asks = not options.yes and not options.jsonl and sys.stdin.isatty() and sys.stderr.isatty()
    how = UpOptions(
        base=options.inventory,
        command=f"{name} {_words(deployments)}",
        dry_run=dry_run,
        selection=selection,
        confirm=_Asking(ask or _asked, output, many=many) if asks and not dry_run else None,
        steps=steps,
        serves=serves,
        repin=repin,
        aim=aim,
        rollout=rollout if many and not dry_run else None,
        twins=Twins() if many else None,
        cancel=cancel,
    )

    def work(unit: str, group: Sequence[Deployment]) -> list[DeploymentResult]:
        if unit in after:
            return up_server(group, how, output.bus)
        return up_host(unit, group, how, output.bus)

    def lost(unit: str, error: DeployError) -> list[DeploymentResult]:
        return [DeploymentResult(want.id, error=error) for want in groups[unit]]

    try:
        with deadline(options.timeout):
            done = run_hosts(
                groups,
                work,
                lost,
                cancel=cancel,
                slots=slots,
                refusal=rollout.refusal,
                after=after,
            )
    finally:
        output.close()
    results = [result for host in done.values() for result in host]
    if ended is not None:
        ended += results
    code = exit_code([result.error for result in results])
    if code == 0 and exit_on_changes:
        code = _found(results)
    if options.as_json:
        if not quiet:
            print_json(_document(results, dry_run, code))
        for result in results:
            if result.error is not None:
                print_error(result.error)
    elif many:
        print_summary(results, dry_run, err=not dry_run or options.jsonl)
    else:
        print_results(results, dry_run, plan_err=options.jsonl)
    return code


def _found(results: Sequence[DeploymentResult]) -> int:
    """What the plans say: the code with which `up` would refuse, else 6 for changes, else 0."""
    outcomes = [result.outcome for result in results if result.outcome is not None]
    codes = {one.refusal.exit_code for one in outcomes if one.refusal is not None}
    if codes:
        return codes.pop() if len(codes) == 1 else 1
    return 6 if any(one.pending for one in outcomes) else 0


def _starts(steps: Callable[[], list[Step]], serves: bool) -> bool:
    """Does the run launch? Then the nodes of one server are one; else each is looked at alone."""
    return serves and any(step.name == "launch" for step in steps())


def _by_server(
    deployments: Sequence[Deployment],
) -> tuple[list[Deployment], list[list[Deployment]]]:
    """Those that are a server each, and the nodes of each server of several, in rank order."""
    alone, servers = [], dict[tuple[str, tuple[str, ...]], list[Deployment]]()
    for want in deployments:
        if want.node is None:
            alone.append(want)
        else:
            servers.setdefault((want.name, want.node.hosts), []).append(want)
    return alone, list(servers.values())


def _units(
    groups: Mapping[str, list[Deployment]], servers: Sequence[list[Deployment]]
) -> tuple[dict[str, list[Deployment]], dict[str, list[str]]]:
    """What runs in a thread each: hosts, and servers of several nodes by their hosts' names.

    With which of them a server waits for: a host may have a server of its own besides, or two.
    """
    units, after = dict(groups), dict[str, list[str]]()
    hosts = {host: {host} for host in groups}
    for server in servers:
        mine = {want.host_name for want in server}
        name = f"{'+'.join(want.host_name for want in server)}/{server[0].name}"
        after[name] = [unit for unit, theirs in hosts.items() if theirs & mine]
        units[name], hosts[name] = server, mine
    return units, after


def _words(deployments: Sequence[Deployment]) -> str:
    """For records of who holds a lock: short, whatever `--all` means."""
    return listed([want.id for want in deployments], 4)


class _Asking:
    """Asks for one deployment after the other; `all` answers for the rest as well."""

    def __init__(self, show: Question, output: Output, *, many: bool) -> None:
        self._show = show
        self._output = output
        self._many = many
        self._turn = threading.Lock()
        self._all = False

    def __call__(self, want: Deployment, outcome: Outcome) -> bool:
        """Whether to act."""
        with self._turn:
            if self._all:
                return True
            with self._output.question():
                question = self._show(want, outcome)
                return not question or self._answer(question)

    def _answer(self, question: str) -> bool:
        try:
            if not self._many:
                return click.confirm(question, default=False, err=True)
            said = click.prompt(
                question, type=click.Choice(["y", "n", "all"]), default="n", err=True
            )
        except click.Abort:
            raise KeyboardInterrupt from None
        self._all = said == "all"
        return said != "n"


def _asked(want: Deployment, outcome: Outcome) -> str:
    if outcome.refusal is not None:
        # It ends before anything is changed: there is nothing to agree to.
        return ""
    for name, plan in outcome.plans.items():
        titles = "; ".join(change.title for change in plan.changes)
        click.echo(f"  {name:<10} {plan.state.value:<8} {titles or plan.reason}", err=True)
    return f"Apply this to {want.id}?"


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
