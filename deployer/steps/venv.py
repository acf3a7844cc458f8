"""Installs the engine from its lock beside the old one, and switches only to what was proven."""

from __future__ import annotations

import re
from typing import ClassVar

from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import Change, Facts, Plan, Probe, RunJob
from deployer.state import DeploymentState
from deployer.steps.base import Step, StepContext
from deployer.steps.venv_build import (
    SETTINGS,
    build_job,
    build_path,
    lock_hash,
    lock_pins,
    same_build,
    sm,
)
from deployer.steps.venv_facts import ComputeFact, Uv, VenvFact, venv_probes

_APT = """export DEBIAN_FRONTEND=noninteractive
apt-get -o DPkg::Lock::Timeout=120 update || exit $?
exec apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends python3 python3-venv
"""

STOP_GRACE_S = 20.0
READ_BUILD = 'cat "$1/script" && printf "\\000" && cat "$1/settings.sh"\n'
"""$1 the job's folder."""
FLAT_INDEX_SINCE = (0, 8)
"""uv that knows folders of wheels as indexes; older ones silently ignore them."""


class VenvStep(Step):
    """engine.venv is a symlink to a build that was proven on the GPUs that are there."""

    name: ClassVar[str] = "venv"

    def probes(self, want: Deployment) -> list[Probe]:
        """The environment, and the GPUs' compute capability."""
        return venv_probes(want)

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing only when the record, the versions and the GPUs all agree with the playbook."""
        fact, compute = facts.get(VenvFact), facts.get(ComputeFact)
        if fact is None or compute is None:
            return Plan.unknown("container", facts.silent.get(want.guest, ""))
        engine = want.playbook.engine
        if fact.problem:
            return Plan.blocked(fact.problem, f"check {engine.venv} on the target")
        if fact.kind in ("folder", "other"):
            return Plan.blocked(
                f"{engine.venv} is not a symlink of ours",
                "move it away, or set engine.venv to another path",
            )
        capabilities = wanted_gpus(want, compute)
        if not capabilities:
            why = compute.problem or "no GPU answers in the guest"
            return Plan.unknown("driver", f"unknown until the guest has its GPUs; {why}")
        reason = why_build(want, fact, sorted(set(capabilities)))
        if not reason:
            short = lock_hash(want.lock_text)[:8]
            return Plan.nothing(
                f"{engine.name} {engine.version} from lock {short}, proven on {sm(capabilities)}"
            )
        ids = state.needed()
        needed = [one.venv for one in state.launches if one.id in ids and one.venv]
        return self._build(want, fact, capabilities, reason, needed)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the changes; what the build itself names as its error is the error.

        A build of something else that a killed run has left at work is ended, not waited for.
        """
        for change in plan.changes:
            if isinstance(change.action, RunJob) and SETTINGS in change.action.files:
                self._end_other(context, change.action)
        try:
            super().apply(context, facts, plan)
        except StepFailed as error:
            said = [line.removeprefix("error: ") for line in error.evidence if "error: " in line]
            if not said:
                raise
            raise StepFailed(
                "; ".join(said[-2:]), where=error.where, fix=error.fix, evidence=error.evidence
            ) from error

    @staticmethod
    def _end_other(context: StepContext, build: RunJob) -> None:
        jobs = context.jobs(build.where)
        found = jobs.find(build.name)
        if found is None or not found.alive:
            return
        job = found.identity
        answer = jobs.transport.run(READ_BUILD, args=(f"{jobs.root}/{job.name}/{job.id}",))
        script, _, settings = answer.stdout.partition(b"\0")
        own = build.script.encode(), build.files[SETTINGS]
        if answer.exit != 0 or same_build((script, settings), own):
            return
        context.note(
            f"a build of another lock, or under other settings, runs (pid {job.pid}); stopping it: "
            "what it has fetched stays in uv's cache"
        )
        proof = jobs.stop(job, grace_s=STOP_GRACE_S)
        if not proof.stopped:
            raise StepFailed(
                f"the other build, job {job.name}/{job.id}, could not be stopped ({proof.how})",
                where=f"{context.want.id} venv",
                fix=f"reboot {context.want.host_name} if these are in D state",
                evidence=proof.survivors,
            )

    def _build(
        self,
        want: Deployment,
        fact: VenvFact,
        capabilities: list[str],
        reason: str,
        needed: list[str],
    ) -> Plan:
        engine = want.playbook.engine
        newer = FLAT_INDEX_SINCE if engine.find_links else ()
        uv = usable_uv(fact.uvs, engine.uv_version, newer)
        changes: list[Change] = []
        if not uv and not fact.ensurepip:
            if not fact.apt:
                return Plan.blocked(
                    "uv is missing, and so is what could install it (python3 with venv and pip)",
                    "install uv, or python3 with its venv module, on the target",
                )
            changes.append(
                Change(
                    "install python3 and python3-venv (apt)",
                    "they bring uv" if fact.python3 else "there is no python3",
                    RunJob(want.guest, f"venv-python-{want.name}", _APT, timeout_s=900.0),
                    undo="apt-get remove python3-venv",
                )
            )
        linked = fact.target if fact.kind == "link" else ""
        job = build_job(want, capabilities, len(capabilities), linked, uv, needed)
        old = f"symlink {engine.venv} back to {linked}" if linked else f"remove {engine.venv}"
        changes.append(
            Change(
                f"build {engine.name} {engine.version} (Python {engine.python}) in "
                f"{build_path(want, capabilities, linked)}, prove it, switch to it",
                reason,
                job,
                undo=old,
            )
        )
        keep = want.playbook.keep.venvs
        return Plan.change(reason, *changes).noted(
            f"after the switch, builds beyond the newest {keep} (keep.venvs) are removed, as far "
            "as nothing uses them"
        )


