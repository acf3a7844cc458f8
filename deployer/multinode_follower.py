"""A node of rank 1 or more of one server: its part of the launch, started, looked at and ended.

As in SGLang 0.5.11 (entrypoints/engine.py, `_launch_subprocesses`), it runs its schedulers and,
once these are ready, a health server on the port; it names no model.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.errors import REFUSALS, Unreachable
from deployer.model import Facts
from deployer.remote.jobs import JobIdentity, JobStatus
from deployer.sglang.argv import command, server_argv
from deployer.sglang.derive import Seen
from deployer.sglang.failure import Failure
from deployer.state import Launch, Manifest
from deployer.steps.base import StepContext
from deployer.steps.launch import LaunchStep
from deployer.steps.launch_restore import as_launched, by_itself, command_of, note_of
from deployer.steps.launch_start import SeenBefore, start_command
from deployer.steps.launch_wait import LOST_S, LaunchFailed, LaunchWait
from deployer.steps.server_facts import ServerFact, ServerJob
from deployer.steps.server_wanted import DERIVED, LaunchNote, Rung, server_job_name

PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|remote process exited|Broken pipe"
    r"|ncclRemoteError|connectFullMesh failed|client socket has|failed to (?:connect|recv)"
    r"|wait timeout after|clients joined|gloo/transport/(?!.*\b127\.).*Connection refused"
    r"|Watchdog caught collective operation timeout|ProcessGroupNCCL watchdog hang"
    r"|\"should dump\" flag on TCPStore",
    re.IGNORECASE,
)
"""Of torch, gloo and NCCL: another rank is gone, which is no cause of its own."""
HEALTH_SERVER_FAILED = re.compile(
    r"\[Errno \d+\] error while attempting to bind on address .*"
    r"|Dummy health check server (?:failed to start: .*|stopped at \S+)"
)
"""SGLang 0.5.11, `launch_dummy_health_check_server`: it ends in a thread of its own. uvicorn leaves
by SystemExit when the port is taken, so that `failed to start` is not said then (tried)."""


@dataclass
class Follower:
    """A node of rank 1 or more. `step` has planned with its own facts."""

    context: StepContext
    step: LaunchStep
    facts: Facts = dataclasses.field(default_factory=Facts)
    wait: FollowerWait | None = None
    launch: Launch | None = None
    active: StepContext | None = None
    """What the launch that runs was started with."""

    @property
    def want(self) -> Deployment:
        """Its deployment."""
        return self.context.want

    @property
    def label(self) -> str:
        """`rank 1 on kpro6`."""
        rank = self.want.node.rank if self.want.node is not None else 0
        return f"rank {rank} on {self.want.host_name}"

    def joins(self, job: JobIdentity, launch: Launch, key: str, step: LaunchStep) -> None:
        """Follows what was found running."""
        self._follows(self.context, job, launch, key, step)

    def start(self, rung: Rung, note: LaunchNote, key: str, shared: str, step: LaunchStep) -> None:
        """Starts its part of the launch `shared`. Raises StepFailed."""
        context = self.context
        want, manifest = rung.deployment(context.want), context.state.manifest
        seen = dataclasses.replace(self.step.seen, launch=shared)
        note = marked(context.want, manifest, note)
        argv, mark = command(want, server_argv(want)), rung.fingerprint(context.want, manifest)
        job, launch = start_command(context, argv, mark, note, key, seen)
        self._follows(context, job, launch, key, step)

    def start_again(self, good: Launch, key: str, shared: str, step: LaunchStep) -> None:
        """Starts what it had in an earlier launch. Raises StepFailed."""
        then = copy.copy(self.context)
        then.want = as_launched(self.context.want, good)
        seen = SeenBefore(self.step.seen.weights, good.venv, good.recipe, shared)
        note = note_of(good, by_itself(self.context.state, good))
        job, launch = start_command(then, command_of(good), good.fingerprint, note, key, seen)
        self._follows(then, job, launch, key, step)

    def end(self, cls: str) -> None:
        """Nothing of its part stays behind. Raises StepFailed."""
        if self.active is None or self.wait is None or self.launch is None:
            return
        failed = Failure(cls, "", "", False)
        # Told as alive: then what it holds is cleared, whatever it died of.
        error = LaunchFailed(failed, None, self.wait.log.phase, (), self.wait.seen())
        self.step.give_up(self.active, self.wait.job, self.launch, error)
        self.active = self.wait = self.launch = None

    def prune(self) -> None:
        """Removes old launches' folders, as rank 0's are."""
        keep = self.want.playbook.serve.keep_launches
        gone = self.context.jobs(self.want.guest).prune(server_job_name(self.want), keep)
        if gone:
            self.context.note(f"removed {len(gone)} old launch folders (serve.keep_launches)")

    def earlier(self, launch_id: str) -> Launch | None:
        """Its part of an earlier launch."""
        return next((one for one in self.context.state.launches if one.id == launch_id), None)

    def _follows(
        self, context: StepContext, job: JobIdentity, launch: Launch, key: str, step: LaunchStep
    ) -> None:
        self.active, self.launch = context, launch
        self.wait = FollowerWait(context, job, key, step.now, step.sleep, label=self.label)


@dataclass
class FollowerWait(LaunchWait):
    """One follower, looked at between two looks at rank 0."""

    label: str = ""
    inode: int = 0
    offset: int = 0
    lost: float | None = None
    status: JobStatus | None = None

    def beat(self) -> bool:
        """Whether it lives, as far as it can be asked. Raises Unreachable after LOST_S."""
        if self.status is not None and not self.status.alive:
            return False
        try:
            status = self.context.jobs(self.context.want.guest).poll(
                self.job, inode=self.inode, offset=self.offset
            )
        except REFUSALS:
            raise
        except Unreachable:
            self.lost = self.now() if self.lost is None else self.lost
            if self.now() - self.lost > LOST_S:
                raise
            return True
        self.lost = None
        self.inode, self.offset, self.status = status.inode, status.offset, status
        self.log.feed(status.log)
        if not status.alive:
            self.status = self._rest(status)
        return status.alive

    def failure(self) -> LaunchFailed:
        """Why it is dead; told as of this node."""
        if self.status is None:
            raise ValueError(f"{self.label} was not asked")
        return self._labelled(self._dead(self.status))

    def late(self) -> LaunchFailed:
        """It lives and its port does not answer."""
        failure = Failure(
            "not-ready-in-time",
            f"it does not listen on port {self.context.want.port}",
            f"read `deploy logs {self.context.want.id}`",
            False,
        )
        return self._labelled(self._failed(failure, None))

    def _labelled(self, error: LaunchFailed) -> LaunchFailed:
        told = dataclasses.replace(
            error.failure, cause_line=f"{self.label}: {error.failure.cause_line or 'no last word'}"
        )
        lines = tuple(f"{self.label}: {line}" for line in error.evidence)
        return LaunchFailed(told, error.exit_code, error.phase, lines, error.seen)

    def seen(self) -> Seen:
        """What its log told of memory."""
        free, use = self.log.free_before.values(), self.log.weight_use.values()
        return Seen(min(free, default=None), max(use, default=None))

    def listens(self) -> bool:
        """Has its health server come up, on a port of its own?

        Raises LaunchFailed when it never will: its schedulers live on without it.
        """
        answer = self._ask_if_there("ready") or {}
        if answer.get("ok") and answer.get("owned") and answer.get("health") == 200:
            return True
        try:
            self._refuse_stranger(answer)
        except LaunchFailed as error:
            raise self._labelled(error) from error
        if said := HEALTH_SERVER_FAILED.search(self.log.text()):
            failure = Failure(
                "port-in-use",
                said[0].strip(),
                f"`ss -tanp` there tells who uses port {self.context.want.port}; or choose another "
                "serve.port",
                False,
            )
            raise self._labelled(self._failed(failure, None))
        return False


def job_of(facts: Facts) -> ServerJob | None:
    """The node's job, when it is alive."""
    server = facts.get(ServerFact)
    job = server.job if server is not None else None
    return job if job is not None and job.alive else None


def marked(want: Deployment, manifest: Manifest | None, note: LaunchNote) -> LaunchNote:
    """The note of rank 0 with the fingerprints of this node; of derived rungs they are not kept."""
    marks = tuple(
        Rung(name).fingerprint(want, manifest) if mark and DERIVED not in name else ""
        for name, mark in zip(note.fell_from, note.marks, strict=False)
    )
    return dataclasses.replace(note, marks=marks)


def only_misses_a_peer(error: LaunchFailed) -> bool:
    """Does it tell no more than that another rank is gone?"""
    return bool(PEER_LOST.search(error.failure.cause_line))
