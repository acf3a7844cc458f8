"""Why a launch failed: classes of failures by log text and exit code. Pure.

The table is read top down; the first rule whose text is in the log of THIS launch names the cause.
SGLang's own headlines ("Received sigquit from a child process", "SIGQUIT received") name none.
"""

from __future__ import annotations

import re

from deployer.sglang.endings import is_end
from deployer.sglang.failure import Failure
from deployer.sglang.failure_rule import Lines, Rule
from deployer.sglang.failure_rules import PLACES, RULES
from deployer.sglang.hostfacts import HostFacts, weigh
from deployer.sglang.log import ANY_MARK, PHASES, is_bar, plain

__all__ = ["Failure", "classify", "fatal_while_alive", "telling_lines"]

MISLEADING = re.compile(
    r"[Ss]igquit (?:received|from a child)|SIGQUIT received|Received sigquit"
    r"|CUDA kernel errors might be asynchronously|For debugging consider passing CUDA_LAUNCH"
    r"|Compile with `TORCH_USE_CUDA_DSA`|leaked semaphore|resource_tracker: |Ignore import error"
    r"|still supported, but 'sglang serve'|warnings\.warn\(|Gracefully exiting"
    r"|Example: sglang serve|server_args=(?:ServerArgs|\{)|has no attribute 'path'"
    r"|\[http_server\] Error: "
)
"""Lines that are never shown as a cause."""
HEADLINE = re.compile(
    r"[Ss]igquit|SIGQUIT|hit an exception: Trace|scheduler (?:is dead|died during)"
    r"|Initialization failed\. warmup error: "
)
"""The server ended itself: its signal 9 is its own."""
NOISE = re.compile(
    r'INFO: .* HTTP/1\.1"|^\s*(?:File "|\^+$|raise |~+)|^Traceback |^\s{4,}\S|^usage: |^\s+\[--'
)
TRAFFIC = re.compile(r'INFO: .* HTTP/1\.1"|Prefill batch,|Decode batch,|^\s*[\^~]+\s*$')
MAX_LINE = 500


EXCEPTION = re.compile(
    r"^(?:(?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*(?:Error|Interrupt)|[A-Z]?\w*Exception)(?:: ?.*|\s*$)"
    # Not every error is called one: requests.exceptions.ReadTimeout, pynvml.NVMLError_Unknown.
    r"|(?:[a-z_]\w*\.)+[A-Z]\w+: \S)"
)
CONSEQUENCE = re.compile(r"^(?:EOFError|\w*BrokenPipeError)\b|scheduler died during initialization")
"""What the others raise when a worker is gone."""
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+)')
BARE = re.compile(r"^\w+:?\s*$")
ASSERTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"assert .*%.*(?:tp|world|dp|ep)_?size|assert .*tp_size.*%"), "tp-size-mismatch"),
    (re.compile(r"assert .*\.(?:shape|size\(\)).*==.*\.(?:shape|size\(\))"), "weights-mismatch"),
)
"""An assertion without a message says in its own words what did not hold."""
NEAR = 4
"""Frames above the error that may name its place."""
FATAL_WHILE_ALIVE = re.compile(
    r"\[Errno 98\].*address already in use|\[Errno 99\].*bind on address"
)
OTHERS_MEMORY = re.compile(r"\bProcess (\d+) has ([\d.]+) GiB memory in use")
"""torch names the other processes on a GPU that is full."""
OTHERS_GIB = 1.0


def classify(
    log_text: str,
    exit_code: int | None,
    phase: str = "starting",
    host: HostFacts | None = None,
) -> Failure:
    """The failure that this log (of one launch only) and this exit code show.

    `exit_code` is 0..255, -n for signal n, None when the process vanished or still runs. `host`:
    what the machine says, when it was asked.
    """
    failure = _by_log(log_text, exit_code, phase)
    return failure if host is None else weigh(failure, exit_code, host)