def wanted_gpus(want: Deployment, compute: ComputeFact) -> list[str]:
    """Capabilities of the deployment's GPUs; of all that the guest sees when none is named so."""
    seen = compute.capabilities
    chosen = [seen[address] for address in want.gpus if address in seen]
    return chosen or list(seen.values())


def why_build(want: Deployment, fact: VenvFact, capabilities: list[str]) -> str:
    """Why the environment that is there will not do; '' when it will."""
    engine, record = want.playbook.engine, fact.record
    if fact.kind == "none":
        return f"nothing is at {engine.venv}"
    if not record:
        return f"{engine.venv} has no record of a proof"
    if fact.broken or not fact.python:
        return f"its Python does not run: {fact.broken or 'missing'}"
    lock = lock_hash(want.lock_text)
    if record.get("lock") != lock:
        return f"the lock changed ({str(record.get('lock', 'none'))[:8]} -> {lock[:8]})"
    if fact.python != engine.python:
        return f"it is Python {fact.python}, the playbook says {engine.python}"
    installed = fact.versions.get(engine.name, "none")
    if installed != engine.version or record.get("version") != engine.version:
        return f"{engine.name} {installed} is installed, the playbook says {engine.version}"
    for name, version in sorted(lock_pins(want.lock_text).items()):
        there = fact.versions.get(name, "none")
        if not same_version(there, version):
            return f"{name} {there} is installed, the lock says {version}"
    proven = [str(c) for c in record.get("capabilities", [])]
    if not set(capabilities) <= set(proven):
        return f"proven on {sm(proven) or 'nothing'}, the GPUs are {sm(capabilities)}"
    return ""


def same_version(there: str, wanted: str) -> bool:
    """Equal, or equal but for a local part (`2.11.0+cu130`) that only one of them names."""
    if "+" in there and "+" in wanted:
        return there == wanted
    return there.partition("+")[0] == wanted.partition("+")[0]


def usable_uv(uvs: tuple[Uv, ...], spec: str, since: tuple[int, ...] = ()) -> str:
    """The path of the first uv that fits `spec` (>=X or ==X) and is not older than `since`.

    '' when ours must be brought.
    """
    match = re.fullmatch(r"(>=|==)\s*(\d+(?:\.\d+)*)", spec.strip())
    if not match:
        return ""
    wanted = tuple(int(number) for number in match[2].split("."))
    for uv in uvs:
        if uv.version < since:
            continue
        padded = uv.version + (0,) * (len(wanted) - len(uv.version))
        if (match[1] == ">=" and padded >= wanted) or padded == wanted:
            return uv.path
    return ""
