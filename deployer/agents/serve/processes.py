"""The processes of a launch and the owners of a port, read from /proc."""

# Plain paths and no pathlib: the names are the kernel's own.
# ruff: noqa: PTH115, PTH123, PTH208

from __future__ import annotations

import os
from typing import Any

Record = dict[str, Any]


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def stat_of(pid: int) -> Record | None:
    """{state, ppid, session, start} of a process, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    fields: list[str] = text[text.rfind(")") + 2 :].split()
    return {
        "pid": pid,
        "state": fields[0],
        "ppid": int(fields[1]),
        "session": int(fields[3]),
        "start": int(fields[19]),
    }


def cmdline_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def processes() -> dict[int, Record]:
    """The stat of every process that can be seen, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = stat_of(int(name))
            if stat is not None:
                found[stat["pid"]] = stat
    return found


def is_running(stat: Record | None) -> bool:
    return stat is not None and stat["state"] not in "ZX"


def listening_inodes(port: int) -> set[str]:
    """Socket inodes that listen on `port`, IPv4 and IPv6."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = file.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(fields[9])
    return inodes


def owners(inodes: set[str]) -> list[int]:
    """Pids that hold one of these sockets."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    pids = []
    for name in os.listdir("/proc"):
        if not (wanted and name.isdigit()):
            continue
        folder = f"/proc/{name}/fd"
        try:
            links = os.listdir(folder)
        except OSError:
            continue
        for link in links:
            try:
                target = os.readlink(folder + "/" + link)
            except OSError:
                continue
            if target in wanted:
                pids.append(int(name))
                break
    return sorted(pids)


def identity(command: Record, port: int) -> Record:
    """Is the job's process the one that was started, who is in its session, who has the port?"""
    # Session 0 is one whose leader lives outside this PID namespace: it groups nothing here.
    pid, session = int(command["pid"]), int(command.get("session") or command["pid"])
    stat = stat_of(pid)
    same = (
        stat is not None
        and is_running(stat)
        and stat["start"] == int(command["start"])
        and boot_id() == command["boot"]
    )
    members = [
        {"pid": one["pid"], "start": one["start"], "title": cmdline_of(one["pid"])[:200]}
        for one in processes().values()
        if is_running(one) and (one["session"] == session or (same and one["pid"] == pid))
    ]
    inodes = listening_inodes(port)
    holding = owners(inodes)
    ours = {member["pid"] for member in members}
    return {
        "alive": bool(same),
        "members": sorted(members, key=lambda member: member["pid"]),
        "listening": bool(inodes),
        "owners": [{"pid": one, "title": cmdline_of(one)[:300]} for one in holding],
        "owned": bool(same and holding and set(holding) <= ours),
    }
