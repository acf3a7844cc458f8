"""What the agent asks the Hub, and what it makes of the answers."""

from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest

from deployer.agents.fetch.body import placed
from deployer.agents.fetch.common import (
    DENIED,
    GAVE_UP,
    MISMATCH,
    NOT_FOUND,
    Again,
    Fatal,
    Unreached,
)
from deployer.agents.fetch.hubhttp import Hub, Proxy, origin, redirected, retry_after
from deployer.agents.fetch.manifest import File, Job

HELLO_BLOB = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"  # git hash-object of "hello"
HELLO_SHA = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
FILE = File("m.safetensors", 5, HELLO_SHA)
JOB = Job("a/b", "c", "/m", (FILE,), endpoint="http://h")
HUB = Hub(JOB, "hf_secret", "http://h")
MIRROR = Hub(JOB, "hf_secret", "http://mirror")


class Answer:
    """What the agent reads of an http.client response."""

    reason = "x"

    def __init__(self, status: int, **headers: str) -> None:
        self.status = status
        self.headers = {name.replace("_", "-").lower(): v for name, v in headers.items()}

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return self.headers.get(name.lower(), default)


class Wire:
    """Takes the request of http.client."""

    def __init__(self) -> None:
        self.sent: tuple[str, dict[str, str]] = ("", {})

    def connect(self) -> None:
        """Nobody is there, and nobody is needed."""

    def request(self, method: str, target: str, headers: dict[str, str]) -> None:
        self.sent = (target, headers)


def asked(hub: Hub, url: str, wanted: str = "") -> tuple[str, dict[str, str]]:
    wire: Any = Wire()
    hub.ask(wire, url, wanted)
    return wire.sent  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0.0),
        ("2", 2.0),
        ("-3", 0.0),
        ("soon", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
    ],
)
def test_retry_after(value: str | None, seconds: float) -> None:
    assert retry_after(value, 10.0) == seconds


def place(answer: Any, offset: int = 0, end: int = 5) -> tuple[int, int]:
    return placed(answer, FILE, offset, end)


def test_only_the_right_bytes_are_taken() -> None:
    assert place(Answer(206, Content_Range="bytes 2-4/5"), 2) == (2, 5)
    assert place(Answer(206, Content_Range="bytes 2-3/5"), 2, 4) == (2, 4)
    assert place(Answer(206, Content_Range="bytes 2-2/5"), 2, 4) == (2, 3), "less than asked for"
    assert place(Answer(200, Content_Length="5"), 2) == (0, 5), "the whole file"
    for wrong in ("bytes 1-4/5", "bytes 2-4/6", "bytes 2-5/5", "bytes 2-1/5", "bytes 2-4/*", ""):
        with pytest.raises(Again, match="Content-Range"):
            place(Answer(206, Content_Range=wrong), 2)
    with pytest.raises(Again, match="Content-Range"):
        place(Answer(206, Content_Range="bytes 2-4/5"), 2, 4)
    with pytest.raises(Again, match="7 bytes"):
        place(Answer(200, Content_Length="7"))
    with pytest.raises(Again, match="web page"):
        place(Answer(200, Content_Type="text/html; charset=utf-8"))
    page = File("docs/index.html", 5, HELLO_SHA)
    assert placed(Answer(200, Content_Type="text/html"), page, 0, 5) == (0, 5)  # type: ignore[arg-type]
    with pytest.raises(Again, match="compressed"):
        place(Answer(200, Content_Encoding="gzip"))


@pytest.mark.parametrize(
    ("status", "code"), [(401, DENIED), (403, DENIED), (404, NOT_FOUND), (410, NOT_FOUND)]
)
def test_the_hubs_refusals_are_final_a_mirrors_only_for_the_mirror(status: int, code: int) -> None:
    answer: Any = Answer(status, X_Error_Code="GatedRepo")
    for hub, expected in ((HUB, code), (MIRROR, GAVE_UP)):
        with pytest.raises(Fatal, match="GatedRepo") as caught:
            hub.check_status(FILE, answer, elsewhere=False)
        assert caught.value.code == expected


@pytest.mark.parametrize("status", [403, 404, 416, 429, 500, 503])
def test_the_cdns_refusals_pass(status: int) -> None:
    answer: Any = Answer(status, Retry_After="4000")
    with pytest.raises(Again) as caught:
        HUB.check_status(FILE, answer, elsewhere=True)
    assert caught.value.range_refused == (status == 416)
    assert caught.value.pause_s == (300.0 if status in (429, 503) else 0.0)


