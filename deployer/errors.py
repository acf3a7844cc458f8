"""Typed errors. One class a cause; each carries what happened, where, and what to do next.

Exit codes (DESIGN section 8): 0 done; 1 a step failed; 2 usage or bad file; 3 unreachable;
4 lock held; 5 a gate failed; 6 changes pending; 130 interrupted.
"""

from __future__ import annotations

import traceback

AGAIN = "run the same command again; it continues where it was"
"""What to do after an end that lost nothing."""


class DeployError(Exception):
    """Base of all errors that a user sees: `what` in one line, `fix` in the next.

    `where` names the place (file:line, host, pid, path); `evidence` holds raw lines that prove it.
    """

    exit_code: int = 1

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", evidence: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"{where}: {what}" if where else what)
        self.what = what
        self.where = where
        self.fix = fix
        self.evidence = evidence

    def again(self) -> DeployError:
        """The same, to be raised in another thread as well."""
        return type(self)(self.what, where=self.where, fix=self.fix, evidence=self.evidence)

    def add(self, text: str) -> None:
        """Appends to `what`: something that was found out while the error was handled."""
        self.what = f"{self.what}; {text}"
        self.args = (f"{self.where}: {self.what}" if self.where else self.what,)


class UsageError(DeployError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = 2


class DocumentError(DeployError):
    """An inventory, playbook or state file is wrong; `where` is file:line:column."""

    exit_code = 2


class StateUnreadable(DeployError):
    """The state file cannot be read. Never treated as empty."""

    exit_code = 2


class Unreachable(DeployError):
    """No session with the target: dark, refused, or it never answered."""

    exit_code = 3


class AuthenticationRefused(Unreachable):
    """The target answered and refused every key that was offered."""


class HostKeyUnknown(Unreachable):
    """The target's host key is in no known_hosts file."""


class HostKeyChanged(Unreachable):
    """The target's host key differs from the recorded one."""


REFUSALS = (AuthenticationRefused, HostKeyUnknown, HostKeyChanged)
"""What will not pass by itself: asking again is of no use."""


class ConnectionLost(Unreachable):
    """The connection ended before the end mark of an answer; nothing in it is believed."""


class DeadlineExceeded(Unreachable):
    """The target was reached but a wait ran over its deadline."""


class LockHeld(DeployError):
    """Another run holds the local or the host lock."""

    exit_code = 4


class LockUnknown(DeployError):
    """The host lock could not be asked for; neither taken nor held."""

    exit_code = 3


class DiskFull(LockUnknown):
    """The target answers, and there is no room to write its lock."""

    exit_code = 1


class StepFailed(DeployError):
    """A step could not reach its goal."""


class StepBlocked(StepFailed):
    """A step refuses to act; `fix` is the way out."""


class RemoteCommandFailed(StepFailed):
    """A change's command ended with a non-zero status."""


class CommandOverdue(DeployError):
    """The whole command ran over its `--timeout`."""


class GateFailed(DeployError):
    """The server answers but is not good."""

    exit_code = 5


class Defect(DeployError):
    """An error that nobody foresaw; `evidence` is the end of its traceback."""

    @classmethod
    def of(cls, error: Exception, where: str) -> Defect:
        """Wraps `error`, for the place where it came up."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        return cls(
            f"unexpected {type(error).__name__}: {error}",
            where=where,
            fix="this is a defect of deploy; report it with the lines shown",
            evidence=tuple(lines[-20:]),
        )


class Interrupted(DeployError):
    """The user stopped the run (SIGINT, SIGTERM)."""

    exit_code = 130


class NotStarted(DeployError):
    """A host or deployment was not touched because of how others of the same run ended."""
