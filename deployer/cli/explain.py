"""`deploy explain LOG`: what a log file of SGLang shows. Offline: needs no inventory."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import click

from deployer.cli.options import Options, common
from deployer.cli.output import print_json
from deployer.errors import UsageError
from deployer.sglang.diagnosis import (
    FAILED,
    READY,
    STOPPED,
    UNFINISHED,
    Diagnosis,
    diagnose,
)
from deployer.sglang.log import WORDS

HEAD = 4 << 20
TAIL = 12 << 20
PIECE = 1 << 20
"""Bytes: of a larger log only the first HEAD and the last TAIL are read."""


@click.command("explain")
@click.argument("log", type=click.Path(allow_dash=True, path_type=Path))
@click.option(
    "--exit",
    "exit_code",
    type=click.IntRange(-64, 255),
    metavar="CODE",
    default=None,
    help="How the server's process ended: 0..255, or -N (also 128+N) for signal N.",
)
@common
def command(options: Options, log: Path, exit_code: int | None) -> int:
    """Explain an SGLang LOG ('-': standard input): phase, cause, and what to do.

    Exit code 0: the log shows a server that got ready, and no failure after it. 1: anything else.
    """
    options.no_events("explain")
    head, tail, size = _read(log)
    if exit_code is not None and 128 < exit_code <= 192:
        exit_code = 128 - exit_code
    found = diagnose(head, tail, exit_code)
    unread = size - len(head) - len(tail)
    if options.as_json:
        print_json(_document(found, exit_code, size, unread))
    else:
        for line in _lines(found, exit_code, unread):
            click.echo(line)
    return 0 if found.outcome in (READY, STOPPED) else 1


def _read(path: Path) -> tuple[bytes, bytes, int]:
    """(head, tail, size in bytes); the tail is empty when the head is everything."""
    if str(path) == "-":
        return read_ends(sys.stdin.buffer)
    try:
        with path.open("rb") as file:
            return read_ends(file)
    except OSError as error:
        raise UsageError(
            f"cannot read the log: {error.strerror}", where=str(path), fix="give a log file, or -"
        ) from error


def read_ends(file: BinaryIO, head: int = HEAD, tail: int = TAIL) -> tuple[bytes, bytes, int]:
    """The first `head` and about the last `tail` bytes of a stream, and its size."""
    first = file.read(head)
    if file.seekable():
        size = file.seek(0, 2)
        file.seek(max(len(first), size - tail))
        last = file.read(tail)
        return (first + last, b"", size) if size <= head + tail else (first, last, size)
    size = len(first)
    pieces: deque[bytes] = deque()
    kept = 0
    while piece := file.read(min(PIECE, tail)):
        size += len(piece)
        kept += len(piece)
        pieces.append(piece)
        while kept - len(pieces[0]) >= tail:
            kept -= len(pieces.popleft())
    last = b"".join(pieces)
    return (first + last, b"", size) if len(first) + len(last) == size else (first, last, size)


def _document(found: Diagnosis, exit_code: int | None, size: int, unread: int) -> dict[str, Any]:
    failure = found.failure
    return {
        "outcome": found.outcome,
        "ready": found.outcome == READY,
        "phase": found.phase,
        "progress": found.progress,
        "class": failure.cls if failure else None,
        "cause_line": failure.cause_line if failure else "",
        "line": found.line or None,
        "action": failure.action if failure else "",
        "next_variant_allowed": failure.next_variant_allowed if failure else False,
        "telling_lines": list(found.telling),
        "figures": found.figures,
        "exit_code": exit_code,
        "launches": found.launches,
        "bytes": size,
        "bytes_unread": unread,
    }


def _lines(found: Diagnosis, exit_code: int | None, unread: int) -> list[str]:
    """The text for a reader: one cause, its line, one action."""
    lines = [_headline(found)]
    if found.telling or found.phase != "starting":
        told = found.progress or WORDS[found.phase]
        lines.append(f"  phase   {found.phase}" + (f" ({told})" if told != found.phase else ""))
    if found.figures:
        told = ", ".join(f"{name} {value:g}" for name, value in found.figures.items())
        lines.append(f"  figures {told}")
    if exit_code is not None:
        lines.append(f"  exit    {f'signal {-exit_code}' if exit_code < 0 else exit_code}")
    if found.launches > 1:
        lines.append(f"  note    {found.launches} launches in this log; the last is explained")
    if unread:
        lines.append(f"  note    {unread} bytes in the middle were not read")
    if found.failure and found.failure.cause_line:
        at = f" (line {found.line})" if found.line else ""
        lines.append(f"  cause{at}: {found.failure.cause_line}")
    if found.outcome not in (READY, STOPPED, FAILED) or (
        found.failure and found.failure.cls in ("exception", "killed")
    ):
        lines += [f"  | {line[:200]}" for line in found.telling]
    if found.failure:
        lines.append(f"  -> {found.failure.action}")
    elif found.outcome == UNFINISHED:
        lines.append("  -> if the process has ended, say how: --exit CODE")
    return lines


def _headline(found: Diagnosis) -> str:
    if found.outcome == READY:
        return "ready: the server says that it is (the log's claim, not a proof)"
    if found.outcome == STOPPED:
        return "asked-to-stop: it got ready (the log's claim), and was later told to stop"
    if found.outcome == UNFINISHED:
        return "unfinished: the log shows neither a ready server nor a failure"
    if found.failure and found.outcome == FAILED:
        after = " after it had got ready" if found.phase == "ready" else ""
        return f"failed{after}: {found.failure.cls}"
    if not found.telling:
        return "unknown: the log is empty, or has no line of a launch"
    return "unknown: no cause in this log that is known; the most telling lines follow"
