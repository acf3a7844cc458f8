"""The one door to a target. Two implementations: ssh.SshTransport and pct.PctTransport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Answer:
    """The complete answer of one command. `exit` is 128+n when the shell died of signal n."""

    exit: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """stdout, decoded once; undecodable bytes become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr, decoded once."""
        return self.stderr.decode("utf-8", "replace")


class Transport(Protocol):
    """Runs POSIX sh on a target.

    `run` gives the script its own `sh` with LC_ALL=C and a full PATH (/usr/local included), `args`
    as "$1".., and `stdin` (binary) then EOF. Noise of login files never reaches the answer, both
    streams are read together, and an answer without its end mark raises ConnectionLost.
    `on_stdout` receives stdout bytes as they come (they are still in the answer).

    Raises errors.Unreachable and its subclasses. A non-zero exit is not an error here.
    """

    @property
    def name(self) -> str:
        """For messages: `kpro5`, `kpro5/129`."""

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """Runs `script` to its end and returns the whole answer."""

    def close(self) -> None:
        """Ends the connection. Idempotent."""
