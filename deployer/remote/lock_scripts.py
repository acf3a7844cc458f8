"""The host lock on the target: a file that appears complete or not at all. POSIX sh.

It is made by `ln` of a finished temp file. Its first line is the run id, its second the record as
base64 of JSON, so that any owner string survives.

A lock whose holder is proven dead is never removed first: whoever gets the link `lock.heir.<dead
run>` is its only heir, looks again whether the dead one still has the lock, and renames the link to
`lock`. So at no moment is there no lock, and of many heirs one gets it. A killed heir leaves its
link, and is proven dead and inherited from in the same way.

A script whose connection was cut may still begin, or go on, when its run has given the lock back
over another one. So that release lays down `lock.gone.<run>` for some seconds, and whoever has
given the run the lock looks for it afterwards: of the two, the later one sees what the other did.

`.spare` beside it takes up a little of the disk once a step has begun, and is given up when the
disk is so full that no lock can be written: what frees space (`deploy gc`) needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployer.remote.lock_record import Held, LockRecord, checked, parse_record
from deployer.shell import quote

LOCK = "/var/lib/deployer/lock"
CUT_TURNS = 15
"""Of 0.2 s: how long a script that was cut off may take to begin, on a machine that is busy."""
TEXT_MAX = 65536
"""Bytes; no lock of ours has more."""


@dataclass(frozen=True)
class Taken:
    """The lock is ours. `stolen`: why the one before us was proven dead, '' when there was none."""

    stolen: str = ""


@dataclass(frozen=True)
class NotAsked:
    """Neither taken nor known to be held. `odd`: something that is no file has its name."""

    reason: str
    odd: bool = False


Outcome = Taken | Held | NotAsked

_WRITE = r"""_l_spare=${_l_path%/*}/.spare
_l_write() {
  # The shell's own printf does not say why a write failed; cat does.
  _l_why=$( { printf '%s\n%s\n' "$_l_run" "$_l_line" | cat >"$_l_new"; } 2>&1)
}
_l_over() {
  # True when this run has given the lock back meanwhile; then it has it no more.
  [ -e "$_l_path.gone.$_l_run" ] || return 1
  _l_holder=
  { read -r _l_holder <"$_l_path"; } 2>/dev/null || :
  [ "$_l_holder" != "$_l_run" ] || rm -f "$_l_path"
  rm -f "$_l_path.gone.$_l_run"
}
_l_put() { _l_write || { rm -f "$_l_spare" && _l_write; }; }
"""

_ACQUIRE = r"""_l_lock=$_l_path _l_failed=
_l_link() {
  # Gives the record the name $1 if that is free; prints nothing.
  _l_new=$_l_lock.new.$_l_run
  _l_put || { _l_failed=write; rm -f "$_l_new"; return 1; }
  # Onto the disk before it has its name: a power cut would leave an empty lock, whose holder
  # nobody could prove dead.
  sync "$_l_new" 2>/dev/null || :
  _l_why=$(ln "$_l_new" "$1" 2>&1)
  _l_code=$? _l_failed=link
  rm -f "$_l_new"
  return "$_l_code"
}
_l_read() {
  _l_holder= _l_record=
  { { read -r _l_holder && read -r _l_record; } <"$1"; } 2>/dev/null || :
}
_l_say() { printf 'deployer-lock %s\n' "$*"; }
_l_held() {
  # Of the file $1, as last read.
  _l_now=$(date +%s) _l_at=$(stat -c %Y "$1" 2>/dev/null) || _l_at=
  _l_say held "${_l_holder:-?}" "${_l_record:-?}" "${_l_at:+$((_l_now - _l_at))}"
}
_l_dead() { case " $_l_stale " in *" $1 "*) ;; *) return 1 ;; esac; }
_l_inherit() {
  # 1: somebody else inherits, as was said.
  _l_read "$_l_lock"
  _l_first=$_l_holder _l_last=$_l_holder _l_old=
  while [ -n "$_l_last" ] && _l_dead "$_l_last"; do
    case " $_l_old " in *" $_l_last "*) break ;; esac
    _l_heir=$_l_lock.heir.$_l_last
    if _l_link "$_l_heir"; then
      _l_read "$_l_lock"
      if [ "$_l_holder" = "$_l_first" ] && mv -f "$_l_heir" "$_l_lock"; then
        for _l_one in $_l_old; do rm -f "$_l_lock.heir.$_l_one"; done
      else
        rm -f "$_l_heir"
      fi
      return 0
    fi
    _l_read "$_l_heir"
    _l_old="$_l_old $_l_last" _l_last=$_l_holder
  done
  [ -n "$_l_old" ] && [ -n "$_l_last" ] && [ "$_l_last" != "$_l_run" ] || return 0
  _l_held "$_l_heir"
  return 1
}
_l_taken() {
  if _l_over; then _l_say unknown "this run has given it back"; return 1; fi
  _l_say taken
}
_l_as() { [ "$(id -u)" = 0 ] || printf ' as %s, who is not root' "$(id -un 2>/dev/null)"; }
_l_acquire() {
  umask 077
  mkdir -p "${_l_lock%/*}" || { _l_say unknown "cannot make ${_l_lock%/*}$(_l_as)"; return 1; }
  if [ -L "$_l_lock" ] || { [ -e "$_l_lock" ] && [ ! -f "$_l_lock" ]; }; then
    _l_say odd "$_l_lock is no regular file"
    return 1
  fi
  for _l_one in "$_l_lock".gone.*; do
    # Their scripts have ended long ago.
    [ ! -e "$_l_one" ] || find "$_l_one" -mmin +60 -exec rm -f {} \; 2>/dev/null
  done
  [ -z "$_l_stale" ] || _l_inherit || return 1
  if _l_link "$_l_lock"; then _l_taken; return; fi
  _l_read "$_l_lock"
  if [ "$_l_holder" = "$_l_run" ]; then _l_taken; return; fi
  if [ -n "$_l_holder" ]; then _l_held "$_l_lock"; return 1; fi
  # It was free again at the second look, or it cannot be written.
  if _l_link "$_l_lock"; then _l_taken; return; fi
  _l_read "$_l_lock"
  if [ -e "$_l_lock" ]; then _l_held "$_l_lock"; return 1; fi
  _l_say unknown "cannot $_l_failed $_l_lock$(_l_as): $_l_why"
  return 1
}
(_l_acquire) || exit 0
"""


def acquire_prelude(record: LockRecord, *, stale: Sequence[str] = (), path: str = LOCK) -> str:
    """sh text that takes the lock and prints one line for `parse_outcome`.

    It ends the script (status 0) when the lock was not taken. Taking it again for the same run id
    is fine. `stale`: run ids of holders proven dead by `is_stale`; only these are replaced.
    """
    values = {
        "path": path,
        "run": checked(record.run_id),
        "line": record.line(),
        "stale": " ".join(map(checked, stale)),
    }
    settings = "".join(f"_l_{name}={quote(value)}\n" for name, value in values.items())
    return settings + _WRITE + _ACQUIRE


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
            run_id, _, rest = rest.partition(" ")
            record, _, age = rest.rpartition(" ")
            return held(run_id, record, age)
        return NotAsked(rest or line, said == "odd")
    return NotAsked("the target did not say")


def held(run_id: str, record: str, age: str = "") -> Held:
    """From the words of the file; a record of another run than its first line is none."""
    found = parse_record(record.strip())
    known = found if found is not None and found.run_id == run_id else None
    return Held(known, run_id.strip("?"), float(age) if age.isdigit() else None)


def parse_read(text: str) -> tuple[Held, str]:
    """Who holds the lock, and the mark of this very file, as `read_script` printed them."""
    mark, age, run_id, record = [*text.split("\n"), "", "", ""][:4]
    return held(run_id.strip(), record, age.strip()), mark


_RELEASE = r"""_l_gone=$_l_path.gone.$_l_run
[ -z "$_l_cut" ] || (
  umask 077
  mkdir -p "${_l_path%/*}" && : >"$_l_gone"
) 2>/dev/null || :
_l_holder=
{ read -r _l_holder <"$_l_path"; } 2>/dev/null || :
[ "$_l_holder" != "$_l_run" ] || rm -f "$_l_path" || exit 1
while [ -e "$_l_gone" ] && [ "${_l_cut:-0}" -gt 0 ]; do
  sleep 0.2 2>/dev/null || sleep 1
  _l_cut=$((_l_cut - 1))
done
[ ! -e "$_l_gone" ] || rm -f "$_l_gone"
"""

_UPDATE = r"""umask 077
_l_new=$_l_path.new.$_l_run
_l_put || { rm -f "$_l_new"; printf '%s\n' "$_l_why" >&2; exit 1; }
# Asked last: what comes between the answer and the rename is overwritten.
_l_holder=
{ read -r _l_holder <"$_l_path"; } 2>/dev/null || :
[ "$_l_holder" = "$_l_run" ] || {
  rm -f "$_l_new"
  printf '%s\n' "$_l_holder"
  _l_over
  exit 75
}
mv -f "$_l_new" "$_l_path" || { rm -f "$_l_new"; exit 1; }
if _l_over; then exit 75; fi
# Of four blocks: of the lock itself, of its next version, and of their names.
# busybox's head does not tell of a full disk.
[ -e "$_l_spare" ] || {
  head -c 16384 /dev/zero >"$_l_spare"
  [ "$(wc -c <"$_l_spare")" -eq 16384 ] || rm -f "$_l_spare"
} 2>/dev/null
"""

# Asked again where something failed: it may have been given back between two looks.
_FREE = r"""_l_free() { [ -e "$_l_path" ] || [ -L "$_l_path" ] || exit 44; }
"""

# The first line tells this file from any that has its name later; a holder that lives writes anew.
_READ = r"""_l_free
[ -f "$_l_path" ] || { _l_free; printf '%s is no regular file\n' "$_l_path" >&2; exit 1; }
stat -c '%i %y %s' "$_l_path" || { _l_free; exit 1; }
_l_at=$(stat -c %Y "$_l_path" 2>/dev/null) || _l_at=
printf '%s\n' "${_l_at:+$(($(date +%s) - _l_at))}"
head -c "$_l_max" "$_l_path" || { _l_free; exit 1; }
"""

_REMOVE = r"""_l_free
[ "$(stat -c '%i %y %s' "$_l_path")" = "$_l_seen" ] || { _l_free; exit 75; }
rm -f "$_l_path"
"""


def release_script(run_id: str, path: str = LOCK, *, cut: bool = False) -> str:
    """sh text that gives the lock back if this run holds it. Idempotent.

    `cut`: a script that takes or writes it may still be under way; it is waited for.
    """
    return (
        f"_l_path={quote(path)}\n_l_run={quote(checked(run_id))}\n"
        f"_l_cut={CUT_TURNS if cut else ''}\n{_RELEASE}"
    )


def update_script(record: LockRecord, path: str = LOCK) -> str:
    """sh text that replaces our record (a new step); status 75 when the lock is not ours."""
    return (
        f"_l_path={quote(path)}\n_l_run={quote(checked(record.run_id))}\n"
        f"_l_line={quote(record.line())}\n{_WRITE}{_UPDATE}"
    )


def read_script(path: str = LOCK) -> str:
    """sh text that prints what `parse_read` reads; status 44 when the lock is free."""
    return f"_l_path={quote(path)}\n_l_max={TEXT_MAX}\n{_FREE}{_READ}"


def remove_script(mark: str, path: str = LOCK) -> str:
    """sh text that removes the very file that had `mark`; status 44 when there is none, 75 when it
    is another, or was written anew.
    """
    return f"_l_path={quote(path)}\n_l_seen={quote(mark)}\n{_FREE}{_REMOVE}"
