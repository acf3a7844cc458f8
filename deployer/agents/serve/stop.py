"""Ends one process and what belongs to it, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from deployer.agents.serve.processes import boot_id, cmdline_of, is_running, processes, stat_of

Record = dict[str, Any]


def stop(command: Record) -> Record:
    """TERM, deadline, KILL to one process and then to what is left of its children and session.

    Only processes whose start time was read before are signalled, through pidfds, so that a pid
    that was given away since is never hit.
    """
    pid, start = int(command["pid"]), int(command["start"])
    if boot_id() != command["boot"]:
        return {"stopped": True, "how": "already gone", "survivors": []}
    table = processes()
    target = table.get(pid)
    if target is None or not is_running(target) or target["start"] != start:
        return {"stopped": True, "how": "already gone", "survivors": []}
    leads = target["session"] == pid
    family: dict[int, int] = {}

    def grow() -> None:
        """Adds descendants, and the rest of the session when the process leads it."""
        seen = processes()
        root = seen.get(pid)
        if root is not None and root["start"] == start:
            family[pid] = start
        added = True
        while added:
            added = False
            for one in seen.values():
                known = family.get(one["ppid"]) is not None and same(one["ppid"], seen)
                session = leads and one["session"] == pid
                if one["pid"] not in family and (known or session) and one["pid"] != os.getpid():
                    family[one["pid"]] = one["start"]
                    added = True

    def same(one: int, seen: dict[int, Record]) -> bool:
        return one in seen and seen[one]["start"] == family.get(one)

    def left() -> list[int]:
        seen = processes()
        return [one for one in family if same(one, seen) and is_running(seen[one])]

    def send(one: int, number: int) -> None:
        try:
            handle = os.pidfd_open(one)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):  # a kernel or a Python without pidfds
            handle = -1
        try:
            stat = stat_of(one)
            if stat is None or stat["start"] != family[one]:
                return
            if handle >= 0:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(one, number)
        except ProcessLookupError:
            return
        finally:
            if handle >= 0:
                os.close(handle)

    def wait(seconds: float, only: int | None) -> bool:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            grow()
            if not [one for one in left() if only is None or one == only]:
                return True
            time.sleep(0.1)
        return False

    grow()
    send(pid, signal.SIGTERM)
    how = "TERM"
    wait(float(command["grace_s"]), pid)
    grow()
    if left():
        how = "KILL"
        for one in left():
            send(one, signal.SIGKILL)
        wait(float(command["kill_s"]), None)
    survivors = []
    for one in left():
        state = (stat_of(one) or {"state": "gone"})["state"]
        survivors.append(f"pid {one}, state {state}: {cmdline_of(one)}")
    return {"stopped": not survivors, "how": how, "survivors": survivors}
