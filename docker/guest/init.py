"""Pid 1 of a lab guest: sshd, the boot-time services, reaping, an orderly end on SIGPWR."""

from __future__ import annotations

import os
import signal
import subprocess
import time

FAULTS = "/etc/lab/faults"
OLD_SERVER = "/usr/lib/lab/old-server.sh"


def fault(name: str) -> bool:
    """Is this fault of the lab on?"""
    try:
        with open(FAULTS) as file:
            return name in file.read().split("\n")
    except FileNotFoundError:
        return False


def end(_number: int, _frame: object) -> None:
    """TERM to everyone, two seconds, KILL, out."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.02)
            except ChildProcessError:
                break
        else:
            continue
        break
    os._exit(0)


signal.signal(signal.SIGPWR, end)
signal.signal(signal.SIGTERM, end)
os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
os.makedirs("/run/lock", mode=0o1777, exist_ok=True)
subprocess.Popen(
    ["/usr/sbin/sshd", "-D", "-e"],
    start_new_session=True,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
if fault("old-server"):
    subprocess.run(["/bin/sh", OLD_SERVER, "start"], check=False)
open("/run/lab-ready", "w").close()
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(1)
