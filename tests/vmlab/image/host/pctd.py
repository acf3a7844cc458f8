"""Answers the VM lab's `pct` from one process: emulated, its imports take longer than its work.

Each call is a fork with the caller's words, environment, folder and standard files (client: pct.c).
A caller that goes away ends its call, with all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys

sys.path.insert(0, "/usr/lib/lab")
import pct

PLACE = "/run/lab/pct"


def take(caller: socket.socket) -> tuple[list[str], dict[bytes, bytes], list[int]]:
    """A call: its words, its environment, and the files stdin, stdout, stderr and folder."""
    head, files, _, _ = socket.recv_fds(caller, 8, 4)
    size, count = struct.unpack("=II", head)
    data = bytearray()
    while len(data) < size:
        part = caller.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    texts = bytes(data).split(b"\0")[:-1]
    env = dict(pair.split(b"=", 1) for pair in texts[count:] if b"=" in pair)
    return [os.fsdecode(word) for word in texts[:count]], env, files


def become(env: dict[bytes, bytes], files: list[int]) -> None:
    """Takes the caller's place, in the fork."""
    os.environb.clear()
    os.environb.update(env)
    os.fchdir(files[3])
    for target in range(3):
        os.dup2(files[target], target)
    for file in files:
        os.close(file)


def serve(listener: socket.socket) -> list[str]:
    """Returns in the fork of each call, with its words."""
    calls: dict[int, tuple[int, socket.socket]] = {}
    gone: set[int] = set()
    while True:
        waiting = [caller for file, (_, caller) in calls.items() if file not in gone]
        ready, _, _ = select.select([listener, *calls, *waiting], [], [])
        for file, (pid, caller) in list(calls.items()):
            if file in ready:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    caller.send(bytes([code if code >= 0 else 128 - code]))
                caller.close()
                os.close(file)
                gone.discard(file)
                del calls[file]
            elif caller in ready:
                gone.add(file)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)
        if listener in ready:
            caller, _ = listener.accept()
            try:
                words, env, files = take(caller)
            except (OSError, EOFError, struct.error):
                caller.close()
                continue
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                become(env, files)
                return words
            for file in files:
                os.close(file)
            calls[os.pidfd_open(pid)] = pid, caller


with contextlib.suppress(FileNotFoundError):
    os.unlink(PLACE)
door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
door.bind(PLACE)
door.listen(64)
pct.main(serve(door)[1:])
