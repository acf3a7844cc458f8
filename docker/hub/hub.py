"""A model hub that speaks the Hugging Face Hub protocol and misbehaves on command. Stdlib only.

    python hub.py --port 8900 --data DIR --shards 6 --mb 4 --host 0.0.0.0
    with Hub(data) as hub: hub.url, hub.faults([...]), hub.stats()

Two origins, as in the real thing: the hub (port) and the CDN (port + 1). Control, on the hub port:

    POST /_faults   a list of faults (below), or of preset names; replaces the list
    POST /_set      {"token": "...", "url_ttl": 5, "bps": 1e6, "etag_salt": "x", "private": true}
    POST /_reset    forget faults, settings of /_set, log and counters
    GET  /_stats    bytes sent and GETs a file, peak connections, tokens seen by the CDN, the log

A fault selects requests: `where` hub|cdn, `method`, `match` (regex on the file name, or on the
path), `ranged` (has a Range header), `skip` n, `times` n (default: for ever). What it does:

    {"do": "stall"}     send up to the cut, then hold the connection open in silence
    {"do": "drip", "bps": 1}       up to the cut at full speed, then so many bytes a second
    {"do": "reset"}     up to the cut, then RST        {"do": "truncate"}   up to the cut, then FIN
    {"do": "corrupt"}   flip one byte at the cut       {"do": "norange"}    200 with the whole file
    {"do": "status", "code": 503, "retry_after": 2}    {"do": "hang"}       accept, never answer

The cut is `after` (bytes of this body) or `at` (offset in the file); a float below 1 is a fraction.
With `at`, requests that do not reach the cut are neither hit nor counted.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import re
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tiny_model

BLOCK = 1 << 16
PRESETS = {
    # The CDN goes silent at 60 % of one shard; the first two connections are lost to it.
    "hub-stall": {"where": "cdn", "match": "00003-of", "do": "stall", "at": 0.6, "times": 2},
    "hub-reset": {"where": "cdn", "match": "00002-of", "do": "reset", "at": 0.5, "times": 1},
    "hub-corrupt": {"where": "cdn", "match": "00004-of", "do": "corrupt", "at": 0.5, "times": 1},
    "hub-busy": {"where": "cdn", "do": "status", "code": 429, "retry_after": 1, "times": 3},
}
DEFAULTS = {"token": None, "url_ttl": 3600.0, "bps": 0.0, "etag_salt": "", "private": False}


@dataclass
class Blob:
    """One file of the repository. `oid`: git's blob id; `lfs`: its bytes come from the CDN."""

    path: Path
    size: int
    sha256: str
    oid: str
    lfs: bool


class Repo:
    """One model repository: name, commit and files."""

    def __init__(self, name: str, root: Path, shards: int, mb: float) -> None:
        self.name = name
        self.blobs: dict[str, Blob] = {}
        for path in tiny_model.build(root, shards, mb):
            self.blobs[path] = self._blob(root / path)
        names = "".join(f"{p}{b.sha256}" for p, b in sorted(self.blobs.items()))
        self.commit = hashlib.sha1(names.encode()).hexdigest()
        self.by_sha = {b.sha256: p for p, b in self.blobs.items()}

    @staticmethod
    def _blob(path: Path) -> Blob:
        size = path.stat().st_size
        sha, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
        with path.open("rb") as f:
            while block := f.read(1 << 20):
                sha.update(block)
                git.update(block)
        return Blob(path, size, sha.hexdigest(), git.hexdigest(), path.suffix == ".safetensors")


