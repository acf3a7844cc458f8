"""Opens `resolve` urls of the Hub and follows them to where the bytes are."""

from __future__ import annotations

import email.utils
import http.client
import ssl
import time
import urllib.parse

from deployer.agents.fetch.common import (
    DENIED,
    MISMATCH,
    NOT_FOUND,
    UNTRUSTED,
    Again,
    Fatal,
)
from deployer.agents.fetch.manifest import File, Job


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

    def __init__(self, job: Job, token: str, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.base = f"{self.endpoint}/{job.repo}/resolve/{job.commit}/"
        self.limits = job.limits
        self.token = token if origin(endpoint) == origin(job.endpoint) else ""
        bundle = job.ca_bundle
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
        timeout = self.limits.recv_timeout_s
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
            raise Again(why, pause_s=min(wait, self.limits.max_pause_s))
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
