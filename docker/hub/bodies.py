"""Ranged bodies, and the faults that strike inside of them."""

from __future__ import annotations

import fcntl
import os
import re
import select
import socket
import ssl
import struct
import termios
import time
import zlib
from typing import Protocol

from answers import Answers
from faults import CUTS, Fault, Span, offset

BLOCK = 1 << 18
SENDFILE = 4 << 20
Fields = dict[str, str]


class Body(Protocol):
    """Bytes that have a size, and a file behind them when they are that file's own."""

    size: int
    file: int | None

    def read(self, at: int, n: int) -> bytes:
        """`n` bytes from offset `at`, fewer only at the end."""
        ...


class FileBody:
    """A file as it is."""

    def __init__(self, handle: int, size: int) -> None:
        self.size = size
        self.file: int | None = handle

    def read(self, at: int, n: int) -> bytes:
        return os.pread(self.file, n, at) if self.file is not None else b""


def byte_range(value: str | None, size: int) -> tuple[int, int] | None:
    """(first, last) to send; None when the range cannot be satisfied (416)."""
    m = re.fullmatch(r"bytes=(\d*)-(\d*)", value or "")
    if not m or not (m[1] or m[2]):
        return 0, size - 1
    if not m[1]:
        return max(0, size - int(m[2])), size - 1
    first = int(m[1])
    return (first, min(int(m[2] or size), size - 1)) if first < size else None


