"""A Debian with real boot tools, apt and dkms in a container of its own, as a step's host."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from deployer import errors
from deployer.model import Facts, Probe, ProbeOutput
from deployer.remote.transport import Answer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONTEXT = ROOT / "docker" / ".build" / "context"
IMAGE = "deployer-test-debian"
BUILD_LIMIT_S = 900


class RealHost:
    """A transport into the container."""

    def __init__(self, container: str) -> None:
        self.container = container
        self.name = "kpro5"

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """`docker exec`, as root with sh."""
        argv = ["docker", "exec", "-i", self.container, "sh", "-c", script, "sh", *args]
        try:
            # Other work on this machine must not decide.
            done = subprocess.run(
                argv, input=stdin, capture_output=True, timeout=10 * timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise errors.DeadlineExceeded("no answer", where=self.name) from None
        if on_stdout is not None and done.stdout:
            on_stdout(done.stdout)
        return Answer(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        """Nothing to close."""

    def sh(self, script: str, *args: str) -> str:
        """stdout of a script that must succeed."""
        answer = self.run(script, args=args, timeout_s=60.0)
        assert answer.exit == 0, f"{script}\n{answer.text}\n{answer.error_text}"
        return answer.text

    def look(self, probes: Sequence[Probe]) -> Facts:
        """The answers of these probes."""
        found = {}
        for probe in probes:
            answer = self.run(probe.script, timeout_s=probe.timeout_s)
            fact = probe.parse(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
            found[type(fact)] = fact
        return Facts(found)

    def files(self, *folders: str) -> list[str]:
        """Links and files below, with mode and hash, a line each."""
        script = (
            'find "$@" -type l -printf "%p -> %l\\n" | sort;'
            'find "$@" -type f -printf "%m " -exec sha256sum {} \\; | sort -k 3'
        )
        return self.sh(script, *folders).splitlines()


def image(folder: Path) -> str:
    """The image, built from what lies in `real/`; skips with the reason where it cannot be."""
    if shutil.which("docker") is None:
        pytest.skip("no docker")
    if not (CONTEXT / "apt.conf").exists():
        pytest.skip("the lab was not set up (sh docker/lab.sh setup)")
    shutil.copytree(HERE / "real", folder)
    for name in ("ca.crt", "apt.conf"):
        shutil.copyfile(CONTEXT / name, folder / name)
    built = subprocess.run(
        ["docker", "build", "-q", "-t", IMAGE, str(folder)],
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return IMAGE


@contextlib.contextmanager
def started(folder: Path) -> Iterator[RealHost]:
    """A fresh container; it goes at the end."""
    name = f"deployer-test-{uuid.uuid4().hex[:8]}"
    argv = ["docker", "run", "-d", "--init", "--name", name, image(folder), "sleep", "3600"]
    subprocess.run(argv, check=True, capture_output=True)
    try:
        yield RealHost(name)
    finally:
        subprocess.run(["docker", "rm", "-f", name], check=True, capture_output=True)
