"""How the host was before the gpus step acted: recorded, compared, put back.

`DeploymentState.extra["gpus"]` keeps it: `before` (drivers, overrides, modules, files);
`changed_boot`, the boot id under which the last change was made (until the host's boot id differs,
what is bound now is effective and not proven across a reboot); `edited`, what boot files held
before our edits; `refresh`, files that were edited and whose initramfs or loader is not made yet.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from typing import Any

from deployer.model import Change, Facts, Plan, RunJob, WriteFile
from deployer.state import DeploymentState
from deployer.steps.base import StepContext
from deployer.steps.boot_edit import REFRESH, Kept, editable
from deployer.steps.boot_facts import BootFacts
from deployer.steps.gpus_facts import GpuFacts, Overrides
from deployer.steps.gpus_moves import Move

KEY = "gpus"
UNLOAD_ORDER = ("nvidia_drm", "nvidia_modeset", "nvidia_uvm", "nvidia")
"""A module goes before the one that it uses."""


def remember(context: StepContext, facts: Facts, plan: Plan) -> None:
    """Saves how the host is now, before `plan` is run."""
    seen, boot = facts.get(GpuFacts), facts.get(BootFacts)
    if seen is None:
        return
    overrides = facts.get(Overrides) or Overrides(problem="not asked")
    written = [one.action for one in plan.changes if isinstance(one.action, WriteFile)]
    kept: dict[str, Any] = dict(context.state.extra.get(KEY) or {})
    files: dict[str, str | None] = dict(kept.get("before", {}).get("files", {}))
    for action in written:
        old = boot.file(action.path) if boot is not None else None
        # The first content is the one to go back to.
        files.setdefault(action.path, base64.b64encode(old.content).decode() if old else None)
    kept["before"] = {
        "time": time.time(),
        "boot_id": seen.boot_id,
        "functions": {
            address: {"driver": one.driver, "override": overrides.of(address)}
            for address, one in seen.all_functions().items()
        },
        "modules": list(seen.modules),
        "files": files,
    }
    kept["changed_boot"] = seen.boot_id
    kept["waited"] = list(kept.get("refresh") or ())
    kept["edited"] = _edited(kept.get("edited") or {}, written, boot or BootFacts())
    context.state.extra[KEY] = kept
    context.save()


def _edited(
    known: dict[str, Any], written: Sequence[WriteFile], boot: BootFacts
) -> dict[str, dict[str, str]]:
    """path -> `was` (base64) and `wrote` (sha256), with what is about to be written."""
    found = dict(known)
    for action in written:
        old = boot.file(action.path)
        if old is None or not editable(action.path):
            continue
        entry = found.get(action.path)
        # Who changed the file after us made another content the one to go back to.
        if entry is None or entry["wrote"] != hashlib.sha256(old.content).hexdigest():
            entry = {"was": base64.b64encode(old.content).decode()}
        found[action.path] = {**entry, "wrote": hashlib.sha256(action.content).hexdigest()}
    return found


def edited(state: DeploymentState) -> tuple[Kept, ...]:
    """Boot files that this tool edited, as they were before."""
    entries = (state.extra.get(KEY) or {}).get("edited") or {}
    return tuple(
        Kept(path, base64.b64decode(one["was"]), one["wrote"]) for path, one in entries.items()
    )


def to_refresh(state: DeploymentState) -> tuple[str, ...]:
    """Files that were written and whose refresh has not ended well: no look at the host tells."""
    return tuple((state.extra.get(KEY) or {}).get("refresh") or ())


def note_refresh(context: StepContext, plan: Plan, change: Change) -> None:
    """Before a change is run: its file waits for the plan's refresh of initramfs and loader."""
    path = change.action.path if isinstance(change.action, WriteFile) else ""
    if not editable(path) or not any(is_refresh(one) for one in plan.changes):
        return
    kept: dict[str, Any] = context.state.extra.setdefault(KEY, {})
    kept["refresh"] = sorted({*(kept.get("refresh") or ()), path})
    context.save()


def forget_refresh(context: StepContext) -> None:
    """After an undo: what waits is what waited before the plan was run."""
    kept: dict[str, Any] = context.state.extra.get(KEY) or {}
    if kept.get("refresh"):
        kept["refresh"] = kept.get("waited", [])
        context.save()


def refreshed(context: StepContext, change: Change) -> None:
    """After a change has run: nothing waits any more when it was the refresh."""
    if is_refresh(change) and to_refresh(context.state):
        context.state.extra[KEY]["refresh"] = []
        context.save()


