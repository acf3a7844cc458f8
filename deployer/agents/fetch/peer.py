"""Worker child: copies from another machine that has the files, by rsync over ssh.

Each file goes into .deployer/incoming, where what is there of it is continued. Nothing here decides
that bytes are right: their hashes do, afterwards.
"""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH105, PTH108, PTH114, PTH118, PTH120, PTH123

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any

from deployer.agents.fetch.child import (
    become_reaper,
    children_of,
    dies_with_its_parent,
    group_members,
    takes_its_group_along,
)
from deployer.agents.fetch.common import DISK_FULL, GAVE_UP, Fatal, disk, log, make_folder
from deployer.agents.fetch.gauge import Reporter
from deployer.agents.fetch.manifest import File, Job, Peer
from deployer.agents.fetch.rsync import (
    CIPHER,
    CONNECT_S,
    copy_words,
    look_script,
    look_words,
    parse_look,
    patch_words,
)
from deployer.agents.fetch.stock import INCOMING, Stock, occupied, size_of

MOST_PARALLEL = 4
LOOK_S = 2.5 * CONNECT_S
TRIES_WITHOUT_BYTES = 3
FULL_BYTES = 1 << 20
"""An rsync that failed with less room than this left has failed for want of room."""


def child(job: Job) -> int:
    """Mode `peer`. 0: all files came; their hashes are another's work. Raises Fatal."""
    if job.peer is None:
        raise Fatal(GAVE_UP, "no peer is configured")
    takes_its_group_along()
    become_reaper()
    return Copy(job, job.peer, Reporter.here().tell).run()


class Transfer:
    """One rsync, of one file into `target`. `patches`: it fills gaps of a file with pieces."""

    def __init__(self, file: File, words: list[str], target: str, patches: bool) -> None:
        self.file, self.target, self.patches = file, target, patches
        self.before = self.there()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, "LC_ALL": "C"},
            preexec_fn=dies_with_its_parent(),
            close_fds=False,  # the lock stays open in all that write
        )
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its status says why
                self.process.stdin.write(b"" if patches else file.path.encode() + b"\0")
                self.process.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def there(self) -> int:
        """Bytes of the file that are there now."""
        return occupied(self.target) if self.patches else size_of(self.target)

    def gained(self) -> int:
        """Bytes that it has brought so far."""
        return max(0, self.there() - self.before)

    def last_words(self) -> str:
        """The end of its stderr, for people."""
        self.errors.seek(0)
        return last_line(self.errors.read().decode("utf-8", "replace"))