class Bodies(Answers):
    """Sends bodies; `entry["sent"]` counts what the kernel took."""

    def send_body(self, body: Body, fault: Fault, fields: Fields) -> None:
        """The range that was asked for, or what the fault makes of it."""
        self.entry["body"] = True
        do, size = fault.get("do"), body.size
        if do == "shrink":
            size = min(size, offset(fault, Span(0, size - 1, size)))
        asked = None if do == "norange" else self.entry["range"]
        wanted = byte_range(asked, size)
        if wanted is None:
            self.entry["body"] = False
            return self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
        first, last = wanted
        fields = {
            "Content-Type": "application/octet-stream",
            "Accept-Ranges": "bytes",
            **fields,
        }
        if do == "wrongrange" and asked:
            first = min(first + fault.get("start", 0), last)
        if asked and not fault.get("omit"):
            fields["Content-Range"] = f"bytes {first}-{last}/{size + fault.get('total', 0)}"
        fields["Content-Length"] = str(last - first + 1)
        if do == "chunked":
            return self.send_chunks(body, Span(first, last, size), fields)
        if do == "gzip":
            return self.send_compressed(body, Span(first, last, size), fields)
        if do == "slowhead" and not self.slow_head(fault):
            return None
        self.head(206 if asked else 200, fields)
        if self.command != "HEAD":
            self.pump(body, Span(first, last, size), fault)
        return None

    def pump(self, body: Body, span: Span, fault: Fault) -> None:
        """Sends the body up to the cut; then the fault has its way."""
        do = fault.get("do")
        cut = offset(fault, span) if do else 0
        end = min(cut, span.last + 1) if do in CUTS else span.last + 1
        flip = cut if do == "corrupt" else -1
        self.wfile.flush()
        plain = flip < 0 and not isinstance(self.connection, ssl.SSLSocket)
        if body.file is not None and plain and not self.shared.setting("bps"):
            self.send_file(body.file, span.first, end)
        else:
            self.send_blocks(body, span.first, end, flip)
        if end <= span.last and do in CUTS:
            self.cut_off(body, end, span.last, fault)

    def send_file(self, handle: int, at: int, end: int) -> None:
        """The kernel copies: the hub must not be what limits a throughput test."""
        out = self.connection.fileno()
        while at < end:
            n = os.sendfile(out, handle, at, min(SENDFILE, end - at))
            if not n:
                raise ConnectionResetError("the file became shorter")
            at += n
            self.entry["sent"] += n

    def send_blocks(self, body: Body, at: int, end: int, flip: int) -> None:
        start, began, first = time.monotonic(), self.entry["sent"], at
        while at < end:
            bps = self.shared.setting("bps")
            n = max(1, min(BLOCK, int(bps / 20))) if bps else BLOCK
            block = body.read(at, min(n, end - at))
            if not block:
                raise ConnectionResetError("the file became shorter")
            if 0 <= flip - at < len(block):
                i = flip - at
                block = block[:i] + bytes([block[i] ^ 0xFF]) + block[i + 1 :]
            self.send(block)
            at += len(block)
            if bps:
                late = (self.entry["sent"] - began) / bps - (time.monotonic() - start)
                if late > 0 and self.shared.stopping.wait(late):
                    raise ConnectionResetError(f"the hub stops after {at - first} bytes")

    def send(self, block: bytes) -> None:
        """One block; counts every byte the kernel takes, also of a block that fails midway."""
        view = memoryview(block)
        while view:
            n = self.connection.send(view)
            self.entry["sent"] += n
            view = view[n:]

    def send_chunks(self, body: Body, span: Span, fields: Fields) -> None:
        """The right bytes, in chunks that nobody announced the sum of."""
        code = 206 if "Content-Range" in fields else 200
        fields = {k: v for k, v in fields.items() if k != "Content-Length"}
        self.head(code, {**fields, "Transfer-Encoding": "chunked"})
        at = span.first
        while at <= span.last:
            block = body.read(at, min(BLOCK, span.last + 1 - at))
            self.connection.sendall(b"%x\r\n" % len(block))
            self.send(block)
            self.connection.sendall(b"\r\n")
            at += len(block)
        self.connection.sendall(b"0\r\n\r\n")

    def send_compressed(self, body: Body, span: Span, fields: Fields) -> None:
        """The body as gzip, whatever the client accepts."""
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        parts, at = [], span.first
        while at <= span.last:
            block = body.read(at, min(BLOCK, span.last + 1 - at))
            parts.append(packer.compress(block))
            at += len(block)
        data = b"".join([*parts, packer.flush()])
        code = 206 if "Content-Range" in fields else 200
        fields = {**fields, "Content-Encoding": "gzip", "Content-Length": str(len(data))}
        self.head(code, fields)
        if self.command != "HEAD":
            self.send(data)

    # ---- faults
    def slow_head(self, fault: Fault) -> bool:
        """Begins a header and drips it; True when the rest may follow, after `secs`."""
        line = b"HTTP/1.1 200 OK\r\nX-Slow: "
        end = time.monotonic() + fault.get("secs", 86400)
        self.connection.sendall(line)
        while time.monotonic() < end:
            if self.shared.stopping.wait(1 / fault.get("bps", 1)):
                break
            self.connection.sendall(b"x")
        self.close_connection = True
        return False

    def cut_off(self, body: Body, at: int, last: int, fault: Fault) -> None:
        """What happens to the connection at the cut. A truncated one is closed by its end."""
        self.close_connection = True
        if fault["do"] == "stall":
            self.hold(fault.get("secs", 86400))
        elif fault["do"] == "drip":
            self.drip(body, at, last, fault.get("bps", 1))
        elif fault["do"] == "reset":
            self.drain()
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.rfile.close()
            self.connection.close()
            raise ConnectionResetError

    def drip(self, body: Body, at: int, last: int, bps: float) -> None:
        step = max(1, int(bps / 10))
        poll = select.poll()
        poll.register(self.connection.fileno(), select.POLLRDHUP)
        with self.shared.holding():
            while at <= last and not self.shared.stopping.wait(step / bps):
                if poll.poll(0):
                    return
                block = body.read(at, min(step, last + 1 - at))
                self.send(block)
                at += len(block)

    def drain(self) -> None:
        """Waits until the client's kernel has what was sent: a RST throws the rest away."""
        end = time.monotonic() + 10
        while time.monotonic() < end and not self.shared.stopping.wait(0.005):
            left = fcntl.ioctl(self.connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
            if not struct.unpack("i", left)[0]:
                return
