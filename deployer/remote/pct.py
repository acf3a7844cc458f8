"""Runs scripts in an LXC container through `pct exec` on its host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deployer import errors
from deployer.remote import framing
from deployer.remote.transport import Answer, Transport

_EXEC = 'vmid=$1; shift; exec pct exec "$vmid" -- "$@"'
# lxc-attach would wait on a stdin that nobody closes, or eat the script's own.
_EXEC_WITHOUT_STDIN = _EXEC + " </dev/null"


class ContainerStopped(errors.Unreachable):
    """The host answers, but the container does not run."""


class ContainerMissing(errors.Unreachable):
    """The host has no container with this vmid."""


class PctTransport:
    """A container reached through its host's transport, which it does not own."""

    def __init__(self, host: Transport, vmid: int, name: str) -> None:
        self._host = host
        self._vmid = vmid
        self._name = name

    @property
    def name(self) -> str:
        """`kpro5/129`."""
        return self._name

    def run(
        self,
        script: str,
        *,
        args: Sequence[str] = (),
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """See Transport.run. Raises ContainerStopped and ContainerMissing as well.

        A deadline ends the wait, not the script: `pct exec` leaves it running in the container.
        """
        framed = framing.frame(script, args, stdin)
        parser = framing.AnswerParser(framed.mark)

        def feed(data: bytes) -> None:
            new = parser.out.feed(data)
            if new and on_stdout is not None:
                on_stdout(new)

        try:
            outer = self._host.run(
                _EXEC if framed.stdin else _EXEC_WITHOUT_STDIN,
                args=(str(self._vmid), *framed.argv),
                stdin=framed.stdin,
                timeout_s=timeout_s,
                on_stdout=feed,
            )
        except (errors.DeadlineExceeded, errors.ConnectionLost) as error:
            error.evidence = parser.evidence()
            raise
        parser.err.feed(outer.stderr)
        if parser.complete:
            return parser.answer()
        raise self._failure(outer, parser)

    def close(self) -> None:
        """Nothing to end: the connection is the host transport's."""

    def _failure(self, outer: Answer, parser: framing.AnswerParser) -> errors.Unreachable:
        text = outer.error_text
        host = self._host.name
        evidence = tuple(line for line in text.splitlines() if line.strip())[-5:]
        if (
            f"container '{self._vmid}' not running" in text
            or f"CT {self._vmid} not running" in text
        ):
            return ContainerStopped(
                f"container {self._vmid} on {host} is not running",
                where=self._name,
                fix=f"start it on {host}: pct start {self._vmid}",
                evidence=evidence,
            )
        if f"{self._vmid}.conf' does not exist" in text:
            return ContainerMissing(
                f"{host} has no container {self._vmid}",
                where=self._name,
                fix="correct the vmid in the inventory (`pct list` on the host shows all)",
                evidence=evidence,
            )
        if outer.exit == 127 and not parser.out.begun:
            return errors.Unreachable(
                f"{host} has no `pct`: not a Proxmox host?",
                where=self._name,
                fix="give the container its own `ssh` in the inventory, or correct the host's kind",
                evidence=evidence,
            )
        if not parser.out.begun and "please run as root" in text:
            return errors.Unreachable(
                f"`pct` on {host} needs root",
                where=self._name,
                fix="set `user: root` in the host's `ssh` of the inventory",
                evidence=evidence,
            )
        begun = "ended before its end mark" if parser.out.begun else "never began"
        return errors.ConnectionLost(
            f"the answer through pct exec {begun} (status {outer.exit})",
            where=self._name,
            fix="" if parser.out.begun else f"look at `pct exec {self._vmid} -- true` on {host}",
            evidence=parser.evidence() if parser.out.begun else evidence,
        )