class Copy:
    """All files that are missing, a few at a time. `tell` takes progress lines."""

    def __init__(self, job: Job, peer: Peer, tell: Callable[[str], None]) -> None:
        self.job, self.peer, self.tell = job, peer, tell
        self.stock = Stock(job.path, job.files)
        self.incoming = os.path.join(job.path, INCOMING)
        self.cipher = CIPHER
        self.parallel = max(1, min(job.connections, MOST_PARALLEL))
        self.running: list[Transfer] = []
        self.resting: list[tuple[float, File]] = []
        self.idle: dict[str, int] = {}
        self.retries = 0
        self.read: dict[int, tuple[bool, int]] = {}
        self.received = self.moved = self.read_by_ssh = self.grown = 0
        self.phase = "probing"
        self.where = f"{peer.user}@{peer.address}:{peer.path}"

    def run(self) -> int:
        """Raises Fatal: GAVE_UP when the peer cannot be used, or lacks files."""
        self.report()
        missing = self.stock.look()
        there = self.probe(missing)
        todo = sorted(there, key=lambda file: file.size)
        self.phase = "downloading"
        due = 0.0
        while todo or self.running or self.resting:
            while todo and len(self.running) < self.parallel:
                self.start(todo.pop())
            time.sleep(0.05)
            for one in [one for one in self.running if one.process.poll() is not None]:
                self.running.remove(one)
                if again := self.finish(one):
                    rest = self.job.limits.backoff_s * 2 ** self.idle[again.path]
                    self.resting.append((time.monotonic() + rest, again))
            now = time.monotonic()
            todo += [file for at, file in self.resting if at <= now]
            self.resting = [one for one in self.resting if one[0] > now]
            if time.monotonic() >= due:
                due = time.monotonic() + 1.0
                self.report()
        self.report()
        if len(there) < len(missing):
            lacking = next(file.path for file in missing if file not in there)
            count = len(missing) - len(there)
            raise Fatal(GAVE_UP, f"{self.where} lacks {count} files, first {lacking}")
        return 0

    def probe(self, missing: list[File]) -> list[File]:
        """The files that the peer has in the right size. Raises Fatal when it cannot be used."""
        mark = secrets.token_hex(8)
        text = look_script(self.peer, mark, missing).encode()
        for cipher in (CIPHER, ""):
            done = self.ask(look_words(self.peer, cipher), text)
            if done.returncode != 255:
                self.cipher = cipher
                break
        output = done.stdout.decode("utf-8", "replace")
        if done.returncode == 255:
            why = last_line(done.stderr.decode("utf-8", "replace")) or "ssh ended with 255"
            raise Fatal(GAVE_UP, f"no ssh to {self.where}, port {self.peer.port}: {why}")
        why, there = parse_look(mark, output, missing)
        if why:
            raise Fatal(GAVE_UP, f"{self.where}: {why}")
        log(f"peer {self.where} has {len(there)} of {len(missing)} files")
        return there

    def ask(self, words: list[str], text: bytes) -> subprocess.CompletedProcess[bytes]:
        """One ssh. Raises Fatal when it does not end in time."""
        try:
            return subprocess.run(
                words,
                input=text,
                capture_output=True,
                timeout=LOOK_S,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
                preexec_fn=dies_with_its_parent(),
            )
        except subprocess.TimeoutExpired:
            why = f"no answer within {LOOK_S:.0f} s"
            raise Fatal(GAVE_UP, f"{self.where}: {why}") from None
        except OSError as error:
            raise Fatal(GAVE_UP, f"{words[0]}: {error.strerror or error}") from error

    def start(self, file: File) -> None:
        """Begins one file, on top of what is there of it."""
        part = os.path.join(self.job.path, file.path) + ".part"
        limit = self.job.limits.bwlimit_bytes_per_s
        kib_per_s = max(1, int(limit / self.parallel / 1024)) if limit else 0
        patches = os.path.lexists(part + ".map") and not os.path.islink(part)
        if patches:
            target = part
            words = patch_words(self.peer, self.cipher, file.path, part, kib_per_s=kib_per_s)
        else:
            target = os.path.join(self.incoming, file.path)
            make_folder(self.job.path, os.path.dirname(target))
            with disk(target):
                self.bring_prefix(file, part, target)
            words = copy_words(
                *(self.peer, self.cipher, self.incoming),
                resume=size_of(target) > 0,
                kib_per_s=kib_per_s,
            )
        try:
            one = Transfer(file, words, target, patches)
        except OSError as error:
            raise Fatal(GAVE_UP, f"{words[0]}: {error.strerror or error}") from error
        self.running.append(one)
        if one.before:
            where = f"{one.before} of {file.size} bytes, from {self.peer.address}"
            log(f"{file.path}: {'filling gaps' if patches else 'going on'} at {where}")

    @staticmethod
    def bring_prefix(file: File, part: str, target: str) -> None:
        """NAME.part goes where rsync continues it, unless more is there."""
        if os.path.islink(target) or size_of(target) > file.size:
            os.unlink(target)
        if 0 < size_of(part) <= file.size and size_of(part) > size_of(target):
            os.replace(part, target)

    def finish(self, one: Transfer) -> File | None:
        """The file, when it must be tried again. Raises Fatal after tries that brought nothing."""
        self.sweep()
        self.grown += one.gained()
        file, code, words = one.file, one.process.returncode, one.last_words()
        one.errors.close()
        if code == 0 and size_of(one.target) == file.size:
            if one.patches:  # all of it counts now
                with disk(one.target):
                    os.unlink(one.target + ".map")
            log(f"{file.path}: {file.size} bytes copied from {self.peer.address}")
            return None
        facts = os.statvfs(self.job.path)
        if facts.f_bavail * facts.f_frsize < FULL_BYTES:
            raise Fatal(DISK_FULL, f"{one.target}: no space left; the bytes so far are kept")
        self.idle[file.path] = 0 if one.gained() else self.idle.get(file.path, 0) + 1
        why = f"rsync ended with {code}: {words}" if code else "rsync ended, but bytes lack"
        if self.idle[file.path] >= TRIES_WITHOUT_BYTES:
            raise Fatal(GAVE_UP, f"{file.path}: {why}")
        self.retries += 1
        log(f"{file.path}: {why}; going on at {one.there()} of {file.size}")
        return file

    def sweep(self) -> None:
        """Ends what a dead rsync has left: its other half would go on writing beside the next."""
        ours = {one.process.pid for one in self.running}
        for pid in children_of(os.getpid()):
            if pid not in ours:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def report(self) -> None:
        """One progress line."""
        self.measure()
        row: dict[str, Any] = {
            "received": self.received,
            "moved": self.moved,
            "retries": self.retries,
            "phase": self.phase,
        }
        self.tell(json.dumps(row))

    def measure(self) -> None:
        """What our processes have read: ssh from the network, rsync also from the disk."""
        for pid, _ in group_members(os.getpgrp()):
            if pid == os.getpid():
                continue
            try:
                with open(f"/proc/{pid}/comm", encoding="utf-8") as stream:
                    is_ssh = stream.read().strip() == "ssh"
                with open(f"/proc/{pid}/io", encoding="ascii") as stream:
                    count = int(stream.readline().split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it has just ended, or may not be looked at
            was_ssh, had = self.read.get(pid, (is_ssh, 0))
            self.read[pid] = (is_ssh, count)
            gain = max(0, count - (had if was_ssh == is_ssh else 0))
            if is_ssh and self.phase == "downloading":
                self.read_by_ssh += gain
            self.moved += gain
        # An ssh that ended since the last look has taken its count along; its bytes are there.
        growing = sum(one.gained() for one in self.running)
        self.received = max(self.received, self.read_by_ssh, self.grown + growing)


def last_line(text: str) -> str:
    """The last line that says something, without what could move a cursor."""
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    return next((line[:300] for line in reversed(lines) if line), "")
