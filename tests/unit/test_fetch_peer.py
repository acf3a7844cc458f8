"""A copy from another machine: command lines, what the answer means, what is continued."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agents.fetch.manifest import File, Peer
from deployer.agents.fetch.peer import Copy, last_line
from deployer.agents.fetch.rsync import (
    CIPHER,
    copy_words,
    look_script,
    look_words,
    parse_look,
    patch_words,
    rsh_quote,
    ssh_words,
)

PEER = Peer("192.0.2.7", "root", 2222, "/srv/models/tiny", "/root/.ssh/id key")
FILES = [File("a.bin", 5, "0" * 64), File("sub dir/b'.bin", 7, "1" * 64), File("c", 0, "2" * 64)]


def rsync_splits(text: str) -> list[str]:
    """The words that rsync makes of its -e (main.c, do_cmd)."""
    words, at = [], 0
    while at < len(text):
        if text[at] == " ":
            at += 1
            continue
        word, quote = "", ""
        while at < len(text) and (text[at] != " " or quote):
            if text[at] in "'\"":
                if not quote:
                    quote, at = text[at], at + 1
                    continue
                if text[at] == quote:
                    at += 1
                    if at >= len(text) or text[at] != quote:
                        quote = ""
                        continue
            word, at = word + text[at], at + 1
        words.append(word)
    return words


@given(
    st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
)
def test_what_rsync_is_told_to_run_is_what_it_runs(words: list[str]) -> None:
    assert rsync_splits(" ".join(rsh_quote(word) for word in words)) == words


def test_ssh_asks_nobody_and_trusts_nobody_new() -> None:
    words = ssh_words(PEER, CIPHER)
    options = [words[at + 1] for at, word in enumerate(words) if word == "-o"]
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "Compression=no"} <= set(options)
    assert any(option.startswith("ConnectTimeout=") for option in options)
    assert words[words.index("-c") + 1] == "aes128-gcm@openssh.com"
    assert words[words.index("-i") + 1] == "/root/.ssh/id key"
    assert words[-4:] == ["-p", "2222", "-l", "root"]
    assert "-c" not in ssh_words(PEER, "")
    assert look_words(PEER, "")[-3:] == ["--", "192.0.2.7", "exec sh -s"]


def test_the_first_copy_is_whole_and_a_rerun_continues() -> None:
    first = copy_words(PEER, CIPHER, "/m/.deployer/incoming", resume=False, kib_per_s=0)
    again = copy_words(PEER, CIPHER, "/m/.deployer/incoming", resume=True, kib_per_s=512)
    assert {"-W", "--inplace"} <= set(first) and "--append-verify" not in first
    assert "--append-verify" in again and "-W" not in again and "--inplace" not in again
    assert "--bwlimit=512" in again and not any("bwlimit" in word for word in first)
    for words in (first, again):
        assert {"-s", "--from0", "--files-from=-", "-L"} <= set(words)
        assert words[-2:] == ["192.0.2.7:/srv/models/tiny/", "/m/.deployer/incoming/"]
        assert rsync_splits(words[words.index("-e") + 1]) == ssh_words(PEER, CIPHER)


def test_gaps_are_filled_in_place() -> None:
    words = patch_words(PEER, CIPHER, "x[1].bin", "/m/x[1].bin.part")
    assert {"--inplace", "--no-whole-file"} <= set(words)
    assert words[-2:] == ["192.0.2.7:/srv/models/tiny/x\\[1\\].bin", "/m/x[1].bin.part"]


def test_addresses_and_folders_that_need_care() -> None:
    peer = Peer("2001:db8::7", "root", 22, "/srv/[a]*\\b/", None)
    words = copy_words(peer, "", "/m", resume=False)
    assert words[-2] == "[2001:db8::7]:/srv/\\[a\\]\\*\\\\b/"
    assert "-i" not in words[words.index("-e") + 1].split()


def look(tmp_path: Path, peer: Peer, files: list[File], path: str = "") -> str:
    """What a real sh answers to the script."""
    script = look_script(peer, "MARK", files)
    env = {"PATH": path or "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", "-s"], input=script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_look_in_a_real_sh(tmp_path: Path) -> None:
    folder = tmp_path / "with space; $(touch x) 'q"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"12345")
    (folder / "sub dir/b'.bin").symlink_to(folder / "seven")
    (folder / "seven").write_bytes(b"1234567")
    (folder / "c").mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "stat").symlink_to("/usr/bin/stat")
    peer = Peer("h", "u", 22, str(folder), None)
    assert look(tmp_path, peer, FILES, str(tools)) == "MARK norsync\n"
    (tools / "rsync").write_text("#!/bin/sh\n")
    (tools / "rsync").chmod(0o755)
    answer = look(tmp_path, peer, FILES, str(tools))
    assert parse_look("MARK", answer, FILES) == ("", FILES[:2])
    gone = Peer("h", "u", 22, str(tmp_path / "none"), None)
    assert look(tmp_path, gone, FILES, str(tools)) == "MARK nofolder\n"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("answer", "why", "there"),
    [
        ("M 0 5\nM 1 7\nM 2 0\nM end\n", "", FILES),
        ("M 0 5\nM 1 8\nM 2 -1\nM end\n", "", FILES[:1]),
        ("M 0 4\nM 1 -1\nM 2 -1\nM end\n", "it has none of the 3 files in the right size", []),
        ("M norsync\n", "rsync is not installed there", []),
        ("M nofolder\n", "the folder is not there, or may not be entered", []),
        ("M 0 5\nM 1 7\n", "its answer was cut off", [FILES[0], FILES[1]]),
        ("", "its answer was cut off", []),
        ("hello\nM 0 5\nM end\n", "its login shell prints 'hello' before every command", []),
        ("M 0 5\nlogout\nM 9 5\nM x 5\nM end\n", "", FILES[:1]),
    ],
)
def test_what_the_answer_means(answer: str, why: str, there: list[File]) -> None:
    said, found = parse_look("M", answer, FILES)
    assert said.startswith(why) and bool(said) == bool(why)
    if not why:
        assert found == there


def test_names_go_to_the_script_as_words() -> None:
    first = look_script(PEER, "M", FILES).splitlines()[0]
    assert shlex.split(first) == ["set", "--", "M", PEER.path, *(file.path for file in FILES)]


@pytest.mark.parametrize(
    ("part", "incoming", "taken"),
    [
        (b"123", None, b"123"),
        (b"123", b"1", b"123"),
        (b"12", b"1234", b"1234"),
        (None, b"1234", b"1234"),
        (None, b"123456", None),  # longer than the file: not of this version
        (b"123456", None, None),
        (b"", None, None),
    ],
)
def test_a_prefix_is_where_rsync_goes_on(
    tmp_path: Path, part: bytes | None, incoming: bytes | None, taken: bytes | None
) -> None:
    target = tmp_path / "incoming"
    if part is not None:
        (tmp_path / "a.part").write_bytes(part)
    if incoming is not None:
        target.write_bytes(incoming)
    Copy.bring_prefix(FILES[0], str(tmp_path / "a.part"), str(target))
    assert (target.read_bytes() if target.exists() else None) == taken


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"12345")
    target = tmp_path / "incoming"
    target.symlink_to(other)
    Copy.bring_prefix(FILES[0], str(tmp_path / "a.part"), str(target))
    assert not target.is_symlink() and other.read_bytes() == b"12345"


def test_last_words_are_one_clean_line() -> None:
    text: Any = "first\nrsync: \x1b[31mno route\x1b[0m to host\n \n\n"
    assert last_line(text) == "rsync: [31mno route[0m to host"
    assert last_line("") == ""
    assert len(last_line("x" * 5000)) == 300
