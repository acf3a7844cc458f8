"""The CAS of Xet: how a file is put together, and the xorbs that hold its chunks."""

from __future__ import annotations

import os
import re

from bodies import Bodies, byte_range
from faults import Span
from repo import CHUNK, FRAME, XORB, Blob


def framed(size: int) -> int:
    """Bytes of a xorb that holds `size` bytes of a file."""
    return size + FRAME * -(-size // CHUNK)


class XorbBody:
    """A xorb: chunks as they are, each behind version, length, scheme (0: stored), length."""

    file: int | None = None

    def __init__(self, handle: int, start: int, length: int) -> None:
        self.handle, self.start, self.length = handle, start, length
        self.size = framed(length)

    def read(self, at: int, n: int) -> bytes:
        first = at // (CHUNK + FRAME)
        last = min(at + n, self.size) - 1
        parts = []
        for i in range(first, last // (CHUNK + FRAME) + 1):
            data = os.pread(
                self.handle, min(CHUNK, self.length - i * CHUNK), self.start + i * CHUNK
            )
            size = len(data).to_bytes(3, "little")
            parts += [b"\0", size, b"\0", size, data]
        skip = at - first * (CHUNK + FRAME)
        return b"".join(parts)[skip : skip + n]


class Cas(Bodies):
    where = "cas"

    def route(self) -> None:
        if m := re.fullmatch(r"(v\d+)/reconstructions/([0-9a-f]+)", self.route_path):
            return self.reconstruction(m[1], m[2])
        if m := re.fullmatch(r"xorbs/([0-9a-f]+)", self.route_path):
            return self.xorb(m[1])
        return self.reply(404, {"error": "no such call"})

    def reconstruction(self, version: str, xet: str) -> None:
        """Which chunks of which xorbs make up the range, and where each xorb is."""
        path = self.shared.repo.by_xet.get(xet)
        if self.fault(self.path) is None:
            return None
        authorization = self.headers.get("Authorization") or ""
        if not self.shared.cas_allows(authorization):
            self.entry["leak"] = bool(authorization)
            return self.reply(401, {"error": "no valid token"})
        if version != "v1" or path is None:
            # The client tries v2 first; 404 sends it to v1.
            return self.reply(404, {"error": "not found"})
        blob = self.shared.repo.blobs[path]
        wanted = byte_range(self.entry["range"], blob.size)
        if wanted is None:
            return self.reply(416, b"", {"Content-Range": f"bytes */{blob.size}"})
        first, last = wanted
        terms: list[dict[str, object]] = []
        fetch: dict[str, list[dict[str, object]]] = {}
        for n in range(first // XORB, last // XORB + 1):
            length = min(XORB, blob.size - n * XORB)
            chunks = {"start": 0, "end": -(-length // CHUNK)}
            name = blob.xorb(n)
            terms.append({"hash": name, "unpacked_length": length, "range": chunks})
            url = f"{self.origin('cas')}/xorbs/{name}?{self.shared.signed(name)}"
            bytes_ = {"start": 0, "end": framed(length) - 1}
            fetch[name] = [{"range": chunks, "url": url, "url_range": bytes_}]
        answer = {"offset_into_first_range": first % XORB, "terms": terms, "fetch_info": fetch}
        return self.reply(200, answer)

    def xorb(self, name: str) -> None:
        """The bytes of a xorb. The cut of a fault counts in the file as its xorbs hold it."""
        path, n = self.shared.repo.by_xorb.get(name, ("", 0))
        blob = self.shared.repo.blobs.get(path)
        if blob is None:
            return self.reply(404, {"error": "no such xorb"})
        self.entry["file"], self.entry["leak"] = path, self.entry["auth"]
        length = min(XORB, blob.size - n * XORB)
        wanted = byte_range(self.entry["range"], framed(length))
        fault = self.fault(path, self.place(blob, n, wanted) if wanted else None, body=True)
        if fault is None:
            return None
        if why := self.shared.refusal(name, self.query):
            return self.reply(403, {"error": why})
        if "at" in fault:
            span = self.place(blob, n, (0, framed(length) - 1))
            at = fault["at"]
            cut = int(at * span.size) if isinstance(at, float) and at < 1 else int(at)
            fault = {**fault, "at": cut - span.first}
        with blob.path.open("rb") as stream:
            body = XorbBody(stream.fileno(), n * XORB, length)
            self.send_body(body, fault, {"ETag": f'"{name}"'})
        return None

    @staticmethod
    def place(blob: Blob, n: int, wanted: tuple[int, int]) -> Span:
        """A range of the n-th xorb, counted over all xorbs of the file."""
        start = n * framed(XORB)
        return Span(start + wanted[0], start + wanted[1], framed(blob.size))
