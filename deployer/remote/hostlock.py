"""The host lock: one run at a time changes a host (DESIGN section 5).

Taking it can travel in the same exec as the probes. `lock_scripts` has what runs on the target,
`lock_record` who holds it and when a holder is proven dead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from deployer import errors
from deployer.model import Probe
from deployer.remote.batch import gather
from deployer.remote.lock_record import (
    RUN_ID,
    Controller,
    Held,
    LockRecord,
    is_stale,
    this_controller,
)
from deployer.remote.lock_scripts import (
    LOCK,
    NotAsked,
    Outcome,
    Taken,
    acquire_prelude,
    parse_outcome,
    parse_read,
    read_script,
    release_script,
    remove_script,
    update_script,
)
from deployer.remote.transport import Answer, Transport

NOT_ROOT = "who is not root"
"""Of the script's answer, when it could not write and is a mere user's."""
NO_LINK = "cannot link"
"""Of the script's answer, when the record could be written and not get its name."""
HEIRS = 8
"""So many dead holders, each an heir of the one before, are replaced by one run."""


def refuse_unless_taken(outcome: Outcome, host: str, mine: LockRecord | None = None) -> None:
    """Raises LockHeld or LockUnknown, which say who, since when, which step and what to do.

    `mine`: the record of who asks, which may have the lock already, under another name.
    """
    if isinstance(outcome, Held):
        twin = outcome.record
        if mine is not None and twin is not None and _one_process(mine, twin) and twin.host != host:
            raise errors.LockHeld(
                f"it is the same machine as {twin.host}, which this run is at work on",
                where=host,
                fix="describe the machine once in the inventory; until then, name one of the two "
                "in a command",
            )
        raise errors.LockHeld(
            f"another run is at work: {outcome.describe()}",
            where=host,
            fix=f"wait for it; if it is surely dead: deploy unlock {host}",
        )
    if isinstance(outcome, NotAsked):
        if is_full(outcome.reason):
            raise disk_full(host, (outcome.reason,))
        fix = f"move it away on {host}" if outcome.odd else f"make {LOCK} writable on {host}"
        if outcome.reason.startswith(NO_LINK):
            fix = f"let {LOCK.rpartition('/')[0]} of {host} lie on a filesystem with hard links"
        if NOT_ROOT in outcome.reason:
            fix = f"let your key log in as root there, and write `user: root` under ssh of {host}"
        raise errors.LockUnknown(
            f"the host lock could not be asked for: {outcome.reason}",
            where=host,
            fix=f"{fix}, then run again",
        )


def _one_process(mine: LockRecord, other: LockRecord) -> bool:
    """Were both written by this process? A boot id that is not known proves nothing."""
    keys = ("boot", "namespace", "pid", "start")
    return bool(mine.boot) and all(getattr(mine, key) == getattr(other, key) for key in keys)


def is_full(text: str) -> bool:
    """Does a tool say that there is no room, of a disk or of a quota?"""
    return "No space left on device" in text or "Disk quota exceeded" in text


def disk_full(host: str, evidence: tuple[str, ...]) -> errors.DiskFull:
    """The error of a target that cannot even hold the lock."""
    folder = LOCK.rpartition("/")[0]
    return errors.DiskFull(
        f"the disk below {folder} is full: not even the host lock can be written",
        where=host,
        fix=f"free space there (df -h {folder}; df -i {folder}), then run again",
        evidence=evidence,
    )


