"""Range requests to a machine that lends its files: each connection is one ssh of its own.

So every stream has its own cipher thread, nothing listens on a port, and no side needs rsync.
"""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH123

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import os
import socket
import subprocess
import tempfile
import threading
import time
from typing import IO

from deployer.agents.fetch import cpus
from deployer.agents.fetch.body import Body
from deployer.agents.fetch.common import GAVE_UP, NOT_FOUND, Fatal, Unreached, Withheld
from deployer.agents.fetch.hubhttp import Hub
from deployer.agents.fetch.lend import MARK
from deployer.agents.fetch.manifest import PEER, File, Job, Peer
from deployer.agents.fetch.rsync import ssh_words

GCM = "aes128-gcm@openssh.com,aes256-gcm@openssh.com"
CHACHA = "chacha20-poly1305@openssh.com"
CTR = "aes128-ctr,aes192-ctr,aes256-ctr"
BUFFER = 1 << 20
"""Between ssh and us: fewer, longer reads."""
MOST_NOISE = 64 << 10
"""Bytes that a login shell may print before our program speaks."""
FIRST_S = 20.0
END_S = 5.0
ASK_S = 5.0
LAST_WORDS_S = 0.3
NEVER = (
    *("Permission denied", "Host key verification failed", "Unable to negotiate"),
    *("Bad configuration", "Too many authentication failures", "Bad owner or permissions"),
)
"""What ssh says of causes that do not pass by themselves."""


def ciphers() -> str:
    """For ssh; the first that the other side has too is taken: the fastest on this machine."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as stream:
            aes = any("aes" in line.split() for line in stream)
    except OSError:
        aes = True
    return ",".join((GCM, CHACHA, CTR) if aes else (CHACHA, GCM, CTR))


@functools.cache
def quick_start() -> tuple[str, ...]:
    """Options of ssh for a handshake without 0.1 s of CPU a connection, where it has a choice.

    That is what sntrup761 costs, first from OpenSSH 9.0 to 9.9 (measured: 90 ms of 100). Its
    successor mlkem768 stays before the classic exchange.
    """
    try:
        done = subprocess.run(["ssh", "-Q", "kex"], capture_output=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    known = done.stdout.decode("ascii", "replace").split()
    if not any(name.startswith("sntrup761") for name in known):
        return ()
    quick = [name for name in ("mlkem768x25519-sha256", "curve25519-sha256") if name in known]
    return ("-o", f"KexAlgorithms=^{','.join(quick)}") if quick else ()


class Connection(http.client.HTTPConnection):
    """An HTTP connection whose bytes go through an ssh."""

    def __init__(self, peer: Peer, timeout_s: float) -> None:
        super().__init__("peer", timeout=timeout_s)
        self.peer = peer
        self.process: subprocess.Popen[bytes] | None = None
        self.errors: IO[bytes] | None = None
        self.said = ""
        self.greeted = False

    def connect(self) -> None:
        """Starts the ssh; whether it reaches the other side shows with the first bytes."""
        near, far = socket.socketpair()
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        with far:
            # When we die, however, the socket ends and the ssh with it.
            self.process = subprocess.Popen(
                [*ssh_words(self.peer, ciphers()), *quick_start(), "--", self.peer.address, "lend"],
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=self.errors,
                env={**os.environ, "LC_ALL": "C"},
            )
        near.settimeout(self.timeout)
        self.sock = near

    def greet(self, limit_s: float) -> None:
        """Reads up to the lender's mark: what a login shell prints stands before it.

        Raises Fatal when the other side does not run the lender, OSError.
        """
        noise, ends = b"", time.monotonic() + limit_s
        while not noise.endswith(MARK):
            try:
                byte = self.sock.recv(1)
            except ConnectionError:  # it has ended without reading what we asked
                byte = b""
            noise += byte
            if not byte and not self.why():
                raise Fatal(GAVE_UP, f"it does not run what its key is for{self.shown(noise)}")
            if not byte:
                raise ConnectionError("ssh has ended")
            if len(noise) >= MOST_NOISE or time.monotonic() >= ends:
                raise Fatal(GAVE_UP, f"something else than the lender speaks{self.shown(noise)}")
        self.greeted = True

    def shown(self, noise: bytes) -> str:
        """For a message: what came in place of the mark, else what stands in stderr."""
        for text in (noise.decode("utf-8", "replace"), self.heard()):
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return f": {lines[-1][:200]!r}"
        return ""

    def heard(self) -> str:
        """What ssh and the other side's program have written to stderr so far."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        return self.errors.read().decode("utf-8", "replace")

    def why(self) -> str:
        """What ssh said of its end, '' while it runs or when the other side ended it."""
        if self.process is None or self.errors is None:
            return self.said
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        if self.process is None or self.process.returncode != 255:
            return ""
        said = [line.strip() for line in self.heard().splitlines() if line.strip()]
        return said[-1][:300] if said else "ssh ended with 255"

    def close(self) -> None:
        """Ends the ssh too; what it said of an end of its own is kept."""
        super().close()
        if self.process is not None:
            # One that ends by itself has closed its side of the socket a moment before.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_WORDS_S)
                self.said = self.why()
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.errors is not None:
            self.errors.close()
            self.errors = None


