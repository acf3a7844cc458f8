"""`deploy status`: hosts, GPUs, deployments and launches as observed now."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from deployer import observe
from deployer.as_running import running
from deployer.cancel import Cancel
from deployer.cli.deadline import deadline
from deployer.cli.figures import short_figures
from deployer.cli.options import Options, common, in_parallel, targets
from deployer.cli.output import print_json
from deployer.cli.report import error_dict, print_error
from deployer.deployment import Deployment
from deployer.errors import Defect, DeployError, DocumentError, StateUnreadable
from deployer.fleet import Slots, by_host, exit_code, run_hosts
from deployer.inventory import Host
from deployer.migrate_mark import Mark, under_way
from deployer.model import Facts, Probe, Where
from deployer.names import listed
from deployer.observe_nodes import join
from deployer.remote.lock_record import Controller, this_controller
from deployer.remote.machine import Machine
from deployer.session import REFUSALS, HostSession
from deployer.state import DeploymentState, HostState
from deployer.state_file import StateFile
from deployer.steps.base import Step
from deployer.steps.order import all_steps
from deployer.twins import Twins
from deployer.up_options import UpOptions
from deployer.up_result import address


@dataclass
class Look:
    """What was seen of one host. `error`: why it, or a guest of it, could not be asked."""

    host_name: str
    host: Host
    seen: list[tuple[Deployment, Facts]] = field(default_factory=list)
    error: DeployError | None = None
    state: HostState | None = None
    state_error: StateUnreadable | None = None

    def state_of(self, want: Deployment) -> DeploymentState:
        """The recorded state of a deployment; a fresh one when there is none."""
        known = self.state.deployments if self.state is not None else {}
        return known.get(want.name, DeploymentState())


class HostSide(Step):
    """The probes of all steps that a host answers without its guest."""

    name = "host"

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def probes(self, want: Deployment) -> list[Probe]:
        """Those of the host."""
        every = [probe for step in self.steps for probe in step.probes(want)]
        return [probe for probe in every if probe.where is Where.HOST]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Any:
        """Not for planning."""
        raise NotImplementedError


def look_at(options: Options, deployments: Sequence[Deployment]) -> list[Look]:
    """One look a deployment, hosts in parallel; no lock, no change."""
    groups, cancel = by_host(deployments), Cancel()

    def lost(host: str, error: DeployError) -> Look:
        return Look(host, groups[host][0].host, error=error)

    with deadline(options.timeout):
        looks = run_hosts(
            groups,
            lambda host, group: _look(options, host, group, cancel, many=len(groups) > 1),
            lost,
            cancel=cancel,
            slots=Slots(options.parallel),
            waits_for=lambda hosts: click.echo(f"waiting for {listed(hosts)}", err=True),
        )
    _tell_twins(list(looks.values()))
    return list(looks.values())


def _tell_twins(looks: Sequence[Look]) -> None:
    """A line on stderr for each name of a machine that has another one."""
    twins = Twins()
    for look in looks:
        machine = next((facts.get(Machine) for _, facts in look.seen), None)
        try:
            twins.meet(look.host_name, look.host, machine, lambda text: click.echo(text, err=True))
        except DocumentError as error:
            print_error(error)


def _look(
    options: Options, host_name: str, group: Sequence[Deployment], cancel: Cancel, *, many: bool
) -> Look:
    look = Look(host_name, group[0].host)
    try:
        look.state = StateFile(UpOptions(options.inventory).deploy_dir / "state", host_name).load()
    except StateUnreadable as error:
        look.state_error = error
    try:
        session = HostSession(host_name, look.host, options.inventory)
    except DeployError as error:
        look.error = error
        return look
    session.recognise = many
    try:
        with cancel.waking(session.wake):
            for want in group:
                cancel.check(want.id)
                look.seen.append((want, _facts(session, want, look)))
    except DeployError as error:
        look.error = cancel.error(host_name) if cancel.asked else error
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - told with its host; the others are shown
        look.error = Defect.of(error, host_name)
    finally:
        session.close(lambda text: click.echo(text, err=True))
    return look


def _facts(session: HostSession, want: Deployment, look: Look) -> Facts:
    """A guest that refuses us leaves its host to be seen; the refusal is kept as the error."""
    steps = [*all_steps(), observe.Sight(), Mark()]
    try:
        return session.look(want, steps)
    except REFUSALS as error:
        facts = session.look(want, [HostSide(steps)])
        look.error = error
        return Facts(facts.values, {Where.GUEST: error.what})


@click.command("status")
@targets
@in_parallel
@common
def command(options: Options, words: tuple[str, ...], all_: bool) -> int:
    """Show hosts, GPUs, deployments and launches as observed now; change nothing.

    Takes no lock. An unreachable host is a line with the cause, and exit code 3.
    """
    options.no_events("status")
    deployments = options.select(words, all_, looks=True)
    looks = look_at(options, running(deployments, UpOptions(options.inventory).deploy_dir))
    code = exit_code([look.error for look in looks])
    me = this_controller()
    wanted = {want.id: want.playbook.engine.version for want in deployments}
    documents = [host_document(look, me, wanted) for look in looks]
    join([one for document in documents for one in document["deployments"]])
    if options.as_json:
        print_json({"time": time.time(), "exit_code": code, "hosts": documents})
        return code
    for look, document in zip(looks, documents, strict=True):
        if look.state_error is not None:
            click.echo(f"{look.host_name}: {look.state_error}", err=True)
        for line in lines(document):
            click.echo(line)
    sys.stdout.flush()
    return code


def host_document(look: Look, me: Controller, wanted: Mapping[str, str]) -> dict[str, Any]:
    """One host as JSON data; what was not seen is absent or None.

    `wanted`: HOST/NAME -> the engine's version of the playbook.
    """
    document: dict[str, Any] = {
        "host": look.host_name,
        "reachable": bool(look.seen),
        "error": error_dict(look.error) if look.error is not None else None,
        "driver": None,
        "gpus": [],
        "lock": None,
        "deployments": [],
    }
    for want, facts in look.seen:
        if not document["gpus"]:
            document["driver"] = observe.driver_document(facts)
            document["gpus"] = observe.gpus_document(look.host, facts)
            document["lock"] = observe.lock_document(facts, me)
        state = look.state_of(want)
        seen = observe.deployment_document(want, facts, state)
        seen["migration"] = under_way(facts, state)
        # A node that follows answers no requests.
        seen["endpoint"] = "" if want.follows else address(want)
        seen["engine"]["wanted"] = wanted.get(want.id, seen["engine"]["wanted"])
        document["deployments"].append(seen)
    return document


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """One host as text: a line a thing, columns aligned."""
    error = document["error"]
    if not document["reachable"]:
        cause = error["what"] if error else "not asked"
        word = "UNREACHABLE" if error and error["exit_code"] == 3 else "NOT SEEN"
        yield f"{document['host']}  {word}: {cause}"
        if error and error["fix"]:
            yield f"  -> {error['fix']}"
        return
    driver = document["driver"]
    version = f"nvidia {driver['version']} {driver['flavour']}".rstrip()
    yield f"{document['host']}  {version if driver['version'] else 'no nvidia module is loaded'}"
    if driver["problem"]:
        yield f"  {'driver':<10} {driver['problem']}"
    yield from _lock_lines(document["lock"])
    for row in _table([_gpu_row(one) for one in document["gpus"]]):
        yield f"  {'gpu':<10} {row}"
    for one in document["deployments"]:
        yield from _deployment_lines(one)
    if error:
        yield f"  {'error':<10} {error['where']}: {error['what']}"
        if error["fix"]:
            yield f"  -> {error['fix']}"


def _lock_lines(lock: Mapping[str, str] | None) -> Iterator[str]:
    if lock is None:
        return
    text = lock["problem"] or f"held by {lock['holder']}"
    yield f"  {'lock':<10} {text}" + (f"; stale: {lock['stale']}" if lock["stale"] else "")


def _gpu_row(one: Mapping[str, Any]) -> list[str]:
    used, total = one["memory_used_mib"], one["memory_total_mib"]
    memory = f"{'?' if used is None else used} / {total} MiB" if total is not None else "-"
    driver = one["driver"] or {True: "no driver", False: "ABSENT", None: "?"}[one["present"]]
    return [one["address"], driver, one["name"] or "-", memory]


def _deployment_lines(one: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {one['id']}"
    box = one["container"]
    if box is not None:
        text = f"{box['vmid']} {box['status']}"
        text += f": {box['problem']}" if box["problem"] else ""
        text += f"; the guest is silent: {box['silent']}" if box["silent"] else ""
        yield f"    {'container':<10} {text}"
    yield f"    {'model':<10} {_model(one)}"
    if one["node"] is not None and one["node"]["problem"]:
        again = f"`deploy up {one['id']}` starts all of them"
        yield f"    {'nodes':<10} {one['node']['problem']}; {again}"
    yield f"    {'launch':<10} {_launch(one)}"
    if one["back"]:
        yield f"    {'':<10} {one['back']['words']}"
    if one["listening"] is not None:
        text = f"{'listening' if one['listening'] else 'nobody listens'} on {one['port']}"
        text += {None: "", True: ", answers", False: f", but: {one['answer_problem']}"}[
            one["answers"]
        ]
        yield f"    {'port':<10} {text}"
    for owner in one["port_owner"]:
        yield f"    {'':<10} held by a stranger: {owner[:160]}"
    if one["launch"]:
        yield f"    {'verdict':<10} {_verdict(one)}"
    if one["rollback"]:
        yield f"    {'rollback':<10} {one['rollback']['words']}"
    if one.get("migration"):
        yield f"    {'migration':<10} {one['migration']['words']}"
    engine, weights = one["engine"], one["weights"]
    if one["state"] == "unknown":
        return
    version = engine["version"] or "none"
    wanted = f" (wanted {engine['wanted']})" if engine["version"] != engine["wanted"] else ""
    yield f"    {'engine':<10} {engine['name']} {version}{wanted}"
    yield f"    {'weights':<10} {_weights(weights)}"


def _model(one: Mapping[str, Any]) -> str:
    node = one["node"]
    if node is None:
        return f"{one['model']} at {one['endpoint']}"
    place = f"rank {node['rank']} of {node['of']} nodes"
    where = f" at {one['endpoint']}" if one["endpoint"] else f", which {node['answers']} answers"
    return f"{one['model']}{where} ({place})"


def _launch(one: Mapping[str, Any]) -> str:
    state = one["state"]
    if state == "unknown":
        return f"unknown: {one['problem']}"
    if not one["launch"]:
        return "none" if state == "none" else "none of ours"
    head = f"{one['launch']} ({one['variant'] or '?'})"
    if one["stopped"]:
        return f"{head} stopped by this tool"
    if one["pid"] is None:
        ended = one["exit"] or "vanished without writing its end"
        return f"{head} ended: {ended}"
    up = f", up {duration(one['uptime_s'])}" if one["uptime_s"] is not None else ""
    return f"{head} {state}, pid {one['pid']}{up}"


def _verdict(one: Mapping[str, Any]) -> str:
    text = one["verdict"] or "not judged yet"
    if one["verdict"] and not one["stopped"] and one["pid"] is None:
        # Of what it served while it lived.
        text = f"was {text} while it ran"
    if one.get("degraded"):
        text += f", {one['degraded']}"
    if one["verified"]:
        text += time.strftime(", judged %Y-%m-%d %H:%M:%SZ", time.gmtime(one["verified"]))
    figures = short_figures(one["figures"])
    return f"{text} ({figures})" if figures else text


def _weights(weights: Mapping[str, Any]) -> str:
    state, count, verified = weights["state"], weights["files"], weights["verified"]
    text = {
        "verified": f"all {count} files verified",
        "incomplete": f"{verified} of {count} files verified",
        "present": f"{count} files, not compared with a list yet",
    }.get(state, state)
    return f"{text} in {weights['path']}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `4 h 02 min`, `5 d 03 h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells: list[str] = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
