"""A record of a migration on a host: where it lies, how it is read, what `status` tells of it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError

from deployer.deployment import Deployment
from deployer.migrate_journal import FOLDER, newest, unknown
from deployer.model import Facts, Plan, Probe, ProbeOutput, Where
from deployer.shell import quote
from deployer.state import DeploymentState, Migration
from deployer.steps.base import Step

MOST_RECORD = 64 * 1024


@dataclass(frozen=True)
class Marked:
    """The record on the host; `problem` when there is one that cannot be read.

    `damaged`: it is no whole JSON document, so no version of this tool has written it like that.
    """

    record: Migration | None = None
    problem: str = ""
    damaged: bool = False


def mark_path(want: Deployment) -> str:
    """Where the record of a deployment's migration lies on its host."""
    return f"{FOLDER}/{want.name}.json"


def parse_mark(output: ProbeOutput) -> Marked:
    """The answer of Mark's probe."""
    if output.timed_out:
        return Marked(problem="reading it took too long")
    if output.exit != 0:
        return Marked(problem=(output.error_text.strip() or f"exit {output.exit}").splitlines()[-1])
    if not output.stdout.strip():
        return Marked()
    try:
        document = json.loads(output.stdout)
    except (ValueError, RecursionError) as error:
        return Marked(problem=f"it is not JSON: {error}", damaged=True)
    try:
        record = Migration.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        return Marked(problem=f"{key}: {first['msg']}" if key else first["msg"])
    strange = unknown(record)
    return Marked(problem=f"{strange} is not known") if strange else Marked(record)


def mark_script(path: str) -> str:
    """Prints the file; nothing when there is none, a word that is no JSON when it is empty."""
    file = quote(path)
    return f"[ ! -e {file} ] || {{ [ -s {file} ] || echo empty; head -c {MOST_RECORD} {file}; }}"


class Mark(Step):
    """Only looks: the record of a migration on the host."""

    name: ClassVar[str] = "journal"

    def probes(self, want: Deployment) -> list[Probe]:
        """One file."""
        return [Probe("migrate.mark", Where.HOST, mark_script(mark_path(want)), parse_mark)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Never anything."""
        return Plan.nothing("it only looks")


def under_way(facts: Facts, state: DeploymentState) -> dict[str, Any] | None:
    """The migration that the deployment is part of and that has not ended, for `status`.

    The host's copy decides where it was seen: another controller may have gone on.
    """
    marked = facts.get(Marked)
    if marked is not None and marked.problem:
        return {"words": f"the record of a migration cannot be read: {marked.problem}"}
    own = state.migration
    record = own if marked is None else marked.record
    if record is not None and own is not None and own.id == record.id:
        # It may have been dark when the record was written last.
        record = newest([record, own])
    if record is None or record.outcome:
        return None
    pair = f"{record.source} {record.destination}"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.entered))
    if record.back:
        told = f"is being taken back: `deploy migrate {pair} --abort` ends that"
    else:
        told = (
            f"is in phase {record.phase} since {since}: `deploy migrate {pair}` goes on, --abort "
            "takes it back"
        )
    return {
        "id": record.id,
        "source": record.source,
        "destination": record.destination,
        "phase": record.phase,
        "back": record.back,
        "entered": record.entered,
        "by": record.controller,
        "words": f"{record.source} -> {record.destination} {told}",
    }