class Kept(Body):
    """A body whose connection serves the next request, when it was read to its end."""

    def __init__(self, body: Body, lender: Lender) -> None:
        super().__init__(body.connection, body.sock, body.response, (body.start, body.stop))
        self.lender, self.left, self.closed = lender, body.stop - body.start, False

    def readinto(self, view: memoryview) -> int:
        """As of Body; never beyond this answer."""
        got = super().readinto(view[: self.left]) if self.left else 0
        self.left -= got
        return got

    def close(self) -> None:
        """Gives the connection back, or ends it."""
        if self.closed:
            return
        self.closed = True
        if self.left:
            super().close()
        else:
            self.response.close()
            self.lender.give_back(self.connection)


class Lender(Hub):
    """The peer of the job as an endpoint. A connection is used again: an ssh costs a handshake."""

    exact = True  # ssh lets no byte change on its way: what is wrong here is wrong there

    def __init__(self, job: Job) -> None:
        if job.peer is None:
            raise Fatal(GAVE_UP, "no peer is configured")
        super().__init__(job, "", PEER)
        self.peer = job.peer
        # A login and the start of the other side's program come before the first answer.
        patience = max(job.limits.recv_timeout_s, FIRST_S)
        self.limits = dataclasses.replace(job.limits, recv_timeout_s=patience)
        self.endpoint = f"{job.peer.user}@{job.peer.address}"
        self.mirror, self.proxy = True, None
        self._idle: list[http.client.HTTPConnection] = []
        self._idle_lock = threading.Lock()

    def at_once(self, most: int) -> int:
        """As of Hub: each stream is a cipher, and keeps a CPU busy where the network is fast."""
        return min(most, max(2, cpus.count()))

    def fatal(self, code: int, text: str) -> Fatal:
        """A file that is not there says nothing of the others."""
        if code == NOT_FOUND:
            return Withheld(GAVE_UP, text.replace("from the hub", f"from {self.endpoint}"))
        return super().fatal(code, text)

    def open(self, file: File, offset: int, end: int, ranged: bool = True) -> Body:
        """As of Hub."""
        return Kept(super().open(file, offset, end, ranged), self)

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """A connection without an answer under way."""
        with self._idle_lock:
            self._idle.append(connection)

    def connect(self, url: str) -> http.client.HTTPConnection:
        """One that is open, else a new ssh, not started yet."""
        with self._idle_lock:
            if self._idle:
                return self._idle.pop()
        return Connection(self.peer, self.limits.recv_timeout_s)

    def reach(self, connection: http.client.HTTPConnection) -> None:
        """Starts it. Raises Fatal when there is no ssh on this machine."""
        if connection.sock is not None:
            return
        try:
            connection.connect()
        except OSError as error:
            raise Fatal(GAVE_UP, f"ssh: {error.strerror or error}") from error

    def ask(self, connection: http.client.HTTPConnection, url: str, wanted: str) -> None:
        """As of Hub; a refused ssh ends before it has read the request."""
        try:
            super().ask(connection, url, wanted)
        except (OSError, http.client.HTTPException) as error:
            self.blame(connection, error)
            if not isinstance(connection, Connection) or connection.greeted:
                raise
            # It has ended without a question; what it said instead is read next.

    def answer(
        self, connection: http.client.HTTPConnection, sock: socket.socket
    ) -> http.client.HTTPResponse:
        """The header of the answer; what ssh itself says comes before what HTTP makes of it."""
        try:
            if isinstance(connection, Connection) and not connection.greeted:
                connection.greet(self.limits.recv_timeout_s)
            return super().answer(connection, sock)
        except (OSError, http.client.HTTPException) as error:
            self.blame(connection, error)
            raise

    def blame(self, connection: http.client.HTTPConnection, error: Exception) -> None:
        """Raises what ssh said instead of `error`: Fatal for what does not pass, or Unreached."""
        why = connection.why() if isinstance(connection, Connection) else ""
        if not why:
            return
        place = f"{self.endpoint}, port {self.peer.port}"
        if any(word in why for word in NEVER):
            raise Fatal(GAVE_UP, f"no ssh to {place}: {why}") from error
        raise Unreached(f"{place}: {why}") from error
