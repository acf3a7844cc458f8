"""The line of authorized_keys in real shells: where it goes, what stays, what a failure leaves."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployer.migrate_key import AUTHORIZE, HOST_KEYS, known_hosts
from deployer.remote.transport import Answer
from tests.local_transport import SHELLS, LocalTransport, shell_path

TAG = "deployer-migrate-m1"
LINE = f'restrict,from="192.0.2.1",command="exec x" ssh-ed25519 AAAA {TAG}'
OTHER = "ssh-ed25519 BBBB other@desk"


@dataclass
class Source:
    """A home, and an sshd that tells its settings."""

    folder: Path
    shell: str

    def __post_init__(self) -> None:
        self.home = self.folder / "ho me"
        self.home.mkdir()
        self.tools = self.folder / "tools"
        self.tools.mkdir()

    @property
    def keys(self) -> Path:
        return self.home / ".ssh" / "authorized_keys"

    def sshd(self, told: str) -> None:
        path = self.tools / "sshd"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{told}\nEND\n")
        path.chmod(0o755)

    def run(
        self, script: str, *args: str, line: str = "", env: dict[str, str] | None = None
    ) -> Answer:
        path = f"{self.tools}:{shell_path(self.shell, self.folder)}"
        here = LocalTransport(path, env={"HOME": str(self.home), **(env or {})})
        return here.run(script, args=args, stdin=line.encode())

    def authorize(self, line: str = LINE) -> Answer:
        return self.run(AUTHORIZE, TAG, "192.0.2.1", line=line)


@pytest.fixture(params=SHELLS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    made = Source(tmp_path, request.param)
    made.sshd("authorizedkeysfile .ssh/authorized_keys .ssh/authorized_keys2")
    return made


def test_one_line_whatever_stood_there(source: Source) -> None:
    source.keys.parent.mkdir()
    source.keys.write_text(f"{OTHER}\r\n# {TAG} is a word here\nssh-rsa CCCC {TAG}0")  # no last \n
    source.keys.chmod(0o644)
    before = source.keys.read_text()
    for _ in range(2):
        assert source.authorize().exit == 0
    assert source.keys.read_text() == f"{before}\n{LINE}\n"
    assert stat.S_IMODE(source.keys.stat().st_mode) == 0o644
    assert source.authorize("").exit == 0
    assert source.keys.read_text() == before + "\n"


def test_nothing_is_left_where_nothing_was(source: Source) -> None:
    assert source.authorize().exit == 0
    assert stat.S_IMODE(source.keys.stat().st_mode) == 0o600
    assert source.authorize("").exit == 0
    assert list(source.keys.parent.iterdir()) == []
    assert source.authorize("").exit == 0


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ("authorizedkeysfile {etc}/keys/%u", "etc/keys/root"),
        ("authorizedkeysfile none\nauthorizedkeyscommand none", ""),
        ("authorizedkeysfile {etc}/%U.keys %h/.ssh/authorized_keys", "ho me/.ssh/authorized_keys"),
        ("authorizedkeysfile {etc}/%U.keys none", "etc/0.keys"),
        ("nothing of it", "ho me/.ssh/authorized_keys"),
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="the names are root's")
def test_it_stands_where_sshd_looks(source: Source, told: str, place: str) -> None:
    source.sshd(told.format(etc=source.folder / "etc"))
    answer = source.authorize()
    if not place:
        assert answer.exit == 1 and "AuthorizedKeysFile none" in answer.error_text
        return
    assert answer.exit == 0, answer.error_text
    path = source.folder / place
    assert path.read_text() == LINE + "\n"
    assert source.keys.exists() == (path == source.keys)
    # Taken away even if sshd has another setting by now.
    path.write_text(f"{OTHER}\n{LINE}\n")
    if path != source.keys:
        source.keys.parent.mkdir()
        source.keys.write_text(f"{OTHER}\n{LINE}\n")
        assert source.authorize("").exit == 0
        assert source.keys.read_text() == OTHER + "\n"
    assert source.authorize("").exit == 0
    assert path.read_text() == OTHER + "\n"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_a_home_that_cannot_be_written(source: Source) -> None:
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", source.home], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mounts here")
    try:
        answer = source.authorize()
        assert answer.exit == 1 and "ead-only" in answer.error_text
        assert source.authorize("").exit == 0  # there is nothing to take away
    finally:
        subprocess.run(["umount", source.home], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_a_full_disk_loses_no_line(source: Source) -> None:
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", source.home], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mounts here")
    try:
        source.keys.parent.mkdir()
        source.keys.write_text(f"{OTHER}\n" * 250)
        with (source.home / "fill").open("wb", buffering=0) as fill, pytest.raises(OSError):
            while True:
                fill.write(bytes(4096))
        assert source.authorize().exit == 1
        assert source.keys.read_text() == f"{OTHER}\n" * 250
        assert [path.name for path in source.keys.parent.iterdir()] == ["authorized_keys"]
    finally:
        subprocess.run(["umount", source.home], check=True)


def test_host_keys_where_sshd_has_them(source: Source) -> None:
    own = source.folder / "own_key"
    own.with_suffix(".pub").write_text("ssh-ed25519 DDDD box\n")
    source.sshd(f"hostkey {own}\nport 22")
    assert "* ssh-ed25519 DDDD\n" in known_hosts(source.run(HOST_KEYS).text)
