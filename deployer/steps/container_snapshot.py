"""A snapshot before a configuration is changed; only snapshots with our names are ever dropped.

Its disks are never rolled back by this tool: that would lose what was written since.
"""

from __future__ import annotations

import hashlib
import re
import time

from deployer import pct_config
from deployer.errors import RemoteCommandFailed
from deployer.events import ChangeDone, ChangeStarted
from deployer.model import Change, Shell, Where
from deployer.shell import assignments
from deployer.steps.base import StepContext
from deployer.steps.container_changes import KEEP_COPY, values_of
from deployer.steps.container_facts import STATE_FOLDER, ContainerFacts

SNAPSHOT_TIMEOUT_S = 600.0
SNAPSHOT_PREFIX = "deployer-"
KEEP_SNAPSHOTS = 2

_SNAPSHOT = r"""
keep_copy || exit 1
for bad in $BROKEN; do
  pct delsnapshot "$VMID" "$bad" --force 1 >&2 || exit 1
done
if said=$(pct snapshot "$VMID" "$NAME" --description "before deployer changed it" 2>&1); then
  printf 'snapshot %s\n' "$NAME"
else
  case $said in
  *"snapshot feature is not available"*) printf 'none %s\n' "$said"; exit 0 ;;
  *"already used"*) ;;
  *) printf '%s\n' "$said" >&2; exit 1 ;;
  esac
fi
for old in $OLD; do
  pct delsnapshot "$VMID" "$old" >/dev/null 2>&1 || printf 'kept %s\n' "$old"
done
"""


def snapshot_name(facts: ContainerFacts) -> str:
    """One name for one configuration: taken again only when something else is to be protected."""
    current = facts.config().current
    keys = sorted(pair for pair in current.keys.items() if pair[0] != "parent")
    meaning = repr((keys, current.raw)).encode("utf-8", "surrogateescape")
    return SNAPSHOT_PREFIX + hashlib.sha256(meaning).hexdigest()[:8]


def own_snapshots(config: pct_config.PctConfig) -> list[str]:
    """Snapshots of ours, the oldest first; others are never touched."""
    ours = re.compile(re.escape(SNAPSHOT_PREFIX) + "[0-9a-f]{8}")
    named = [(part.keys.get("snaptime", "0"), name) for name, part in config.snapshots.items()]
    return [name for _, name in sorted(named) if ours.fullmatch(name)]


def snapshot(vmid: int, facts: ContainerFacts) -> Change | None:
    """A snapshot before an edit; None when this configuration has one already."""
    name = snapshot_name(facts)
    config = facts.config()
    ours = own_snapshots(config)
    # One whose taking or dropping was cut off protects nothing, and its name is taken.
    broken = [one for one in ours if "snapstate" in config.snapshots[one].keys]
    ours = [one for one in ours if one not in broken]
    if name in ours:
        return None
    old = ours[: max(0, len(ours) + 1 - KEEP_SNAPSHOTS)]
    values = {**values_of(vmid), "NAME": name, "OLD": " ".join(old)}
    values["BROKEN"] = " ".join(broken)
    dropped = f" and drop {', '.join([*broken, *old])}" if broken or old else ""
    return Change(
        f"take snapshot {name} of container {vmid}{dropped}",
        "before its configuration is changed; storages without snapshots do without",
        Shell(Where.HOST, assignments(values) + KEEP_COPY + _SNAPSHOT, SNAPSHOT_TIMEOUT_S),
        f"pct delsnapshot {vmid} {name}",
    )


def is_snapshot(change: Change) -> bool:
    """Whether this change is the snapshot, after which the file is another one."""
    return change.title.startswith("take snapshot ")


def take(context: StepContext, change: Change) -> None:
    """Runs it. A storage without snapshots is told; the copy of the configuration is then all.

    Raises RemoteCommandFailed when pct fails for another reason.
    """
    action = change.action
    if not isinstance(action, Shell):
        raise TypeError("a snapshot is taken by a script")
    want = context.want
    ids = (want.host_name, want.id, context.step)
    context.bus.emit(ChangeStarted(*ids, change.title))
    began = time.monotonic()
    transport = context.on(action.where)
    answer = transport.run(action.script, timeout_s=action.timeout_s)
    if answer.exit != 0:
        raise RemoteCommandFailed(
            f"{change.title}: the command ended with status {answer.exit}",
            where=transport.name,
            evidence=tuple(answer.error_text.splitlines()[-20:]),
            fix="with `snapshot: never` in the inventory the step goes without one",
        )
    for line in answer.text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "none":
            context.note(
                f"no snapshot of container {want.vmid}: {rest}; a copy of its configuration lies "
                f"in {STATE_FOLDER}/{want.vmid} on {want.host_name}",
                "warning",
            )
        elif word == "kept":
            context.note(f"snapshot {rest} could not be dropped and stays", "warning")
    context.bus.emit(ChangeDone(*ids, change.title, time.monotonic() - began))
