"""What the container step would run on the host to change a configuration, as data.

Each script says what it would change as a diff in its first lines, does it under pct's own rules
(lock, digest), and reads back what lies there afterwards.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from deployer import pct_config, pct_edit, proxmox
from deployer.model import Change, Shell, Where
from deployer.shell import assignments, words
from deployer.steps.container_facts import STATE_FOLDER

EDIT_TIMEOUT_S = 60.0
KEEP_COPIES = 10

# The copy is for people. It never lies below /etc/pve, where every file goes to all nodes.
KEEP_COPY = r"""
sum_of() { sha1sum <"$1" | cut -d ' ' -f 1; }
keep_copy() {
  kept=$STATE/$(sum_of "$CONF").conf
  if ! (umask 077 && mkdir -p "$STATE" && cat "$CONF" >"$kept.tmp" && mv -f "$kept.tmp" "$kept")
  then
    rm -f "$kept.tmp"
    echo "no copy of $CONF could be kept in $STATE: nothing was changed" >&2
    return 1
  fi
  ls -t "$STATE"/*.conf | sed "1,${COPIES}d" | while read -r old; do rm -f "$old"; done
}
"""

# The lock and the check are those of pct: an edit of another is never overwritten. The check is
# made again at the last moment, for those who edit without the lock. pmxcfs fixes owner and mode
# itself and refuses to set them; elsewhere the new file gets those of the old one. A rename within
# the folder is atomic; what a killed edit left is taken away by the next one, under the lock.
_EDIT = r"""
mkdir -p "$LOCKS"
exec 9>>"$LOCKS/pve-config-$VMID.lock"
if ! flock -w 10 9; then
  echo "the configuration of container $VMID is locked by another task" >&2
  exit 1
fi
new=$CONF.deployer.tmp
refuse() { echo "$1" >&2; exit 1; }
trap 'rm -f "$new"' EXIT
trap 'exit 1' HUP INT TERM
unchanged() {
  [ "$(sum_of "$CONF")" = "$BEFORE" ] ||
    refuse "$CONF was changed by another meanwhile; nothing was written"
}
unchanged
keep_copy || exit 1
cat >"$new" ||
  refuse "$CONF cannot be written; without quorum /etc/pve is read-only (pvecm status)"
[ "$(sum_of "$new")" = "$AFTER" ] ||
  refuse "the new text of $CONF came over broken; nothing was changed"
owner=$(stat -c %u:%g "$CONF") mode=$(stat -c %a "$CONF")
if [ "$(stat -c '%u:%g %a' "$new")" != "$owner $mode" ]; then
  chown "$owner" "$new" && chmod "$mode" "$new" ||
    refuse "owner and mode of $CONF cannot be kept; nothing was changed"
fi
unchanged
mv -f "$new" "$CONF" || refuse "$CONF cannot be replaced; nothing was changed (pvecm status)"
[ "$(sum_of "$CONF")" = "$AFTER" ] ||
  refuse "$CONF does not hold what was written: look at it"
"""

# pct may end with an error after it has written, and with success when all is only pending: what
# counts is what lies in the file. Whether it is in force is seen by the next look.
_SET = r"""
keep_copy || exit 1
status=0
"$@" || status=$?
printf '%s\n' "$LINES_WANTED" | while read -r line; do
  # A snapshot's section may hold the same line: only what stands before the first one counts.
  sed -e '/^\[pve:pending\]/b' -e '/^\[/q' "$CONF" | grep -qxF -e "$line" && continue
  echo "pct ended with status $status, and \"$line\" is not in $CONF" >&2
  exit 1
done || exit 1
[ "$status" -eq 0 ] || echo "pct ended with status $status after it had written"
"""


def digest(text: str) -> str:
    """pct's digest of a configuration: the sha1 of its bytes."""
    return hashlib.sha1(pct_config.encode(text), usedforsecurity=False).hexdigest()


def _digest_option(text: str) -> list[str]:
    """pct refuses when the file is another one. A line `digest:` in it makes it refuse always."""
    spoilt = any(line.startswith("digest:") for line in pct_config.parse_conf(text).ignored)
    return [] if spoilt else ["--digest", digest(text)]


def values_of(vmid: int) -> dict[str, str]:
    """What the scripts of this step know by name."""
    return {
        "VMID": str(vmid),
        "CONF": f"/etc/pve/lxc/{vmid}.conf",
        "STATE": f"{STATE_FOLDER}/{vmid}",
        "COPIES": str(KEEP_COPIES),
    }


def _shown(before: str, after: str, vmid: int) -> str:
    """The diff as comments; control characters cannot end one."""
    lines = pct_edit.diff(before, after, f"/etc/pve/lxc/{vmid}.conf")
    return "".join("# " + re.sub(r"[\x00-\x1f\x7f]", "?", line) + "\n" for line in lines)


def set_devices(vmid: int, text: str | None, paths: Mapping[int, str], reason: str) -> Change:
    """Adds devN entries by `pct set`. `text`: what the file will hold then; None: not known yet."""
    lines = [f"dev{index}: {path},mode=0666" for index, path in paths.items()]
    argv = ["pct", "set", str(vmid)]
    for line in lines:
        key, _, value = line.partition(": ")
        argv += [f"--{key}", value]
    shown = ""
    if text is not None:
        argv += _digest_option(text)
        shown = _shown(text, pct_edit.apply(text, pct_edit.Edit(tuple(lines))), vmid)
    values = {**values_of(vmid), "LINES_WANTED": "\n".join(lines)}
    script = shown + f"set -- {words(argv)}\n" + assignments(values) + KEEP_COPY + _SET
    names = ", ".join(paths.values())
    keys = ",".join(f"dev{index}" for index in paths)
    return Change(
        f"add {names} to container {vmid}",
        reason,
        Shell(Where.HOST, script, EDIT_TIMEOUT_S),
        words(["pct", "set", str(vmid), "--delete", keys]),
    )


def delete_devices(vmid: int, keys: Sequence[str], text: str) -> Shell:
    """Takes devN entries out again; in a running container that waits for its next start."""
    return Shell(
        Where.HOST,
        words(["pct", "set", str(vmid), "--delete", ",".join(keys), *_digest_option(text)]),
        EDIT_TIMEOUT_S,
    )


def edit_conf(vmid: int, before: str, after: str) -> Shell:
    """Replaces the file's text under pct's lock. Raises ValueError when it is over 1 MiB."""
    content = pct_config.encode(after)
    if len(content) > pct_config.MAX_BYTES:
        raise ValueError(f"its configuration would be {len(content)} bytes; /etc/pve takes 1 MiB")
    values = {
        **values_of(vmid),
        "LOCKS": pct_config.LOCK_FOLDER,
        "BEFORE": digest(before),
        "AFTER": digest(after),
    }
    script = _shown(before, after, vmid) + assignments(values) + KEEP_COPY + _EDIT
    return Shell(Where.HOST, script, EDIT_TIMEOUT_S, stdin=content)


def edit_lines(vmid: int, before: str, edit: pct_edit.Edit, reason: str) -> Change:
    """Makes an edit of raw lines. Raises ValueError as `edit_conf`."""
    action = edit_conf(vmid, before, pct_edit.apply(before, edit))
    parts = []
    if edit.replace:
        parts += [f"correct {old} to {new}" for old, new in edit.replace]
    if edit.add:
        parts.append(f"add {', '.join(edit.add)}")
    title = f"{' and '.join(parts)} in the configuration of container {vmid}"
    undo = "; ".join(
        [f"take out {line}" for line in edit.add]
        + [f"write {old} for {new}" for old, new in edit.replace]
    )
    return Change(title, reason, action, f"in /etc/pve/lxc/{vmid}.conf: {undo}")


def has_devn(version: tuple[int, ...]) -> bool:
    """Whether this pve-container has devN; one of unknown version is taken for a new one."""
    return not version or version >= proxmox.DEVICES_SINCE