def _by_log(log_text: str, exit_code: int | None, phase: str) -> Failure:
    lines = _lines(log_text)
    if not [line for line in lines if not is_end(line)]:
        return Failure(
            "died-silent",
            "",
            f"it ended with {_code(exit_code)} before it wrote a word: run the job's script by "
            "hand on the target, and look for the out-of-memory killer in `dmesg`",
            False,
        )
    telling = [line for line in lines if not MISLEADING.search(line)]
    told_all, told_end = Lines(telling), Lines(_after_last_advance(telling))
    for rules, judged in ((FIRM, None), (PASSING, told_all), (LAST, told_all)):
        for rule in rules:
            if rule.phases and not _between(phase, rule.phases):
                continue
            # What a launch went on after is believed only when nothing else is found.
            where = judged or (told_end if rule.passing else told_all)
            if hits := rule.hits(where):
                cause = hits[-1 if rule.last else 0]
                return _taken_by_others(cause) or Failure(
                    rule.cls, _cut(cause), rule.action, rule.next_variant
                )
    if exit_code == -15:
        return Failure(
            "asked-to-stop", "", "somebody stopped the server: run `deploy up` again", False
        )
    if exit_code == -9 and not any(HEADLINE.search(line) for line in lines):
        return Failure(
            "killed",
            "",
            "it was killed from outside: look for the out-of-memory killer in `dmesg` on the host",
            False,
        )
    raised = [line for line in telling if EXCEPTION.match(line) and not CONSEQUENCE.search(line)]
    for rule in CRASHED:
        hits = rule.hits(told_all)
        if hits and not raised:
            return Failure(rule.cls, _cut(hits[0]), rule.action, rule.next_variant)
    if raised and any("CUDA error: " in line for line in raised):
        cause = next(line for line in raised if "CUDA error: " in line)
        return Failure(
            "cuda-fault", _cut(cause), "a GPU kernel failed: read the host's dmesg", True
        )
    if raised:
        return _raised(raised[-1], lines, phase)
    told = [line for line in telling if not NOISE.search(line)]
    return Failure(
        "unknown",
        _cut(told[-1]) if told else "",
        f"unknown cause ({_code(exit_code)}, phase {phase}): read the last lines of the log",
        False,
    )


def _raised(cause: str, lines: list[str], phase: str) -> Failure:
    """An error whose text no rule knows: the part of SGLang that raised it still says something."""
    at = max(i for i, line in enumerate(lines) if line == cause)
    begin = next((i for i in range(at, -1, -1) if "Traceback (most" in lines[i]), 0)
    frames = [frame for line in lines[begin:at] if (frame := FRAME.match(line))]
    where = ""
    if frames:
        path = frames[-1]["path"].rpartition("/site-packages/")[2]
        where = f"; it was raised in {path} line {frames[-1]['line']}"
    asserted = lines[at - 1].strip() if frames and at else ""
    if BARE.match(cause.strip()) and asserted.startswith("assert "):
        for pattern, cls in ASSERTS:
            if pattern.search(asserted):
                row = next(rule for rule in RULES if rule.cls == cls)
                return Failure(cls, _cut(asserted), row.action + where, row.next_variant)
        cause = asserted
    for place in PLACES:
        if place.phases and not _between(phase, place.phases):
            continue
        if any(place.frame.search(frame["path"]) for frame in frames[-NEAR:]):
            return Failure(place.cls, _cut(cause), place.action + where, place.next_variant)
    return Failure(
        "exception",
        _cut(cause),
        "an error that is not in this tool's table; the traceback is in the log of the launch"
        + where,
        PHASES.index(phase) >= PHASES.index("graphs") if phase in PHASES else False,
    )


def _taken_by_others(cause: str) -> Failure | None:
    """The failure when torch says that another process holds memory of the GPU."""
    others = [one for one in OTHERS_MEMORY.findall(cause) if float(one[1]) >= OTHERS_GIB]
    # In a container torch knows its own process only by the host's number.
    if not others or (len(others) == 1 and "this process has" not in cause):
        return None
    told = ", ".join(f"pid {pid} holds {gib} GiB" for pid, gib in others)
    return Failure(
        "gpu-occupied",
        _cut(cause),
        f"another process uses the GPU ({told}): end it, or take other GPUs",
        False,
    )


LAST: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.cls == "kernel-build-failed")
"""A build says why before it fails; it may say it before another rank goes on."""
CRASHED: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.cls == "child-crashed")
"""A worker that raised has told what: its end is the consequence."""
FIRM: tuple[Rule, ...] = tuple(rule for rule in RULES if rule not in (*LAST, *CRASHED))
PASSING: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.passing)
"""Rules whose text a launch may survive."""


def _lines(log_text: str) -> list[str]:
    lines = plain(log_text).replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip() and not is_bar(line)]


def _after_last_advance(lines: list[str]) -> list[str]:
    """What stands below the last line that shows the launch going on."""
    for i in range(len(lines) - 1, -1, -1):
        if ANY_MARK.search(lines[i]):
            return lines[i + 1 :]
    return lines


def fatal_while_alive(log_text: str) -> bool:
    """Is the launch lost although its process lives on? (A lost port: SGLang does not exit.)"""
    return bool(FATAL_WHILE_ALIVE.search(log_text))


def telling_lines(log_text: str, count: int = 12) -> tuple[str, ...]:
    """The last lines that say something: no bars, no headlines that mislead."""
    told = (
        line for line in _lines(log_text) if not (MISLEADING.search(line) or TRAFFIC.search(line))
    )
    return tuple(_cut(line) for line in told)[-count:]


def _between(phase: str, span: tuple[str, str]) -> bool:
    if phase not in PHASES:
        return False
    return PHASES.index(span[0]) <= PHASES.index(phase) <= PHASES.index(span[1])


def _code(exit_code: int | None) -> str:
    if exit_code is None:
        return "an unknown exit code"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def _cut(line: str) -> str:
    return line.strip()[:MAX_LINE]
