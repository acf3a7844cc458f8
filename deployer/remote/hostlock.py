"""The host lock: one run at a time changes a host (DESIGN section 5).

/var/lib/deployer/lock on the target is a file that appears complete or not at all (`ln` of a
finished temp file). Its first line is the run id, its second the record as base64 of JSON, so that
any owner string survives. Taking it can travel in the same exec as the probes: `acquire_prelude`.
"""

from __future__ import annotations

import base64
import dataclasses
import getpass
import json
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deployer import errors
from deployer.locallock import start_of
from deployer.model import Probe
from deployer.remote.batch import gather
from deployer.remote.transport import Answer, Transport
from deployer.shell import quote

LOCK = "/var/lib/deployer/lock"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class LockRecord:
    """Who holds the lock. Pid, boot id, start (clock ticks) and namespace are the controller's."""

    owner: str
    """user@controller"""
    host: str
    pid: int
    boot: str
    start: int
    machine: str
    namespace: str
    run_id: str
    step: str
    since: float
    """Unix seconds, controller clock."""

    @classmethod
    def mine(cls, host: str, run_id: str, step: str = "") -> LockRecord:
        """A record of this process, now. `host` is the inventory name of what is locked."""
        me = this_controller()
        return cls(
            owner=f"{_user()}@{me.host}",
            host=host,
            pid=os.getpid(),
            boot=me.boot,
            start=start_of(os.getpid()) or 0,
            machine=me.machine,
            namespace=me.namespace,
            run_id=_checked(run_id),
            step=step,
            since=time.time(),
        )

    def line(self) -> str:
        """One base64 word."""
        return base64.b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    def describe(self) -> str:
        """`root@desk (run r1, pid 77) since 2026-11-30 06:54:20 UTC, in step venv`."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        step = f", in step {self.step}" if self.step else ""
        return f"{self.owner} (run {self.run_id}, pid {self.pid}) since {since}{step}"


@dataclass(frozen=True)
class Taken:
    """The lock is ours. `stolen`: why the one before us was proven dead, '' when there was none."""

    stolen: str = ""


@dataclass(frozen=True)
class Held:
    """Someone else has it. `record` is None when what they wrote cannot be read."""

    record: LockRecord | None
    run_id: str = ""


@dataclass(frozen=True)
class NotAsked:
    """Neither taken nor known to be held."""

    reason: str


Outcome = Taken | Held | NotAsked


def _no_process(pid: int) -> int | None:
    del pid
    return None


@dataclass(frozen=True)
class Controller:
    """This machine, as far as it can prove a lock stale. Empty texts prove nothing."""

    host: str
    machine: str
    boot: str
    namespace: str
    start_of: Callable[[int], int | None] = field(default=_no_process, compare=False)
    """Kernel start time of a live process here, None when there is none."""


def this_controller() -> Controller:
    """The machine that we run on."""
    return Controller(
        host=socket.gethostname(),
        machine=_first_line("/etc/machine-id"),
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        namespace=_link("/proc/self/ns/pid"),
        start_of=start_of,
    )


def is_stale(record: LockRecord, me: Controller) -> str | None:
    """Why the holder is proven dead, or None. Only a holder on this very machine can be proven."""
    if not record.boot or not me.boot:
        return None
    if record.boot != me.boot:
        # Another boot proves a reboot only where the machine is known to be the same.
        if not (record.machine == me.machine != "" and record.owner.endswith(f"@{me.host}")):
            return None
        return f"{me.host} has been rebooted since"
    if record.namespace != me.namespace or not me.namespace or not record.start:
        return None
    start = me.start_of(record.pid)
    if start is None:
        return f"pid {record.pid} on {me.host} is gone"
    if start != record.start:
        return f"pid {record.pid} on {me.host} is another process now"
    return None


_ACQUIRE = r"""_l_lock=$_l_path
_l_try() {
  # Takes the lock when it is free; prints nothing.
  _l_new=$_l_lock.new.$_l_run
  printf '%s\n%s\n' "$_l_run" "$_l_line" >"$_l_new" || return 1
  # Onto the disk before it has its name: a power cut would leave an empty lock, whose holder
  # nobody could prove dead.
  sync "$_l_new" 2>/dev/null || :
  ln "$_l_new" "$_l_lock" 2>/dev/null
  _l_code=$?
  rm -f "$_l_new"
  return "$_l_code"
}
_l_read() {
  _l_holder= _l_record=
  { { read -r _l_holder && read -r _l_record; } <"$_l_lock"; } 2>/dev/null || :
}
_l_say() { printf 'deployer-lock %s\n' "$*"; }
_l_acquire() {
  umask 077
  mkdir -p "${_l_lock%/*}" || { _l_say unknown "cannot make ${_l_lock%/*}"; return 1; }
  [ ! -d "$_l_lock" ] || { _l_say unknown "$_l_lock is a folder"; return 1; }
  if [ -n "$_l_stale" ]; then
    # Move aside what is taken for stale, and look again: it may be a new one by now.
    _l_old=$_l_lock.stale.$_l_run
    _l_read
    if [ "$_l_holder" = "$_l_stale" ] && mv "$_l_lock" "$_l_old" 2>/dev/null; then
      _l_holder=
      { read -r _l_holder <"$_l_old"; } 2>/dev/null || :
      [ "$_l_holder" = "$_l_stale" ] || ln "$_l_old" "$_l_lock" 2>/dev/null
      rm -f "$_l_old"
    fi
  fi
  if _l_try; then _l_say taken; return 0; fi
  _l_read
  if [ "$_l_holder" = "$_l_run" ]; then _l_say taken; return 0; fi
  if [ -n "$_l_holder" ]; then _l_say held "$_l_holder" "$_l_record"; return 1; fi
  # It was free again at the second look, or it cannot be written.
  if _l_try; then _l_say taken; return 0; fi
  _l_read
  if [ -e "$_l_lock" ]; then _l_say held "${_l_holder:-?}" "$_l_record"; return 1; fi
  # The shell's own printf does not say why a write failed; cat does.
  _l_new=$_l_lock.new.$_l_run
  _l_say unknown "cannot write $_l_lock: $( { printf '%s\n' "$_l_line" | cat >"$_l_new"; } 2>&1)"
  rm -f "$_l_lock.new.$_l_run"
  return 1
}
(_l_acquire) || exit 0
"""


def acquire_prelude(record: LockRecord, *, stale: str = "", path: str = LOCK) -> str:
    """sh text that takes the lock and prints one line for `parse_outcome`.

    It ends the script (status 0) when the lock was not taken. Taking it again for the same run id
    is fine. `stale`: the run id of a holder proven dead by `is_stale`; only that one is replaced.
    """
    run_id = _checked(record.run_id)
    values = {"path": path, "run": run_id, "line": record.line(), "stale": stale}
    settings = "".join(f"_l_{name}={quote(value)}\n" for name, value in values.items())
    return settings + _ACQUIRE


def parse_outcome(printed: bytes) -> Outcome:
    """What `acquire_prelude` printed."""
    for line in printed.decode("utf-8", "replace").splitlines():
        mark, _, rest = line.partition(" ")
        if mark != "deployer-lock":
            continue
        said, _, rest = rest.partition(" ")
        if said == "taken":
            return Taken()
        if said == "held":
            run_id, _, record = rest.partition(" ")
            return Held(parse_record(record), run_id)
        return NotAsked(rest or line)
    return NotAsked("the target did not say")


def parse_record(line: str) -> LockRecord | None:
    """A record from its base64 word; None when it is not one."""
    try:
        values = json.loads(base64.b64decode(line, validate=True))
        known = {item.name for item in dataclasses.fields(LockRecord)}
        return LockRecord(**{key: value for key, value in values.items() if key in known})
    except (ValueError, TypeError, AttributeError):
        return None


_RELEASE = r"""_l_holder=
{ read -r _l_holder <"$_l_path"; } 2>/dev/null || :
[ "$_l_holder" != "$_l_run" ] || rm -f "$_l_path"
"""

_UPDATE = r"""_l_holder=
{ read -r _l_holder <"$_l_path"; } 2>/dev/null || :
[ "$_l_holder" = "$_l_run" ] || { printf '%s\n' "$_l_holder"; exit 75; }
umask 077
_l_new=$_l_path.new.$_l_run
printf '%s\n%s\n' "$_l_run" "$_l_line" | cat >"$_l_new" && mv -f "$_l_new" "$_l_path" && exit
rm -f "$_l_new"
exit 1
"""


def release_script(run_id: str, path: str = LOCK) -> str:
    """sh text that gives the lock back if this run holds it. Idempotent."""
    return f"_l_path={quote(path)}\n_l_run={quote(_checked(run_id))}\n{_RELEASE}"


def update_script(record: LockRecord, path: str = LOCK) -> str:
    """sh text that replaces our record (a new step); status 75 when the lock is not ours."""
    return (
        f"_l_path={quote(path)}\n_l_run={quote(_checked(record.run_id))}\n"
        f"_l_line={quote(record.line())}\n{_UPDATE}"
    )


def refuse_unless_taken(outcome: Outcome, host: str) -> None:
    """Raises LockHeld or LockUnknown, which say who, since when, which step and what to do."""
    if isinstance(outcome, Held):
        who = outcome.record.describe() if outcome.record else f"run {outcome.run_id}"
        raise errors.LockHeld(
            f"another run is at work: {who}",
            where=host,
            fix=f"wait for it; if it is surely dead: deploy unlock {host}",
        )
    if isinstance(outcome, NotAsked):
        if is_full(outcome.reason):
            raise disk_full(host, (outcome.reason,))
        raise errors.LockUnknown(
            f"the host lock could not be asked for: {outcome.reason}",
            where=host,
            fix=f"make {LOCK} writable on {host}, then run again",
        )


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
        return gather(
            transport,
            probes,
            prelude=self.prelude(),
            on_prelude=lambda _, printed: self.settle(transport, parse_outcome(printed)),
        )

    def prelude(self) -> str:
        """sh text that tries; its output is for `settle(transport, parse_outcome(output))`."""
        return acquire_prelude(self.record, path=self._path)

    def settle(self, transport: Transport, outcome: Outcome) -> Taken:
        """Ends an attempt: taken, or one more try when the holder is proven dead, or raises."""
        if not isinstance(outcome, Held) or outcome.record is None:
            refuse_unless_taken(outcome, self.record.host)
            return Taken()
        before = outcome.record
        stolen = is_stale(before, self._me) or ""
        if stolen:
            again = acquire_prelude(self.record, stale=outcome.run_id, path=self._path)
            outcome = self._ask(transport, again)
        refuse_unless_taken(outcome, self.record.host)
        self._on_note(f"took over the lock of a dead run: {before.describe()}; {stolen}")
        return Taken(stolen)

    def enter(self, transport: Transport, step: str) -> None:
        """Says which step runs. Raises LockHeld when the lock is no longer ours."""
        self.record = dataclasses.replace(self.record, step=step)
        answer = transport.run(update_script(self.record, self._path))
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
        answer = transport.run(release_script(self.record.run_id, self._path))
        if answer.exit != 0:
            raise self._unknown(answer)

    def _ask(self, transport: Transport, script: str) -> Outcome:
        try:
            answer = transport.run(script)
        except errors.Unreachable as error:
            return NotAsked(str(error))
        outcome = parse_outcome(answer.stdout)
        if isinstance(outcome, NotAsked) and answer.stderr:
            return NotAsked(f"{outcome.reason}: {answer.error_text.strip().splitlines()[-1]}")
        return outcome

    def _unknown(self, answer: Answer) -> errors.LockUnknown:
        if is_full(answer.error_text):
            return disk_full(self.record.host, tuple(answer.error_text.splitlines()[-5:]))
        return errors.LockUnknown(
            "the host lock could not be written",
            where=self.record.host,
            evidence=tuple(answer.error_text.splitlines()[-5:]),
        )


def read_lock(transport: Transport, path: str = LOCK) -> Held | None:
    """Who holds the lock now, None when it is free. Raises LockUnknown."""
    script = f"[ -e {quote(path)} ] || [ -L {quote(path)} ] || exit 44\nexec cat {quote(path)}\n"
    answer = transport.run(script)
    if answer.exit == 44:
        return None
    if answer.exit != 0:
        raise errors.LockUnknown(
            "the host lock could not be read",
            where=transport.name,
            evidence=tuple(answer.error_text.splitlines()[-5:]),
        )
    run_id, _, rest = answer.text.partition("\n")
    return Held(parse_record(rest.strip()), run_id)


def unlock(transport: Transport, path: str = LOCK) -> Held | None:
    """`deploy unlock`: takes the lock away from whoever holds it; returns who did."""
    held = read_lock(transport, path)
    answer = transport.run(f"rm -f {quote(path)}\n")
    if answer.exit != 0:
        raise errors.LockUnknown(
            "the host lock could not be removed",
            where=transport.name,
            evidence=tuple(answer.error_text.splitlines()[-5:]),
        )
    return held


def _checked(run_id: str) -> str:
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"not a run id: {run_id!r}")
    return run_id


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").split("\n")[0].strip()
    except OSError:
        # Not Linux: nothing can be proven by it, and an empty text says so.
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
