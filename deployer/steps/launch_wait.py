"""Follows one launch until it serves, or until it is known that it will not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deployer.errors import REFUSALS, StepFailed, Unreachable
from deployer.remote.job_scripts import LOG_CHUNK
from deployer.remote.jobs import JobIdentity, JobStatus
from deployer.sglang.derive import Seen
from deployer.sglang.failures import Failure, classify, fatal_while_alive, telling_lines
from deployer.sglang.hostfacts import WEIGHED, HostFacts, weigh
from deployer.sglang.log import LaunchLog
from deployer.steps.base import StepContext
from deployer.steps.launch_clock import PhaseClock
from deployer.steps.launch_evidence import Evidence
from deployer.steps.launch_workers import Workers
from deployer.steps.server_agent import Record, ask

EARLY = frozenset({"starting", "args"})
"""Phases before the first worker."""
LOST_S = 120.0
"""How long the connection may be away before the run gives up; the job lives on."""
ASK_EVERY_S = 3.0
ASK_TIMEOUT_S = 40.0
LOOK_EVERY_S = 10.0
"""How often the workers are looked at while the server does not answer yet."""
ORPHANED_S = 5.0
"""A server that sees a worker die ends itself within some 2 s, and its log then says why."""
AGENT_TRIES = 5
"""So often in a row the agent may fail: a machine that is full while weights load has no room."""
TELL_EVERY_S = 5.0
"""A wait is told also when nothing moves: who reads sees it, and an interrupt ends it there."""


class LaunchFailed(Exception):
    """This launch will not serve. `exit_code` None: its process still lived."""

    def __init__(
        self,
        failure: Failure,
        exit_code: int | None,
        phase: str,
        evidence: tuple[str, ...],
        seen: Seen,
    ) -> None:
        super().__init__(failure.cause_line or failure.cls)
        self.failure = failure
        self.exit_code = exit_code
        self.phase = phase
        self.evidence = evidence
        self.seen = seen


@dataclass
class LaunchWait:
    """The wait for one launch. Reads only this launch's own log, from its first byte."""

    context: StepContext
    job: JobIdentity
    api_key: str = ""
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    log: LaunchLog = field(default_factory=LaunchLog)
    workers: Workers = field(default_factory=Workers)
    agent_failures: int = 0
    unread: str = ""
    """Why the end of the log could not be read; '' when it was."""

    def until_ready(self) -> Record:
        """The agent's answer that proves it: our pid, our port, our model, /health 200.

        Raises LaunchFailed with a classified cause.
        """
        serve = self.context.want.playbook.serve
        ends = self.now() + serve.ready_timeout_s
        heard = told = self.now()
        asked = looked = -LOOK_EVERY_S
        clock = PhaseClock(serve.phases, self.now())
        inode = offset = 0
        lost: float | None = None
        while True:
            try:
                status = self.context.jobs(self.context.want.guest).poll(
                    self.job, inode=inode, offset=offset
                )
                lost = None
            except REFUSALS:
                raise
            except Unreachable:
                # Also a new connection that is refused: the target may be restarting its network.
                lost = self.now() if lost is None else lost
                away = self.now() - lost
                if away > LOST_S:
                    raise
                self.context.progress("the target does not answer", away, LOST_S, "s")
                self.sleep(2.0)
                continue
            inode, offset = status.inode, status.offset
            if status.log:
                heard = self.now()
            if self.log.feed(status.log) or self.now() - told >= TELL_EVERY_S:
                told = self.now()
                self._tell(told - heard)
            if not status.alive:
                raise self._dead(self._rest(status))
            if fatal_while_alive(self.log.text()):
                raise self._failed(classify(self.log.text(), None, self.log.phase), None)
            answering = self.log.phase in {"warmup", "ready"} or self.now() - heard > 5
            if answering and self.now() - asked >= ASK_EVERY_S:
                asked = looked = self.now()
                answer = self._ask_if_there("ready")
                if answer is not None:
                    if is_ready(answer, self.context.want.playbook.model.served_name):
                        # It may have come up while it was asked: its figures are in the rest.
                        self._rest(status)
                        return answer
                    self._refuse_stranger(answer)
            elif self.log.phase not in EARLY and self.now() - looked >= LOOK_EVERY_S:
                looked = self.now()
                self._ask_if_there("identity")
            if self.workers.lost_s(self.now()) > ORPHANED_S:
                raise self._failed(self.workers.failure(), None)
            if overdue := clock.overdue(self.log, self.now()):
                raise self._failed(overdue, None)
            if self.now() - heard > serve.silence_timeout_s:
                raise self._failed(_silent(serve.silence_timeout_s, self.log), None)
            if self.now() >= ends:
                raise self._failed(_late(serve.ready_timeout_s, self.log), None)
            if len(status.log) < LOG_CHUNK:
                self.sleep(1.0)

    def _rest(self, status: JobStatus) -> JobStatus:
        """Reads what the log holds by now; over a cut connection as far as it is had in time."""
        ends = self.now() + LOST_S
        while True:
            try:
                status = self.context.jobs(self.context.want.guest).poll(
                    self.job, inode=status.inode, offset=status.offset
                )
            except REFUSALS:
                raise
            except Unreachable as error:
                if self.now() >= ends:
                    self.unread = error.what
                    return status
                away = LOST_S - (ends - self.now())
                self.context.progress("the target does not answer", away, LOST_S, "s")
                self.sleep(2.0)
                continue
            self.log.feed(status.log)
            if len(status.log) < LOG_CHUNK or self.now() >= ends:
                return status

    def _tell(self, silent_s: float) -> None:
        what, done, total, unit = self.log.progress()
        silence = f", no new line for {silent_s:.0f} s" if silent_s >= TELL_EVERY_S else ""
        self.context.progress(what, done, total, unit, f"launch {self.job.id}{silence}")

    def _ask_if_there(self, do: str) -> Record | None:
        """The agent's answer; None when the connection failed: the next poll asks for how long."""
        try:
            answer = self._ask(do)
            self.agent_failures = 0
            self.workers.look(answer, self.now())
            return answer
        except REFUSALS:
            raise
        except (StepFailed, Unreachable) as error:
            self.agent_failures += isinstance(error, StepFailed)
            if self.agent_failures >= AGENT_TRIES:
                raise
            self.context.note(f"the server could not be asked, trying again: {error}", "warning")
            return None

    def _ask(self, do: str) -> Record:
        command = {
            "do": do,
            "pid": self.job.pid,
            "start": self.job.start,
            "boot": self.job.boot,
            "session": self.job.session,
            "timeout_s": 25,
        }
        context = self.context
        return ask(
            context.on(context.want.guest),
            context.want,
            [command],
            timeout_s=ASK_TIMEOUT_S + 30,
            api_key=self.api_key,
        )[0]

    def _refuse_stranger(self, answer: Record) -> None:
        """A port of somebody else never becomes ours: SGLang does not even exit (seen)."""
        strangers = answer.get("owners") or []
        if answer.get("listening") and not answer.get("owned") and answer.get("alive"):
            ours = {member["pid"] for member in answer.get("members", [])}
            named = [one for one in strangers if one["pid"] not in ours]
            if named:
                told = f"pid {named[0]['pid']}: {named[0]['title'][:200]}"
                failure = Failure(
                    "port-in-use",
                    f"port {self.context.want.port} is held by {told}",
                    "stop that process, or choose another serve.port",
                    False,
                )
                raise self._failed(failure, None)
        models = answer.get("models") or {}
        served = self.context.want.playbook.model.served_name
        if models.get("status") == 200 and served not in models.get("ids", []):
            failure = Failure(
                "wrong-model",
                f"/v1/models says {models.get('ids')}, not {served}",
                "see model.served_name in the playbook",
                False,
            )
            raise self._failed(failure, None)
        if models.get("status") == 401:
            failure = Failure(
                "unauthorized", "", "the API key sent is not the server's: `deploy restart`", False
            )
            raise self._failed(failure, None)

    def _dead(self, status: JobStatus) -> LaunchFailed:
        return self._failed(classify(self.log.text(), status.exit, self.log.phase), status.exit)

    def _failed(self, failure: Failure, exit_code: int | None) -> LaunchFailed:
        """With the word of the machine, asked before anything of the launch is ended."""
        evidence = Evidence(self.context, self.job)
        host = evidence.gather() if failure.cls in WEIGHED else HostFacts()
        said = failure.cause_line
        failure = weigh(failure, exit_code, host)
        lines = telling_lines(self.log.text())
        if said and said not in lines:
            lines = (said, *lines)
        lines = (*lines, *host.lines(), *(f"not asked: {one}" for one in evidence.problems))
        if self.unread:
            lines = (*lines, f"the end of the log was not read: {self.unread}")
        if failure.cause_line and failure.cause_line not in lines:
            lines = (*lines, failure.cause_line)
        free, use = self.log.free_before.values(), self.log.weight_use.values()
        seen = Seen(min(free, default=None), max(use, default=None))
        return LaunchFailed(failure, exit_code, self.log.phase, lines, seen)


def is_ready(answer: Record, served_name: str) -> bool:
    """Does the agent's answer to `ready` prove that our server serves our model?"""
    models = answer.get("models") or {}
    return bool(
        answer.get("ok")
        and answer.get("owned")
        and served_name in models.get("ids", [])
        and answer.get("health") == 200
    )


def _silent(seconds: float, log: LaunchLog) -> Failure:
    return Failure(
        "silent",
        "",
        f"no new log line for {seconds:g} s in phase `{log.phase}`: a hang; another variant may "
        "pass (in `distributed` try serve.env NCCL_P2P_DISABLE: '1')",
        log.phase not in {"starting", "args", "tokenizer", "distributed"},
    )


def _late(seconds: float, log: LaunchLog) -> Failure:
    return Failure(
        "not-ready-in-time",
        "",
        f"not ready after {seconds:g} s, phase `{log.phase}`: raise serve.ready_timeout_s if it "
        "still makes progress",
        False,
    )
