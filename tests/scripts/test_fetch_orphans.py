"""Partial files of other clients: found, judged, taken over, cleaned. On real files."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployer.agents.fetch import orphans
from deployer.agents.fetch.claims import claim, foreign, plain
from deployer.agents.fetch.common import LOCKED, Fatal
from deployer.agents.fetch.holders import Holder, command_of, holders
from deployer.agents.fetch.look import valid_bytes, valid_of_part
from deployer.agents.fetch.manifest import File
from deployer.agents.fetch.orphans import adopt, adopt_all, clean, cleanable
from deployer.agents.fetch.partials import (
    HF_PLACE,
    OWN_HF,
    OWN_INCOMING,
    Partial,
    aria2_prefix,
    dense,
    etag_of,
    partials,
)
from deployer.agents.fetch.pieces import Journal

DATA = bytes(range(256)) * 4096
"""1 MiB."""
SHA = hashlib.sha256(DATA).hexdigest()
NAME = "model-00001.safetensors"
FILE = File(NAME, len(DATA), SHA, "")


def hf_name(name: str, etag: str = SHA, uuid: str = "0a1b2c3d") -> str:
    short = base64.urlsafe_b64encode(hashlib.sha1(f"{name}.metadata".encode()).digest()).decode()
    return f"{short}.{etag}" + (f".{uuid}" if uuid else "") + ".incomplete"


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def hf(root: Path, size: int, **named: str) -> Path:
    return put(root / HF_PLACE / hf_name(NAME, **named), DATA[:size])


def control(
    done: str, piece: int = 1 << 16, total: int = len(DATA), version: int = 1, flying: bytes = b""
) -> bytes:
    """The bytes of NAME.aria2; `done` has a 1 or a 0 for each piece."""
    order = ">" if version else "="
    bits = bytes(int(done[at : at + 8].ljust(8, "0"), 2) for at in range(0, -(-total // piece), 8))
    head = struct.pack(">H", version) + bytes(4) + struct.pack(f"{order}I", 0)
    head += struct.pack(f"{order}IQQI", piece, total, 0, len(bits)) + bits
    return head + struct.pack(f"{order}I", 1 if flying else 0) + flying


def record(root: Path) -> None:
    facts = put(root / NAME, DATA).stat()
    row = {"size": len(DATA), "mtime_ns": facts.st_mtime_ns, "sha256": SHA, "blob_id": ""}
    text = json.dumps({"version": 1, "files": {NAME: row}})
    put(root / ".deployer" / "verified.json", text.encode())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def writer(path: Path, code: str = "pass") -> Iterator[int]:
    """Another process that has `path` open for writing."""
    script = (
        f"import fcntl, sys; f = open(sys.argv[1], 'r+b'); {code}; print(1, flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", script, str(path), "--token", "hf_secret"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"1\n"
    try:
        yield child.pid
    finally:
        child.communicate(b"\n", timeout=10)


@given(
    st.text(st.characters(exclude_characters="/\0"), max_size=40),
    st.sampled_from([40, 64]),
    st.sampled_from(["", "0a1b2c3d"]),
    st.integers(0, 2**256 - 1),
)
def test_the_hash_is_read_from_every_form_of_the_name(
    name: str, length: int, uuid: str, number: int
) -> None:
    etag = f"{number:064x}"[-length:]
    assert etag_of(hf_name("x", etag, uuid)) == etag
    assert etag_of(".".join(filter(None, [name, etag, uuid, "incomplete"]))) in (etag, "")
    assert etag_of(f"a{name}.{etag}.incomplete") == etag


@given(st.text(max_size=120))
def test_another_name_has_no_hash(name: str) -> None:
    found = etag_of(name)
    assert not found or (found in name and name.endswith(".incomplete"))


@pytest.mark.parametrize("end", ["", "\n", ".part", "x", ".incomplete\n"])
def test_a_name_that_only_begins_right_has_no_hash(end: str) -> None:
    assert etag_of(hf_name("x")[: -len(".incomplete")] + end) == ""
    assert etag_of(hf_name("x") + end) == (SHA if not end else "")


@given(
    st.integers(1, 70),
    st.integers(1, 1 << 40),
    st.sampled_from([0, 1]),
    st.data(),
)
def test_leading_pieces_of_a_control_file(
    pieces: int, piece: int, version: int, data: st.DataObject
) -> None:
    piece %= 1 << 30
    piece += 1
    total = (pieces - 1) * piece + data.draw(st.integers(1, piece))
    done = "".join(data.draw(st.lists(st.sampled_from("01"), min_size=pieces, max_size=pieces)))
    leading = len(done) - len(done.lstrip("1"))
    flying = struct.pack(">III", 3, piece, 1) + b"\xff"
    told = aria2_prefix(control(done, piece, total, version, flying))
    assert told == (total, min(leading * piece, total))


@given(st.binary(max_size=200))
def test_any_bytes_as_a_control_file(raw: bytes) -> None:
    told = aria2_prefix(raw)
    assert told is None or 0 <= told[1] <= told[0]


def test_a_control_file_that_is_cut_or_of_a_torrent_says_nothing() -> None:
    whole = control("1" * 16)
    assert aria2_prefix(whole) == (len(DATA), len(DATA))
    assert all(aria2_prefix(whole[:at]) is None for at in range(36))
    assert aria2_prefix(whole[:5] + b"\1" + whole[6:]) is None
    assert aria2_prefix(b"\0\2" + whole[2:]) is None


ENDS = st.integers(-9, 99)
IN_ORDER = st.lists(st.integers(0, 99), max_size=12).map(sorted)


@given(
    st.lists(st.tuples(ENDS, ENDS), max_size=6)
    | IN_ORDER.map(lambda ends: list(zip(ends[::2], ends[1::2], strict=False))),
    st.integers(0, 60),
)
def test_valid_bytes_are_counted_once_and_never_beyond_the_file(
    pieces: list[tuple[int, int]], prefix: int
) -> None:
    size = 50
    runs = [(0, prefix), *pieces]
    flat = [at for run in runs for at in run]
    good = {n for start, stop in runs for n in range(start, min(stop, size))}
    if flat != sorted(flat):
        good = set()  # a map that makes no sense
    assert valid_bytes({"prefix": prefix, "pieces": pieces}, size) == len(good)


def test_a_hole_ends_the_prefix(tmp_path: Path) -> None:
    path = put(tmp_path / "f", DATA)
    assert dense(str(path))[:2] == (len(DATA), len(DATA))
    with path.open("r+b") as stream:
        stream.truncate(65536)
        stream.seek(len(DATA))
        stream.write(DATA)
    assert dense(str(path))[:2] == (65536, 2 * len(DATA))
    os.link(path, tmp_path / "g")
    assert dense(str(path))[0] == 0
    (tmp_path / "l").symlink_to(path)
    os.mkfifo(tmp_path / "p")
    for odd in ("l", "p", "."):
        with pytest.raises(OSError):
            dense(str(tmp_path / odd))


@pytest.mark.parametrize("uuid", ["0a1b2c3d", ""])
def test_the_longest_partial_of_hf_becomes_the_part(tmp_path: Path, uuid: str) -> None:
    hf(tmp_path, 100, uuid="ffffffff")
    longest = hf(tmp_path, 70_000, uuid=uuid)
    lock = put(tmp_path / HF_PLACE / f"{NAME}.lock", b"")
    assert adopt(str(tmp_path), FILE) == 70_000
    assert (tmp_path / f"{NAME}.part").read_bytes() == DATA[:70_000]
    assert not longest.exists() and not lock.exists()
    assert [row[2] for row in cleanable(str(tmp_path), [FILE])] == [
        f"{NAME} has more bytes already"
    ]
    assert adopt(str(tmp_path), FILE) == 0


def test_a_part_that_has_more_stays_and_its_map_never_lies(tmp_path: Path) -> None:
    hf(tmp_path, 70_000)
    part = put(tmp_path / f"{NAME}.part", DATA[:500_000])
    assert adopt(str(tmp_path), FILE) == 0
    mapped = put(tmp_path / f"{NAME}.part.map", b'{"prefix": 10, "pieces": [[60000, 129000]]}')
    assert adopt(str(tmp_path), FILE) == 990
    assert part.read_bytes() == DATA[:70_000] and not mapped.exists()


@pytest.mark.parametrize("dies_at", ["map", "move"])
def test_a_death_while_taking_over_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    def die(*words: object) -> None:
        raise KeyboardInterrupt

    hf(tmp_path, 70_000)
    part = put(tmp_path / f"{NAME}.part", DATA[:10_000] + b"x" * 120_000)
    put(tmp_path / f"{NAME}.part.map", b'{"prefix": 10000, "pieces": [[100000, 100100]]}')
    with monkeypatch.context() as patch:
        if dies_at == "map":
            patch.setattr(Journal, "forget", die)
        else:
            patch.setattr(orphans, "_move", die)
        with pytest.raises(KeyboardInterrupt):
            adopt(str(tmp_path), FILE)
    # Whichever file is there, its valid bytes are right ones, and none are fewer than before.
    valid = valid_of_part(str(tmp_path / NAME))
    assert valid == 10_000 and part.read_bytes()[:valid] == DATA[:valid]
    assert adopt(str(tmp_path), FILE) == 60_000
    assert part.read_bytes() == DATA[:70_000] and valid_of_part(str(tmp_path / NAME)) == 70_000


def test_another_version_a_longer_one_and_an_empty_one_are_left(tmp_path: Path) -> None:
    hf(tmp_path, 10, etag="1" * 64)
    put(tmp_path / HF_PLACE / hf_name(NAME), DATA + b"more")
    put(tmp_path / HF_PLACE / hf_name(NAME, uuid="00000000"), b"")
    put(tmp_path / HF_PLACE / "rubbish.incomplete", b"1")
    assert adopt_all(str(tmp_path), [FILE]) == 0
    rows = cleanable(str(tmp_path), [FILE])
    assert sorted(row[2] for row in rows) == [
        f"it belongs to another version of {NAME}",
        "no file has its hash",
        "no file has its hash",
        "none of its bytes can be trusted",
    ]
    assert sum(row[1] for row in rows) >= len(DATA)


def test_files_of_one_content_and_one_partial(tmp_path: Path) -> None:
    twin = File("copy/model.safetensors", len(DATA), SHA, "")
    hf(tmp_path, 70_000)
    hf(tmp_path, 60_000, uuid="ffffffff")
    assert adopt_all(str(tmp_path), [FILE, twin]) == 130_000
    assert (tmp_path / f"{twin.path}.part").stat().st_size == 60_000


def test_what_our_own_children_left(tmp_path: Path) -> None:
    other = File("sub/b.safetensors", len(DATA), "2" * 64, "")
    put(tmp_path / OWN_HF / NAME, DATA)
    put(tmp_path / OWN_HF / HF_PLACE / hf_name(NAME), DATA[:9])
    put(tmp_path / OWN_INCOMING / "sub" / "b.safetensors", DATA[:5000])
    put(tmp_path / OWN_INCOMING / "sub" / ".b.safetensors.XyZ123", DATA[:5000])
    assert adopt_all(str(tmp_path), [FILE, other]) == len(DATA) + 5000
    assert (tmp_path / f"{NAME}.part").read_bytes() == DATA
    assert (tmp_path / "sub" / "b.safetensors.part").read_bytes() == DATA[:5000]
    assert not (tmp_path / OWN_INCOMING).exists()
    assert not (tmp_path / OWN_HF / HF_PLACE).exists()


@pytest.mark.parametrize("version", [0, 1])
def test_the_leading_pieces_of_aria2(tmp_path: Path, version: int) -> None:
    put(tmp_path / NAME, DATA[:200_000] + bytes(len(DATA) - 200_000))
    put(tmp_path / f"{NAME}.aria2", control("1110001000000001", version=version))
    assert adopt(str(tmp_path), FILE) == 3 << 16
    assert (tmp_path / f"{NAME}.part").read_bytes() == DATA[: 3 << 16]
    assert names(tmp_path) == [f"{NAME}.part"]


def test_aria2_never_promises_more_than_is_on_the_disk(tmp_path: Path) -> None:
    put(tmp_path / NAME, DATA[:65536])
    put(tmp_path / f"{NAME}.aria2", control("1111000000000000"))
    assert adopt(str(tmp_path), FILE) == 65536
    put(tmp_path / "b", DATA)
    put(tmp_path / "b.aria2", control("1" * 16, total=len(DATA) - 1))
    assert adopt(str(tmp_path), File("b", len(DATA), SHA, "")) == 0
    put(tmp_path / "gone.aria2", control("1" * 16))
    assert ("gone.aria2", "no file of the list is this one") in [
        (row[0], row[2]) for row in cleanable(str(tmp_path), [FILE])
    ]


def test_a_verified_file_gives_up_its_partials_but_not_itself(tmp_path: Path) -> None:
    record(tmp_path)
    hf(tmp_path, 100)
    for name in (f"{NAME}.part", f"{NAME}.bad", f"{NAME}.aria2", "old.safetensors.part", "n.txt"):
        put(tmp_path / name, b"12345")
    rows = cleanable(str(tmp_path), [FILE])
    assert adopt_all(str(tmp_path), [FILE]) == 0
    removed = clean(str(tmp_path), [FILE], {row[0] for row in rows})
    assert removed == rows and len(rows) == 5
    assert names(tmp_path) == [".cache", ".deployer", NAME, "n.txt"]
    assert (tmp_path / NAME).read_bytes() == DATA


def test_only_what_was_agreed_to_is_removed(tmp_path: Path) -> None:
    put(tmp_path / "a.part", b"1")
    put(tmp_path / "b.part", b"1")
    outside = put(tmp_path.parent / "outside.part", b"1")
    agreed = {"b.part", "../outside.part", str(outside), NAME}
    assert [row[0] for row in clean(str(tmp_path), [FILE], agreed)] == ["b.part"]
    assert (tmp_path / "a.part").exists() and outside.exists()


def test_a_file_of_the_list_is_no_partial_whatever_its_name(tmp_path: Path) -> None:
    put(tmp_path / "weights.part", b"1")
    assert cleanable(str(tmp_path), [File("weights.part", 1, "1" * 64, "")]) == []
    assert len(cleanable(str(tmp_path), [FILE])) == 1


def test_links_and_pipes_are_never_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside / HF_PLACE / hf_name(NAME), DATA[:100])
    put(outside / "a.part", b"1")
    root.mkdir()
    (root / ".cache").symlink_to(outside / ".cache")
    (root / ".deployer").mkdir()
    (root / ".deployer" / "incoming").symlink_to(outside)
    (root / "sub").symlink_to(outside)
    assert adopt_all(str(root), [FILE]) == 0 and cleanable(str(root), [FILE]) == []
    (root / ".cache").unlink()
    place = root / HF_PLACE
    place.mkdir(parents=True)
    (place / hf_name(NAME)).symlink_to(outside / HF_PLACE / hf_name(NAME))
    os.mkfifo(place / hf_name(NAME, uuid="00000000"))
    os.mkfifo(root / f"{NAME}.part")
    assert adopt_all(str(root), [FILE]) == 0 and cleanable(str(root), [FILE]) == []


def test_odd_names_stay_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / HF_PLACE / "12:00:00 error: x\n12:00:00 error: y" / hf_name(NAME)
    put(odd, DATA[:100])
    put(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.part")), b"1")
    rows = cleanable(str(tmp_path), [FILE])
    assert plain(rows[0][0]).isascii() and json.loads(json.dumps(rows))[0][0] == rows[0][0]
    assert adopt(str(tmp_path), FILE) == 100
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "took over 100 bytes" in said


def test_who_writes_a_partial_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hf(tmp_path, 100)
    with writer(path) as pid:
        assert adopt(str(tmp_path), FILE) == 0
        said = capsys.readouterr().out
        assert f"pid {pid}" in said and "warning: " in said and "hf_secret" not in said
        hf(tmp_path, 9, etag="3" * 64)
        with pytest.raises(Fatal, match=f"pid {pid}") as caught:
            clean(str(tmp_path), [FILE], {row[0] for row in cleanable(str(tmp_path), [FILE])})
        assert caught.value.code == LOCKED
    assert adopt(str(tmp_path), FILE) == 100


def test_a_held_lock_of_hf_keeps_its_partial(tmp_path: Path) -> None:
    path = hf(tmp_path, 100)
    lock = put(tmp_path / HF_PLACE / f"{NAME}.lock", b"")
    with writer(lock, "fcntl.flock(f, fcntl.LOCK_EX)") as pid:
        assert adopt(str(tmp_path), FILE) == 0 and path.exists()
        facts = lock.stat()
        found = holders({(facts.st_dev, facts.st_ino): f"x/{lock.name}"})
        assert [(one.pid, one.path) for one in found] == [(pid, f"x/{lock.name}")]
    assert adopt(str(tmp_path), FILE) == 100 and not lock.exists()


def test_our_own_live_download_forbids_cleaning(tmp_path: Path) -> None:
    lock = put(tmp_path / ".deployer" / "lock", b"{}")
    with lock.open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(Fatal, match="another download holds the lock"):
            clean(str(tmp_path), [FILE], set())


def test_a_reader_holds_nothing(tmp_path: Path) -> None:
    path = hf(tmp_path, 100)
    with path.open("rb"):
        assert adopt(str(tmp_path), FILE) == 100


def test_secrets_of_a_command_line_are_left_out() -> None:
    words = [
        "--header=Authorization: Bearer abc",
        "--token",
        "t0k",
        "http://me:pw@h/",
        "http://h:80/x",
        "hf_abcdef",
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "1\n"
    try:
        shown = command_of(child.pid)
    finally:
        child.communicate("\n", timeout=10)
    assert "http://me:***@h/ http://h:80/x" in shown
    assert "Bearer ***" in shown and not any(word in shown for word in ("abc", "t0k", "pw@"))
    assert command_of(2**22 + 1) == ""


def test_a_partial_on_another_file_system_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def crossing(source: str, target: str) -> None:
        if source.endswith(".incomplete"):
            raise OSError(18, "Invalid cross-device link")
        real(source, target)

    hf(tmp_path, 70_000)
    monkeypatch.setattr(os, "replace", crossing)
    assert adopt(str(tmp_path), FILE) == 70_000
    assert (tmp_path / f"{NAME}.part").read_bytes() == DATA[:70_000]
    assert not partials(str(tmp_path), [])


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from(["a", "b", ""]), st.integers(0, 1)),
        max_size=8,
    ),
    st.integers(0, 25),
)
def test_each_file_gets_its_longest_and_nothing_is_lost(
    rows: list[tuple[int, str, int]], there: int
) -> None:
    files = [File("a", 20, "1" * 64, ""), File("b", 20, "", "2" * 40)]
    found = [
        Partial("hf", f"p{number}", 1, prefix, name, "" if name else ("1" * 64, "2" * 40)[which], 0)
        for number, (prefix, name, which) in enumerate(rows)
    ]
    chosen, left = claim(found, files, lambda file: there)
    assert len(chosen) + len(left) == len(found)
    for file in files:
        mine = [p.prefix for p in found if p.name == file.path or p.etag in (file.sha256 or "x",
                file.blob_id or "x")]  # fmt: skip
        best = max((prefix for prefix in mine if prefix <= 20), default=0)
        if best > there and there < 20:
            assert chosen[file.path].prefix == best
        else:
            assert file.path not in chosen


@pytest.mark.parametrize(
    ("path", "ours", "other"),
    [
        (f"{HF_PLACE}/x.incomplete", True, True),
        (NAME, True, True),
        (f"{NAME}.aria2", True, True),
        (f"{NAME}.part", False, True),
        (f".{NAME}.XyZ12a", True, True),
        (f"sub/.{NAME}.XyZ12a", False, False),
        (".deployer/hf/x", False, False),
        ("serve.log", False, False),
    ],
)
def test_who_is_a_stranger(path: str, ours: bool, other: bool) -> None:
    holder = Holder(1, "x", path)
    assert foreign(holder, [NAME], ours=True) is ours
    assert foreign(holder, [NAME], ours=False) is other
