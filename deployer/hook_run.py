"""Runs a command of the user to its end, whatever it does: it may hang, flood, leave children.

What it has started in the background and left there (a forward, a proxy) is its own business: it is
not waited for, and keeps its output.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from deployer.errors import StepFailed
from deployer.inventory import HookCutover
from deployer.locallock import start_of
from deployer.shell import words

GRACE_S = 5.0
"""Between TERM and KILL."""
LOOK_EVERY_S = 0.1
MOST = 64 * 1024 * 1024
"""Bytes of output."""
TOLD = 64 * 1024
LINES, WIDTH = 40, 300
"""Of the output's end that is told."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
"""Variables whose values the output must not show."""

Tick = Callable[[str, float, float], None]
"""Told what is waited for, seconds so far, and the limit."""


def run_hook(
    rules: HookCutover,
    variables: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    mark: Path | None = None,
    tick: Tick = lambda what, spent, limit: None,
) -> list[str]:
    """Runs it and returns the end of its output. Raises StepFailed with that as evidence.

    At the deadline its process group is ended. `mark` is a file that tells of it while it runs: one
    that a killed run has left is waited for first, so that no two of them work at once.
    """
    shown = words(rules.command)
    if mark is not None:
        _former(mark, rules.timeout_s, tick)
    with tempfile.TemporaryFile() as output:
        process = _started(rules.command, {**environ, **variables}, output, shown)
        try:
            if mark is not None:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.write_text(json.dumps(_identity(process.pid)), encoding="utf-8")
            problem = _watched(process, rules.timeout_s, output, tick)
        except BaseException:
            _end(process)
            raise
        finally:
            if mark is not None:
                mark.unlink(missing_ok=True)
        lines = _lines(output, environ)
    if problem:
        fix = "correct it, then run the same command again: it will be run again; or --abort"
        raise StepFailed(f"the hook {problem}", where=shown, fix=fix, evidence=tuple(lines))
    return lines


def _started(
    command: Sequence[str], environ: Mapping[str, str], output: IO[bytes], shown: str
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
    except OSError as error:
        raise StepFailed(
            f"the hook cannot be run: {error.strerror or error}",
            where=shown,
            fix="correct cutover.hook.command",
        ) from error


def _watched(
    process: subprocess.Popen[bytes], limit_s: float, output: IO[bytes], tick: Tick
) -> str:
    """Waits for its end; what was wrong with it, '' for nothing."""
    began = time.monotonic()
    while True:
        try:
            code = process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            if code < 0:
                return f"was ended by signal {-code} ({signal.strsignal(-code)})"
            return f"ended with status {code}" if code else ""
        spent = time.monotonic() - began
        if spent >= limit_s:
            _end(process)
            return f"still ran after {limit_s:g} s (cutover.hook.timeout_s) and was ended"
        if os.fstat(output.fileno()).st_size > MOST:
            _end(process)
            return f"wrote more than {MOST // 1024 // 1024} MiB and was ended"
        tick("the hook runs", spent, limit_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its group gets TERM, then KILL. An interrupt meanwhile comes after that."""
    try:
        _signal(process.pid, signal.SIGTERM)
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # Children of it may be left, also when it has ended.
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def _identity(pid: int) -> dict[str, object]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"pid": pid, "start": start_of(pid), "boot": boot}


def _former(mark: Path, limit_s: float, tick: Tick) -> None:
    """Waits for the hook of a run that was killed, at most as long as one may take; then ends it.

    Raises StepFailed when it does not end.
    """
    try:
        told = json.loads(mark.read_text(encoding="utf-8"))
        pid = int(told["pid"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    began, sent = time.monotonic(), False
    while _identity(pid) == told and told["start"] is not None:
        spent = time.monotonic() - began
        if spent >= limit_s and not sent:
            _signal(pid, signal.SIGKILL)
            sent = True
        if spent >= limit_s + GRACE_S:
            raise StepFailed(
                f"the hook of a run that was killed does not end (pid {pid})",
                fix="end it by hand, then run the same command again",
            )
        tick(f"the hook of a run that was killed still runs (pid {pid})", spent, limit_s)
        time.sleep(LOOK_EVERY_S)


def _lines(output: IO[bytes], environ: Mapping[str, str]) -> list[str]:
    """The end of the output, without the values of secret variables."""
    size = os.fstat(output.fileno()).st_size
    output.seek(max(0, size - TOLD))
    text = output.read(TOLD).decode("utf-8", "replace")
    hidden = {value for name, value in environ.items() if SECRET.search(name) and len(value) > 5}
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, "***")
    lines = [line if len(line) <= WIDTH else line[:WIDTH] + "..." for line in text.splitlines()]
    return lines[-LINES:]


def unrunnable(program: Path) -> str:
    """Why the kernel would not run this file, which is executable; '' when it would."""
    try:
        with program.open("rb") as file:
            first = file.read(256).split(b"\n")[0]
    except OSError as error:
        # It may be run and not read.
        return "" if isinstance(error, PermissionError) else str(error.strerror)
    if not first.startswith(b"#!"):
        return "" if first.startswith(b"\x7fELF") else "it is no program and has no #! line"
    named = first[2:].split()
    interpreter = os.fsdecode(named[0]) if named else ""
    if first.endswith(b"\r"):
        return "its #! line ends with a carriage return (saved by Windows)"
    if interpreter and Path(interpreter).exists():
        return ""
    return f"its #! line names {interpreter or 'nothing'}, which is not there"
