"""The real library against endpoints that refuse, hang, lie, or are no Hub at all."""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deployer import hub
from deployer.hub_errors import asked_pause
from deployer.hub_manifest import (
    CollidingFileNames,
    HubError,
    IncompleteRepository,
    UnsafeFileName,
)
from deployer.playbook import Playbook

Reply = tuple[int, dict[str, str], bytes]
COMMIT = "a" * 40
INDEX = json.dumps({"weight_map": {"w": "m.safetensors"}}).encode()
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Stub:
    """A Hub on loopback; `on` maps a part of a path to what answers instead.

    A list is played once, its items in order; a callable gets the request.
    """

    def __init__(self) -> None:
        self.on: dict[str, Any] = {}
        self.seen: list[tuple[str, str]] = []
        self.stopping = threading.Event()
        self.files: list[dict[str, Any]] = [
            {"rfilename": "m.safetensors", "size": 9, "blobId": "b" * 40, "lfs": lfs("1")},
            {"rfilename": "model.safetensors.index.json", "size": len(INDEX), "blobId": git(INDEX)},
        ]
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                return

            def do_GET(self) -> None:
                stub.seen.append((self.path, self.headers.get("Authorization") or ""))
                reply = stub.answer(self)
                if reply is None:
                    stub.stopping.wait(60)
                    self.close_connection = True
                    return
                status, headers, body = reply
                self.send_response(status)
                fields = {"Content-Type": "application/json", "Content-Length": str(len(body))}
                for name, value in {**fields, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> Reply | None:
        for part, plays in self.on.items():
            if part not in request.path:
                continue
            if isinstance(plays, list):
                if not plays:
                    continue
                plays = plays.pop(0)
            return plays(request) if callable(plays) else plays  # type: ignore[no-any-return]
        if request.path.endswith("/auth-check"):
            return 200, {}, b"{}"
        if "/resolve/" in request.path:
            return 200, {}, INDEX
        listed = {"id": "acme/tiny", "sha": COMMIT, "siblings": self.files, "private": False}
        return 200, {}, json.dumps({**listed, "downloads": 0, "likes": 0, "tags": []}).encode()

    def count(self, part: str) -> int:
        return sum(part in path for path, _ in self.seen)


def lfs(digit: str) -> dict[str, Any]:
    return {"sha256": digit * 64, "size": 9, "pointerSize": 3}


def git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def said(status: int, code: str = "", message: str = "", **headers: str) -> Reply:
    names = {"X-Error-Code": code, "X-Error-Message": message} if code or message else {}
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, {**names, **more}, json.dumps({"error": message or "no"}).encode()


HTML: Reply = (200, {"Content-Type": "text/html"}, b"<html>Please log in</html>")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(hub, "_pause", lambda state: asked_pause(state.outcome.exception()) or 0.01)
    stub = Stub()
    yield stub
    stub.stopping.set()
    stub.server.shutdown()
    stub.server.server_close()


def playbook(endpoint: str) -> Playbook:
    return Playbook.model_validate(
        {
            "model": {"repo": "acme/tiny", "path": "/srv/m", "served_name": "m"},
            "download": {"endpoint": endpoint},
            "driver": {"version": "580.1"},
            "engine": {"version": "0.5.11", "lock": "l.txt", "venv": "/opt/v"},
        }
    )


def fetch(stub: Stub, token: str | None = None, deadline_s: float = 10.0) -> list[str]:
    manifest = hub.fetch_manifest(playbook(stub.url), token, deadline_s=deadline_s)
    return [file.path for file in manifest.files]


def refused(stub: Stub, token: str | None = None, deadline_s: float = 10.0) -> HubError:
    with pytest.raises(HubError) as caught:
        fetch(stub, token, deadline_s)
    error = caught.value
    assert "\n" not in str(error) and error.fix, error
    return error


def test_three_questions_and_the_token_with_each(stub: Stub) -> None:
    assert fetch(stub, "hf_x") == ["m.safetensors", "model.safetensors.index.json"]
    assert [auth for _, auth in stub.seen] == ["Bearer hf_x"] * 3


def test_no_token_of_this_machine_is_sent(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
    fetch(stub)
    assert [auth for _, auth in stub.seen] == [""] * 3


def test_the_token_does_not_follow_the_index_to_another_origin(stub: Stub) -> None:
    other = Stub()
    other.on["/elsewhere"] = (200, {}, INDEX)
    stub.on["/resolve/"] = said(302, location=f"{other.url}/elsewhere")
    fetch(stub, "hf_x")
    assert other.seen == [("/elsewhere", "")]
    other.server.shutdown()
    other.server.server_close()


ACCESS: dict[str, tuple[Reply, type[HubError], str]] = {
    "gated": (said(403, "GatedRepo", "ask for access"), hub.AccessGated, "terms"),
    "missing or private": (said(401, "RepoNotFound", "Repository not found"),
                           hub.RepositoryMissing, "if it is private, set HF_TOKEN"),
    "private, as the Hub answers strangers": (said(401, "", "Invalid username or password."),
                                              hub.RepositoryMissing, "if it is private"),
    "a token that nobody knows": (
        said(401, "", "Invalid credentials in Authorization header"), hub.TokenRefused, "renew"),
    "a token without rights": (said(403, "", "token lacks a scope"), hub.TokenRefused, "HF_TOKEN"),
    "disabled": (said(403, "", "Access to this resource is disabled."),
                 hub.RepositoryMissing, "another model"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCESS)
def test_who_may_not_read_is_told_at_once(stub: Stub, name: str) -> None:
    reply, kind, fix = ACCESS[name]
    stub.on["auth-check"] = reply
    error = refused(stub)
    assert type(error) is kind and fix in error.fix, error
    assert len(stub.seen) == 1


def test_a_missing_repository_with_a_token_asks_about_the_token(stub: Stub) -> None:
    stub.on["auth-check"] = said(404, "RepoNotFound", "Repository not found")
    assert "is the token in HF_TOKEN one of a user" in refused(stub, "hf_x").fix


def test_a_missing_revision(stub: Stub) -> None:
    stub.on["/revision/"] = said(404, "RevisionNotFound", "Invalid rev id")
    assert type(refused(stub)) is hub.RevisionMissing


def test_a_mirror_without_an_access_check_is_a_hub_still(stub: Stub) -> None:
    stub.on["auth-check"] = (404, {"Content-Type": "text/html"}, b"<html>no</html>")
    assert len(fetch(stub)) == 2


NO_HUB: dict[str, Any] = {
    "a login page": HTML,
    "a web server": (404, {"Content-Type": "text/html"}, b"<html>no</html>"),
    "json of something else": (200, {}, b'{"hello": "world"}'),
    "a list": (200, {}, b"[]"),
    "no json": (200, {}, b"{"),
}


@pytest.mark.parametrize("name", NO_HUB)
def test_what_is_no_hub_is_called_so(stub: Stub, name: str) -> None:
    stub.on[""] = NO_HUB[name]
    error = refused(stub)
    assert type(error) is hub.EndpointWrong or "commit" in str(error), repr(error)
    assert "endpoint" in error.fix


QUESTIONS = ["auth-check", "/revision/", "/resolve/"]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_costs_a_try_of_that_question_only(
    stub: Stub, question: str, status: int
) -> None:
    stub.on[question] = [said(status)]
    assert len(fetch(stub)) == 2
    assert [stub.count(part) for part in QUESTIONS] == [
        2 if part == question else 1 for part in QUESTIONS
    ]


@pytest.mark.parametrize("question", QUESTIONS)
def test_one_silent_try_is_made_again(
    stub: Stub, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "QUESTION_S", 0.3)
    stub.on[question] = [None]
    assert len(fetch(stub)) == 2 and stub.count(question) == 2


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_hub_that_stays_silent_ends_at_the_deadline(
    stub: Stub, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "QUESTION_S", 0.2)
    stub.on[question] = None
    began = time.monotonic()
    error = refused(stub, deadline_s=1.0)
    assert type(error) is hub.HubSilent and time.monotonic() - began < 1.6
    what = {"auth-check": "access check", "/revision/": "file list", "/resolve/": "index"}
    assert what[question] in str(error)


def test_a_hung_question_does_not_keep_the_process(stub: Stub) -> None:
    stub.on["auth-check"] = None
    code = (
        "from deployer import hub; from tests.scripts.test_hub_access import playbook\n"
        "hub.QUESTION_S = 0.2\n"
        f"try: hub.fetch_manifest(playbook({stub.url!r}), None, deadline_s=0.4)\n"
        "except hub.HubSilent: print('silent')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.stdout == "silent\n" and done.returncode == 0, done.stderr


def test_a_drip_of_an_index_ends_too(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "QUESTION_S", 0.3)

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000")
        request.end_headers()
        while not stub.stopping.wait(0.05):
            try:
                request.wfile.write(b" ")
            except OSError:
                return

    stub.on["/resolve/"] = drip
    assert type(refused(stub, deadline_s=0.8)) is hub.HubSilent


def test_retry_after_is_kept(stub: Stub) -> None:
    stub.on["/revision/"] = [said(429, retry_after="1")]
    began = time.monotonic()
    assert len(fetch(stub)) == 2 and time.monotonic() - began >= 1.0


def test_a_pause_beyond_the_deadline_is_told_instead_of_waited_for(stub: Stub) -> None:
    stub.on["/revision/"] = said(429, retry_after="90")
    began = time.monotonic()
    error = refused(stub)
    assert type(error) is hub.EndpointUnreachable and error.exit_code == 3
    assert "429" in str(error) and "pause of 90 s" in str(error) and "in 90 s" in error.fix
    assert time.monotonic() - began < 2 and stub.count("/revision/") == 1


def test_every_way_to_ask_for_a_pause() -> None:
    def error(status: int = 429, **headers: str) -> Exception:
        made: Any = Exception()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        made.response = type("R", (), {"status_code": status, "headers": names})
        return made  # type: ignore[no-any-return]

    assert asked_pause(error(Retry_After="7")) == 7
    assert 50 < asked_pause(error(Retry_After=formatdate(time.time() + 60, usegmt=True))) <= 60
    assert asked_pause(error(Retry_After=formatdate(1, usegmt=True))) == 0
    assert asked_pause(error(Retry_After="soon")) == 0
    assert asked_pause(error(RateLimit='"api";r=0;t=55')) == 55
    assert asked_pause(error(RateLimit='"api";r=9;t=55')) == 0
    assert asked_pause(error(503, RateLimit='"api";r=0;t=55')) == 0
    assert asked_pause(Exception()) == 0


def test_an_error_that_stays_is_told_after_all_tries(stub: Stub) -> None:
    stub.on["/revision/"] = said(503)
    error = refused(stub)
    assert "answered 503 for the file list" in str(error) and stub.count("/revision/") == hub.TRIES


def test_an_index_with_other_bytes_is_not_believed(stub: Stub) -> None:
    stub.on["/resolve/"] = [(200, {}, INDEX[:-1] + b" ")]
    assert len(fetch(stub)) == 2
    stub.on["/resolve/"] = (200, {}, INDEX[:-1])
    assert "other bytes for model.safetensors.index.json" in str(refused(stub))


def test_an_index_that_names_more_than_is_listed(stub: Stub) -> None:
    index = json.dumps({"weight_map": {"w": "m.safetensors", "x": "n.safetensors"}}).encode()
    stub.files[1] |= {"size": len(index), "blobId": git(index)}
    stub.on["/resolve/"] = (200, {}, index)
    error = refused(stub)
    assert type(error) is IncompleteRepository and "n.safetensors" in str(error)


def test_a_text_of_the_manifest_is_read_and_proven(stub: Stub) -> None:
    book = playbook(stub.url)
    manifest = hub.fetch_manifest(book, None)
    text = hub.fetch_text(book, manifest, "model.safetensors.index.json", None)
    assert text == INDEX.decode()
    with pytest.raises(IncompleteRepository, match=r"no config\.json"):
        hub.fetch_text(book, manifest, "config.json", None)


def test_an_absurd_index_is_not_read(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_TEXT_BYTES", 10)
    assert "no such file needs" in str(refused(stub)) and stub.count("/resolve/") == 0


NAMES = ["../x.json", "/etc/x.json", "a\nb.json", "a/../../b.safetensors", "\ud800.json",
         "a" * 240 + ".json"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_that_must_not_be_written(stub: Stub, name: str) -> None:
    stub.files.append({"rfilename": name, "size": 1, "blobId": "c" * 40})
    error = refused(stub)
    assert type(error) is UnsafeFileName and str(error).isprintable()
    assert stub.count("/resolve/") == 0


def test_twins_and_a_file_in_a_file(stub: Stub) -> None:
    stub.files.append(dict(stub.files[0]))
    assert "twice" in str(refused(stub))
    stub.files[-1] = {"rfilename": "m.safetensors/x.json", "size": 1, "blobId": "c" * 40}
    error = refused(stub)
    assert type(error) is CollidingFileNames and "m.safetensors/x.json below it" in str(error)


def test_hidden_folders_are_not_fetched(stub: Stub) -> None:
    for name in (".deployer/verified.json", ".cache/huggingface/x.json", "a/.b/c.json"):
        stub.files.append({"rfilename": name, "size": 1, "blobId": "c" * 40})
    assert len(fetch(stub)) == 2


# ---- the way there


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], HubError]:
    """The error of an endpoint, from a process of its own: the library keeps one session."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)

    def ask(endpoint: str, **env: str) -> str:
        code = (
            "import sys\nfrom deployer import hub\n"
            "from tests.scripts.test_hub_access import playbook\n"
            "hub._pause = lambda _: 0.01\n"
            "try: hub.fetch_manifest(playbook(sys.argv[1]), None, deadline_s=5); print('ok')\n"
            "except hub.HubError as e: print(type(e).__name__, e.exit_code, e, '|', e.fix)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, endpoint],
            capture_output=True,
            text=True,
            timeout=30,
            env={**os.environ, **env},
            cwd=Path(__file__).resolve().parents[2],
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return ask  # type: ignore[return-value]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nothing_listens(quick: Any) -> None:
    said = quick(f"http://127.0.0.1:{free_port()}")
    assert said.startswith("EndpointUnreachable 3 ") and "cannot be reached" in said


def test_a_dead_proxy_is_named_without_its_password(quick: Any, stub: Stub) -> None:
    proxy = f"http://user:secret@127.0.0.1:{free_port()}"
    said = quick("http://hub.example", HTTP_PROXY=proxy)
    assert "through the proxy of HTTP_PROXY, http://127.0.0.1:" in said and "secret" not in said
    said = quick("http://hub.example", HTTP_PROXY="nonsense://x:secret@y")
    assert "proxy" in said and "secret" not in said
    assert quick(stub.url, HTTP_PROXY=proxy, NO_PROXY="127.0.0.1") == "ok"


def test_the_proxy_of_the_environment_is_used(quick: Any, stub: Stub) -> None:
    assert quick("http://hub.example", HTTP_PROXY=stub.url) == "ok"
    assert stub.seen[0][0].startswith("http://hub.example/")


def test_offline_mode_is_said(quick: Any, stub: Stub) -> None:
    said = quick(stub.url, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in said and stub.seen == []


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


def test_certificates(quick: Any, stub: Stub, pem: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem / "cert.pem", pem / "key.pem")
    stub.server.socket = context.wrap_socket(stub.server.socket, server_side=True)
    url = stub.url.replace("http", "https")
    good, empty = str(pem / "cert.pem"), str(pem / "empty.pem")
    (pem / "empty.pem").write_text("nothing\n")
    assert quick(url, SSL_CERT_FILE=good) == "ok"
    unknown = quick(url)
    assert unknown.startswith("CertificateUntrusted 3 ") and "set SSL_CERT_FILE" in unknown
    assert "self-signed" in unknown or "self signed" in unknown
    ignored = quick(url, REQUESTS_CA_BUNDLE=good)
    assert "REQUESTS_CA_BUNDLE are not read" in ignored or "REQUESTS_CA_BUNDLE" in ignored
    for path, why in ((empty, "no certificate"), ("/no/ca.pem", "does not exist")):
        broken = quick(url, SSL_CERT_FILE=path)
        assert broken.startswith("CertificateUntrusted") and why in broken and path in broken
