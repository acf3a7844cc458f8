"""What a whole log file of SGLang shows: a server that got ready, a failure, or neither. Pure.

Reads the log of anybody's launch: bytes from a file of which only the head and the tail may be at
hand, with the stamps of journald or a container runtime before the lines, several launches in a
row. "Ready" is only what the log claims: readiness is proven by asking the server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from deployer.sglang.carriers import uncarried
from deployer.sglang.endings import as_signal, told_exit
from deployer.sglang.failures import EXCEPTION, TRAFFIC, Failure, classify, telling_lines
from deployer.sglang.log import ANY_MARK, COLOUR, READY_LINE, LaunchLog

READY, STOPPED = "ready", "stopped"
FAILED, UNFINISHED, UNKNOWN = "failed", "unfinished", "unknown"

BEGIN = re.compile(r"'python -m sglang\.launch_server' is still supported")
ARGS = re.compile(r"\bserver_args=(?:ServerArgs\(|\{)")
DEATH = re.compile(
    r"[Rr]eceived sigquit|SIGQUIT received|SIGTERM received|crashed with exit code"
    r"|Scheduler or DataParallelController \d+ terminated with "
    r"|^\[[^\]]*\] (?:Scheduler|\w+Manager|DataParallelController) hit an exception"
    r"|[Ww]atchdog timeout \(|Initialization failed\. warmup error: "
    r"|Fatal Python error: |CUDA error: |terminate called after throwing"
    r"|\[Errno 98\].*address already in use|DistBackendError"
    r"|^[\w. ]+: error: (?:unrecognized|argument|ambiguous|the following)"
)
"""Lines after which the launch is over, or can never be ready."""
LOST_PORT = re.compile(r"\[Errno (?:98|99)\].*(?:bind|address)")
"""The port went to somebody else: a ready line after it speaks of the other's server."""
SGLANG = re.compile(r"sglang|server_args=|^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
RAISED = EXCEPTION


ASKED = re.compile(r"SIGTERM received\.")
REQUEST = re.compile(r"^\[[^\]]*\] (?:Receive|Finish): ")
"""A logged request: its text is a client's, not the server's."""
EMPTY = "is it the right file? If its process has ended, say how: --exit CODE"
RECENT = 12
"""How many last lines may hold the exception that ended a log without a word of its end."""


@dataclass(frozen=True)
class Line:
    """`number` counts line feeds from 1; 0 where bytes before it were not read."""

    number: int
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """`outcome`: ready, stopped (ready, then told to stop), failed, unfinished or unknown.

    `phase` is a word of `log.PHASES`. `failure` is None where none was found. `line` counts
    line feeds from 1; 0 where it is not known. `launches` is how many launches the text shows; the
    last is explained.
    """

    outcome: str
    phase: str
    failure: Failure | None
    line: int
    telling: tuple[str, ...]
    figures: dict[str, float]
    launches: int
    progress: str


def diagnose(head: bytes, tail: bytes = b"", exit_code: int | None = None) -> Diagnosis:
    """Explains the log whose first and last bytes are given (`tail` empty: `head` is all of it).

    `exit_code` is the one of the process: 0..255, or -n for signal n; None when not known.
    """
    if exit_code is not None:
        exit_code = as_signal(exit_code)
    lines = clean(head)
    if tail:
        # The last line of the head and the first of the tail are cut in their middle.
        lines = [*lines[:-1], *(replace(line, number=0) for line in clean(tail)[1:])]
    begin, launches = _last_launch(lines)
    own = [line for line in lines[begin:] if line.text.strip() and not _is_traffic(line.text)]
    ready = next((i for i, line in enumerate(own) if READY_LINE.match(line.text)), None)
    if ready is not None and any(LOST_PORT.search(line.text) for line in own[:ready]):
        own = own[:ready]
        ready = None
    judged = own if ready is None else own[ready:]
    log = _read(own if ready is None else own[: ready + 1])
    if exit_code is None:
        exit_code = told_exit([line.text for line in judged])
    judged = _until_asked(judged)
    dead = any(DEATH.search(line.text) for line in judged)
    if ready is not None and not dead and exit_code in (None, 0):
        return Diagnosis(READY, "ready", None, 0, (), log.figures, launches, "")
    over = dead or exit_code is not None or any(_raised(line) for line in judged[-RECENT:])
    if not over:
        judged = judged[_last_advance(judged) :]
    failure = classify("\n".join(line.text for line in judged), exit_code, log.phase)
    if not own and exit_code is None:
        failure = replace(failure, action=EMPTY)
    outcome = _outcome(failure, over, any(SGLANG.search(line.text) for line in own))
    if ready is not None and failure.cls == "asked-to-stop":
        outcome = STOPPED
    return Diagnosis(
        outcome,
        log.phase,
        None if outcome == UNFINISHED else failure,
        0 if outcome == UNFINISHED else _number(judged, failure.cause_line),
        telling_lines("\n".join(line.text for line in own)),
        log.figures,
        launches,
        _progress(log),
    )


def _until_asked(lines: list[Line]) -> list[Line]:
    """Up to the SIGTERM, where nothing had failed before it: what dies later was told to."""
    for i, line in enumerate(lines):
        if ASKED.search(line.text):
            return lines[: i + 1]
        if DEATH.search(line.text):
            break
    return lines


def _last_advance(lines: list[Line]) -> int:
    """Where the launch went on last: what stands before did not end it."""
    for i in range(len(lines) - 1, -1, -1):
        if ANY_MARK.search(lines[i].text):
            return i
    return 0


def _is_traffic(text: str) -> bool:
    return bool(TRAFFIC.search(text) or REQUEST.search(text))


def _raised(line: Line) -> bool:
    return bool(RAISED.match(line.text))


def clean(data: bytes) -> list[Line]:
    """The lines, without colours and without the stamps of those who carried them."""
    text = COLOUR.sub("", data.decode("utf-8", "replace").replace("\x00", ""))
    return [
        Line(number, piece.rstrip())
        for number, line in enumerate(uncarried(text), 1)
        for piece in line.rstrip("\r").split("\r")
    ]


def _last_launch(lines: list[Line]) -> tuple[int, int]:
    """(index of the last launch's first line, number of launches)."""
    begins = [i for i, line in enumerate(lines) if BEGIN.search(line.text)]
    if not begins:
        begins = [i for i, line in enumerate(lines) if ARGS.search(line.text)]
    if len(begins) < 2:
        return 0, 1
    return begins[-1], len(begins)


def _outcome(failure: Failure, over: bool, is_sglang: bool) -> str:
    if failure.cls == "exception":
        return FAILED if over else UNFINISHED
    if failure.cls not in ("unknown", "died-silent"):
        return FAILED
    if failure.cls == "died-silent":
        return FAILED if over else UNKNOWN
    return UNKNOWN if over or not is_sglang else UNFINISHED


def _progress(log: LaunchLog) -> str:
    what, done, total, unit = log.progress()
    return f"{what}, {done:g} of {total:g} {unit}" if unit != "phases" else what


def _number(lines: list[Line], cause: str) -> int:
    if not cause:
        return 0
    return next((line.number for line in lines if line.text.strip().startswith(cause)), 0)


def _read(lines: list[Line]) -> LaunchLog:
    log = LaunchLog()
    log.feed("".join(f"{line.text}\n" for line in lines).encode("utf-8", "replace"))
    if log.phase == "ready" and not any(READY_LINE.match(line.text) for line in lines):
        log.phase = "warmup"
    return log
