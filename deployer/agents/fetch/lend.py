"""Mode `lend`, on the machine that has the files: answers range requests on stdin and stdout.

What an ssh key that is made for one copy may run, and nothing else. It speaks the part of HTTP that
the range workers speak, so that a copy between hosts is resumed, split and hashed as any download.

Standard library only, and little of it: it starts once a connection, on a machine that serves.
"""

# Paths are plain strings here, as everywhere in the agent.
# ruff: noqa: PTH118, PTH123

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # each connection starts this program: what it does not need, it does not load
    from typing import IO, Any

MARK = b"deployer lends\n"
"""The first that we say: what comes before it is a login shell's."""
MOST_HEAD = 64 * 1024
PIECE = 1 << 20
F_SETPIPE_SZ = 1031  # fcntl(2); Python has its name since 3.10


class Refused(Exception):
    """The request is answered with this status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Shelf:
    """The files of a manifest, by the path of their address. `sizes`: bytes that each must have.

    `until`: when the right to copy ends (Unix time, by this machine's clock).
    """

    def __init__(self, manifest: dict[str, Any]) -> None:
        # Bytes: the locale that sshd gave us may not be able to spell a name.
        self.root = str(manifest["path"]).encode("utf-8", "surrogateescape")
        self.until = float(manifest["until"])
        self.prefix = f"/{manifest['repo']}/resolve/{manifest['commit']}/".encode()
        self.sizes = {str(row["path"]): int(row["size"]) for row in manifest["files"]}

    def opened(self, name: str) -> int:
        """A descriptor. Raises Refused."""
        if time.time() >= self.until:
            raise Refused(403, "the time for this copy is over")
        if name not in self.sizes:
            raise Refused(404, "no file of the list")
        path = os.path.join(self.root, name.encode("utf-8", "surrogateescape"))
        try:
            # A pipe would keep us waiting for its writer.
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Refused(404, error.strerror or "not there") from error
        facts = os.fstat(handle)
        why = ""
        if not stat.S_ISREG(facts.st_mode):
            why = "no regular file"
        elif facts.st_size != self.sizes[name]:
            why = f"{facts.st_size} bytes here, not {self.sizes[name]}"
        if why:
            os.close(handle)
            raise Refused(404, why)
        return handle


def unquoted(path: bytes) -> str:
    """`%41` -> `A`; the bytes of a name are UTF-8."""
    raw = re.sub(rb"%([0-9A-Fa-f]{2})", lambda found: bytes([int(found[1], 16)]), path)
    return raw.decode("utf-8", "surrogateescape")


def asked(head: bytes, shelf: Shelf) -> tuple[str, int, int, bool]:
    """The file and the bytes [start, end) of a request, and whether it named a range.

    Raises Refused.
    """
    first, _, rest = head.partition(b"\r\n")
    found = re.fullmatch(rb"GET (/\S*) HTTP/1\.1", first)
    if found is None:
        raise Refused(400, "only GET is answered")
    if not found[1].startswith(shelf.prefix):
        raise Refused(404, "another model")
    name = unquoted(found[1][len(shelf.prefix) :])
    size = shelf.sizes.get(name, 0)
    told = re.search(rb"(?im)^range:([^\r\n]*)", rest)
    if told is None:
        return name, 0, size, False
    ranged = re.fullmatch(rb" *bytes=(\d{1,18})-(\d{0,18}) *", told[1])
    start = int(ranged[1]) if ranged else 0
    end = min(int(ranged[2]) + 1 if ranged and ranged[2] else size, size)
    if (ranged is None or start >= end) and name in shelf.sizes:
        raise Refused(416, "no such range")
    return name, start, end, True


def read_head(stream: IO[bytes]) -> bytes:
    """The next request up to its empty line, b'' when there is none. Raises Refused."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = stream.readline(MOST_HEAD)
        if not line and not head:
            return b""
        head += line
        if not line or len(head) > MOST_HEAD:
            raise Refused(400, "no whole request came")
    return head


def lend(shelf: Shelf, incoming: IO[bytes], out: int) -> int:
    """Answers requests until there are no more; `out` is a descriptor. 1 after one cut short."""
    while True:
        try:
            head = read_head(incoming)
            if not head:
                return 0
            name, start, end, ranged = asked(head, shelf)
            handle = shelf.opened(name)
        except Refused as error:
            text = f"HTTP/1.1 {error.status} {error.reason}\r\nContent-Length: 0\r\n\r\n"
            put(out, text.encode("utf-8", "replace"))
            if error.status == 400:
                return 1
            continue
        lines = [f"HTTP/1.1 {'206 Partial Content' if ranged else '200 OK'}"]
        lines += ["Content-Type: application/octet-stream", f"Content-Length: {end - start}"]
        if ranged:
            lines.append(f"Content-Range: bytes {start}-{end - 1}/{shelf.sizes[name]}")
        try:
            put(out, "\r\n".join([*lines, "", ""]).encode())
            if not pour(handle, out, start, end):
                return 1
        finally:
            os.close(handle)


def pour(handle: int, out: int, start: int, end: int) -> bool:
    """Copies bytes; False when the file ends before: the reader was told a length, and sees it."""
    at = start
    while at < end:
        try:
            sent = os.sendfile(out, handle, at, min(PIECE, end - at))
        except BrokenPipeError:
            raise
        except OSError:  # not every pair of descriptors knows sendfile
            data = os.pread(handle, min(PIECE, end - at), at)
            put(out, data)
            sent = len(data)
        if not sent:
            return False
        at += sent
    return True


def put(out: int, data: bytes) -> None:
    """All of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def main(folder: str) -> int:
    """Lends what `manifest.json` of `folder` lists. A reader that has gone away is no error."""
    try:
        with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as stream:
            shelf = Shelf(json.load(stream))
        with contextlib.suppress(OSError):  # no pipe; else sshd is woken once for 64 KiB
            fcntl.fcntl(sys.stdout.fileno(), F_SETPIPE_SZ, PIECE)
        put(sys.stdout.fileno(), MARK)
        return lend(shelf, sys.stdin.buffer, sys.stdout.fileno())
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
