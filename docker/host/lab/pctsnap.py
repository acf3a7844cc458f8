"""Snapshots of the lab's `pct`: the configuration's part of them; volumes stay as they are."""

from __future__ import annotations

import re
import time

import ct
import ctconf
import ctdisk
from ctconf import die, load, locked, refuse_lock, save, warn
from pctargs import as_task, options, reject


def show(vmid: str) -> None:
    """`pct listsnapshot`: a tree by parents, the oldest first, the present state last."""
    conf = load(vmid)
    rows = {
        name: (part.keys.get("parent", ""), part.keys.get("snaptime", ""), part.description)
        for name, part in conf.snapshots.items()
    }
    rows["current"] = (conf.current.keys.get("parent", ""), "", "You are here!")

    def age(name: str) -> float:
        return float(rows[name][1]) if rows[name][1].isdigit() else float("inf")

    def row(prefix: str, name: str) -> None:
        _, taken, text = rows[name]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(taken or "0")))
        told = text.splitlines()[0] if text.strip() else "no-description"
        room = max(0, 30 - len(prefix))
        print(f"{prefix} {name:<{room}} {when if taken else '':<23} {told}")
        for child in sorted((n for n in rows if rows[n][0] == name and n != name), key=age):
            row(f" {prefix}", child)

    for root in sorted((n for n in rows if rows[n][0] not in rows), key=age):
        row("`->", root)


def work(vmid: str, command: str, words: list[str]) -> bool:
    """`pct snapshot`, `delsnapshot`, `rollback`; True when a start is to follow.

    Warnings of a task are on stdout.
    """
    if not words:
        die(f"400 not enough arguments\npct {command} <vmid> <snapname> [OPTIONS]")
    name = words[0]
    given = options(command, words[1:], {"force", "start"}, {"description"})
    if command == "snapshot" and name == "current":
        die("unable to use snapshot name 'current' (reserved name)", 2)
    if len(name) > 40:
        reject(command, {"snapname": "value may only be 40 characters long"})
    if not re.fullmatch(r"[a-z][a-z0-9_-]+", name, re.IGNORECASE):
        reject(command, {"snapname": f"invalid format - invalid configuration ID '{name}'\n"})
    with ctconf.warnings_on_stdout():
        as_task(lambda: _snapshots(vmid, command, name, given))
    return command == "rollback" and given.get("start") == "1"


def _snapshots(vmid: str, command: str, name: str, given: dict[str, str]) -> None:
    with locked(vmid):
        conf = load(vmid)
        current = conf.current
        if current.keys.get("template") == "1":
            what = {
                "snapshot": "take a snapshot if it's a template",
                "rollback": "rollback if vm is a template",
                "delsnapshot": "delete a snapshot if vm is a template",
            }
            die(f"you can't {what[command]}")
        if command != "snapshot":
            if name not in conf.snapshots:
                die(f"snapshot '{name}' does not exist")
            state = conf.snapshots[name].keys.get("snapstate")
            if command == "rollback" and state:
                die(f"unable to rollback to incomplete snapshot (snapstate = {state})")
        refuse_lock(conf)
        if command == "snapshot":
            if name in conf.snapshots:
                die(f"snapshot name '{name}' already used")
            if not ctdisk.snapshots(current):
                die("snapshot feature is not available")
            for other, section in sorted(conf.snapshots.items()):
                if section.keys.get("parent") == name:
                    warn(
                        f"deleting parent '{name}' reference from '{other}' to avoid bogus "
                        "snapshot cycle."
                    )
                    del section.keys["parent"]
            taken = current.copy()
            taken.keys = {k: v for k, v in taken.keys.items() if not _stays(k)}
            taken.keys["snaptime"] = str(int(time.time()))
            taken.description = given["description"] + "\n" if given.get("description") else ""
            conf.snapshots[name] = taken
            current.keys["parent"] = name
        elif command == "delsnapshot":
            gone = conf.snapshots.pop(name)
            for section in (current, *conf.snapshots.values()):
                if section.keys.get("parent") == name:
                    section.keys.pop("parent")
                    if "parent" in gone.keys:
                        section.keys["parent"] = gone.keys["parent"]
            for volume in sorted(gone.volumes()):
                current.add_unused(volume)
        else:
            if ct.running(vmid):
                ct.kill(vmid)
            back = conf.snapshots[name].copy()
            for volume in sorted(current.volumes() - back.volumes()):
                current.add_unused(volume)
            kept = {k: v for k, v in current.keys.items() if k.startswith("unused")}
            back.keys = {**{k: v for k, v in back.keys.items() if not _stays(k)}, **kept}
            back.keys["parent"] = name
            back.description = current.description
            conf.current, conf.pending = back, ctconf.Section()
        save(conf)
        # pct reads it again at its next stages.
        for _ in range(2):
            load(vmid)


def _stays(key: str) -> bool:
    """Keys that go neither into a snapshot nor out of one."""
    return key.startswith("unused") or key in ("digest", "lock", "snapstate", "snaptime", "vmstate")