@dataclass
class Shared:
    """What the request threads share."""

    repo: Repo
    key: bytes
    faults: list[dict] = field(default_factory=list)
    set: dict = field(default_factory=lambda: dict(DEFAULTS))
    log: list[dict] = field(default_factory=list)
    live: int = 0
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)

    def sign(self, sha: str, expires: str) -> str:
        return hmac.new(self.key, f"{sha}:{expires}".encode(), hashlib.sha256).hexdigest()[:32]

    def pick(self, where: str, method: str, name: str, ranged: bool, span: tuple | None) -> dict:
        """The first fault that hits this request, counted; {} if none. span: first, last, size."""
        with self.lock:
            for fault in self.faults:
                if fault.get("where", where) != where or fault.get("method", method) != method:
                    continue
                if fault.get("ranged", ranged) != ranged:
                    continue
                if not re.search(fault.get("match", ""), name):
                    continue
                if span and "at" in fault and not span[0] <= self.offset(fault, span) <= span[1]:
                    continue
                fault["seen"] = fault.get("seen", 0) + 1
                first = fault.get("skip", 0)
                if first < fault["seen"] <= first + fault.get("times", 1 << 60):
                    return fault
        return {}

    @staticmethod
    def offset(fault: dict, span: tuple) -> int:
        """The file offset at which a fault cuts or flips."""
        first, last, size = span
        if "at" in fault:
            at = fault["at"]
            return int(at * size) if isinstance(at, float) and at < 1 else int(at)
        after = fault.get("after", 0)
        body = last - first + 1
        return first + (int(after * body) if isinstance(after, float) and after < 1 else int(after))

    def stats(self) -> dict:
        with self.lock:
            log = [dict(e) for e in self.log]
            peak = self.peak
        sent: dict[str, int] = {}
        gets: dict[str, int] = {}
        for e in log:
            if e["method"] == "GET" and e["where"] == "cdn" and e["file"]:
                sent[e["file"]] = sent.get(e["file"], 0) + e["sent"]
                gets[e["file"]] = gets.get(e["file"], 0) + 1
        leaks = sum(1 for e in log if e["where"] == "cdn" and e["auth"])
        return {
            "sent_total": sum(sent.values()),
            "sent": sent,
            "gets": gets,
            "peak_connections": peak,
            "auth_leaks": leaks,
            "log": log,
        }


