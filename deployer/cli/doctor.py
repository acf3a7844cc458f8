"""`deploy doctor`: look at everything, worst problem first, with the action for it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from deployer import observe
from deployer.catalog import Catalog
from deployer.cli.doctor_bare import look_at_bare
from deployer.cli.options import Options, common, in_parallel, targets
from deployer.cli.output import print_json
from deployer.cli.plain import printable
from deployer.cli.status import Look, look_at
from deployer.errors import DeployError, StepBlocked, UsageError
from deployer.findings import Finding, Level, examine, in_order, of_error, of_lock
from deployer.fleet import exit_code
from deployer.locallock import read_owner
from deployer.observe_nodes import join
from deployer.remote.lock_record import Controller, this_controller
from deployer.steps.order import all_steps
from deployer.up_options import UpOptions

MARKS = {
    Level.UNREACHABLE: "UNREACHABLE",
    Level.BLOCKED: "BLOCKED",
    Level.WARNING: "warning",
    Level.PENDING: "pending",
    Level.UNKNOWN: "unknown",
    Level.FINE: "fine",
}


@click.command("doctor")
@targets
@in_parallel
@click.option(
    "--rehash", is_flag=True, help="Hash the model's files again; exit code 1 when one is wrong."
)
@click.option(
    "--clean-partials", "clean", is_flag=True, help="Remove partial downloads of no use; asks."
)
@common
def command(options: Options, words: tuple[str, ...], all_: bool, rehash: bool, clean: bool) -> int:
    """Look at everything, worst problem first, with the action for it; change nothing.

    Of a host without deployments: what can be said without one. Exit code 0 when nothing is in
    the way of `up`, 1 when something is blocked, 3 when a host cannot be reached.
    """
    if rehash and clean:
        raise UsageError("--rehash and --clean-partials exclude each other", fix="give one of them")
    if rehash or clean:
        from deployer.cli import doctor_files

        work = doctor_files.rehash if rehash else doctor_files.clean_partials
        return work(options, options.select(words, all_, looks=True))
    options.no_events("doctor, without --rehash or --clean-partials,")
    me, folder = this_controller(), UpOptions(options.inventory).deploy_dir
    catalog = Catalog.load(options.inventory)
    bare = catalog.undeployed(words, all_, options.limit)
    deployments = catalog.select(
        words, all_, limit=options.limit, whole=not options.limit, bare=bool(bare)
    )
    looks = look_at(options, deployments)
    found = {look.host_name: host_findings(look, me, folder) for look in looks}
    for host, ones in nodes_findings(looks).items():
        found[host] = in_order([*found[host], *ones])
    errors = [look.error for look in looks]
    for name, seen in look_at_bare(options, {name: catalog.hosts[name] for name in bare}).items():
        found[name] = in_order([*seen.found, *_local_lock(name, folder)])
        errors.append(seen.error)
    code = exit_code([*errors, *_blocks(found)])
    if options.as_json:
        hosts = [
            {"host": name, "findings": [one.to_dict() for one in ones]}
            for name, ones in found.items()
        ]
        print_json({"time": time.time(), "exit_code": code, "hosts": hosts})
        return code
    for name, ones in found.items():
        click.echo(f"{name}: {_summary(ones)}")
        width = max(len(one.where) for one in ones)
        for one, later in zip(ones, [*ones[1:], None], strict=True):
            text = f"  {MARKS[one.level]:<11} {one.where:<{width}}  {one.what}"
            click.echo(printable(text))
            if one.fix and (later is None or later.fix != one.fix):
                click.echo(printable(f"  {'':<11} {'':<{width}}  -> {one.fix}"))
        for line in _facts(ones):
            click.echo(f"  {line}".rstrip())
    return code


def host_findings(look: Look, me: Controller, folder: Path) -> list[Finding]:
    """Everything found on one host, worst first; `folder` is `.deploy`."""
    found: list[Finding] = []
    if look.error is not None:
        found.append(of_error(look.error, look.host_name))
    if look.state_error is not None:
        error = look.state_error
        found.append(Finding(Level.BLOCKED, error.where or look.host_name, error.what, error.fix))
    found += _local_lock(look.host_name, folder)
    for want, facts in look.seen:
        found += of_lock(look.host_name, facts, me)
        found += examine(want, facts, look.state_of(want), all_steps())
    return in_order(found)


def nodes_findings(looks: Sequence[Look]) -> dict[str, list[Finding]]:
    """Host -> what the nodes of one server say together."""
    found: dict[str, list[Finding]] = {}
    seen = [
        (look.host_name, observe.deployment_document(want, facts, look.state_of(want)))
        for look in looks
        for want, facts in look.seen
        if want.node is not None
    ]
    join([one for _, one in seen])
    for host, one in seen:
        if problem := one["node"]["problem"]:
            again = f"`deploy up {one['id']}` starts all of them"
            told = Finding(Level.WARNING, f"{one['id']} launch", problem, again)
            found.setdefault(host, []).append(told)
    return found


def _local_lock(host: str, folder: Path) -> list[Finding]:
    """A run of this machine that is at work. The record of a dead one means nothing: no finding."""
    owner = read_owner(folder / "locks" / f"{host}.owner.json")
    if owner is None or not owner.alive:
        return []
    what = f"a run on this machine is at work: {owner.describe(time.time())}"
    return [Finding(Level.WARNING, host, what, "wait for it, or stop it with Ctrl-C")]


def _blocks(found: Mapping[str, list[Finding]]) -> list[DeployError]:
    blocked = [one for ones in found.values() for one in ones if one.level is Level.BLOCKED]
    return [StepBlocked(one.what, where=one.where) for one in blocked]


def _facts(ones: list[Finding]) -> list[str]:
    """What was seen, step by step; what several deployments of a host share is shown once."""
    shown: dict[tuple[str, str], str] = {}
    for one in sorted(ones, key=lambda one: one.where):
        for note in one.notes:
            shown.setdefault((one.where.rpartition(" ")[2], note), one.where)
    lines, last = [], ""
    for (_, note), where in sorted(shown.items(), key=lambda item: _place(item[1])):
        if where != last:
            lines.append(f"seen for {where}:")
            last = where
        lines.append(f"  {note}")
    return lines


def _place(where: str) -> tuple[str, int]:
    """Deployments by name, their steps in the order of `up`."""
    name, _, step = where.rpartition(" ")
    names = [one.name for one in all_steps()]
    return name, names.index(step) if step in names else len(names)


def _summary(ones: list[Finding]) -> str:
    counts: dict[Level, int] = {}
    for one in ones:
        counts[one.level] = counts.get(one.level, 0) + 1
    if set(counts) == {Level.FINE}:
        return "nothing to do"
    return ", ".join(f"{count} {level.name.lower()}" for level, count in sorted(counts.items()))
