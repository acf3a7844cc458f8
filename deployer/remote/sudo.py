"""Runs scripts as root through `sudo -n`, over the transport of another user."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployer.remote.framing import PATH
from deployer.remote.transport import Answer, Transport

_HEAD = f"PATH={PATH}; LC_ALL=C; export PATH LC_ALL; umask 022; cd /\n"


def sudo_works(transport: Transport) -> bool:
    """Whether the user may become root without a password. Raises Unreachable."""
    answer = transport.run("sudo -n /bin/sh -c 'id -u' </dev/null", timeout_s=20.0)
    return answer.exit == 0 and answer.text.strip() == "0"


class SudoTransport:
    """A Transport for scripts without input of their own: the script itself travels as input."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """Of the transport below."""
        return self._inner.name

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """See Transport.run. Raises ValueError for a script with input."""
        if stdin:
            raise ValueError("no input through sudo: the script travels there")
        return self._inner.run(
            'exec sudo -n /bin/sh -s -- "$@"',
            args=args,
            stdin=(_HEAD + script).encode("utf-8", "surrogateescape"),
            timeout_s=timeout_s,
            on_stdout=on_stdout,
        )

    def close(self) -> None:
        """Ends the connection below."""
        self._inner.close()
