"""`deploy logs`: the log of a launch; -f follows it across rotation and to the next launch."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Callable

import click

from deployer.catalog import Catalog
from deployer.cli.deadline import deadline
from deployer.cli.options import Options, common, complete_target
from deployer.errors import DeployError, Unreachable, UsageError
from deployer.names import listed
from deployer.remote.jobs import LOST_S, JobIdentity, Jobs, JobStatus
from deployer.session import REFUSALS, HostSession
from deployer.sglang.masking import KeyMask
from deployer.steps.server_wanted import server_job_name

EVERY_S = 1.0
GUESS_BYTES = 256
"""Of a line; when it was too little, eight times as much is read."""

Write = Callable[[str], None]


@click.command("logs")
@click.argument("word", metavar="HOST/NAME", shell_complete=complete_target)
@click.option("-f", "--follow", is_flag=True, help="Print what comes, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    metavar="N",
    help="Lines of the log's end to begin with.",
)
@click.option("--launch", metavar="ID", default="", help="This launch (default: the current one).")
@common
def command(options: Options, word: str, follow: bool, lines: int, launch: str) -> int:
    """Print the log of the current launch.

    Only the log is on stdout. HOST alone is enough when it has one deployment. -f goes on across
    rotation and to the next launch, also while no server runs.
    """
    if options.as_json or options.jsonl:
        raise UsageError("logs prints the log as it is", fix="leave out --json and --jsonl")
    deployments = Catalog.load(options.inventory).select([word], whole=False)
    if len(deployments) != 1:
        raise UsageError(
            f"{word} has {len(deployments)} deployments",
            fix=f"name one of {listed([want.id for want in deployments])}",
        )
    [want] = deployments
    session = HostSession(want.host_name, want.host, options.inventory)
    try:
        with deadline(options.timeout):
            jobs = Jobs(session.transports(want)[want.guest])
        reader = LogReader(jobs, server_job_name(want), want.id, _to_stdout, _to_stderr)
        try:
            with deadline(options.timeout):
                reader.begin(launch, lines)
            if follow:
                reader.follow(pinned=bool(launch), timeout_s=options.timeout)
        finally:
            reader.end()
    finally:
        session.close(_to_stderr)
    return 0


class LogReader:
    """Reads the log of a server job; `say` is for what is not the log. API keys are masked."""

    def __init__(
        self,
        jobs: Jobs,
        job_name: str,
        label: str,
        write: Write,
        say: Write,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.jobs = jobs
        self.job_name = job_name
        self.label = label
        self.write = write
        self.say = say
        self.clock = clock
        self.sleep = sleep
        self.told_end = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._mask = KeyMask()
        self._job: JobIdentity | None = None
        self._inode = 0
        self._offset = 0

    def begin(self, launch: str, lines: int) -> None:
        """Prints the last `lines` lines. Raises DeployError when there is no such launch."""
        try:
            status = self.jobs.find(self.job_name, tail_bytes=0, job_id=launch)
        except ValueError:
            raise UsageError(f"{launch!r} is no id of a launch", fix=self._history()) from None
        if status is None and launch:
            raise UsageError(f"launch {launch} is not on the target", fix=self._history())
        if status is None:
            raise DeployError(
                f"no launch of {self.label} is on the target", fix=f"`deploy up {self.label}`"
            )
        self._job, self._inode, self._offset = status.identity, status.inode, status.offset
        self._write(self._tail(status, lines))

    def follow(self, *, pinned: bool, timeout_s: float | None = None) -> None:
        """Prints what comes until it is interrupted; `pinned`: only until this launch has ended.

        A target that does not answer is asked again for a minute.
        """
        began = answered = self.clock()
        while timeout_s is None or self.clock() - began < timeout_s:
            try:
                if self._step(pinned):
                    return
                answered = self.clock()
            except REFUSALS:
                raise
            except Unreachable as error:
                if self.clock() - answered >= LOST_S:
                    raise
                self.say(f"--- {error}; asking again ---")
            self.sleep(EVERY_S)

    def end(self) -> None:
        """Prints what was kept back: half a character, or what may be the start of a key."""
        self._write(b"", final=True)

    def _step(self, pinned: bool) -> bool:
        """One round of following. True when nothing can come any more."""
        if self._job is None:
            raise ValueError("begin comes first")
        status = self._drain(self._job)
        if not status.alive and not self.told_end:
            self.told_end = True
            self.say(f"--- launch {self._job.id} has ended: {_ending(status.exit)} ---")
        if pinned:
            return not status.alive
        newest = self.jobs.find(self.job_name, tail_bytes=0)
        if newest is not None and newest.identity.id != self._job.id:
            # What the old one wrote between the two looks comes first.
            self._drain(self._job)
            self.end()
            self._job, self._inode, self._offset = newest.identity, 0, 0
            self.told_end = False
            self.say(f"--- launch {self._job.id} ---")
            return self._step(pinned)
        return False

    def _drain(self, job: JobIdentity) -> JobStatus:
        """Prints all that is new."""
        while True:
            status = self.jobs.poll(job, inode=self._inode, offset=self._offset)
            self._inode, self._offset = status.inode, status.offset
            self._write(status.log)
            if not status.log:
                return status

    def _tail(self, end: JobStatus, lines: int) -> bytes:
        """The last `lines` lines before the offset of `end`, rotated files included."""
        size = lines * GUESS_BYTES
        while lines:
            asked = max(0, end.offset - size)
            start, text = self._read(end, asked)
            if text.count(b"\n", 0, len(text) - 1) >= lines or start > asked or asked == 0:
                return _last_lines(text, lines)
            size *= 8
        return b""

    def _read(self, end: JobStatus, offset: int) -> tuple[int, bytes]:
        """The log from `offset` (or from the oldest byte that is left) to `end`."""
        parts: list[bytes] = []
        start, inode = -1, end.inode
        while offset < end.offset or start < 0:
            status = self.jobs.poll(end.identity, inode=inode, offset=offset)
            if start < 0:
                start = status.offset - len(status.log)
            inode, offset = status.inode, status.offset
            parts.append(status.log)
            if not status.log:
                break
        text = b"".join(parts)
        return start, text[: max(0, end.offset - start)]

    def _write(self, raw: bytes, *, final: bool = False) -> None:
        text = self._mask.feed(self._decoder.decode(raw, final))
        if final:
            text += self._mask.flush()
        if text:
            self.write(text)

    def _history(self) -> str:
        return f"see `deploy history {self.label}`; old launches are removed (serve.keep_launches)"


def _last_lines(text: bytes, count: int) -> bytes:
    """The last `count` lines; only LF ends a line (a progress bar writes many CR)."""
    rows = text.split(b"\n")
    ended = rows[-1] == b""
    return b"\n".join(rows[-count - 1 :] if ended else rows[-count:])


def _ending(code: int | None) -> str:
    if code is None:
        return "it vanished without writing its end"
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _to_stdout(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)