def is_refresh(change: Change) -> bool:
    """Whether it makes initramfs and loader anew."""
    return isinstance(change.action, RunJob) and change.action.name == REFRESH


def proof(state: DeploymentState, seen: GpuFacts) -> str:
    """Whether the binding has lived through a reboot since this tool last changed it; '' if not
    known."""
    changed = (state.extra.get(KEY) or {}).get("changed_boot", "")
    if not changed or not seen.boot_id:
        return ""
    if changed == seen.boot_id:
        return "effective now, not proven across a reboot"
    return "proven across a reboot"


def moves_back(before: Facts, after: Facts) -> tuple[Move, ...]:
    """What brings each function whose driver or override differs back to what it was."""
    old, new = before.need(GpuFacts).all_functions(), after.need(GpuFacts).all_functions()
    was, now = before.get(Overrides) or Overrides(), after.get(Overrides) or Overrides()
    moves = []
    for address, one in old.items():
        current = new.get(address)
        if current is None or not current.present:
            continue
        if current.driver != one.driver or (
            was.of(address) is not None and was.of(address) != now.of(address)
        ):
            moves.append(Move(address, one.driver, current.driver, was.of(address)))
    return tuple(moves)


def to_unload(before: Facts, after: Facts) -> tuple[str, ...]:
    """Modules of nvidia that are loaded and were not, in the order in which they can go."""
    old, new = before.need(GpuFacts).modules, after.need(GpuFacts).modules
    return tuple(name for name in UNLOAD_ORDER if name in new and name not in old)


def new_nodes(before: Facts, after: Facts) -> tuple[str, ...]:
    """Device nodes that are there and were not."""
    old = {node.path for node in before.need(GpuFacts).nodes}
    return tuple(node.path for node in after.need(GpuFacts).nodes if node.path not in old)


def differences(before: Facts, after: Facts) -> list[str]:
    """What is not as it was, link by link and file by file; empty when all is as before."""
    first, last = before.need(GpuFacts), after.get(GpuFacts)
    if last is None or (last.timed_out and not any(one.present for one in last.functions)):
        return ["the PCI devices gave no answer, so nothing can be compared"]
    found = []
    now = last.all_functions()
    for address, one in first.all_functions().items():
        driver = now[address].driver if address in now else ""
        if driver != one.driver:
            found.append(
                f"{address} was on {one.driver or 'no driver'} and is on {driver or 'no driver'}"
            )
    found += _overrides(before, after, sorted(now))
    found += _sets("module", first.modules, last.modules)
    old_nodes = {node.path: node for node in first.nodes}
    new_nodes_ = {node.path: node for node in last.nodes}
    found += _sets("node", tuple(old_nodes), tuple(new_nodes_))
    found += [
        f"{path} was {_node(old_nodes[path])} and is {_node(node)}"
        for path, node in new_nodes_.items()
        if path in old_nodes and node != old_nodes[path]
    ]
    found += _files(before.get(BootFacts), after.get(BootFacts))
    return found


def _node(node: Any) -> str:
    return f"{node.major}:{node.minor}" if node.is_char else f"no device ({node.kind})"


def _overrides(before: Facts, after: Facts, addresses: Sequence[str]) -> list[str]:
    was, now = before.get(Overrides) or Overrides(), after.get(Overrides) or Overrides()
    found = []
    for address in addresses:
        old, new = was.of(address), now.of(address)
        if old is not None and new is None:
            why = now.problem or "a write to its driver files is under way"
            found.append(f"driver_override of {address} was '{old}' and cannot be read: {why}")
        elif old is not None and old != new:
            found.append(f"driver_override of {address} was '{old}' and is '{new}'")
    return found


def _sets(what: str, old: Sequence[str], new: Sequence[str]) -> list[str]:
    gone = [f"{what} {name} was there and is gone" for name in old if name not in new]
    return gone + [f"{what} {name} is there and was not" for name in new if name not in old]


def _files(old: BootFacts | None, new: BootFacts | None) -> list[str]:
    if old is None or new is None:
        return []
    was = {file.path: file.content for file in old.files}
    now = {file.path: file.content for file in new.files}
    found = [f"{path} is not what it was" for path in was if path in now and was[path] != now[path]]
    found += [f"{path} was there and is gone" for path in was if path not in now]
    found += [f"{path} is there and was not" for path in now if path not in was]
    return found + _sets("boot link", old.enabled, new.enabled)
