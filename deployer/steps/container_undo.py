"""Puts a container back as it was before a failed step, or says what differs and why.

Only what this step adds is taken out: its devN entries, its raw lines, its snapshot. A container
that it created stays: there may be something in it to look at. So does a configuration that works,
when what failed is CUDA or the driver's libraries in the guest.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployer import pct_edit
from deployer.errors import DeployError
from deployer.model import Facts, Plan, Shell, Where
from deployer.pct_config import Section, printable
from deployer.shell import words
from deployer.steps.base import StepContext
from deployer.steps.container_changes import delete_devices, edit_conf
from deployer.steps.container_devices import lacks
from deployer.steps.container_facts import ContainerFacts, GuestNodes
from deployer.steps.container_inside import wrong_nodes
from deployer.steps.container_power import halt_shell, start_shell
from deployer.steps.container_snapshot import own_snapshots, snapshot_name
from deployer.steps.gpus_facts import GpuFacts


@dataclass(frozen=True)
class TakeBack:
    """One script, and what it does in words."""

    what: str
    action: Shell


def undo(context: StepContext, facts: Facts, plan: Plan, error: DeployError) -> None:
    """Adds to `error` what was put back, or what could not be. Raises nothing of its own."""
    vmid = context.want.vmid
    before, host = facts.get(ContainerFacts), facts.get(GpuFacts)
    if vmid is None or before is None:
        return
    try:
        looked = context.reprobe()
        now = looked.get(ContainerFacts)
        if not before.exists or before.config().lock == "create":
            if now is not None and now.exists:
                error.add(f"container {vmid} was created and stays (`pct destroy {vmid}`)")
            return
        if now is None or now.conf is None:
            error.add(f"what became of container {vmid} cannot be seen: see `pct config {vmid}`")
            return
        if _right(looked, now):
            if kept := _config_differences(before, now):
                error.add(
                    f"what was done to container {vmid} is right and stays, since the failure lies "
                    f"elsewhere: {'; '.join(kept)}"
                )
            return
        failed = []
        done = []
        started = any(change.title.startswith("start container ") for change in plan.changes)
        for one in steps_back(vmid, before, now, host, started=started):
            answer = context.on(Where.HOST).run(
                one.action.script, stdin=one.action.stdin, timeout_s=one.action.timeout_s
            )
            if answer.exit == 0:
                done.append(one.what)
            else:
                said = (answer.error_text.strip() or answer.text.strip()).splitlines()
                failed.append(f"{one.what} failed: {said[-1] if said else answer.exit}")
        after = context.reprobe().get(ContainerFacts) if done or failed else now
        if after is not None and after.conf is not None:
            after = _bytes_back(context, vmid, before, after)
        left = failed + (differences(before, after) if after is not None else [])
    except DeployError as trouble:
        error.add(f"container {vmid} could not be put back: {trouble.what}")
        return
    if left:
        error.add(f"container {vmid} is not as before: {'; '.join(left)}")
    elif done:
        error.add(f"container {vmid} is as before again ({', '.join(done)})")


def _right(looked: Facts, now: ContainerFacts) -> bool:
    """The guest runs and sees its devices: to take them out again would only break it."""
    host, guest = looked.get(GpuFacts), looked.get(GuestNodes)
    if now.status != "running" or host is None or guest is None or not host.ready:
        return False
    return not wrong_nodes(host, guest) and not lacks(now, host)


def steps_back(
    vmid: int,
    before: ContainerFacts,
    now: ContainerFacts,
    host: GpuFacts | None,
    *,
    started: bool,
) -> list[TakeBack]:
    """In order; pure. `started`: the plan had a start, so a running container is of our making."""
    found = []
    if before.status == "stopped" and now.status == "running" and started:
        found.append(TakeBack("it is shut down", halt_shell(vmid, now.ha)))
    text = now.conf or ""
    if host is not None:
        old = pct_edit.apply(text, lacks(before, host).edit.reverse())
        if old != text:
            found.append(TakeBack("its raw lines are taken out", edit_conf(vmid, text, old)))
            text = old
    if added := _added_devices(before, now, host):
        found.append(TakeBack(f"{', '.join(added)} taken out", delete_devices(vmid, added, text)))
    name = snapshot_name(before)
    if name in own_snapshots(now.config()) and name not in own_snapshots(before.config()):
        script = words(["pct", "delsnapshot", str(vmid), name])
        found.append(TakeBack(f"snapshot {name} dropped", Shell(Where.HOST, script, 600.0)))
    if before.status == "running" and now.status == "stopped":
        found.append(TakeBack("it is started again", start_shell(vmid, now.ha)))
    return found


def _added_devices(before: ContainerFacts, now: ContainerFacts, host: GpuFacts | None) -> list[str]:
    """devN entries that were not there, of nodes that this step brings."""
    had = {**before.config().current.keys, **before.config().pending.keys}
    needed = set(host.needed()) if host is not None else set()
    config = now.config()
    entries = {**config.current.devices(), **config.pending.devices()}
    return sorted(
        key
        for key, entry in entries.items()
        if key not in had and entry.path in needed and entry.options == {"mode": "0666"}
    )


def _bytes_back(
    context: StepContext, vmid: int, before: ContainerFacts, after: ContainerFacts
) -> ContainerFacts:
    """pct sorts and moves lines when it writes: with the same meaning, the old text comes back."""
    if after.conf == before.conf or after.conf is None or before.conf is None:
        return after
    if _config_differences(before, after):
        return after
    action = edit_conf(vmid, after.conf, before.conf)
    context.on(Where.HOST).run(action.script, stdin=action.stdin, timeout_s=action.timeout_s)
    return context.reprobe().get(ContainerFacts) or after


def differences(before: ContainerFacts, after: ContainerFacts) -> list[str]:
    """What is not as it was, with the reason where it is known; [] when nothing differs."""
    found = _config_differences(before, after)
    if before.status != after.status:
        found.append(f"it is {after.status or 'of unknown state'} and was {before.status}")
    return found


def _config_differences(before: ContainerFacts, after: ContainerFacts) -> list[str]:
    found = []
    old, new = before.config(), after.config()
    waits = {key for key in new.delete if key not in old.delete}
    for key in sorted(waits):
        found.append(f"{key} goes at its next start (a running container keeps its devices)")
    current = _section("", old.current, new.current)
    pending = _section("pending ", old.pending, new.pending)
    found += [text for text in (*current, *pending) if text.split(" ")[0] not in waits]
    gone, made = set(old.snapshots) - set(new.snapshots), set(new.snapshots) - set(old.snapshots)
    found += [f"snapshot {name} was dropped" for name in sorted(gone)]
    found += [f"snapshot {name} is new" for name in sorted(made)]
    return [printable(text) for text in found]


def _section(label: str, old: Section, new: Section) -> list[str]:
    found = []
    for key in sorted({*old.keys, *new.keys}):
        was, is_now = old.keys.get(key), new.keys.get(key)
        if was == is_now:
            continue
        if is_now is None:
            found.append(f"{label}{key} is gone")
        elif was is None:
            found.append(f"{label}{key} is new ({is_now})")
        else:
            found.append(f"{label}{key} is {is_now} and was {was}")
    if list(old.raw) != list(new.raw):
        found += [f"{label}line {k}: {v} is new" for k, v in new.raw if (k, v) not in old.raw]
        found += [f"{label}line {k}: {v} is gone" for k, v in old.raw if (k, v) not in new.raw]
    if old.description.rstrip("\n") != new.description.rstrip("\n"):
        found.append(f"{label}its description differs")
    return found
