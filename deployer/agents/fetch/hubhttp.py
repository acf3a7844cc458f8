"""Opens `resolve` urls of the Hub and follows them to where the bytes are."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import re
import socket
import ssl
import threading
import time
import urllib.parse

from deployer.agents.fetch.body import Body, placed, shut
from deployer.agents.fetch.common import (
    DENIED,
    GAVE_UP,
    MISMATCH,
    NOT_FOUND,
    UNTRUSTED,
    Again,
    Fatal,
    Unreached,
)
from deployer.agents.fetch.manifest import File, Job

MOST_HOPS = 6
CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
)
"""Where distributions keep it, for a Python that was built for another one."""


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
    except (TypeError, ValueError, OverflowError):
        return 0.0


def redirected(url: str, location: str) -> str:
    """The address that a redirect names. Raises Again for what is no http(s) address."""
    try:
        target = urllib.parse.urljoin(url, location)
        scheme, host, _ = origin(target)
    except ValueError:
        scheme, host = "", ""
    if scheme not in ("http", "https") or not host or not target.isprintable():
        raise Again("a redirect to something that is no http(s) address")
    return target


def trust(bundle: str | None) -> ssl.SSLContext:
    """Verifies against `bundle`, or what this machine trusts. Raises Fatal UNTRUSTED."""
    try:
        context = ssl.create_default_context(cafile=bundle)
    except (OSError, ssl.SSLError) as error:
        raise Fatal(UNTRUSTED, f"CA bundle {bundle}: {error}") from error
    places = ssl.get_default_verify_paths()
    if bundle is None and places.cafile is None and places.capath is None:
        for path in CA_BUNDLES:
            with contextlib.suppress(OSError):
                context.load_verify_locations(path)
                break
    return context


class Proxy:
    """An http proxy: `CONNECT` for https, the whole url for http. Its password is never shown."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 80
        self.headers: dict[str, str] = {}
        if parts.username is not None:
            user = urllib.parse.unquote(parts.username)
            password = urllib.parse.unquote(parts.password or "")
            pair = base64.b64encode(f"{user}:{password}".encode()).decode("ascii")
            self.headers["Proxy-Authorization"] = f"Basic {pair}"

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port}"


