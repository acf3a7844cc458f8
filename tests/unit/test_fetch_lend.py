"""The lending side of a copy between hosts: what it answers, and what it gives nobody."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from deployer.agents.fetch import borrow, lend
from deployer.agents.fetch.common import Fatal, Unreached, Withheld
from deployer.agents.fetch.manifest import PEER, Job, Peer
from deployer.agents.fetch.methods import ladder

COMMIT = "c" * 40
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def shelf(tmp_path: Path) -> lend.Shelf:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "é 1.bin").write_bytes(CONTENT)
    (tmp_path / "short").write_bytes(b"ab")
    (tmp_path / "secret").write_bytes(b"not of the model")
    (tmp_path / "link").symlink_to("/etc/hostname")
    os.mkfifo(tmp_path / "pipe")
    sizes = {"short": 3, "gone": 5, "sub": 4096, "pipe": 0, "/etc/hostname": 1, "link": 10**9}
    rows = [("sub/é 1.bin", len(CONTENT)), *sizes.items()]
    files = [{"path": path, "size": size} for path, size in rows]
    until = time.time() + 60
    return lend.Shelf(
        {"path": str(tmp_path), "repo": "a/b", "commit": COMMIT, "files": files, "until": until}
    )


def answers(shelf: lend.Shelf, *requests: str) -> tuple[int, bytes]:
    """What came for these request heads, and the exit code."""
    reader, writer = os.pipe()
    text = "".join(f"{request}\r\n\r\n" for request in requests).encode()
    got: list[bytes] = []

    def drain() -> None:
        with os.fdopen(reader, "rb") as stream:
            got.append(stream.read())

    thread = threading.Thread(target=drain)
    thread.start()
    code = lend.lend(shelf, io.BytesIO(text), writer)
    os.close(writer)
    thread.join()
    return code, got[0]


def get(name: str, more: str = "") -> str:
    return f"GET /a/b/resolve/{COMMIT}/{name} HTTP/1.1\r\nHost: peer{more}"


def test_ranges_one_after_the_other_on_one_connection(shelf: lend.Shelf) -> None:
    name = "sub/%C3%A9%201.bin"
    code, said = answers(
        shelf, get(name, "\r\nRange: bytes=10-19"), get(name, "\r\nrange: bytes=10200-"), get(name)
    )
    assert code == 0
    first, second, third = said.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"206 ") and first.endswith(b"\r\n\r\n" + CONTENT[10:20])
    assert b"Content-Range: bytes 10-19/10240\r\n" in first
    assert b"Content-Range: bytes 10200-10239/10240\r\n" in second
    assert third.startswith(b"200 ") and third.endswith(b"\r\n\r\n" + CONTENT)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("secret"), b"404"),
        (get("../short"), b"404"),
        (get("%2e%2e/short"), b"404"),
        (get("gone"), b"404"),
        (get("short"), b"404"),  # another size than the list's
        (get("sub"), b"404"),
        (get("pipe"), b"404"),
        (get("link"), b"404"),  # whatever it leads to, it has not the size of the list
        (get("/etc/passwd"), b"404"),
        (get("sub/../short"), b"404"),
        (get("short%00"), b"404"),
        (get("sub/%C3%A9%201.bin", "\r\nRange: bytes=" + "9" * 5000 + "-"), b"416"),
        (get("sub/%C3%A9%201.bin", "\r\nRange: bytes=0-1,5-6"), b"416"),
        (get("sub/%C3%A9%201.bin", "\r\nRange: bytes=-5"), b"416"),
        (f"GET /other/model/resolve/{COMMIT}/short HTTP/1.1", b"404"),
        (get("sub/%C3%A9%201.bin", "\r\nRange: bytes=10240-10241"), b"416"),
        ("POST / HTTP/1.1", b"400"),
        ("nonsense", b"400"),
    ],
)
def test_nothing_but_the_listed_files(shelf: lend.Shelf, request_: str, status: bytes) -> None:
    _, said = answers(shelf, request_)
    assert said.startswith(b"HTTP/1.1 " + status)
    assert said.endswith(b"Content-Length: 0\r\n\r\n")


def test_a_refusal_does_not_end_the_connection(shelf: lend.Shelf) -> None:
    code, said = answers(shelf, get("secret"), get("sub/%C3%A9%201.bin"))
    assert code == 0 and said.endswith(CONTENT)


def test_the_right_to_copy_ends_by_itself(shelf: lend.Shelf) -> None:
    shelf.until = time.time() - 1
    _, said = answers(shelf, get("sub/%C3%A9%201.bin"))
    assert said.startswith(b"HTTP/1.1 403")


def test_an_endless_head_is_refused(shelf: lend.Shelf) -> None:
    code, said = answers(shelf, "GET /" + "x" * (2 * lend.MOST_HEAD))
    assert code == 1 and said.startswith(b"HTTP/1.1 400")


# ---- the other side, with a program in place of ssh


def job(tmp_path: Path, content: bytes = CONTENT) -> Job:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "a.bin").write_bytes(content)
    row = {"path": "a.bin", "size": len(content), "sha256": "0" * 64}
    manifest = {
        "path": str(source),
        "repo": "a/b",
        "commit": COMMIT,
        "files": [row],
        "until": time.time() + 60,
    }
    (source / "manifest.json").write_text(json.dumps(manifest))
    peer = {"address": "192.0.2.9", "user": "root", "path": str(source), "lends": True}
    limits = {"recv_timeout_s": 5}
    return Job.parse({**manifest, "methods": ["peer"], "peer": peer, "limits": limits})


def stand_in(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> list[int]:
    """`words` run in place of ssh; the list grows with each start."""
    started: list[int] = []

    def instead(peer: Peer, cipher: str) -> list[str]:
        started.append(1)
        assert "aes128-gcm@openssh.com" in cipher.split(",")
        return words

    monkeypatch.setattr(borrow, "ssh_words", instead)
    return started


def read(body: object, count: int) -> bytes:
    got = bytearray(count)
    view, at = memoryview(got), 0
    while at < count:
        step = body.readinto(view[at:])  # type: ignore[attr-defined]
        assert step
        at += step
    return bytes(got)


def test_a_connection_serves_again_only_when_its_answer_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(Path(lend.__file__).parent)!r}); import lend; "
    code += f"sys.exit(lend.main({str(tmp_path / 'source')!r}))"
    started = stand_in(monkeypatch, [sys.executable, "-c", code])
    lender = borrow.Lender(wanted)
    [file] = wanted.files
    for start in (0, 100):
        body = lender.open(file, start, start + 50)
        assert read(body, 50) == CONTENT[start : start + 50]
        body.close()
        body.close()
    assert len(started) == 1
    body = lender.open(file, 0, 5000)
    read(body, 10)
    body.close()  # the rest of the answer is still under way
    body = lender.open(file, 7, 9)
    assert read(body, 2) == CONTENT[7:9]
    assert len(started) == 2
    body.abort()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("root@192.0.2.9: Permission denied (publickey).", Fatal),
        ("Host key verification failed.", Fatal),
        ("ssh: connect to host 192.0.2.9 port 22: Connection refused", Unreached),
        ("Unable to negotiate with 192.0.2.9: no matching cipher found.", Fatal),
    ],
)
def test_what_ssh_says_is_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception]
) -> None:
    wanted = job(tmp_path)
    stand_in(monkeypatch, ["sh", "-c", f"echo '{said}' >&2; exit 255", "--"])
    with pytest.raises(kind, match=said.split(":")[-1].strip().split("(")[0]):
        borrow.Lender(wanted).open(wanted.files[0], 0, 5)


LEND = f"import sys; sys.path.insert(0, {str(Path(lend.__file__).parent)!r}); import lend; "


def test_what_a_login_shell_prints_is_read_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tmp_path)
    noise = "printf 'Welcome\\nHTTP/1.1 200 OK\\r\\n\\r\\nno newline'"
    code = LEND + f"sys.exit(lend.main({str(tmp_path / 'source')!r}))"
    run = shlex.join([sys.executable, "-c", code])
    stand_in(monkeypatch, ["sh", "-c", f"{noise}; exec {run}", "--"])
    body = borrow.Lender(wanted).open(wanted.files[0], 5, 9)
    assert read(body, 4) == CONTENT[5:9]
    body.close()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo This service allows sftp connections only.; exit 1", "sftp connections only"),
        ("echo sh: lend: not found >&2; exit 127", "lend: not found"),
        ("exit 0", "does not run what its key is for"),
        ("yes noise", "something else than the lender speaks: 'n"),
    ],
)
def test_another_program_behind_the_key_is_no_matter_of_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    wanted = job(tmp_path)
    stand_in(monkeypatch, ["sh", "-c", script, "--"])
    with pytest.raises(Fatal, match=said):
        borrow.Lender(wanted).open(wanted.files[0], 0, 5)


def test_a_file_that_is_withheld_says_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job(tmp_path)
    (tmp_path / "source" / "a.bin").write_bytes(b"other")
    code = LEND + f"sys.exit(lend.main({str(tmp_path / 'source')!r}))"
    stand_in(monkeypatch, [sys.executable, "-c", code])
    with pytest.raises(Withheld, match=r"a.bin: 404 5 bytes here, not 10240 from root@192.0.2.9"):
        borrow.Lender(wanted).open(wanted.files[0], 0, 5)


def test_the_ladder_has_it_as_a_range_worker(tmp_path: Path) -> None:
    [method] = ladder(job(tmp_path), "token", {"HF_TOKEN": "token"})
    assert method.name == "peer 192.0.2.9" and method.own_figures
    assert list(method.words[-2:]) == ["range", PEER]
    assert "HF_TOKEN" not in method.environ