class HostLock:
    """The lock of one host, for one run. `me` is the controller that proves others dead.

    `on_note` is told when the lock of a dead run was taken over.
    """

    def __init__(
        self,
        record: LockRecord,
        me: Controller | None = None,
        path: str = LOCK,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.record = record
        self._me = me or this_controller()
        self._path = path
        self._on_note = on_note
        self._under_way = False
        """Whether a script that takes or writes it may not have ended yet."""

    def acquire(self, transport: Transport) -> Taken:
        """Takes the lock, also from a holder that is proven dead. Raises LockHeld, LockUnknown."""
        return self.settle(transport, self._ask(transport, self.prelude()))

    def acquire_and_gather(
        self, transport: Transport, probes: Sequence[Probe]
    ) -> dict[type, object]:
        """Takes the lock and runs the probes under it, in one exec.

        Raises LockHeld and LockUnknown, and what `batch.gather` raises; the lock is ours after the
        latter.
        """

        def answered(answer: Answer, printed: bytes) -> None:
            self._under_way = False
            self.settle(transport, parse_outcome(printed))

        self._under_way = True
        return gather(transport, probes, prelude=self.prelude(), on_prelude=answered)

    def prelude(self) -> str:
        """sh text that tries; its output is for `settle(transport, parse_outcome(output))`."""
        return acquire_prelude(self.record, path=self._path)

    def settle(self, transport: Transport, outcome: Outcome) -> Taken:
        """Ends an attempt: taken, or one more try for each holder proven dead, or raises."""
        dead: dict[str, tuple[str, str]] = {}
        while isinstance(outcome, Held) and outcome.record is not None and len(dead) < HEIRS:
            why = is_stale(outcome.record, self._me) or ""
            if not why or outcome.run_id in dead or not RUN_ID.fullmatch(outcome.run_id):
                break
            dead[outcome.run_id] = outcome.describe(), why
            again = acquire_prelude(self.record, stale=tuple(dead), path=self._path)
            outcome = self._ask(transport, again)
        refuse_unless_taken(outcome, self.record.host, self.record)
        for who, why in dead.values():
            self._on_note(f"took over the lock of a dead run: {who}; {why}")
        return Taken("; ".join(why for _, why in dead.values()))

    def enter(self, transport: Transport, step: str) -> None:
        """Says which step runs. Raises LockHeld when the lock is no longer ours."""
        self.record = dataclasses.replace(self.record, step=step)
        self._under_way = True
        answer = transport.run(update_script(self.record, self._path))
        self._under_way = False
        if answer.exit == 75:
            raise errors.LockHeld(
                f"the lock of this run was taken away (now: {answer.text.strip() or 'nobody'})",
                where=self.record.host,
                fix="see who runs: deploy status " + self.record.host,
            )
        if answer.exit != 0:
            raise self._unknown(answer)

    def release(self, transport: Transport) -> None:
        """Gives it back; nothing happens when it is not ours."""
        script = release_script(self.record.run_id, self._path, cut=self._under_way)
        answer = transport.run(script)
        if answer.exit != 0:
            raise self._unknown(answer)
        self._under_way = False

    def _ask(self, transport: Transport, script: str) -> Outcome:
        self._under_way = True
        try:
            answer = transport.run(script)
        except errors.Unreachable as error:
            return NotAsked(str(error))
        self._under_way = False
        outcome = parse_outcome(answer.stdout)
        if isinstance(outcome, NotAsked) and answer.stderr:
            told = answer.error_text.strip().splitlines()[-1]
            return dataclasses.replace(outcome, reason=f"{outcome.reason}: {told}")
        return outcome

    def _unknown(self, answer: Answer) -> errors.LockUnknown:
        if is_full(answer.error_text):
            return disk_full(self.record.host, tuple(answer.error_text.splitlines()[-5:]))
        return _not_done("written", self.record.host, answer)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A lock as it was read. `mark`: what tells this very file."""

    held: Held
    mark: str = ""


def read_lock(transport: Transport, path: str = LOCK) -> Seen | None:
    """Who holds the lock now, None when it is free. Raises LockUnknown."""
    answer = transport.run(read_script(path))
    if answer.exit == 44:
        return None
    if answer.exit != 0:
        raise _not_done("read", transport.name, answer)
    return Seen(*parse_read(answer.text))


def unlock(transport: Transport, seen: Seen, path: str = LOCK) -> bool:
    """`deploy unlock`: takes the lock away from who was seen to hold it.

    False when it was free by then. Raises LockHeld when another holds it now, or the same has
    written since and so is alive; then nothing was removed.
    """
    answer = transport.run(remove_script(seen.mark, path))
    if answer.exit == 75:
        raise errors.LockHeld(
            "the lock was written again meanwhile: its run is alive, or another has it; nothing "
            "was removed",
            where=transport.name,
            fix=f"see who runs: deploy status {transport.name}",
        )
    if answer.exit not in (0, 44):
        raise _not_done("removed", transport.name, answer)
    return answer.exit == 0


def _not_done(what: str, host: str, answer: Answer) -> errors.LockUnknown:
    return errors.LockUnknown(
        f"the host lock could not be {what}",
        where=host,
        fix=f"look at {LOCK} and its folder on {host}, then run again",
        evidence=tuple(answer.error_text.splitlines()[-5:]),
    )
