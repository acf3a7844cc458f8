"""Follows the download job: one exec that streams a line a second, joined again when it is lost.

No process is started a second. What cannot stream (no agent in the job's folder, an old one) is
polled instead, and that is said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from deployer import errors
from deployer.agents.bundle import NAME
from deployer.remote.jobs import LOST_S, JobIdentity, Jobs, JobStatus
from deployer.steps.base import StepContext
from deployer.steps.shards_facts import find_python
from deployer.steps.shards_figures import Figures, read_figures

LONGEST_S = 7 * 86400.0
"""Of one job, and so of one wait for it."""
ATTACH_S = 30
"""Of one exec: a connection that fell silent is noticed after this and the slack."""
SLACK_S = 10.0
RETRY_S = 1.0
POOR_EXECS = 3
"""So many execs in a row that end early or badly: polled from then on."""
MUTE_LOOKS = 10
"""A supervisor is mute after so many looks without a tick; one look may follow a long silence."""
EMIT_EVERY_S = 1.0
LOG_TAIL = 8192
LONGEST_LINE = 16 * 1024 * 1024

_WARNING = " warning: "
_CLOCK = len("12:00:00")


class Mute(Exception):
    """The job lives, but its supervisor has given no sign of life for too long."""


def mute_after(stall_s: float) -> float:
    """How long the supervisor on the target, which ticks every second, may be silent."""
    return max(30.0, 2 * stall_s)


class Watch:
    """Sees every status of the job: emits progress and warnings, keeps the log's tail.

    The watchdog is the supervisor on the target. This one is for a supervisor that is mute.
    `done` and `total` in bytes.
    """

    def __init__(
        self,
        context: StepContext,
        mute_s: float,
        clock: Callable[[], float] = time.monotonic,
        earlier: bytes = b"",
    ) -> None:
        """`earlier`: the end of the log as it was when an already running job was joined."""
        self.context, self.mute_s, self.clock = context, mute_s, clock
        self.figures = Figures()
        self.tail = earlier[-LOG_TAIL:]
        self._line = self.tail.rpartition(b"\n")[2]
        self._sign: object = None
        self._since, self._looks = clock(), 0
        self._emitted = -EMIT_EVERY_S
        self._unsaid = False

    @property
    def done(self) -> int:
        """Valid bytes on the target."""
        return self.figures.done

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self.figures.total

    def see(self, status: JobStatus) -> None:
        """Raises Mute."""
        self._read(status.log)
        figures = read_figures(status.progress)
        sign: object = (status.progress, status.offset)
        if figures is not None and figures.tick < self.figures.tick:
            figures, sign = None, self._sign
        if figures is not None:
            self._unsaid = self._unsaid or figures != self.figures
            self.figures = figures
            sign = figures.tick if figures.tick >= 0 else sign
        now = self.clock()
        if sign != self._sign:
            self._sign, self._since, self._looks = sign, now, 0
        else:
            self._looks += 1
        if figures is not None and (now - self._emitted >= EMIT_EVERY_S or not status.alive):
            self._emit(now)
        if status.alive and now - self._since > self.mute_s and self._looks >= MUTE_LOOKS:
            raise Mute

    def lines(self, count: int) -> tuple[str, ...]:
        """The last lines of the job's log."""
        return tuple(self.tail.decode("utf-8", "replace").splitlines()[-count:])

    def _emit(self, now: float) -> None:
        if not self._unsaid:
            return
        self._emitted, self._unsaid = now, False
        told = self.figures
        self.context.progress(
            "download",
            told.done,
            told.total,
            "bytes",
            told.words(),
            parts=told.parts,
            figures=told.mapping(),
        )

    def _read(self, log: bytes) -> None:
        """Each whole line once; a cut one waits for its rest."""
        self.tail = (self.tail + log)[-LOG_TAIL:]
        *whole, rest = (self._line + log).split(b"\n")
        self._line = rest[-LOG_TAIL:]
        for raw in whole:
            line = raw.decode("utf-8", "replace").rstrip("\r")
            if line[_CLOCK:].startswith(_WARNING) and line[:_CLOCK].count(":") == 2:
                self.context.note(line[_CLOCK + len(_WARNING) :], "warning")


