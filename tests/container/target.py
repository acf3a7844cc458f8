"""A bare machine of a test's own: the lab's guest image in a container, with a real sshd.

Its layer survives a reboot; nothing else does. The lab's own containers are not touched.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path

from lab import LAB, PREFIX, Result, run
from sshd import free_port, make_key

IMAGE = f"{PREFIX}guest"
SSHD_PORT = 2222
RECEIVE_BUFFER = 128 * 1024
"""The most that the kernel of a target holds for one connection, in bytes."""


def need_image() -> None:
    """Builds the lab's images when the guest's is not there."""
    if run(["docker", "image", "inspect", IMAGE]).exit != 0:
        run(["sh", str(LAB), "build"], timeout_s=600).ok()


def bridge_address() -> str:
    """This machine's address on Docker's default bridge: where containers reach a hub of ours."""
    form = "{{(index .IPAM.Config 0).Gateway}}"
    gateway = run(["docker", "network", "inspect", "bridge", "-f", form]).ok().out.strip()
    assert gateway, "Docker's default bridge names no gateway"
    return gateway


class Target:
    """One container. `folder` gets its keys; `mounts` are `docker run -v` values."""

    def __init__(self, name: str, folder: Path, mounts: tuple[str, ...] = ()) -> None:
        self.name = f"deployer-{name}-{os.getpid()}"
        self.port = free_port()
        self.addresses: set[str] = set()
        """On Docker's bridge; a reboot may bring another one."""
        self.user_key = make_key(folder / "user_key")
        host_key = make_key(folder / "host_key")
        kind, key, *_ = host_key.with_name("host_key.pub").read_text().split()
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")
        options = [word for mount in mounts for word in ("-v", mount)]
        options += ["-p", f"127.0.0.1:{self.port}:{SSHD_PORT}", "--hostname", name]
        # The kernel would let what waits for a reader grow to megabytes, which a death then loses.
        options += ["--sysctl", f"net.ipv4.tcp_rmem=4096 {RECEIVE_BUFFER} {RECEIVE_BUFFER}"]
        command = ["/usr/bin/python3", "/usr/lib/lab/init.py"]
        run(["docker", "create", "--name", self.name, *options, IMAGE, *command]).ok()
        try:
            keys = {
                "etc/ssh/ssh_host_ed25519_key": host_key,
                "root/.ssh/authorized_keys": self.user_key.with_name("user_key.pub"),
            }
            run(["docker", "cp", "-", f"{self.name}:/"], stdin=_tar(keys)).ok()
            self.start()
        except BaseException:
            self.remove()
            raise

    def start(self) -> None:
        """Power on; returns when sshd answers."""
        run(["docker", "start", self.name]).ok()
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        self.addresses.add(run(["docker", "inspect", "-f", form, self.name]).ok().out.strip())
        ready = f"ss -Hltn 'sport = :{SSHD_PORT}' | grep -q LISTEN"
        deadline = time.monotonic() + 20
        while self.sh(ready).exit != 0:
            assert time.monotonic() < deadline, f"sshd of {self.name} does not listen after 20 s"
            time.sleep(0.05)

    def reboot(self) -> None:
        """The power is cut: all processes die at once, then it starts again."""
        run(["docker", "kill", "-s", "KILL", self.name]).ok()
        self.start()

    def remove(self) -> None:
        """Ends it and removes it."""
        run(["docker", "rm", "-f", "-v", self.name]).ok()

    def exec(self, *words: str) -> list[str]:
        """The command line that runs `words` inside, stdin connected."""
        return ["docker", "exec", "-i", self.name, *words]

    def sh(
        self, script: str, *args: str, stdin: bytes | None = None, timeout_s: float = 60
    ) -> Result:
        """Runs POSIX sh text with "$1".. = args."""
        return run(self.exec("sh", "-c", script, "sh", *args), stdin=stdin, timeout_s=timeout_s)


def _tar(files: dict[str, Path]) -> bytes:
    """Files of root's, 0600, below folders of 0700 or what is there already."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in files.items():
            info = tarfile.TarInfo(name)
            content = path.read_bytes()
            info.size, info.mode, info.mtime = len(content), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
