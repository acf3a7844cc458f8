"""Monitor of one guest: holds its command socket, makes its namespaces, ends with its init."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time

import ct
from ctconf import load


def main(vmid: str, dev: str) -> int:
    """Runs the guest to its end."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0{ct.LXC}/{vmid}/command")
    except OSError as error:
        print(f"lxc-start: {vmid}: command socket: {error}", file=sys.stderr)
        return 1
    held.listen(1)
    conf = load(vmid, told=False)
    ready, init = f"{ct.RUN}/{vmid}.ready", f"{ct.RUN}/{vmid}.init"
    for name in (ready, init):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    entries = [field for entry in ct.mounts(vmid, conf) for field in entry]
    name = conf.current.keys.get("hostname", f"CT{vmid}")
    guest = subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
            "/bin/sh",
            "/usr/lib/lab/ctinit.sh",
            ct.rootfs(vmid),
            dev,
            name,
            *entries,
        ],
        env={"PATH": os.environ["PATH"], "container": "lxc", "TERM": "linux"},
    )
    # unshare forks: the guest's init is its only child.
    deadline = time.monotonic() + 15
    while guest.poll() is None and time.monotonic() < deadline:
        with open(f"/proc/{guest.pid}/task/{guest.pid}/children") as file:
            children = file.read().split()
        if children:
            with open(init + ".new", "w") as file:
                file.write(children[0])
            os.replace(init + ".new", init)
            break
        time.sleep(0.01)
    while guest.poll() is None and time.monotonic() < deadline:
        # ctinit.sh execs /sbin/init, and that announces itself in the guest's /run.
        if os.path.exists(f"/proc/{children[0]}/root/run/lab-ready"):
            open(ready, "w").close()
            break
        time.sleep(0.01)
    status = guest.wait()
    for name in (ready, init):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
