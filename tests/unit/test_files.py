"""Files on a target, with the real shells."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deployer import errors
from deployer.remote.files import read_file, sha256, write_atomic
from tests.local_transport import SHELLS, LocalTransport, shell_path


@pytest.fixture(params=SHELLS)
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return LocalTransport(shell_path(request.param, tmp_path_factory.getbasetemp()))


CONTENT = bytes(range(256)) * 999


def test_write_makes_and_replaces(transport: LocalTransport, tmp_path: Path) -> None:
    path = tmp_path / "it's a $file"
    write_atomic(transport, str(path), CONTENT, 0o640)
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o7777 == 0o640
    before = path.stat().st_ino
    write_atomic(transport, str(path), b"", 0o600)
    assert path.read_bytes() == b"" and path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]


def test_write_keeps_owner_and_symlink(transport: LocalTransport, tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_atomic(transport, str(link), b"new")
    assert link.is_symlink() and real.read_bytes() == b"new"


def test_write_says_why_not(transport: LocalTransport, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.RemoteCommandFailed, match="could not write") as caught:
        write_atomic(transport, str(tmp_path / "file" / "x"), b"x")
    assert caught.value.where == "here" and "file" in caught.value.evidence[0]
    with pytest.raises(errors.RemoteCommandFailed) as caught:
        write_atomic(transport, str(tmp_path), b"x")
    assert caught.value.evidence == ("it is a folder",)
    with pytest.raises(errors.RemoteCommandFailed) as caught:
        write_atomic(transport, "relative", b"x")
    assert caught.value.evidence == ("not an absolute path",)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_write_makes_its_folder(transport: LocalTransport, tmp_path: Path) -> None:
    write_atomic(transport, str(tmp_path / "a" / "b" / "x"), b"x")
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"x"


def test_a_short_write_changes_nothing(transport: LocalTransport, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    class Cut(LocalTransport):
        def run(self, script, *, stdin=b"", **more):  # type: ignore[no-untyped-def]
            return transport.run(script, stdin=stdin[:-1], **more)

    with pytest.raises(errors.RemoteCommandFailed) as caught:
        write_atomic(Cut(""), str(path), b"new")
    assert "2 of 3 bytes arrived" in caught.value.evidence[0]
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_read(transport: LocalTransport, tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert read_file(transport, str(path)) is None
    path.write_bytes(CONTENT)
    assert read_file(transport, str(path), len(CONTENT)) == CONTENT
    with pytest.raises(errors.RemoteCommandFailed, match="larger than 10 bytes"):
        read_file(transport, str(path), 10)
    with pytest.raises(errors.RemoteCommandFailed) as caught:
        read_file(transport, str(tmp_path))
    assert caught.value.evidence == ("not a regular file",)


def test_sha256(transport: LocalTransport, tmp_path: Path) -> None:
    path, gone = tmp_path / "-x\ny", str(tmp_path / "gone")
    path.write_bytes(CONTENT)
    expected = hashlib.sha256(CONTENT).hexdigest()
    assert sha256(transport, str(path), gone) == {str(path): expected, gone: None}
    assert sha256(transport) == {}


def test_sha256_by_python_alone(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "python3"):
        (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
    path = tmp_path / "x"
    path.write_bytes(CONTENT)
    got = sha256(LocalTransport(str(tmp_path / "bin")), str(path), "/gone")
    assert got == {str(path): hashlib.sha256(CONTENT).hexdigest(), "/gone": None}
    (tmp_path / "bin" / "python3").unlink()
    with pytest.raises(errors.RemoteCommandFailed) as caught:
        sha256(LocalTransport(str(tmp_path / "bin")), str(path))
    assert "neither sha256sum nor python3" in caught.value.evidence[0]