class Handler(BaseHTTPRequestHandler):
    """One request. `where` and `shared` are set on a subclass an origin."""

    protocol_version = "HTTP/1.1"
    where = "hub"
    shared: Shared

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        self.route_path = unquote(url.path).strip("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.entry = {
            "t": round(time.time(), 3),
            "where": self.where,
            "method": self.command,
            "path": self.path,
            "file": None,
            "range": self.headers.get("Range"),
            "auth": bool(self.headers.get("Authorization")),
            "agent": (self.headers.get("User-Agent") or "")[:60],
            "status": None,
            "sent": 0,
            "fault": None,
        }
        if self.where == "hub" and self.route_path.startswith("_"):
            return self.control()
        with self.shared.lock:
            self.shared.log.append(self.entry)
            self.shared.live += 1
            self.shared.peak = max(self.shared.peak, self.shared.live)
        try:
            if self.where == "cdn":
                self.cdn()
            else:
                self.hub()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with self.shared.lock:
                self.shared.live -= 1
        return None

    do_HEAD = do_POST = do_GET

    # ---- answers
    def reply(self, code: int, body: object = b"", headers: dict | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.entry["status"] = code
        self.send_response(code)
        fields = {"Content-Length": str(len(data)), "Content-Type": "application/json"}
        for name, value in {**fields, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code: int, error: str, message: str) -> None:
        headers = {"X-Error-Code": error, "X-Error-Message": message} if error else {}
        self.reply(code, {"error": message}, headers)

    def fault(self, name: str, span: tuple | None = None) -> dict | None:
        """The fault of this request; None when it has already been answered by it."""
        found = self.shared.pick(self.where, self.command, name, bool(self.entry["range"]), span)
        self.entry["fault"] = found.get("do")
        if found.get("do") == "status":
            wait = found.get("retry_after")
            headers = {} if wait is None else {"Retry-After": str(wait)}
            self.reply(found["code"], {"error": f"injected {found['code']}"}, headers)
            return None
        if found.get("do") == "hang":
            self.hold(found.get("secs", 86400))
            return None
        return found

    def hold(self, seconds: float) -> None:
        """Silence until the client goes, the hub stops, or the time is over."""
        self.close_connection = True
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.shared.stopping.wait(0.1):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return

    def control(self) -> None:
        shared = self.shared
        try:
            data = json.loads(self.body or b"null")
            if self.route_path == "_faults":
                faults = [dict(PRESETS[f]) if isinstance(f, str) else dict(f) for f in data]
                with shared.lock:
                    shared.faults = faults
            elif self.route_path == "_set":
                unknown = set(data) - set(DEFAULTS)
                if unknown:
                    raise KeyError(f"unknown setting {sorted(unknown)}")
                shared.set.update(data)
            elif self.route_path == "_reset":
                with shared.lock:
                    shared.faults, shared.log, shared.peak = [], [], 0
                    shared.set = dict(DEFAULTS)
            elif self.route_path != "_stats":
                return self.reply(404, {"error": "no such control"})
        except (ValueError, KeyError, TypeError) as e:
            return self.reply(400, {"error": str(e)})
        return self.reply(200, shared.stats() if self.route_path == "_stats" else {"ok": True})

    # ---- hub
    def hub(self) -> None:
        name, path = re.escape(self.shared.repo.name), self.route_path
        if m := re.fullmatch(rf"(?:models/)?{name}/resolve/([^/]+)/(.+)", path):
            return self.resolve(m[1], m[2])
        if path == f"api/models/{self.shared.repo.name}/auth-check":
            if self.fault(path) is not None and self.allowed():
                self.reply(200, {})
            return None
        if m := re.fullmatch(rf"api/models/{name}(?:/(revision|tree|paths-info)/([^/]+).*)?", path):
            return self.info(m[1] or "revision", m[2] or "main")
        if path.startswith("api/models/") or "/resolve/" in path:
            return self.refuse(404, "RepoNotFound", "Repository not found")
        return self.reply(404, {"error": "Not found"})

    def allowed(self) -> bool:
        """True, or answers as the Hub does for a gated repository."""
        token = self.shared.set["token"]
        auth = self.headers.get("Authorization")
        if not token or auth == f"Bearer {token}":
            return True
        name = self.shared.repo.name
        if auth:
            why = f"Access to model {name} is restricted and you are not in the authorized list."
            self.refuse(403, "GatedRepo", why)
        else:
            why = f"Access to model {name} is restricted. You must have access to it and be "
            self.refuse(401, "GatedRepo", why + "authenticated to access it. Please log in.")
        return False

    def known(self, revision: str) -> bool:
        if revision in ("main", self.shared.repo.commit):
            return True
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return False

    def info(self, kind: str, revision: str) -> None:
        shared, repo = self.shared, self.shared.repo
        if self.fault(self.path) is None:
            return None
        if shared.set["private"] and not self.allowed():
            return None
        if not self.known(revision):
            return None
        wanted = None
        if kind == "paths-info":
            wanted = parse_qs(self.body.decode()).get("paths", [])
        rows = []
        for path, blob in repo.blobs.items():
            if wanted is not None and path not in wanted:
                continue
            lfs = {"size": blob.size, "pointerSize": 135}
            if kind == "revision":
                row: dict = {"rfilename": path}
                if "blobs" in self.query:
                    row.update(size=blob.size, blobId=blob.oid)
                    if blob.lfs:
                        row["lfs"] = {"sha256": self.etag(blob), **lfs}
            else:
                row = {"type": "file", "path": path, "size": blob.size, "oid": blob.oid}
                if blob.lfs:
                    row["lfs"] = {"oid": self.etag(blob), **lfs}
            rows.append(row)
        if kind != "revision":
            return self.reply(200, rows)
        return self.reply(
            200,
            {
                "_id": repo.commit[:24],
                "id": repo.name,
                "modelId": repo.name,
                "author": repo.name.split("/")[0],
                "sha": repo.commit,
                "private": shared.set["private"],
                "gated": "manual" if shared.set["token"] else False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": ["safetensors", "qwen3_5"],
                "pipeline_tag": "text-generation",
                "createdAt": "2026-01-01T00:00:00.000Z",
                "lastModified": "2026-01-01T00:00:00.000Z",
                "siblings": rows,
            },
        )

    def etag(self, blob: Blob) -> str:
        salt = self.shared.set["etag_salt"]
        return hashlib.sha256((blob.sha256 + salt).encode()).hexdigest() if salt else blob.sha256

    def resolve(self, revision: str, path: str) -> None:
        """Small files come at once; large ones as a redirect to a signed CDN url."""
        shared, blob = self.shared, self.shared.repo.blobs.get(path)
        self.entry["file"] = path
        if self.fault(path) is None or not self.allowed() or not self.known(revision):
            return None
        head = {"X-Repo-Commit": shared.repo.commit, "Accept-Ranges": "bytes"}
        if blob is None:
            head |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.reply(404, b"", head)
        if not blob.lfs:
            head |= {"ETag": f'"{blob.oid}"', "Content-Type": "text/plain; charset=utf-8"}
            return self.reply(200, blob.path.read_bytes(), head)
        expires = f"{time.time() + shared.set['url_ttl']:.3f}"
        host = urlsplit("//" + (self.headers.get("Host") or "localhost")).hostname or "localhost"
        host = f"[{host}]" if ":" in host else host
        origin = f"http://{host}:{self.server.server_address[1] + 1}"
        sign = shared.sign(blob.sha256, expires)
        head |= {
            "X-Linked-Size": str(blob.size),
            "X-Linked-Etag": f'"{self.etag(blob)}"',
            "Location": f"{origin}/{blob.sha256}?Expires={expires}&Signature={sign}",
        }
        return self.reply(302, b"", head)

    # ---- CDN
    def cdn(self) -> None:
        shared, sha = self.shared, self.route_path
        path = shared.repo.by_sha.get(sha)
        if path is None:
            return self.reply(404, {"error": "no such object"})
        self.entry["file"], blob = path, shared.repo.blobs[path]
        wanted = byte_range(self.entry["range"], blob.size)
        fault = self.fault(path, wanted and (*wanted, blob.size))
        if fault is None:
            return None
        expires = self.query.get("Expires", "0")
        if not hmac.compare_digest(self.query.get("Signature", ""), shared.sign(sha, expires)):
            return self.reply(403, {"error": "SignatureDoesNotMatch"})
        if time.time() > float(expires):
            return self.reply(403, {"error": "Request has expired"})
        if fault.get("do") == "norange":
            wanted = (0, blob.size - 1)
        elif wanted is None:
            return self.reply(416, b"", {"Content-Range": f"bytes */{blob.size}"})
        return self.send_blob(blob, wanted, fault)

    def send_blob(self, blob: Blob, wanted: tuple[int, int], fault: dict) -> None:
        first, last = wanted
        do = fault.get("do")
        partial = self.entry["range"] is not None and do != "norange"
        self.entry["status"] = code = 206 if partial else 200
        self.send_response(code)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{blob.sha256}"')
        if partial:
            self.send_header("Content-Range", f"bytes {first}-{last}/{blob.size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.shared.offset(fault, (first, last, blob.size)) if do else None
        end = last + 1 if do not in ("stall", "drip", "reset", "truncate") else min(cut, last + 1)
        pos, start, bps = first, time.monotonic(), self.shared.set["bps"]
        with blob.path.open("rb") as f:
            f.seek(pos)
            while pos < end:
                block = f.read(min(BLOCK, end - pos))
                if do == "corrupt" and pos <= cut < pos + len(block):
                    i = cut - pos
                    block = block[:i] + bytes([block[i] ^ 0xFF]) + block[i + 1 :]
                self.wfile.write(block)
                pos += len(block)
                self.entry["sent"] = pos - first
                if bps:
                    late = (pos - first) / bps - (time.monotonic() - start)
                    self.shared.stopping.wait(max(0.0, late))
        if pos <= last:
            self.cut_off(blob, pos, last, fault)

    def cut_off(self, blob: Blob, pos: int, last: int, fault: dict) -> None:
        self.close_connection = True
        self.wfile.flush()
        if fault["do"] == "stall":
            self.hold(fault.get("secs", 86400))
        elif fault["do"] == "drip":
            bps = fault.get("bps", 1)
            step = max(1, int(bps / 10))
            with blob.path.open("rb") as f:
                f.seek(pos)
                while pos <= last and not self.shared.stopping.wait(step / bps):
                    block = f.read(min(step, last + 1 - pos))
                    self.wfile.write(block)
                    pos += len(block)
                    self.entry["sent"] += len(block)
        elif fault["do"] == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.rfile.close()
            self.connection.close()
            raise ConnectionResetError
        # truncate: the connection is closed after this request, with bytes owing


def byte_range(value: str | None, size: int) -> tuple[int, int] | None:
    """(first, last) to send; None when the range cannot be satisfied (416)."""
    m = re.fullmatch(r"bytes=(\d*)-(\d*)", value or "")
    if not m or not (m[1] or m[2]):
        return 0, size - 1
    if not m[1]:
        return max(0, size - int(m[2])), size - 1
    first = int(m[1])
    return (first, min(int(m[2] or size), size - 1)) if first < size else None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        return  # a client that hangs up is part of the game

    def get_request(self) -> tuple:
        conn, address = super().get_request()
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return conn, address


class Hub:
    """A running hub. port 0: two adjacent free ports are chosen."""

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        repo: str = "acme/tiny-hybrid",
        shards: int = 6,
        mb: float = 1,
        **settings: object,
    ) -> None:
        self._temp = None if data else tempfile.TemporaryDirectory(prefix="hub-")
        root = Path(data or self._temp.name) / repo.replace("/", "--")
        self.repo = Repo(repo, root, shards, mb)
        key = hashlib.sha256(self.repo.commit.encode()).digest()
        self.shared = Shared(self.repo, key)
        self.shared.set.update(settings)
        self.servers = self._listen(host, port)
        shown = "127.0.0.1" if host == "0.0.0.0" else host
        self.url = f"http://{shown}:{self.servers[0].server_address[1]}"

    def _listen(self, host: str, port: int) -> list[Server]:
        hub, cdn = (
            type(where, (Handler,), {"where": where, "shared": self.shared})
            for where in ("hub", "cdn")
        )
        for _ in range(50):
            first = Server((host, port), hub)
            try:
                return [first, Server((host, first.server_address[1] + 1), cdn)]
            except OSError:
                first.server_close()
                if port:
                    raise
        raise OSError("no two adjacent free ports")

    def __enter__(self) -> Hub:
        for server in self.servers:
            run = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            run.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shared.stopping.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()
        if self._temp:
            self._temp.cleanup()

    def faults(self, faults: list) -> None:
        """Replace the fault list; preset names are allowed."""
        with self.shared.lock:
            self.shared.faults = [
                dict(PRESETS[f]) if isinstance(f, str) else dict(f) for f in faults
            ]

    def stats(self) -> dict:
        return self.shared.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900, help="hub; the CDN listens on port + 1")
    parser.add_argument("--data", default="./hubdata")
    parser.add_argument("--repo", default="acme/tiny-hybrid")
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--mb", type=float, default=4, help="MiB a shard, about")
    parser.add_argument("--token", help="require this token for the bytes (a gated repository)")
    parser.add_argument("--url-ttl", type=float, default=3600.0, help="life of a CDN url, seconds")
    parser.add_argument("--bps", type=float, default=0.0, help="bytes a second a connection")
    parser.add_argument("--faults", default="[]", help="JSON list, see the module text")
    a = parser.parse_args()
    stop = threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.set())
    hub = Hub(
        a.data, port=a.port, host=a.host, repo=a.repo, shards=a.shards, mb=a.mb,
        token=a.token, url_ttl=a.url_ttl, bps=a.bps,
    )  # fmt: skip
    with hub:
        hub.faults(json.loads(a.faults))
        print(f"{hub.url} {hub.repo.name}@{hub.repo.commit}", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
