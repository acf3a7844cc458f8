"""One framed command on one SSH session: both streams read together, every wait bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deployer import errors
from deployer.remote import framing
from deployer.remote.socket import import_paramiko
from deployer.remote.sshlogin import WINDOW_BYTES, hang_up
from deployer.remote.transport import Answer

if TYPE_CHECKING:
    import paramiko

SESSION_RETRY_S = 0.05
"""sshd counts a session until it has reaped it (MaxSessions): pause before another try."""

SESSION_DEADLINE_S = 10.0
"""How long a refused session is tried again."""

NO_SHELL = (
    "`ssh HOST true` must end at once with status 0: see the account's login shell (/bin/false, "
    "nologin), a forced command for this key, an expired password, and what its profile runs"
)
OVERDUE = "is it short of CPU, memory or disk? Then run the same command again"
STATUS_S = 2.0
"""How long the exit status may come after the end of both streams."""
HANG_UP_S = 2.0
"""How long the close of a session may take."""

_CHUNK = 256 * 1024
_CONNECT_FAILED = 2


@contextmanager
def bounded(transport: paramiko.Transport, seconds: float) -> Iterator[None]:
    """Closes the transport when the block takes longer: paramiko has waits without a deadline."""
    late = threading.Event()

    def give_up() -> None:
        late.set()
        hang_up(transport)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError(f"no reply within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


class _Woken(threading.Event):
    """Set by either stream of a channel when bytes or the end have come.

    Not the channel's `fileno()`: paramiko clears that without a lock while the other stream sets
    it, and then bytes lie unread without a wake-up.
    """

    def clear(self) -> None:
        """paramiko calls it when one stream is empty; the other one may not be."""

    def await_news(self, seconds: float) -> None:
        """Waits, and forgets: what comes from now on sets it again."""
        self.wait(seconds)
        super().clear()


def _unread(channel: paramiko.Channel) -> bool:
    return channel.recv_ready() or channel.recv_stderr_ready()


class Exchange:
    """One command on one session."""

    def __init__(
        self,
        name: str,
        transport: paramiko.Transport,
        framed: framing.Frame,
        timeout_s: float,
        on_stdout: Callable[[bytes], None] | None,
    ) -> None:
        self._name = name
        self._transport = transport
        self._framed = framed
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._on_stdout = on_stdout
        self._parser = framing.AnswerParser(framed.mark)

    def run(self) -> Answer:
        """The whole answer. Raises DeadlineExceeded, ConnectionLost, Unreachable."""
        import_paramiko()
        import paramiko

        channel: paramiko.Channel | None = None
        try:
            with bounded(self._transport, self._left()):
                channel = self._session()
                channel.exec_command(self._framed.command)
                if not self._framed.stdin:
                    channel.shutdown_write()
            if self._framed.stdin:
                self._send_in_background(channel)
            self._read(channel)
        except TimeoutError as error:
            raise self._late() from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._lost(str(error) or type(error).__name__) from error
        self._hang_up(channel)
        return self._parser.answer()

    def _hang_up(self, channel: paramiko.Channel) -> None:
        """Closes the session; the answer is complete, so a connection that fails now is dropped."""
        import_paramiko()
        import paramiko

        try:
            with bounded(self._transport, HANG_UP_S):
                channel.close()
        except (paramiko.SSHException, EOFError, OSError):
            hang_up(self._transport)

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _session(self) -> paramiko.Channel:
        import_paramiko()
        import paramiko

        until = min(self._deadline, time.monotonic() + SESSION_DEADLINE_S)
        while True:
            try:
                return self._transport.open_session(window_size=WINDOW_BYTES, timeout=self._left())
            except paramiko.ChannelException as error:
                if error.code == _CONNECT_FAILED and time.monotonic() < until:
                    time.sleep(SESSION_RETRY_S)
                    continue
                raise errors.Unreachable(
                    f"sshd opens no session: {error.text}",
                    where=self._name,
                    fix="look at MaxSessions in its sshd_config",
                ) from error

    def _send_in_background(self, channel: paramiko.Channel) -> None:
        """A script may answer before it has read its input, so both must flow."""
        import_paramiko()
        import paramiko

        data = self._framed.stdin

        def send() -> None:
            try:
                # In pieces: sendall copies what is left of its argument for every packet.
                for at in range(0, len(data), _CHUNK):
                    channel.sendall(data[at : at + _CHUNK])
                channel.shutdown_write()
            except (OSError, EOFError, paramiko.SSHException):
                # The script ended without reading all of it, or the reader reports what happened.
                return

        channel.settimeout(self._left())
        threading.Thread(target=send, daemon=True, name=f"stdin {self._name}").start()

    def _read(self, channel: paramiko.Channel) -> None:
        woken = _Woken()
        channel.in_buffer.set_event(woken)
        channel.in_stderr_buffer.set_event(woken)
        while not self._parser.complete:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            woken.await_news(left)
            # Asked first: what came before the end is still read below.
            ended = channel.eof_received or channel.closed
            while self._take(channel) and time.monotonic() < self._deadline:
                pass
            if ended and not self._parser.complete and not _unread(channel):
                raise self._lost(self._cause(channel))

    def _take(self, channel: paramiko.Channel) -> bool:
        """Reads a piece of each stream; False when there was none."""
        parser = self._parser
        out = channel.recv(_CHUNK) if channel.recv_ready() else b""
        new = parser.out.feed(out) if out else b""
        if new and self._on_stdout is not None:
            self._on_stdout(new)
        err = channel.recv_stderr(_CHUNK) if channel.recv_stderr_ready() else b""
        if err:
            parser.err.feed(err)
        return bool(out or err) and not parser.complete

    def _cause(self, channel: paramiko.Channel) -> str:
        if not self._transport.is_active():
            error = self._transport.get_exception()
            return str(error or "") or "the connection was closed"
        # The end of the streams travels before the exit status; the event is set by close too.
        channel.status_event.wait(min(STATUS_S, self._left()))
        if channel.exit_status_ready() and channel.recv_exit_status() >= 0:
            return f"the remote shell ended with status {channel.recv_exit_status()}"
        return "the session was closed"

    def _late(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"no complete answer within {self._timeout_s:g} s",
            where=self._name,
            fix=NO_SHELL if not self._parser.out.begun else OVERDUE,
            evidence=self._parser.evidence(),
        )

    def _lost(self, cause: str) -> errors.ConnectionLost:
        # The connection stands, and not one line of ours was run.
        refused = self._transport.is_active() and not self._parser.out.begun
        return errors.ConnectionLost(
            f"the answer ended before its end mark: {cause}",
            where=self._name,
            fix=NO_SHELL if refused else errors.AGAIN,
            evidence=self._parser.evidence(),
        )
