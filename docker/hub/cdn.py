"""The CDN: signed urls to the bytes of large files. A token that comes here has leaked."""

from __future__ import annotations

import re

from bodies import Bodies, FileBody, byte_range
from faults import Span


class Cdn(Bodies):
    where = "cdn"

    def route(self) -> None:
        self.entry["leak"] = self.entry["auth"]
        shared = self.shared
        name = re.escape(shared.repo.name)
        if m := re.fullmatch(rf"{name}/resolve/[^/]+/(.+)", self.route_path):
            # The other origin of hub-redirect-elsewhere: it asks for nothing and gives everything.
            path, signed = m[1], False
        else:
            path, signed = shared.repo.by_sha.get(self.route_path, ""), True
        blob = shared.repo.blobs.get(path)
        if blob is None:
            return self.reply(404, {"error": "no such object"})
        self.entry["file"] = path
        wanted = byte_range(self.entry["range"], blob.size)
        fault = self.fault(path, Span(*wanted, blob.size) if wanted else None, body=True)
        if fault is None:
            return None
        if signed and (why := shared.refusal(blob.sha256, self.query)):
            return self.reply(403, {"error": why})
        with blob.path.open("rb") as stream:
            # As at the real CDN the ETag is 64 hex digits that are not the file's sha256.
            self.send_body(FileBody(stream.fileno(), blob.size), fault, {"ETag": f'"{blob.xet}"'})
        return None
