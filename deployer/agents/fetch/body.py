"""The body of an answer: which bytes of a file it holds, and how they are read."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket

from deployer.agents.fetch.common import Again
from deployer.agents.fetch.manifest import File


def shut(sock: socket.socket) -> None:
    """Wakes the thread that reads from it; that one closes."""
    # Not SSLSocket.shutdown: it would let the reader take cipher text for the answer.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Body:
    """The bytes [start, stop) of the file, as they come. `close` and `abort` may come twice."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        sock: socket.socket,
        response: http.client.HTTPResponse,
        span: tuple[int, int],
    ) -> None:
        self.connection, self.sock, self.response = connection, sock, response
        self.start, self.stop = span

    def readinto(self, view: memoryview) -> int:
        """What is there, at least one byte; 0 when the connection has ended. Raises OSError."""
        # The buffered reader hands over its own bytes, then reads straight into `view`.
        raw = getattr(self.response.fp, "readinto1", None)
        if raw is not None and not self.response.chunked:
            return int(raw(view))
        data = self.response.read1(len(view))
        view[: len(data)] = data
        return len(data)

    def abort(self) -> None:
        """Ends it for the thread that reads."""
        shut(self.sock)

    def close(self) -> None:
        """Ends the connection at once."""
        self.response.close()
        self.connection.close()


def placed(
    response: http.client.HTTPResponse, file: File, offset: int, end: int
) -> tuple[int, int]:
    """Which bytes of the file the body holds. Raises Again for an answer that cannot be used.

    A 206 is believed by its Content-Range alone: it must start at `offset`, stay within `end`,
    and be of a file of this size. A 200 is the whole file.
    """
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise Again("the answer is compressed, although identity was asked for")
    kind = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
    if kind == "text/html" and not file.path.endswith((".html", ".htm")):
        raise Again("the answer is a web page, not the file")
    if response.status == 200:
        length = response.getheader("Content-Length") or ""
        if length.isdigit() and int(length) != file.size:
            raise Again(f"the answer has {length} bytes, not {file.size}")
        return 0, file.size
    told = (response.getheader("Content-Range") or "").strip()
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", told)
    if found:
        first, last, total = (int(number) for number in found.groups())
        if first == offset and total == file.size and first <= last < end:
            return first, last + 1
    raise Again(f"Content-Range {told!r}, not 'bytes {offset}-{end - 1}/{file.size}'")
