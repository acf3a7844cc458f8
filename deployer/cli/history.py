"""`deploy history`: the launches of a deployment, newest last."""

from __future__ import annotations

import time

import click

from deployer.catalog import Catalog
from deployer.cli.figures import short_figures
from deployer.cli.options import Options, common, targets
from deployer.cli.output import print_json
from deployer.cli.report import error_dict, print_error
from deployer.errors import DocumentError, StateUnreadable
from deployer.fleet import exit_code
from deployer.state import DeploymentState, HostState, Launch, ValidatedSet
from deployer.state_file import StateFile
from deployer.steps.rolled_back import back_document, back_words, record_document, record_words
from deployer.steps.server_wanted import degraded
from deployer.up_options import UpOptions


@click.command("history")
@targets
@common
def command(options: Options, words: tuple[str, ...], all_: bool) -> int:
    """List launches with variant, figures and verdict; * marks the last known-good one.

    A launch that repeats an earlier one says from which to which it went back, by whom, and whether
    that was asked for or came of a failure.
    """
    options.no_events("history")
    named = _named(options, words, all_)
    folder = UpOptions(base=options.inventory).deploy_dir / "state"
    states: dict[str, HostState] = {}
    errors: dict[str, StateUnreadable] = {}
    for host in dict.fromkeys(host for host, _ in named):
        try:
            states[host] = StateFile(folder, host).load()
        except StateUnreadable as error:
            errors[host] = error
    owned = {
        f"{host}/{name}": states[host].deployments.get(name, DeploymentState())
        for host, name in named
        if host in states
    }
    code = exit_code(list(errors.values()))
    if options.as_json:
        print_json(
            {
                name: {
                    "known_good": own.known_good,
                    "launches": [
                        {**launch.model_dump(), "back": back_document(launch.back)}
                        for launch in own.launches
                    ],
                    "validated": [proven.model_dump() for proven in own.validated],
                    "rollback": record_document(own.rollback, name),
                }
                for name, own in owned.items()
            }
            | {
                f"{host}/{name}": {"error": error_dict(errors[host])}
                for host, name in named
                if host in errors
            }
        )
        return code
    for name, own in owned.items():
        count = len(own.launches)
        click.echo(f"{name}: {count} launch{'es' if count != 1 else ''}")
        for launch in own.launches:
            click.echo(_line(launch, launch.id == own.known_good))
            if launch.back is not None:
                click.echo(f"    {back_words(launch.back)}")
        for proven in own.validated:
            click.echo(_validated(proven))
        if own.rollback is not None:
            click.echo(f"  rollback {record_words(own.rollback, name)}")
    for unread in errors.values():
        print_error(unread)
    return code


def _named(options: Options, words: tuple[str, ...], all_: bool) -> list[tuple[str, str]]:
    """(host, name) of the deployments; what was launched is told whatever their playbooks say."""
    catalog = Catalog.load(options.inventory)
    try:
        found = catalog.select(
            list(words), all_, limit=options.limit, whole=not options.limit, launches=False
        )
    except DocumentError:
        return catalog.named(list(words), all_, options.limit)
    return [(want.host_name, want.name) for want in found]


def _line(launch: Launch, good: bool) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(launch.started))
    figures = short_figures(launch.figures)
    mark = "*" if good else " "
    line = f"{mark} {launch.id:<22} {when}  {launch.variant:<10} {_verdict(launch)}"
    if less := degraded(launch.variant, launch.instead_of):
        line += f", {less}"
    return f"{line}  ({figures})" if figures else line


def _verdict(launch: Launch) -> str:
    """What its gates said stays said when it was stopped afterwards."""
    return (
        "good; stopped since" if launch.verdict == "stopped" and launch.verified else launch.verdict
    )


def _validated(proven: ValidatedSet) -> str:
    when = time.strftime("%Y-%m-%d", time.gmtime(proven.proven))
    less = degraded(proven.variant, proven.instead_of)
    return (
        f"  validated {when}: {proven.variant} of {proven.model}, engine {proven.engine}, on "
        f"{', '.join(proven.gpus)} (launch {proven.launch})" + (f"; {less}" if less else "")
    )