class Stream:
    """The lines of `attach` as statuses, however they are cut; nothing of the log twice.

    `inode` and `offset`: where the log was read to, and where the next exec goes on.
    """

    def __init__(self, job: JobIdentity, inode: int = 0, offset: int = 0) -> None:
        self.job, self.inode, self.offset = job, inode, offset
        self.count = 0
        """Lines of this exec."""
        self.ended = False
        self._pending = b""

    def begin(self) -> None:
        """A new exec: half a line of the one before is no line."""
        self.count, self._pending = 0, b""

    def feed(self, data: bytes) -> list[JobStatus]:
        """The statuses that `data` completes."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > LONGEST_LINE:
            self._pending = b""
        return [status for line in lines if (status := self._status(line)) is not None]

    def _status(self, line: bytes) -> JobStatus | None:
        """None for what is no line of `attach`, and for one that is older than the last."""
        try:
            row = json.loads(line.decode("utf-8", "replace"))
            alive, ended = row["alive"], row["exit"]
            inode, offset = row["inode"], row["offset"]
            text, progress = row["log"], row["progress"]
        except (ValueError, KeyError, TypeError):
            return None
        if not (isinstance(alive, bool) and isinstance(text, str) and isinstance(progress, str)):
            return None
        if not (_is_int(inode) and _is_int(offset) and (ended is None or _is_int(ended))):
            return None
        self.count += 1
        log = _raw(text)
        if inode == self.inode:
            if offset < self.offset:
                return None
            if offset == self.offset:
                log = b""
        self.inode, self.offset = inode, offset
        self.ended = not alive or ended is not None
        return JobStatus(self.job, not self.ended, ended, log, inode, offset, progress.strip())


def follow(
    context: StepContext,
    jobs: Jobs,
    watch: Watch,
    stream: Stream,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> JobStatus:
    """Waits for the job's end. Raises Mute, JobOverdue, and Unreachable when the target is lost.

    A connection that is lost meanwhile is made again for LOST_S; the job does not notice.
    """
    job = stream.job
    folder = f"{jobs.root}/{job.name}/{job.id}"
    script = attach_script(context.want.playbook.engine.venv)
    began = clock()
    lost: float | None = None
    poor = 0

    def take(data: bytes) -> None:
        for status in stream.feed(data):
            watch.see(status)

    while not stream.ended and clock() - began < LONGEST_S:
        stream.begin()
        asked = clock()
        try:
            answer = jobs.transport.run(
                script,
                args=(folder, str(stream.inode), str(stream.offset), str(ATTACH_S)),
                timeout_s=ATTACH_S + SLACK_S,
                on_stdout=take,
            )
        except errors.REFUSALS:
            raise
        except errors.Unreachable as error:
            now = clock()
            if lost is None or stream.count:
                lost = now
                context.note(f"the target is lost, the download goes on there: {error.what}")
            if now - lost >= LOST_S:
                raise
            sleep(RETRY_S)
            continue
        lost = None
        early = clock() - asked < ATTACH_S / 2 and not stream.ended
        poor = poor + 1 if answer.exit != 0 or not stream.count or early else 0
        if (answer.exit != 0 and not stream.count) or poor >= POOR_EXECS:
            said = answer.error_text.strip().splitlines() or [f"exit {answer.exit}"]
            context.note(f"the download cannot be streamed, so it is polled: {said[-1][:200]}")
            break
        if early:
            sleep(RETRY_S)
    # What ended is asked once more by the job mechanism itself: its word on the exit counts.
    return jobs.follow(
        job,
        timeout_s=max(0.0, LONGEST_S - (clock() - began)),
        stall_s=LONGEST_S,
        on_status=watch.see,
        inode=stream.inode,
        offset=stream.offset,
    )


def attach_script(venv: str) -> str:
    """sh text that becomes the agent in its attach mode; "$1" is the job's folder."""
    return (
        find_python(venv)
        + '[ -n "$py" ] || { echo "no python3 (3.9 or newer) on this machine" >&2; exit 127; }\n'
        + f'[ -f "$1/{NAME}" ] || {{ echo "there is no $1/{NAME}" >&2; exit 127; }}\n'
        + f'exec "$py" -I -S "$1/{NAME}" attach "$@"\n'
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _raw(text: str) -> bytes:
    """The log's bytes again: what was no UTF-8 may have travelled as lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")
