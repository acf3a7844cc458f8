"""The container lab as tests use it: hosts, guests, faults, and the deployer driven at it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "docker" / "lab.sh"
INVENTORY = ROOT / "docker" / "inventory"
HOSTS = ("kpro5", "kpro6")
PREFIX = "deployer-lab-"


@dataclass(frozen=True)
class Result:
    """What a command left: status and both streams, decoded."""

    exit: int
    out: str
    err: str

    def ok(self) -> Result:
        """Itself, when the status is 0."""
        assert self.exit == 0, f"exit {self.exit}\n{self.out}\n{self.err}"
        return self


def run(
    argv: list[str], *, stdin: bytes | None = None, timeout_s: float = 60, **env: str
) -> Result:
    """Runs a command here; raises subprocess.TimeoutExpired at the deadline."""
    done = subprocess.run(
        argv,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=timeout_s,
        env={**os.environ, **env},
        check=False,
    )
    return Result(
        done.returncode,
        done.stdout.decode("utf-8", "replace"),
        done.stderr.decode("utf-8", "replace"),
    )


class Machine:
    """A host of the lab, or its guest 129. Commands go through `docker exec`, not through SSH."""

    def __init__(self, host: str, vmid: int | None = None, prefix: str = PREFIX) -> None:
        self.host = host
        self.vmid = vmid
        self.prefix = prefix

    def sh(
        self, script: str, *args: str, stdin: bytes | None = None, timeout_s: float = 60
    ) -> Result:
        """Runs POSIX sh text with "$1".. = args."""
        inside = [] if self.vmid is None else ["pct", "exec", str(self.vmid), "--"]
        argv = [
            "docker",
            "exec",
            "-i",
            self.prefix + self.host,
            *inside,
            "sh",
            "-c",
            script,
            "sh",
            *args,
        ]
        return run(argv, stdin=stdin, timeout_s=timeout_s)

    def read(self, path: str) -> str:
        """The text of a file."""
        return self.sh('cat -- "$1"', path).ok().out

    def driver(self, address: str) -> str:
        """The driver that a PCI function is bound to, '' when none."""
        return self.sh(
            'cd "/sys/bus/pci/devices/$1" && [ ! -e driver ] || basename "$(readlink driver)"',
            address,
        ).out.strip()

    def pids(self, pattern: str) -> list[int]:
        """Processes whose command line matches, as this machine numbers them."""
        return [
            int(word) for word in self.sh('pgrep -f -- "$1" | grep -vx $$', pattern).out.split()
        ]


class Lab:
    """The whole lab. Everything acts through docker/lab.sh, as a user would."""

    def __init__(self) -> None:
        self.hosts = {name: Machine(name) for name in HOSTS}
        self.guests = {name: Machine(name, 129) for name in HOSTS}

    def lab(self, *words: str, timeout_s: float = 60) -> Result:
        """`lab.sh WORDS`; must succeed."""
        return run(["sh", str(LAB), *words], timeout_s=timeout_s).ok()

    def reset(self, *hosts: str) -> None:
        """Hosts as after the first start (none named: all, and the hub); local state too."""
        self.lab("reset", *hosts)
        for host in hosts or HOSTS:
            self.forget(host)

    def forget(self, host: str) -> None:
        """Removes the deployer's local record of a host."""
        state = ROOT / "docker" / ".deploy" / "state"
        for path in [state / f"{host}.json", *state.glob(f"{host}.json.*")]:
            path.unlink(missing_ok=True)

    def fault(self, name: str, on: bool = True, host: str = "kpro5") -> None:
        """Switches a fault."""
        self.lab("fault", name, "on" if on else "off", host)

    def faults(self) -> list[str]:
        """All faults that exist."""
        return [line.split()[0] for line in self.lab("faults").out.splitlines()]

    def deploy(self, *words: str, timeout_s: float = 300, **env: str) -> Result:
        """`deploy -i docker/inventory WORDS` with the interpreter of the tests."""
        argv = [str(Path(sys.executable).parent / "deploy"), "-i", str(INVENTORY), *words]
        return run(argv, timeout_s=timeout_s, **env)

    def deploy_process(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        """The same, started; for tests that interrupt it."""
        argv = [str(Path(sys.executable).parent / "deploy"), "-i", str(INVENTORY), *words]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )


def eventually(check: Callable[[], bool], what: str, timeout_s: float = 10) -> None:
    """Polls until `check` holds; fails with `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
