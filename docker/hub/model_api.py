"""The hub itself: what a repository has, who may see it, and where the bytes are."""

from __future__ import annotations

import hashlib
import re
from typing import Any
from urllib.parse import parse_qs, quote

from bodies import Bodies, FileBody
from faults import Fault
from repo import Blob

INVALID = "Invalid credentials in Authorization header"


class ModelApi(Bodies):
    where = "hub"

    def route(self) -> None:
        name, path = re.escape(self.shared.repo.name), self.route_path
        if m := re.fullmatch(rf"(?:models/)?{name}/resolve/([^/]+)/(.+)", path):
            return self.resolve(m[1], m[2])
        if m := re.fullmatch(rf"api/resolve-cache/models/{name}/([^/]+)/(.+)", path):
            return self.cached(m[1], m[2])
        if path == f"api/models/{self.shared.repo.name}/auth-check":
            if self.fault(path) is not None and self.allowed():
                self.reply(200, {})
            return None
        if m := re.fullmatch(rf"api/models/{name}/xet-read-token/([^/]+)", path):
            return self.xet_token(m[1])
        if m := re.fullmatch(rf"api/models/{name}(?:/(revision|tree|paths-info)/([^/]+).*)?", path):
            return self.info(m[1] or "revision", m[2] or "main")
        if path.startswith("api/models/") or "/resolve/" in path:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        return self.reply(404, {"error": "Not found"})

    # ---- access
    def allowed(self, listing: bool = False) -> bool:
        """True, or answers as the Hub does. The listing of a gated repository is public."""
        token, private = self.shared.setting("token"), self.shared.setting("private")
        sent = self.headers.get("Authorization")
        if not token or sent == f"Bearer {token}":
            return True
        name = self.shared.repo.name
        stranger = sent == f"Bearer {self.shared.setting('denied')}"
        if sent and not stranger:
            self.refuse(401, "", INVALID)
        elif private:
            # The Hub does not admit that a private repository exists.
            self.refuse(404 if stranger else 401, "RepoNotFound", "Repository not found")
        elif listing:
            return True
        elif stranger:
            why = f"Access to model {name} is restricted and you are not in the authorized list."
            self.refuse(403, "GatedRepo", why)
        else:
            why = f"Access to model {name} is restricted. You must have access to it and be "
            self.refuse(401, "GatedRepo", why + "authenticated to access it. Please log in.")
        return False

    def known(self, revision: str) -> bool:
        """True for main and the commit, or answers."""
        if revision in ("main", self.shared.repo.commit):
            return True
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return False

    # ---- listings
    def info(self, kind: str, revision: str) -> None:
        """`model_info`, a page of the tree, or `paths-info` (a form with the paths wanted)."""
        if self.fault(self.path) is None or not self.allowed(listing=True):
            return None
        if not self.known(revision):
            return None
        blobs = self.shared.repo.blobs
        if kind == "revision":
            return self.reply(200, self.about([self.sibling(*one) for one in blobs.items()]))
        if kind == "paths-info":
            wanted = parse_qs(self.body.decode()).get("paths", [])
            return self.reply(200, [self.row(p, b) for p, b in blobs.items() if p in wanted])
        rows = [self.row(path, blob) for path, blob in blobs.items()]
        page, start = int(self.shared.setting("page")), int(self.query.get("cursor", 0))
        fields = {}
        if start + page < len(rows):
            query = f"recursive=true&expand=false&cursor={start + page}"
            here = f"{self.origin('hub')}/{quote(self.route_path)}"
            fields["Link"] = f'<{here}?{query}>; rel="next"'
        return self.reply(200, rows[start : start + page], fields)

    def sibling(self, path: str, blob: Blob) -> dict[str, Any]:
        if "blobs" not in self.query:
            return {"rfilename": path}
        row: dict[str, Any] = {"rfilename": path, "size": blob.size, "blobId": blob.oid}
        if blob.lfs:
            row["lfs"] = {"sha256": self.etag(blob), "size": blob.size, "pointerSize": 135}
        return row

    def row(self, path: str, blob: Blob) -> dict[str, Any]:
        row: dict[str, Any] = {"type": "file", "path": path, "size": blob.size, "oid": blob.oid}
        if blob.lfs:
            row["lfs"] = {"oid": self.etag(blob), "size": blob.size, "pointerSize": 135}
            if self.shared.setting("xet"):
                row["xetHash"] = blob.xet
        return row

    def about(self, siblings: list[dict[str, Any]]) -> dict[str, Any]:
        repo = self.shared.repo
        return {
            "_id": repo.commit[:24],
            "id": repo.name,
            "modelId": repo.name,
            "author": repo.name.split("/")[0],
            "sha": repo.commit,
            "private": bool(self.shared.setting("private")),
            "gated": "manual" if self.shared.setting("token") else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": ["safetensors", "qwen3_5"],
            "pipeline_tag": "text-generation",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "lastModified": "2026-01-01T00:00:00.000Z",
            "siblings": siblings,
        }

    def etag(self, blob: Blob) -> str:
        """The sha256 of a large file, as the hub gives it out."""
        salt = self.shared.setting("etag_salt")
        return hashlib.sha256((blob.sha256 + salt).encode()).hexdigest() if salt else blob.sha256

    # ---- bytes
    def resolve(self, revision: str, path: str) -> None:
        """Redirects: a large file to a signed CDN url, a small one to this hub's own cache."""
        repo, blob = self.shared.repo, self.shared.repo.blobs.get(path)
        self.entry["file"] = path
        inline = blob is not None and not blob.lfs and not self.shared.setting("resolve_cache")
        fault = self.fault(path, body=inline)
        if fault is None or not self.allowed() or not self.known(revision):
            return None
        fields = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if blob is None:
            return self.no_entry(fields)
        if blob.lfs:
            return self.reply(302, b"", fields | self.linked(blob))
        if not inline:
            where = f"/api/resolve-cache/models/{repo.name}/{repo.commit}/{quote(path)}"
            where += f"?{quote(self.path, safe='')}=&etag=%22{blob.oid}%22"
            fields |= {"Location": where, "X-Linked-Etag": f'"{blob.oid}"'}
            fields |= {"X-Linked-Size": str(blob.size)}
            return self.reply(307, b"", fields)
        return self.send_small(blob, fault, fields)

    def no_entry(self, fields: dict[str, str]) -> None:
        error = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
        self.reply(404, b"", {**fields, **error})

    def linked(self, blob: Blob) -> dict[str, str]:
        """The fields that lead to a large file."""
        repo = self.shared.repo
        fields = {
            "X-Linked-Size": str(blob.size),
            "X-Linked-Etag": f'"{self.etag(blob)}"',
            "Location": f"{self.origin('cdn')}/{blob.sha256}?{self.shared.signed(blob.sha256)}",
        }
        if self.shared.setting("xet"):
            route = f"{self.origin('hub')}/api/models/{repo.name}/xet-read-token/{repo.commit}"
            fields["X-Xet-Hash"] = blob.xet
            fields["X-Xet-Refresh-Route"] = route
            fields["Link"] = f'<{route}>; rel="xet-auth"'
        return fields

    def cached(self, revision: str, path: str) -> None:
        """The hub's cache of small files."""
        self.entry["file"], blob = path, self.shared.repo.blobs.get(path)
        fault = self.fault(path, body=True)
        if fault is None or not self.allowed() or not self.known(revision):
            return None
        fields = {"X-Repo-Commit": self.shared.repo.commit}
        if blob is None or blob.lfs:
            return self.no_entry(fields)
        return self.send_small(blob, fault, fields)

    def send_small(self, blob: Blob, fault: Fault, fields: dict[str, str]) -> None:
        fields = {
            **fields,
            "ETag": f'"{blob.oid}"',
            "Content-Type": "text/plain; charset=utf-8",
        }
        with blob.path.open("rb") as stream:
            self.send_body(FileBody(stream.fileno(), blob.size), fault, fields)

    def xet_token(self, revision: str) -> None:
        """A token for the CAS, for who may have the bytes."""
        if self.fault(self.path) is None or not self.allowed() or not self.known(revision):
            return None
        if not self.shared.setting("xet"):
            return self.reply(404, {"error": "Not found"})
        token, until = self.shared.cas_token()
        cas = self.origin("cas")
        fields = {
            "X-Xet-Cas-Url": cas,
            "X-Xet-Access-Token": token,
            "X-Xet-Token-Expiration": str(until),
        }
        return self.reply(200, {"casUrl": cas, "accessToken": token, "exp": until}, fields)