def test_another_version_at_the_hub_is_an_error() -> None:
    small = File("c.json", 5, "", HELLO_BLOB)
    for file, headers, text in (
        (FILE, {"X_Linked_Etag": '"' + "0" * 64 + '"'}, "another version"),
        (FILE, {"X_Linked_Size": "9"}, "9 bytes, not 5"),
        (small, {"ETag": 'W/"' + "0" * 40 + '"'}, "another version"),
    ):
        answer: Any = Answer(302, **headers)
        with pytest.raises(Fatal, match=text) as caught:
            HUB.check_linked(file, answer)
        assert caught.value.code == MISMATCH and file.path in str(caught.value)
    for etag in (HELLO_SHA, HELLO_SHA.upper(), "0" * 32, "x" * 64, "0" * 40):
        right: Any = Answer(302, X_Linked_Etag=f'"{etag}"', X_Linked_Size="5")
        HUB.check_linked(FILE, right)


def test_origins() -> None:
    assert origin("https://h/x") == origin("https://H:443/y")
    assert origin("http://h/x") != origin("https://h/x")
    assert origin("http://h:1/x") != origin("http://h:2/x")


def test_a_redirect_to_nowhere_is_not_followed() -> None:
    assert redirected("https://h/a/b", "/c?d=1") == "https://h/c?d=1"
    assert redirected("https://h/a", "http://[::1]:8/x") == "http://[::1]:8/x"
    for location in (
        "ftp://h/x",
        "http:///x",
        "http://h:port/x",
        "http://[/x",
        "//h:99999/",
        "http://h/\n",
    ):
        with pytest.raises(Again, match="redirect"):
            redirected("https://h/a", location)


def test_the_token_goes_to_the_jobs_own_endpoint_only() -> None:
    assert asked(HUB, "http://h/a/b/resolve/c/m")[1]["Authorization"] == "Bearer hf_secret"
    for hub, url in (
        (HUB, "https://h/x"),
        (HUB, "http://h:81/x"),
        (HUB, "http://cdn/x?sig=1"),
        (MIRROR, "http://mirror/x"),
        (MIRROR, "http://h/x"),
    ):
        assert "hf_secret" not in str(asked(hub, url))


def test_a_range_is_asked_for_as_it_is() -> None:
    target, headers = asked(HUB, "http://cdn/x?sig=1", "bytes=2-4")
    assert target == "/x?sig=1" and headers["Range"] == "bytes=2-4"
    assert headers["Accept-Encoding"] == "identity"
    assert "Range" not in asked(HUB, "http://cdn/x")[1]


def test_a_proxy_is_asked_with_the_whole_url_and_its_password_is_not_shown() -> None:
    job = Job("a/b", "c", "/m", (FILE,), endpoint="http://h", proxy="http://me:ge%40heim@p:3128")
    hub = Hub(job, "", "http://h")
    target, headers = asked(hub, "http://cdn:81/x?sig=1")
    assert target == "http://cdn:81/x?sig=1"
    assert headers["Proxy-Authorization"] == "Basic bWU6Z2VAaGVpbQ=="
    assert str(hub.proxy) == "the proxy p:3128"
    connection = hub.connect("http://cdn:81/x")
    assert (connection.host, connection.port) == ("p", 3128)
    secure = hub.connect("https://cdn/x")
    assert (secure.host, secure.port) == ("p", 3128)
    assert secure._tunnel_host == "cdn"  # type: ignore[attr-defined]
    denied: Any = Answer(407)
    with pytest.raises(Fatal, match="the proxy p:3128 wants a user and password"):
        hub.check_status(FILE, denied, elsewhere=False)
    assert Proxy("http://p").headers == {} and Proxy("http://p").port == 80


class Deaf(Wire):
    """A way that leads nowhere."""

    host, port = "h", 443

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def connect(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "refused"),
        socket.gaierror(-3, "Temporary failure in name resolution"),
        socket.timeout("timed out"),  # noqa: UP041 - Python 3.9 on the target
        OSError(113, "No route to host"),
    ],
)
def test_who_is_not_reached_is_told_apart(error: OSError) -> None:
    wire: Any = Deaf(error)
    with pytest.raises(Unreached, match="h:443: "):
        HUB.ask(wire, "https://h/x", "")


def test_a_certificate_that_is_not_trusted_is_no_outage() -> None:
    wire: Any = Deaf(ssl.SSLCertVerificationError("self-signed"))
    with pytest.raises(ssl.SSLError):
        HUB.ask(wire, "https://h/x", "")
