"""Fetches the files of a manifest by HTTP ranges, resumes, and lets only right bytes have a name.

Self-contained (stdlib, Python 3.9+); runs on the target as `python3 range_agent.py` in its job's
folder. Reads `manifest.json` there, writes `progress` there (one JSON line a second) and log lines
to stdout. The token comes from the environment variable HF_TOKEN. http_proxy is not used.

Layout below the model's folder: NAME.part (a prefix of the file), NAME.bad (wrong bytes, kept for
inspection), .deployer/verified.json (size, mtime_ns and hashes of what was checked), and
.deployer/lock.

Exit codes: 0 complete and verified; 10 hash mismatch; 11 access denied; 12 not found; 13 disk full;
14 gave up after retries; 15 another download holds the lock; 16 certificate not trusted; 17 the
repository itself is incomplete or malformed; 18 other disk error; 2 bad manifest.
"""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH100, PTH103, PTH105, PTH110, PTH112, PTH116, PTH118, PTH120, PTH123, PTH202, PTH208

from __future__ import annotations

import contextlib
import email.utils
import errno
import fcntl
import hashlib
import http.client
import json
import os
import queue
import random
import ssl
import sys
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Iterator
from typing import Any

BLOCK = 256 * 1024
MISMATCH, DENIED, NOT_FOUND, DISK_FULL, GAVE_UP, LOCKED = 10, 11, 12, 13, 14, 15
UNTRUSTED, MALFORMED, DISK_ERROR = 16, 17, 18
MAX_HEADER = 32 * 1024 * 1024
LIMITS: dict[str, float] = {
    "recv_timeout_s": 20.0,
    "slow_bytes_per_s": 32 * 1024,
    "slow_window_s": 30.0,
    "idle_tries": 6,  # tries in a row that bring nothing
    "tries": 200,  # of one file
    "backoff_s": 1.0,
    "max_backoff_s": 30.0,
    "max_pause_s": 300.0,
}


class Fatal(Exception):
    """Ends the whole download with an exit code and one line."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Again(Exception):
    """This try is over; the file goes on where it is. `pause_s` holds back the whole pool."""

    def __init__(self, why: str, pause_s: float = 0.0, range_refused: bool = False) -> None:
        super().__init__(why)
        self.pause_s = pause_s
        self.range_refused = range_refused


class Stopped(Exception):
    """Another worker met a fatal error; the bytes so far are kept."""


@contextlib.contextmanager
def disk(path: str) -> Iterator[None]:
    """Turns errors of the local file system into fatal ones, apart from network errors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Fatal(DISK_FULL, f"{path}: no space left; the bytes so far are kept") from error
        raise Fatal(DISK_ERROR, f"{path}: {error.strerror or error}") from error


def log(text: str) -> None:
    """One line of the job's log."""
    print(time.strftime("%H:%M:%S ") + text, flush=True)


