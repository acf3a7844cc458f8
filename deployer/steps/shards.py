"""Brings the model's files to the target, and lets a file have its name only when it is right."""

from __future__ import annotations

from typing import ClassVar

from deployer import hub
from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.model import Change, Facts, Plan, PlanState, Probe, Procedure
from deployer.state import DeploymentState, Manifest
from deployer.steps.base import Step, StepContext
from deployer.steps.shards_download import download, job_name, size_text
from deployer.steps.shards_facts import ShardsFact, shards_probe

INODES_SPARE = 100


def pinned(want: Deployment, state: DeploymentState) -> Manifest | None:
    """The recorded file list when it answers what the playbook asks for; a branch stays pinned."""
    manifest, model = state.manifest, want.playbook.model
    if manifest is None or (manifest.repo, manifest.asked) != (model.repo, model.revision):
        return None
    return manifest


class ShardsStep(Step):
    """Downloads what is missing, resumes what was cut, verifies what nobody has verified."""

    name: ClassVar[str] = "shards"

    def probes(self, want: Deployment) -> list[Probe]:
        """One look at the model folder."""
        return [shards_probe(want.playbook.model.path, want.playbook.engine.venv, want.guest)]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Nothing only when every file of the pinned list is verified on disk."""
        fact = facts.get(ShardsFact)
        if fact is None:
            return Plan.unknown("container", facts.silent.get(want.guest, ""))
        path = want.playbook.model.path
        if not fact.python:
            return Plan.unknown("venv", "no python3 on the target before venv has run")
        if fact.problem:
            return Plan.blocked(fact.problem, f"check {path} on the target")
        manifest = pinned(want, state)
        if manifest is None:
            return self._plan_list(want, fact)
        return self._plan_files(want, fact, manifest)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Pins the file list if there is none, then downloads. Raises HubError, StepFailed."""
        want, state = context.want, context.state
        manifest = pinned(want, state)
        if manifest is None:
            token = context.environ.get(want.playbook.download.token_env) or None
            manifest = hub.fetch_manifest(want.playbook, token)
            state.manifest = manifest
            context.save()
            total = size_text(sum(file.size for file in manifest.files))
            context.note(
                f"{manifest.repo} {manifest.asked} is {manifest.commit[:12]}: "
                f"{len(manifest.files)} files, {total}"
            )
            plan = self.plan(want, facts, state)
            if plan.state is PlanState.BLOCKED:
                raise StepBlocked(plan.reason, where=want.id, fix=plan.fix)
        if plan.state is PlanState.CHANGES:
            download(context, manifest)

    def _plan_list(self, want: Deployment, fact: ShardsFact) -> Plan:
        """Before the list is known: say what will be asked, and that a download follows."""
        model = want.playbook.model
        endpoint = want.playbook.download.endpoint
        ask = Change(
            f"fetch the file list of {model.repo} at {model.revision}",
            "no file list is pinned for this revision",
            Procedure(want.guest, f"GET {endpoint}/api/models/{model.repo} (from here)"),
        )
        fetch = Change(
            f"download what {model.path} lacks",
            f"{len(fact.files)} files there, none can be judged before the list is known",
            self._action(want),
            undo="what was there stays; wrong files are renamed to NAME.bad",
        )
        return Plan.change("the file list is not known yet", ask, fetch)

    def _plan_files(self, want: Deployment, fact: ShardsFact, manifest: Manifest) -> Plan:
        path = want.playbook.model.path
        total = sum(file.size for file in manifest.files)
        left = [file for file in manifest.files if not fact.verified(file)]
        if not left:
            kinds = "sha256" if any(file.sha256 for file in manifest.files) else "git hash"
            count = len(manifest.files)
            return Plan.nothing(f"{count} files, {size_text(total)}, all verified ({kinds})")
        there = sum(fact.present(file) for file in left)
        lacking = sum(file.size for file in left) - there
        if blocked := self._no_room(want, fact, lacking, len(left)):
            return blocked
        if not fact.writable:
            return Plan.blocked(
                f"{fact.near} is not writable", "check the mount and the rights of model.path"
            )
        verb = "verify" if lacking == 0 else "download"
        reason = f"{len(manifest.files) - len(left)} of {len(manifest.files)} files verified"
        if there:
            reason += f", {size_text(there)} of the rest is there and will be checked"
        if fact.record_error:
            reason += f"; the hash record is unreadable ({fact.record_error})"
        if fact.running:
            reason += f"; a download runs (pid {fact.running}) and is joined"
        return Plan.change(
            reason,
            Change(
                f"{verb} {len(left)} files, {size_text(lacking or there)}, to {path}",
                reason,
                self._action(want),
                undo="what was there stays; wrong files are renamed to NAME.bad",
            ),
        )

    @staticmethod
    def _action(want: Deployment) -> Procedure:
        download = want.playbook.download
        endpoint = download.target_endpoint or download.endpoint
        return Procedure(
            want.guest,
            f"job {job_name(want)}: range requests to {endpoint}, {download.connections} at a "
            f"time, into NAME.part; sha256 while receiving; renamed when right; "
            f"no byte for {download.stall_s:g} s: killed and resumed, "
            f"at most {download.max_restarts} times",
        )

    @staticmethod
    def _no_room(want: Deployment, fact: ShardsFact, lacking: int, files: int) -> Plan | None:
        margin = want.playbook.download.margin_bytes
        path = want.playbook.model.path
        if lacking and lacking + margin > fact.free:
            others = [f"{p} ({size_text(free)} free)" for p, free in fact.elsewhere]
            others = [
                o
                for o, (_, free) in zip(others, fact.elsewhere, strict=True)
                if free > lacking + margin
            ]
            move = f", or set model.path below {' or '.join(others)}" if others else ""
            return Plan.blocked(
                f"{path}: {size_text(fact.free)} free, {size_text(lacking)} to download and "
                f"{size_text(margin)} margin needed",
                f"free {size_text(lacking + margin - fact.free)} at {fact.near}{move}",
            )
        if fact.inodes_total and fact.inodes < files + INODES_SPARE:
            return Plan.blocked(
                f"{path}: only {fact.inodes} inodes free, {files + INODES_SPARE} needed",
                f"remove small files from the file system of {fact.near}",
            )
        return None
