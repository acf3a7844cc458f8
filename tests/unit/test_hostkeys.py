"""known_hosts files and the verdict on an offered key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import stat
from pathlib import Path

import pytest

from deployer import errors
from deployer.remote import hostkeys, sshauth
from deployer.remote.hostkeys import HostKey, append_key, check, find, load, lookup_name

ED = HostKey("ssh-ed25519", b"ed-one")
ED_OTHER = HostKey("ssh-ed25519", b"ed-two")
RSA = HostKey("ssh-rsa", b"rsa-one")


def line(hosts: str, key: HostKey, marker: str = "") -> str:
    return f"{marker} {hosts} {key.type} {base64.b64encode(key.blob).decode()} comment\n".lstrip()


def hashed(name: str) -> str:
    salt = b"salt" * 5
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "known_hosts"
    path.write_text("".join(lines))
    return path


def judge(path: Path, key: HostKey, name: str = "box") -> None:
    check([path], name, key, host="kpro5", place="box:22")


def test_fingerprint_is_that_of_ssh_keygen() -> None:
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl")
    assert HostKey("ssh-ed25519", blob).fingerprint == (
        "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"
    )


@pytest.mark.parametrize(
    ("hosts", "name", "matches"),
    [
        ("box", "box", True),
        ("BOX", "box", True),
        ("a,box,b", "box", True),
        ("box", "boxes", False),
        ("*.lab", "kpro5.lab", True),
        ("*.lab,!kpro5.lab", "kpro5.lab", False),
        ("192.0.2.?", "192.0.2.5", True),
        ("[box]:2222", "[box]:2222", True),
        ("[box]:2222", "box", False),
        ("box", "[box]:2222", False),
        (hashed("box"), "box", True),
        (hashed("box"), "other", False),
        ("|1|broken", "box", False),
    ],
)
def test_which_lines_are_about_a_name(tmp_path: Path, hosts: str, name: str, matches: bool) -> None:
    path = write(tmp_path, line(hosts, ED))
    assert bool(find([path], name)) is matches


def test_lines_that_are_none_are_skipped_and_numbers_stay_right(tmp_path: Path) -> None:
    path = write(tmp_path, "# x\n", "\n", "short\n", "box ssh-rsa !!!\n", line("box", ED))
    assert [(known.line, known.key) for known in load(path)] == [(5, ED)]


def test_port_22_has_the_plain_name() -> None:
    assert lookup_name("box", 22) == "box"
    assert lookup_name("box", 22105) == "[box]:22105"


def test_known_key_is_accepted(tmp_path: Path) -> None:
    judge(write(tmp_path, line("box", RSA), line("box", ED)), ED)


def test_key_recorded_without_port_is_accepted_as_ssh_does(tmp_path: Path) -> None:
    path = write(tmp_path, line("box", ED))
    judge(path, ED, "[box]:2222")
    with pytest.raises(errors.HostKeyUnknown):
        judge(path, ED_OTHER, "[box]:2222")


def test_unknown_key_shows_its_fingerprint_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(errors.HostKeyUnknown) as caught:
        judge(tmp_path / "none", ED)
    assert ED.fingerprint in str(caught.value)
    assert "`deploy trust kpro5`" in caught.value.fix


@pytest.mark.parametrize("recorded", [ED_OTHER, RSA])
def test_changed_key_shows_both_and_the_line(tmp_path: Path, recorded: HostKey) -> None:
    path = write(tmp_path, "# first\n", line("box", recorded))
    with pytest.raises(errors.HostKeyChanged) as caught:
        judge(path, ED)
    for part in (ED.fingerprint, recorded.fingerprint, f"{path}:2"):
        assert part in str(caught.value)


def test_revoked_key_is_refused_even_when_recorded(tmp_path: Path) -> None:
    path = write(tmp_path, line("box", ED), line("*", ED, "@revoked"))
    with pytest.raises(errors.HostKeyChanged, match="revokes"):
        judge(path, ED)


def test_certificate_authorities_are_no_host_keys(tmp_path: Path) -> None:
    with pytest.raises(errors.HostKeyUnknown):
        judge(write(tmp_path, line("*", ED, "@cert-authority")), ED)


def test_recorded_types_are_asked_for_first(tmp_path: Path) -> None:
    known = find([write(tmp_path, line("box", RSA), line("box", ED))], "box")
    assert hostkeys.preferred_types(known) == [*hostkeys.RSA_SIGNATURES, "ssh-ed25519"]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, line("box", ED))
    assert load(path) is load(path)
    write(tmp_path, line("box", ED), line("b", RSA))
    assert len(load(path)) == 2


def test_an_unreadable_file_is_an_error_and_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(errors.DocumentError, match="cannot be read"):
        load(tmp_path)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    """It may never say anything. /dev/null is a file without lines."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(errors.DocumentError, match="it is no regular file"):
        load(pipe)
    assert sshauth._load_key(pipe) == (None, "is no regular file")
    assert load(Path("/dev/null")) == ()


def test_append_keeps_the_rest_and_the_mode(tmp_path: Path) -> None:
    path = write(tmp_path, "# mine", "")
    path.chmod(0o640)
    append_key(path, "[box]:2222", ED)
    append_key(path, "[box]:2222", ED)
    assert path.read_text() == "# mine\n[box]:2222 ssh-ed25519 ZWQtb25l\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["known_hosts"]


def test_append_makes_a_private_file_in_a_private_folder(tmp_path: Path) -> None:
    path = tmp_path / "ssh/known_hosts"
    append_key(path, "box", ED)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_append_follows_a_symlink(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("")
    link = tmp_path / "link"
    link.symlink_to(real)
    append_key(link, "box", ED)
    assert link.is_symlink()
    assert "box" in real.read_text()


def test_append_never_overrides_another_key(tmp_path: Path) -> None:
    path = write(tmp_path, line("box", ED_OTHER))
    before = path.read_text()
    with pytest.raises(errors.HostKeyChanged):
        append_key(path, "box", ED)
    append_key(path, "box", RSA)
    assert path.read_text().startswith(before)


def test_the_index_finds_what_the_lines_match(tmp_path: Path) -> None:
    blob = base64.b64encode(b"\0\0\0\x0bssh-ed25519x").decode()
    hosts = ["a,[b]:2222", "*.example.com,!x.example.com", "A", "|1|c2FsdA==|bm8=", "b?", "a"]
    path = tmp_path / "known"
    path.write_text("".join(f"{one} ssh-ed25519 {blob}\n" for one in hosts))
    lines = hostkeys.load(path)
    assert len(lines) == 6
    for name in ("a", "A", "[b]:2222", "[B]:2222", "y.example.com", "x.example.com", "b1", "z"):
        assert hostkeys.find([path], name) == [one for one in lines if one.matches(name)]
    assert [one.line for one in hostkeys.find([path], "a")] == [1, 3, 6]
