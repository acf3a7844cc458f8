"""Brings the model's files to the target, and lets a file have its name only when it is right."""

from __future__ import annotations

from typing import ClassVar

from deployer import hub
from deployer.deployment import Deployment
from deployer.errors import StepBlocked
from deployer.model import Change, Facts, Plan, PlanState, Probe, Procedure
from deployer.state import DeploymentState, Manifest
from deployer.steps.base import Step, StepContext
from deployer.steps.server_compat import refusal, settled_problems
from deployer.steps.shards_download import download, job_name
from deployer.steps.shards_facts import ShardsFact, shards_probe
from deployer.steps.shards_figures import size_text
from deployer.steps.shards_preflight import (
    lacking,
    leads_out,
    leftovers,
    no_room,
    obstacle,
    stranger,
)


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
            return Plan.unknown(
                "venv", "no python3 (3.9 or newer) on the target before venv has run"
            )
        if fact.problem:
            return Plan.blocked(fact.problem, f"check {path} on the target")
        manifest = pinned(want, state)
        if manifest is None:
            blocked = obstacle(want, fact) or stranger(want, fact, ())
            return blocked or self._plan_list(want, fact)
        return self._plan_files(want, fact, manifest)

    def prepare(self, context: StepContext) -> bool:
        """Pins the file list: what the model is may refuse the launch before anything is built.

        Raises HubError for an answer that stands. A Hub that is away is asked again at our turn.
        """
        if pinned(context.want, context.state) is not None:
            return False
        try:
            _pin(context)
        except (hub.EndpointUnreachable, hub.HubSilent) as error:
            context.note(f"the file list is asked for again at step shards: {error.what}")
            return False
        return True

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Pins the file list if there is none, then downloads. Raises HubError, StepFailed."""
        want, state = context.want, context.state
        manifest = pinned(want, state)
        if manifest is None:
            manifest = _pin(context)
            known = settled_problems(want, facts, manifest, want.variant_name)
            plan = refusal(known, stands=True) if known else self.plan(want, facts, state)
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
            f"{len(fact.finished)} files there, none can be judged before the list is known",
            self._action(want),
            undo="what was there stays; wrong files are renamed to NAME.bad",
        )
        return Plan.change("the file list is not known yet", ask, fetch)

    def _plan_files(self, want: Deployment, fact: ShardsFact, manifest: Manifest) -> Plan:
        path, files = want.playbook.model.path, manifest.files
        left = [file for file in files if not fact.verified(file)]
        found = leftovers(fact, files, own=not left)
        useless = found.useless_text(want.id)
        if not left:
            kinds = "sha256" if any(file.sha256 for file in files) else "git hash"
            total = size_text(sum(file.size for file in files))
            reason = f"{len(files)} files, {total}, all verified ({kinds})"
            return Plan.nothing("; ".join(filter(None, [reason, useless])))
        blocked = (
            obstacle(want, fact, left)
            or leads_out(want, fact, left)
            or stranger(want, fact, files)
            or no_room(want, fact, left, found)
        )
        if blocked:
            return blocked
        to_fetch = lacking(fact, left, found)
        there = sum(file.size for file in left) - to_fetch
        reasons = [f"{len(files) - len(left)} of {len(files)} files verified"]
        if there:
            reasons[0] += f", {size_text(there)} of the rest is there and will be checked"
        reasons += filter(None, [found.adopted_text(), useless])
        if fact.record_error:
            reasons.append(f"the hash record is unreadable ({fact.record_error})")
        if fact.running:
            reasons.append(f"a download runs (pid {fact.running}) and is joined")
        reason = "; ".join(reasons)
        verb = "verify" if to_fetch == 0 else "download"
        return Plan.change(
            reason,
            Change(
                f"{verb} {len(left)} files, {size_text(to_fetch or there)}, to {path}",
                reason,
                self._action(want),
                undo="what was there stays; wrong files are renamed to NAME.bad",
            ),
        )

    @staticmethod
    def _action(want: Deployment) -> Procedure:
        rules = want.playbook.download
        floor = ""
        if rules.floor_bytes_per_s:
            floor = (
                f"below {size_text(rules.floor_bytes_per_s)}/s over {rules.floor_window_s:g} s, "
            )
        return Procedure(
            want.guest,
            f"job {job_name(want)}: {methods_text(want)}; into NAME.part, sha256 while receiving, "
            f"renamed when right. A method without a byte for {rules.stall_s:g} s, {floor}or "
            f"{rules.phase_s:g} s without getting to bytes is killed, the bytes stay, and the next "
            f"goes on; {rules.stalls_per_method} kills bar it. "
            f"A job that vanishes is started again, at most {rules.max_restarts} times",
        )


def _pin(context: StepContext) -> Manifest:
    """Asks the Hub for the file list and records it. Raises HubError."""
    token = context.environ.get(context.want.playbook.download.token_env) or None
    manifest = hub.fetch_manifest(context.want.playbook, token)
    context.state.manifest = manifest
    context.save()
    total = size_text(sum(file.size for file in manifest.files))
    context.note(
        f"{manifest.repo} {manifest.asked} is {manifest.commit[:12]}: "
        f"{len(manifest.files)} files, {total}"
    )
    return manifest


def methods_text(want: Deployment) -> str:
    """The methods that the playbook allows and feeds, in their order; hf-xet knows no limit."""
    rules = want.playbook.download
    endpoint = rules.target_endpoint or rules.endpoint
    limit = ""
    if rules.bwlimit_bytes_per_s:
        limit = f", at most {size_text(rules.bwlimit_bytes_per_s)}/s"
    said = {
        "range": f"range requests to {endpoint} ({rules.connections} at a time{limit})",
        "hf-xet": "" if limit else "hf-xet from the venv",
        "mirror": f"range requests to {', '.join(rules.mirrors)}" if rules.mirrors else "",
        "peer": f"rsync from {rules.peer.user}@{rules.peer.address}" if rules.peer else "",
    }
    return ", then ".join(said[method] for method in rules.methods if said[method])