class Hub:
    """Asks one endpoint. A mirror's refusals end the mirror, not the job."""

    exact = False
    """Do the bytes surely come as they are there? Else wrong ones are fetched once more."""

    def __init__(self, job: Job, token: str, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.base = f"{self.endpoint}/{job.repo}/resolve/{urllib.parse.quote(job.commit, '')}/"
        self.limits, self.ca_bundle = job.limits, job.ca_bundle
        self.mirror = origin(endpoint) != origin(job.endpoint)
        self.token = "" if self.mirror else token
        self.proxy = Proxy(job.proxy) if job.proxy else None
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._asked: dict[socket.socket, float] = {}

    def fatal(self, code: int, text: str) -> Fatal:
        """The error for what this endpoint refuses."""
        return Fatal(GAVE_UP, f"{self.endpoint}: {text}") if self.mirror else Fatal(code, text)

    def at_once(self, most: int) -> int:
        """How many connections to begin with; the others follow while CPUs are idle."""
        return most

    def tls(self) -> ssl.SSLContext:
        """One context for all connections, made when the first needs it."""
        with self._lock:
            if self._tls is None:
                self._tls = trust(self.ca_bundle)
            return self._tls

    def open(self, file: File, offset: int, end: int, ranged: bool = True) -> Body:
        """The bytes [offset, end), or the file from its beginning where ranges are ignored.

        `ranged`: False never asks for a range. Raises Again, Fatal, OSError or HTTPException.
        """
        wanted = f"bytes={offset}-{end - 1}" if ranged and (offset, end) != (0, file.size) else ""
        url = self.base + urllib.parse.quote(file.path)
        for hop in range(MOST_HOPS):
            connection = self.connect(url)
            response = None
            try:
                self.ask(connection, url, wanted)
                sock = connection.sock
                response = self.answer(connection, sock)
                if hop == 0:
                    self.check_linked(file, response)
                if response.status in (301, 302, 303, 307, 308):
                    url = redirected(url, response.getheader("Location") or "")
                    response.close()
                    connection.close()
                    continue
                self.check_status(file, response, elsewhere=origin(url) != origin(self.base))
                return Body(connection, sock, response, placed(response, file, offset, end))
            except BaseException:
                if response is not None:
                    response.close()
                connection.close()
                raise
        raise Again(f"more than {MOST_HOPS - 1} redirects")

    def connect(self, url: str) -> http.client.HTTPConnection:
        """A connection that is not open yet, to the url's host or to the proxy."""
        scheme, host, port = origin(url)
        timeout = self.limits.recv_timeout_s
        near = (self.proxy.host, self.proxy.port) if self.proxy else (host, port)
        if scheme != "https":
            return http.client.HTTPConnection(*near, timeout=timeout)
        connection = http.client.HTTPSConnection(*near, timeout=timeout, context=self.tls())
        if self.proxy:
            connection.set_tunnel(host, port, headers=self.proxy.headers)
        return connection

    def ask(self, connection: http.client.HTTPConnection, url: str, wanted: str) -> None:
        """Sends the request; `wanted` is a Range header or ''. The token goes to one origin."""
        parts = urllib.parse.urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"User-Agent": "deployer-range/1", "Accept-Encoding": "identity"}
        headers["Connection"] = "close"
        if wanted:
            headers["Range"] = wanted
        if self.token and origin(url) == origin(self.base):
            headers["Authorization"] = f"Bearer {self.token}"
        if self.proxy and parts.scheme == "http":
            target = f"http://{parts.netloc.rpartition('@')[2]}{target}"
            headers.update(self.proxy.headers)
        self.reach(connection)
        connection.request("GET", target, headers=headers)

    def reach(self, connection: http.client.HTTPConnection) -> None:
        """Connects. Raises Unreached, Fatal, and ssl.SSLError (whom we reach is another matter)."""
        try:
            connection.connect()
        except ssl.SSLError:
            raise
        except OSError as error:
            if self.proxy and "Tunnel connection failed: 407" in str(error):
                raise Fatal(DENIED, f"{self.proxy} wants a user and password (407)") from error
            via = f" (through {self.proxy})" if self.proxy else ""
            place = f"{connection.host}:{connection.port}"
            raise Unreached(f"{place}: {type(error).__name__}: {error}{via}") from error

    def answer(
        self, connection: http.client.HTTPConnection, sock: socket.socket
    ) -> http.client.HTTPResponse:
        """The header of the answer, whole within recv_timeout_s. Raises Again."""
        with self._lock:
            self._asked[sock] = time.monotonic() + self.limits.recv_timeout_s
        response, problem = None, None
        try:
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            problem = error
        with self._lock:
            late = self._asked.pop(sock, None) is None
        if response is not None and not late:
            return response
        if response is not None:  # cut off, which http.client takes for its end
            response.close()
        if late or problem is None:
            wait = f"{self.limits.recv_timeout_s:g} s"
            raise Again(f"the header of the answer was not whole after {wait}") from problem
        raise problem

    def hurry(self, now: float) -> None:
        """Ends requests whose header is overdue at `now` (monotonic). Call it once a second.

        A header that comes byte by byte never meets the time limit of a single receive.
        """
        with self._lock:
            for sock in [sock for sock, due in self._asked.items() if now >= due]:
                del self._asked[sock]
                shut(sock)

    def check_linked(self, file: File, response: http.client.HTTPResponse) -> None:
        """The hub says what it links to; another file than the pinned one ends the download."""
        linked = response.getheader("X-Linked-Etag") or response.getheader("ETag") or ""
        etag = linked.removeprefix("W/").strip('"').lower()
        expected = file.sha256 or file.blob_id
        if re.fullmatch("[0-9a-f]+", etag) and len(etag) == len(expected) and etag != expected:
            text = f"{file.path}: the hub now has another version ({etag}); the old bytes are kept"
            raise self.fatal(MISMATCH, text)
        size = response.getheader("X-Linked-Size") or ""
        if size.isdigit() and int(size) != file.size:
            text = f"the hub now has another version of {size} bytes, not {file.size}"
            raise self.fatal(MISMATCH, f"{file.path}: {text}; the old bytes are kept")

    def check_status(self, file: File, response: http.client.HTTPResponse, elsewhere: bool) -> None:
        """Raises for everything but 200 and 206. `elsewhere`: not the hub but its CDN."""
        status = response.status
        if status in (200, 206):
            return
        why = f"{status} {response.reason} from {'the CDN' if elsewhere else 'the hub'}"
        code = response.getheader("X-Error-Code") or ""
        message = response.getheader("X-Error-Message") or ""
        detail = f"{file.path}: {why}" + (f", {code}" if code else "")
        if status == 407:
            raise Fatal(DENIED, f"{self.proxy or 'a proxy'} wants a user and password (407)")
        if not elsewhere and status in (401, 403):
            raise self.fatal(DENIED, f"{detail}{': ' + message if message else ''}")
        if not elsewhere and status in (404, 410):
            raise self.fatal(NOT_FOUND, f"{detail}{': ' + message if message else ''}")
        if status in (429, 503):
            wait = retry_after(response.getheader("Retry-After"), time.time())
            raise Again(why, pause_s=min(wait, self.limits.max_pause_s))
        raise Again(why, range_refused=status == 416)
