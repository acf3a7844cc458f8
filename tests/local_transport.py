"""Test doubles of a transport: one that runs sh here, one that replays canned answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployer import errors
from deployer.remote.transport import Answer

SHELLS = ("dash", "busybox")
"""`dash`: Debian's sh and tools. `busybox`: ash and nothing but busybox applets on PATH."""


def shell_path(shell: str, folder: Path) -> str:
    """A PATH under which `sh` is the named shell; made once in `folder`."""
    binaries = folder / f"bin-{shell}"
    if not binaries.exists():
        binaries.mkdir(parents=True)
        if shell == "busybox":
            busybox = shutil.which("busybox")
            if busybox is None:
                raise FileNotFoundError("busybox is not installed")
            applets = subprocess.run([busybox, "--list"], capture_output=True, check=True)
            for applet in applets.stdout.decode().split():
                if applet not in {"[", "[["}:
                    (binaries / applet).symlink_to(busybox)
        else:
            (binaries / "sh").symlink_to("/bin/dash")
    if shell == "busybox":
        return str(binaries)
    return f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalTransport:
    """Runs scripts on this machine with the chosen sh. `env` adds to its environment."""

    def __init__(self, path: str, name: str = "here", env: dict[str, str] | None = None) -> None:
        self._path = path
        self._name = name
        self._env = env or {}
        self.runs = 0

    @property
    def name(self) -> str:
        return self._name

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        self.runs += 1
        env = {"LC_ALL": "C", "PATH": self._path, "HOME": "/root", **self._env}
        shell = shutil.which("sh", path=self._path)
        if shell is None:
            raise FileNotFoundError("no sh on PATH")
        with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
            file.write(script)
            file.flush()
            process = subprocess.Popen(
                [shell, file.name, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd="/",
            )
            try:
                out, err = _talk(process, stdin, time.monotonic() + timeout_s, on_stdout)
            except TimeoutError:
                raise errors.DeadlineExceeded(
                    f"no answer within {timeout_s:g} s", where=self._name
                ) from None
            finally:
                # As a closed session does: whoever still writes gets an error, not an end.
                if process.poll() is None:
                    process.kill()
                    process.wait()
        code = process.returncode
        return Answer(128 - code if code < 0 else code, out, err)

    def close(self) -> None:
        pass


def _talk(
    process: subprocess.Popen[bytes],
    stdin: bytes,
    deadline: float,
    on_stdout: Callable[[bytes], None] | None,
) -> tuple[bytes, bytes]:
    """Both streams of `process` to their ends; stdout is told as it comes. Raises TimeoutError."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    pipe = process.stdin

    def send() -> None:
        # The script may end without reading all of it.
        with contextlib.suppress(BrokenPipeError), pipe:
            pipe.write(stdin)

    threading.Thread(target=send, daemon=True).start()
    got = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        for stream in got:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(left) if left > 0 else []
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                if on_stdout is not None and key.fileobj is process.stdout:
                    on_stdout(data)
                got[key.fileobj] += data  # type: ignore[index]
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    return bytes(got[process.stdout]), bytes(got[process.stderr])


@dataclass(frozen=True)
class Call:
    """One recorded `run`."""

    script: str
    args: tuple[str, ...]
    stdin: bytes
    timeout_s: float


Reply = Answer | bytes | str | BaseException | Callable[[Call], Answer]


class ScriptedTransport:
    """Records what it was asked and replays answers in order; running out of them is an error."""

    def __init__(self, *replies: Reply, name: str = "scripted") -> None:
        self._name = name
        self.replies = list(replies)
        self.calls: list[Call] = []

    @property
    def name(self) -> str:
        return self._name

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        call = Call(script, tuple(args), stdin, timeout_s)
        self.calls.append(call)
        if not self.replies:
            raise LookupError(f"no reply left for call {len(self.calls)}: {script[:200]}")
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        if callable(reply):
            reply = reply(call)
        if isinstance(reply, str):
            reply = reply.encode()
        answer = Answer(0, reply, b"") if isinstance(reply, bytes) else reply
        if on_stdout is not None and answer.stdout:
            on_stdout(answer.stdout)
        return answer

    def close(self) -> None:
        pass


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when there is no such process (or it is a zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """This machine's boot id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def environment(pid: int) -> dict[str, str]:
    """The start environment of a process of ours."""
    raw = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(item).split("=", 1) for item in raw if b"=" in item)
