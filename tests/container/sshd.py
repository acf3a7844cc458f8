"""Real OpenSSH servers on loopback ports, with their own keys; and peers that misbehave."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
WHY_NOT = (
    ""
    if SSHD and shutil.which("ssh-keygen")
    else "no /usr/sbin/sshd or ssh-keygen here (apt-get install openssh-server openssh-client)"
)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A new key pair at `path` (and `path`.pub)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def fingerprint(path: Path) -> str:
    """What ssh-keygen says about a public key."""
    shown = subprocess.run(["ssh-keygen", "-lf", str(path)], capture_output=True, check=True)
    return shown.stdout.decode().split()[1]


@dataclass
class Sshd:
    """One running server. `known_hosts` and `user_key` are what a client needs."""

    folder: Path
    port: int
    user_key: Path
    host_key: Path
    known_hosts: Path
    process: subprocess.Popen[bytes]
    user: str = field(default_factory=getpass.getuser)

    @property
    def log(self) -> str:
        """All that sshd has logged."""
        return (self.folder / "sshd.log").read_text(errors="replace")

    def stop(self) -> None:
        """Ends the server and every session of it."""
        for pid in [*children(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def children(pid: int) -> list[int]:
    """All living descendants of a process of ours."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    direct = [int(word) for word in text.split()]
    return [*direct, *(deeper for child in direct for deeper in children(child))]


def start_sshd(
    folder: Path,
    *,
    options: tuple[str, ...] = (),
    user_key: Path | None = None,
    host_key: Path | None = None,
    login: str = "",
    bashrc: str = "",
    within: tuple[str, ...] = (),
) -> Sshd:
    """Starts sshd as the current user and waits until it answers.

    `within` are words in front of its command line, of a program that ends up running it.
    `options` are lines of sshd_config and come first. `login` is sh text that runs before the
    command (as ForceCommand: noise of rc files, odd environments) and ends with running
    "$SSH_ORIGINAL_COMMAND"; `bashrc` becomes the ~/.bashrc that bash sources for ssh commands.
    """
    if SSHD is None:
        raise FileNotFoundError(WHY_NOT)
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    user_key = user_key or make_key(folder / "user_key")
    host_key = host_key or make_key(folder / "host_key")
    lines = list(options)
    if bashrc:
        (folder / "home").mkdir()
        (folder / "home/.bashrc").write_text(bashrc)
        lines.append(f"SetEnv HOME={folder}/home")
    if login:
        script = folder / "login.sh"
        script.write_text(f"#!/bin/sh\n{login}\n")
        script.chmod(0o755)
        lines.append(f"ForceCommand {script}")
    authorized = folder / "authorized_keys"
    authorized.write_text((user_key.with_name(user_key.name + ".pub")).read_text())
    port = free_port()
    config = folder / "sshd_config"
    config.write_text(
        "\n".join(
            [
                *lines,
                f"Port {port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {host_key}",
                f"AuthorizedKeysFile {authorized}",
                "PermitRootLogin prohibit-password",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                "UsePAM no",
                "StrictModes no",
                "PidFile none",
                "UseDNS no",
                "LogLevel VERBOSE",
                "",
            ]
        )
    )
    known = folder / "known_hosts"
    public = host_key.with_name(host_key.name + ".pub").read_text().split()
    known.write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            [*within, SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Sshd(folder, port, user_key, host_key, known, process)
    wait_for_port(port, process)
    return server


def wait_for_port(port: int, process: subprocess.Popen[bytes], limit_s: float = 10.0) -> None:
    """Returns once something accepts on the port."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with socket.socket() as probe:
            probe.settimeout(0.5)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nothing accepts on port {port} after {limit_s} s")


PROXY = """
import socket, sys, threading
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
def pump(source, sink):
    while True:
        data = source.recv(65536)
        if not data:
            break
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
while True:
    client, _ = listener.accept()
    server = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    for pair in ((client, server), (server, client)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@contextlib.contextmanager
def frozen_proxy(target: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A forwarding proxy as a process of its own, which a test can stop (SIGSTOP)."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", PROXY, str(port), str(target)])
    try:
        wait_for_port(port, process)
        yield port, process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


class Proxy:
    """A forwarding TCP proxy in threads, whose connections a test can cut."""

    def __init__(self, target: int, drop_first: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.target = target
        self.drop_first = drop_first
        self.accepted = 0
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.accepted += 1
            if self.accepted <= self.drop_first:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            self.pairs.append((client, server))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def fin(self) -> None:
        """Ends all connections in order."""
        for client, _ in self.pairs:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def rst(self) -> None:
        """Resets all connections."""
        for client, _ in self.pairs:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # A descriptor that another thread reads is not closed before its read ends.
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RD)
            client.close()

    def close(self) -> None:
        """Ends it all."""
        self.listener.close()
        self.fin()


@contextlib.contextmanager
def silent_server(greeting: bytes = b"") -> Iterator[int]:
    """Accepts connections and says `greeting`, then nothing for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    client.sendall(greeting)
                    kept.append(client)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        for client in kept:
            client.close()


@contextlib.contextmanager
def dark_host() -> Iterator[int]:
    """A port that drops connection attempts: its queue is full and nobody accepts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        time.sleep(0.05)
        yield listener.getsockname()[1]
        for filler in fillers:
            filler.close()