def replace_file(path: str, text: str, sync: bool = True) -> None:
    """Writes `path` by temp file and rename."""
    with disk(path):
        with open(path + ".tmp", "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if sync:
                os.fsync(stream.fileno())
        os.replace(path + ".tmp", path)


def sync_folder(path: str) -> None:
    """Makes a rename in `path` durable."""
    with disk(path):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def safe_name(name: str) -> bool:
    """True for a relative path that stays below its folder and has no control characters."""
    parts = name.split("/")
    return bool(name) and name.isprintable() and not any(part in ("", ".", "..") for part in parts)


class File:
    """One file of the manifest."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.path = str(row["path"])
        self.size = int(row["size"])
        self.sha256 = str(row.get("sha256") or "")
        self.blob_id = str(row.get("blob_id") or "")
        if not safe_name(self.path) or self.size < 0 or self.path.split("/")[0] == ".deployer":
            raise ValueError(f"unsafe file in the manifest: {self.path!r}")
        if not (self.sha256 or self.blob_id):
            raise ValueError(f"no hash in the manifest: {self.path!r}")


class Digest:
    """sha256 of the bytes, and the git blob id where only that is known."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.git = None if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)

    def update(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        if self.git is not None:
            self.git.update(data)

    def wrong(self) -> str:
        """'' when the bytes are right, else expected and got."""
        got = self.sha256.hexdigest() if self.git is None else self.git.hexdigest()
        expected = self.file.sha256 or self.file.blob_id
        return "" if got == expected else f"expected {expected}, got {got}"


class Gauge:
    """The shared figures. `moved` counts every byte received or hashed and never falls."""

    def __init__(self, total: int, files: int) -> None:
        self.lock = threading.Lock()
        self.total, self.files = total, files
        self.bytes = self.moved = self.retries = self.files_done = 0
        self.pause_until = 0.0
        self.history: deque[tuple[float, int]] = deque(maxlen=11)
        self.received = 0

    def add(self, valid: int = 0, moved: int = 0, received: int = 0) -> None:
        with self.lock:
            self.bytes += valid
            self.moved += moved
            self.received += received

    def line(self) -> str:
        """The progress line; speed in bytes/s over the last 10 s, pause in seconds left."""
        with self.lock:
            now = time.monotonic()
            self.history.append((now, self.received))
            then, received = self.history[0]
            speed = (self.received - received) / (now - then) if now > then else 0.0
            return json.dumps(
                {
                    "bytes": self.bytes,
                    "total": self.total,
                    "speed": int(speed),
                    "files_done": self.files_done,
                    "files": self.files,
                    "retries": self.retries,
                    "moved": self.moved,
                    "pause": max(0, int(self.pause_until - now)),
                }
            )


class Record:
    """`.deployer/verified.json`: what was hashed, and how the file looked then."""

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, ".deployer", "verified.json")
        self.lock = threading.Lock()
        self.files: dict[str, dict[str, Any]] = {}
        try:
            with open(self.path, encoding="utf-8") as stream:
                rows = json.load(stream)["files"]
            self.files = {str(k): dict(v) for k, v in rows.items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log(f"{self.path} is unreadable ({error}): all files are hashed again")

    def holds(self, file: File, facts: os.stat_result) -> bool:
        """True when the file was verified and has not been touched since."""
        row = self.files.get(file.path, {})
        if (row.get("size"), row.get("mtime_ns")) != (facts.st_size, facts.st_mtime_ns):
            return False
        if facts.st_size != file.size:
            return False
        if file.sha256:
            return bool(row.get("sha256") == file.sha256)
        return bool(row.get("blob_id") == file.blob_id)

    def add(self, file: File, facts: os.stat_result, sha256: str) -> None:
        row = {
            "size": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            "sha256": sha256,
            "blob_id": file.blob_id,
        }
        with self.lock:
            self.files[file.path] = row
            replace_file(self.path, json.dumps({"version": 1, "files": self.files}, indent=1))


class Part:
    """NAME.part: an exact prefix of the file and its running hash."""

    def __init__(self, path: str, file: File, gauge: Gauge) -> None:
        self.path, self.file, self.gauge = path, file, gauge
        self.digest, self.offset = Digest(file), 0
        with disk(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.handle = os.open(path, flags, 0o644)
            if os.fstat(self.handle).st_size > file.size:
                os.ftruncate(self.handle, 0)
            while data := os.read(self.handle, BLOCK):
                self.digest.update(data)
                self.offset += len(data)
                gauge.add(valid=len(data), moved=len(data))

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with disk(self.path):
            while view:
                done = os.write(self.handle, view)
                self.digest.update(view[:done])
                self.offset += done
                self.gauge.add(valid=done, moved=done, received=done)
                view = view[done:]

    def restart(self) -> None:
        """Throws the prefix away."""
        self.gauge.add(valid=-self.offset)
        with disk(self.path):
            os.ftruncate(self.handle, 0)
            os.lseek(self.handle, 0, os.SEEK_SET)
        self.digest, self.offset = Digest(self.file), 0

    def sync(self) -> None:
        with disk(self.path):
            os.fsync(self.handle)

    def close(self) -> None:
        os.close(self.handle)


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host, port: the token is sent to one origin only."""
    parts = urllib.parse.urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, (parts.hostname or "").lower(), parts.port or default


def retry_after(value: str | None, now: float) -> float:
    """Seconds of a Retry-After header (number or date); 0 when absent or unreadable."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (TypeError, ValueError):
        return 0.0


class Hub:
    """Opens `resolve` urls and follows them to where the bytes are."""

    def __init__(self, job: dict[str, Any], token: str, limits: dict[str, float]) -> None:
        self.endpoint = str(job["endpoint"]).rstrip("/")
        if urllib.parse.urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise ValueError(f"not an http(s) endpoint: {self.endpoint!r}")
        self.base = f"{self.endpoint}/{job['repo']}/resolve/{job['commit']}/"
        self.token, self.limits = token, limits
        bundle = job.get("ca_bundle") or None
        try:
            self.tls = ssl.create_default_context(cafile=bundle)
        except (OSError, ssl.SSLError) as error:
            raise Fatal(UNTRUSTED, f"CA bundle {bundle}: {error}") from error

    def open(
        self, file: File, offset: int
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The answer that carries the bytes from `offset`: 206, or 200 from the beginning.

        Raises Again or Fatal for every other answer.
        """
        url = self.base + urllib.parse.quote(file.path)
        for hop in range(6):
            connection = self.connect(url)
            try:
                response = self.ask(connection, url, offset)
                if response.status in (301, 302, 303, 307, 308):
                    self.check_linked(file, response)
                    url = urllib.parse.urljoin(url, response.getheader("Location") or "")
                    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
                        raise Again("a redirect to something that is not http(s)")
                    connection.close()
                    continue
                self.check_status(file, response, elsewhere=origin(url) != origin(self.base))
                if hop == 0:
                    self.check_linked(file, response)
                return connection, response
            except BaseException:
                connection.close()
                raise
        raise Again("more than 5 redirects")

    def connect(self, url: str) -> http.client.HTTPConnection:
        scheme, host, port = origin(url)
        timeout = self.limits["recv_timeout_s"]
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=self.tls)
        return http.client.HTTPConnection(host, port, timeout=timeout)

    def ask(
        self, connection: http.client.HTTPConnection, url: str, offset: int
    ) -> http.client.HTTPResponse:
        parts = urllib.parse.urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"User-Agent": "deployer-range/1", "Accept-Encoding": "identity"}
        headers["Connection"] = "close"
        if offset:
            headers["Range"] = f"bytes={offset}-"
        if self.token and origin(url) == origin(self.base):
            headers["Authorization"] = f"Bearer {self.token}"
        connection.request("GET", target, headers=headers)
        return connection.getresponse()

    @staticmethod
    def check_linked(file: File, response: http.client.HTTPResponse) -> None:
        """The hub says what it links to; another file than the pinned one ends the download."""
        etag = (response.getheader("X-Linked-Etag") or "").strip('"')
        size = response.getheader("X-Linked-Size") or ""
        if file.sha256 and len(etag) == 64 and etag != file.sha256:
            raise Fatal(MISMATCH, f"{file.path}: the hub now has another version ({etag})")
        if size.isdigit() and int(size) != file.size:
            raise Fatal(MISMATCH, f"{file.path}: the hub says {size} bytes, not {file.size}")

    def check_status(self, file: File, response: http.client.HTTPResponse, elsewhere: bool) -> None:
        """Raises for everything but 200 and 206. `elsewhere`: not the hub but its CDN."""
        status = response.status
        if status in (200, 206):
            return
        why = f"{status} {response.reason} from {'the CDN' if elsewhere else 'the hub'}"
        code = response.getheader("X-Error-Code") or ""
        message = response.getheader("X-Error-Message") or ""
        detail = f"{file.path}: {why}" + (f", {code}" if code else "")
        if not elsewhere and status in (401, 403):
            raise Fatal(DENIED, f"{detail}{': ' + message if message else ''}")
        if not elsewhere and status in (404, 410):
            raise Fatal(NOT_FOUND, f"{detail}{': ' + message if message else ''}")
        if status in (429, 503):
            wait = retry_after(response.getheader("Retry-After"), time.time())
            raise Again(why, pause_s=min(wait, self.limits["max_pause_s"]))
        raise Again(why, range_refused=status == 416)


def resumes_at(response: http.client.HTTPResponse, file: File, offset: int) -> bool:
    """True for a right 206; False for a 200 that starts over; Again for anything else."""
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise Again("the answer is compressed, although identity was asked for")
    if response.status == 200:
        length = response.getheader("Content-Length") or ""
        if length.isdigit() and int(length) != file.size:
            raise Again(f"the answer has {length} bytes, not {file.size}")
        return False
    wanted = f"bytes {offset}-{file.size - 1}/{file.size}"
    if response.getheader("Content-Range", "").strip() != wanted:
        raise Again(f"Content-Range {response.getheader('Content-Range')!r}, not {wanted!r}")
    return True


def broken_header(path: str) -> str:
    """'' when a safetensors file's length word, JSON and offsets cover the file exactly."""
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            return f"header of {length} bytes in a file of {size}"
        if length > MAX_HEADER:
            return f"header of {length} bytes is over {MAX_HEADER}"
        try:
            header = json.loads(stream.read(length))
            spans = sorted(
                (int(row["data_offsets"][0]), int(row["data_offsets"][1]))
                for name, row in header.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return f"header is not safetensors JSON ({error})"
    end = 0
    for start, stop in spans:
        if start != end or stop < start:
            return f"tensor offsets have a hole or overlap at {end}"
        end = stop
    return "" if end == size - 8 - length else f"tensors end at {end}, data at {size - 8 - length}"


def lock_is_held(path: str) -> bool:
    """True while another process holds a flock on `path`."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class Download:
    """The pool: small files first, then by size, largest first."""

    def __init__(self, job: dict[str, Any], token: str, progress: str) -> None:
        self.root = str(job["path"])
        self.limits = {**LIMITS, **job.get("limits", {})}
        self.files = [File(row) for row in job["files"]]
        self.hub = Hub(job, token, self.limits)
        self.workers = max(1, min(int(job.get("connections", 4)), len(self.files) or 1))
        self.progress = progress
        self.gauge = Gauge(sum(file.size for file in self.files), len(self.files))
        self.record = Record(self.root)
        self.queue: queue.SimpleQueue[File] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.errors: list[Fatal] = []
        small = sorted((f for f in self.files if f.size < 1 << 20), key=lambda f: f.size)
        large = sorted((f for f in self.files if f.size >= 1 << 20), key=lambda f: -f.size)
        for file in small + large:
            self.queue.put(file)

    def run(self) -> None:
        """Fetches everything; raises the first Fatal."""
        threads = [threading.Thread(target=self.work, daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            replace_file(self.progress, self.gauge.line() + "\n", sync=False)
            deadline = time.monotonic() + 1.0
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        replace_file(self.progress, self.gauge.line() + "\n", sync=False)
        if self.errors:
            raise self.errors[0]

    def work(self) -> None:
        while not self.stop.is_set():
            try:
                file = self.queue.get_nowait()
            except queue.Empty:
                return
            try:
                self.fetch(file)
            except Stopped:
                return
            except Fatal as error:
                self.errors.append(error)
                self.stop.set()
            except Exception as error:  # noqa: BLE001 - a worker's bug must end the job, named
                self.errors.append(Fatal(1, f"{file.path}: {type(error).__name__}: {error}"))
                self.stop.set()

    def fetch(self, file: File) -> None:
        """Brings one file to its final name, verified."""
        final = os.path.join(self.root, file.path)
        with disk(final):
            os.makedirs(os.path.dirname(final), exist_ok=True)
        if not self.already_there(file, final):
            self.adopt_orphan(file, final + ".part")
            part = Part(final + ".part", file, self.gauge)
            try:
                sha256 = self.receive_right(file, part)
                part.sync()
            finally:
                part.close()
            with disk(final):
                os.replace(final + ".part", final)
                facts = os.stat(final)
            sync_folder(os.path.dirname(final))
            self.record.add(file, facts, sha256)
        self.check_content(file, final)
        with self.gauge.lock:
            self.gauge.files_done += 1
            done = self.gauge.files_done
        log(f"verified {file.path} ({file.size} bytes), {done} of {self.gauge.files}")

    def already_there(self, file: File, final: str) -> bool:
        """Judges a file that has the final name; what is wrong is moved out of the way."""
        try:
            facts = os.stat(final)
        except FileNotFoundError:
            return False
        if self.record.holds(file, facts):
            self.gauge.add(valid=file.size)
            return True
        if facts.st_size == file.size:
            digest = Digest(file)
            with disk(final), open(final, "rb", buffering=0) as stream:
                while data := stream.read(BLOCK):
                    digest.update(data)
                    self.gauge.add(moved=len(data))
                    if self.stop.is_set():
                        raise Stopped
            wrong = digest.wrong()
            if not wrong:
                self.record.add(file, facts, digest.sha256.hexdigest())
                self.gauge.add(valid=file.size)
                return True
            log(f"{file.path}: {wrong}; moved to {file.path}.bad, fetching it again")
        elif facts.st_size < file.size and not os.path.exists(final + ".part"):
            log(f"{file.path}: {facts.st_size} of {file.size} bytes; resuming")
            with disk(final):
                os.replace(final, final + ".part")
            return False
        else:
            log(f"{file.path}: {facts.st_size} bytes, not {file.size}; moved to {file.path}.bad")
        with disk(final):
            os.replace(final, final + ".bad")
        return False

    def adopt_orphan(self, file: File, part: str) -> None:
        """Takes over the dense prefix that a killed huggingface_hub left behind, if any."""
        cache = os.path.join(self.root, ".cache", "huggingface", "download")
        if os.path.exists(part) or not file.sha256 or not os.path.isdir(cache):
            return
        if lock_is_held(os.path.join(cache, file.path + ".lock")):
            return
        found: list[tuple[int, str]] = []
        folder = os.path.join(cache, os.path.dirname(file.path))
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if f".{file.sha256}." in name and name.endswith(".incomplete"):
                facts = os.stat(os.path.join(folder, name))
                if 0 < facts.st_size <= file.size and facts.st_blocks * 512 >= facts.st_size:
                    found.append((facts.st_size, os.path.join(folder, name)))
        if found:
            size, path = max(found)
            with disk(part):
                os.replace(path, part)
            log(f"{file.path}: took over {size} bytes of an earlier download")

    def receive_right(self, file: File, part: Part) -> str:
        """Receives until the hash is right; wrong bytes are fetched once more, then named."""
        self.receive(file, part)
        if wrong := part.digest.wrong():
            log(f"{file.path}: {wrong}; fetching it again")
            part.restart()
            self.receive(file, part)
        if wrong := part.digest.wrong():
            with disk(part.path):
                os.replace(part.path, part.path[: -len(".part")] + ".bad")
            raise Fatal(MISMATCH, f"{file.path}: {wrong}, twice; kept as {file.path}.bad")
        return part.digest.sha256.hexdigest()

    def receive(self, file: File, part: Part) -> None:
        """Tries until all bytes are there. Bounded: tries that bring nothing, and tries in all."""
        idle = refused = 0
        again = Again("no try was allowed")
        for _ in range(int(self.limits["tries"])):
            if part.offset == file.size:
                return
            self.wait_turn()
            before = part.offset
            try:
                self.one_try(file, part)
                return
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    text = f"{self.hub.endpoint}: {error.verify_message or error}"
                    raise Fatal(UNTRUSTED, text) from error
                again = Again(f"{type(error).__name__}: {error}")
            except Again as error:
                again = error
            refused = refused + 1 if again.range_refused else 0
            if refused >= 2:
                part.restart()
            idle = 0 if part.offset > before else idle + 1
            if idle > self.limits["idle_tries"]:
                break
            self.back_off(file, part, again, idle)
        raise Fatal(GAVE_UP, f"{file.path}: gave up at {part.offset} of {file.size} bytes: {again}")

    def back_off(self, file: File, part: Part, again: Again, idle: int) -> None:
        """Logs the retry and waits: the whole pool when the hub asked for it."""
        with self.gauge.lock:
            self.gauge.retries += 1
            if again.pause_s:
                until = time.monotonic() + again.pause_s
                self.gauge.pause_until = max(self.gauge.pause_until, until)
        log(f"{file.path}: {again}; going on at {part.offset} of {file.size}")
        if not again.pause_s:
            longest = min(self.limits["max_backoff_s"], self.limits["backoff_s"] * 2**idle)
            self.stop.wait(longest * random.uniform(0.25, 0.5))

    def wait_turn(self) -> None:
        """Waits while the pool is held back. Raises Stopped."""
        while not self.stop.is_set():
            left = self.gauge.pause_until - time.monotonic()
            if left <= 0:
                return
            self.stop.wait(left)
        raise Stopped

    def one_try(self, file: File, part: Part) -> None:
        """One request; returns when all bytes came."""
        connection, response = self.hub.open(file, part.offset)
        try:
            if not resumes_at(response, file, part.offset) and part.offset:
                log(f"{file.path}: the server ignored the range; from the beginning")
                part.restart()
            mark, since = part.offset, time.monotonic()
            while part.offset < file.size:
                if self.stop.is_set():
                    raise Stopped
                data = response.read1(min(BLOCK, file.size - part.offset))
                if not data:
                    raise Again("the connection ended early")
                part.write(data)
                spent = time.monotonic() - since
                if spent >= self.limits["slow_window_s"]:
                    if (part.offset - mark) / spent < self.limits["slow_bytes_per_s"]:
                        raise Again(f"only {(part.offset - mark) / spent:.0f} bytes/s")
                    mark, since = part.offset, time.monotonic()
        finally:
            connection.close()

    def check_content(self, file: File, final: str) -> None:
        """An index must name only files of the manifest; a shard's header must cover it."""
        if file.path.endswith(".safetensors"):
            with disk(final):
                broken = broken_header(final)
            if broken:
                raise Fatal(MALFORMED, f"{file.path}: right hash, but {broken}")
        if file.path.endswith(".safetensors.index.json"):
            folder = os.path.dirname(file.path)
            try:
                with open(final, encoding="utf-8") as stream:
                    shards = set(json.load(stream)["weight_map"].values())
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise Fatal(MALFORMED, f"{file.path}: not a weight index ({error})") from error
            there = {f.path for f in self.files}
            lost = sorted(s for s in shards if os.path.join(folder, str(s)) not in there)
            if lost:
                text = f"{file.path} names {len(lost)} files that the list lacks: {lost[0]}"
                raise Fatal(MALFORMED, text)


def kernel_start(pid: int) -> int:
    """Start time in clock ticks (field 22 of /proc/PID/stat), 0 when unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextlib.contextmanager
def only_one(root: str) -> Iterator[None]:
    """Holds `.deployer/lock`; the kernel frees it however this process ends."""
    folder = os.path.join(root, ".deployer")
    with disk(folder):
        os.makedirs(folder, exist_ok=True)
        handle = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode("utf-8", "replace").strip()
            raise Fatal(LOCKED, f"{root}: another download holds the lock: {holder}") from None
        with disk(folder):
            os.ftruncate(handle, 0)
            who = {"pid": os.getpid(), "start": kernel_start(os.getpid())}
            os.pwrite(handle, json.dumps(who).encode(), 0)
        yield
    finally:
        os.close(handle)


def main() -> int:
    """Runs the job of this folder; see the module for the exit codes."""
    token = os.environ.pop("HF_TOKEN", "")
    try:
        with open("manifest.json", encoding="utf-8") as stream:
            job = json.load(stream)
        root = str(job["path"])
        with only_one(root):
            download = Download(job, token, os.path.abspath("progress"))
            log(f"{len(download.files)} files, {download.gauge.total} bytes, to {root}")
            download.run()
    except Fatal as error:
        log(f"error: {error}")
        return error.code
    except (OSError, ValueError, KeyError, TypeError) as error:
        log(f"error: manifest.json: {type(error).__name__}: {error}")
        return 2
    log("complete: every file is verified")
    return 0


if __name__ == "__main__":
    sys.exit(main())
