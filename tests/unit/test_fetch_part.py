"""NAME.part, its pieces and their journal."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployer.agents.fetch import part as part_module
from deployer.agents.fetch import pieces as pieces_module
from deployer.agents.fetch.common import DISK_ERROR, Fatal
from deployer.agents.fetch.gauge import Gauge
from deployer.agents.fetch.manifest import File
from deployer.agents.fetch.part import Part
from deployer.agents.fetch.pieces import SHOWS_S, Journal, Span

BLOCK, LEAST = 16, 64
DATA = random.Random(3).randbytes(1000)
FILE = File("m.bin", len(DATA), hashlib.sha256(DATA).hexdigest())


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of 16 bytes, pieces of 64 and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_module, "BLOCK", BLOCK)
        patch.setattr(part_module, "LEAST_PIECE", LEAST)
        patch.setattr(part_module, "MOST_LAG", 4 * BLOCK)
        yield


def opened(folder: Path) -> Part:
    return Part(str(folder / "m.part"), FILE, Gauge(FILE.size, 1))


def put(part: Part, span: Span, count: int) -> int:
    """The next bytes of a span, as a connection would write them."""
    count = min(count, span.left)
    part.write(span, memoryview(DATA)[span.at : span.at + count])
    return count


def taken(part: Part, most: int = len(DATA)) -> Span:
    span = part.take(most)
    assert span is not None
    return span


def finish(part: Part) -> None:
    """Everything that is missing, by one connection."""
    while (span := part.take(len(DATA))) is not None:
        while span.left:
            put(part, span, BLOCK)
        part.release(span)
    part.catch_up(lambda: None)


def test_a_part_is_hashed_again_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(DATA[:300])
    part = opened(tmp_path)
    assert (part.reach, part.gauge.bytes, part.hashed) == (300, 300, 0)
    assert part.behind()
    finish(part)
    assert part.digest.wrong() == "" and part.closing
    part.restart()
    assert (part.reach, part.gauge.bytes, (tmp_path / "m.part").stat().st_size) == (0, 0, 0)
    part.close()


def test_a_part_that_is_longer_than_the_file_starts_over(tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(DATA + b"more")
    part = opened(tmp_path)
    assert part.reach == 0 and (tmp_path / "m.part").stat().st_size == 0
    part.close()


def test_what_is_no_regular_file_is_never_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    path = tmp_path / "m.part"
    path.symlink_to(other)
    with pytest.raises(Fatal, match="symbolic link") as caught:
        opened(tmp_path)
    assert caught.value.code == DISK_ERROR and str(path) in str(caught.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Fatal, match="no regular file"):
        opened(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(Fatal, match="folder stands where a file is needed"):
        opened(tmp_path)
    path.rmdir()
    path.write_bytes(DATA[:10])
    for make in (Path.mkdir, os.mkfifo, lambda place: place.symlink_to(other)):
        where = tmp_path / "m.part.map"
        make(where)
        with pytest.raises(Fatal, match=r"m\.part\.map"):
            opened(tmp_path)
        where.rmdir() if where.is_dir() and not where.is_symlink() else where.unlink()
    assert other.read_bytes() == b"precious"


def test_the_temp_file_of_the_map_is_never_followed_either(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    (tmp_path / "m.part.map.tmp").symlink_to(other)
    part = opened(tmp_path)
    taken(part, 100)
    assert part.journal.read() == [(0, 0)]
    assert other.read_bytes() == b"precious"
    part.close()


def test_pieces_are_cut_at_blocks_and_never_short(tmp_path: Path) -> None:
    part = opened(tmp_path)
    spans = []
    while (span := part.take(200)) is not None:
        spans.append((span.at, span.end))
    assert spans == [(0, 192), (192, 384), (384, 576), (576, 768), (768, 1000)]
    assert all(start % BLOCK == 0 and end - start >= LEAST for start, end in spans)
    part.close()


def test_a_whole_file_makes_no_map(tmp_path: Path) -> None:
    part = opened(tmp_path)
    span = taken(part)
    put(part, span, BLOCK)
    assert not Path(part.journal.path).exists()
    thief = part.steal(math.inf)
    assert thief is not None and (span.end, thief.at, thief.end) == (thief.at, 496, 1000)
    assert json.loads(Path(part.journal.path).read_text()) == {"prefix": 16, "pieces": []}
    put(part, thief, BLOCK)
    put(part, span, BLOCK)
    assert part.journal.read() == [(0, 32), (496, 512)]
    while span.left:
        put(part, span, BLOCK)
    assert not part.release(span)
    put(part, thief, BLOCK)
    assert not Path(part.journal.path).exists(), "all is a prefix again"
    part.close()


def test_stealing_needs_a_wide_gap_and_a_server_that_knows_ranges(tmp_path: Path) -> None:
    part = opened(tmp_path)
    span = taken(part)
    put(part, span, 1000 - 2 * LEAST)
    assert span.left == 2 * LEAST and part.steal(math.inf) is None
    part.close()
    (tmp_path / "m.part").unlink()
    other = opened(tmp_path)
    other.no_ranges()
    taken(other)
    assert other.steal(math.inf) is None and other.take(100) is None
    other.close()


def test_only_what_takes_its_owner_long_is_stolen(tmp_path: Path) -> None:
    part = opened(tmp_path)
    span = taken(part)
    began = span.since
    put(part, span, 200)
    assert part.steal(began + SHOWS_S / 2) is None, "nobody knows yet"
    # 800 bytes are left: at 200 bytes in 0.7 s they take 2.8 s, at 200 in 1 s they take 4 s.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "SHOWS_S", 0.5)
        assert part.steal(began + 0.7) is None
        stolen = part.steal(began + 1.0)
    assert stolen is not None and stolen.owned
    assert part.steal(began + 1.0) is None, "both have less than 3 s to go"
    part.close()


def test_a_body_that_goes_on_is_followed_over_what_is_there(tmp_path: Path) -> None:
    part = opened(tmp_path)
    first, second = taken(part, 192), taken(part, 192)
    put(part, second, 50)
    part.no_ranges()
    assert not part.release(second)
    while first.left:
        put(part, first, BLOCK)
    later = part.follow(first)
    assert later is second and later.at == 242 and later.owned and not first.owned
    while later.left:
        put(part, later, BLOCK)
    third = part.follow(later)
    assert third is not None and (third.at, third.end) == (384, 1000)
    while third.left:
        put(part, third, BLOCK)
    assert part.follow(third) is None
    assert part.release(third) and not part.release(third), "completed once"
    part.catch_up(lambda: None)
    assert part.digest.wrong() == ""
    part.close()


def test_a_body_is_not_followed_into_what_another_fetches(tmp_path: Path) -> None:
    part = opened(tmp_path)
    first, _second = taken(part, 192), taken(part, 192)
    put(part, first, 192)
    assert part.follow(first) is None and first.owned
    part.close()


def test_the_hash_follows_the_prefix_into_pieces(tmp_path: Path) -> None:
    part = opened(tmp_path)
    first, second = taken(part, 192), taken(part, 192)
    put(part, second, 100)
    assert part.hashed == 0
    put(part, first, 100)
    assert part.hashed == 100, "hashed while received"
    put(part, first, 92)
    part.release(first)
    assert part.behind()
    part.catch_up(lambda: None)
    assert part.hashed == 292 and not part.behind()
    put(part, second, 16)
    assert part.hashed == 308
    part.close()


@pytest.mark.parametrize(
    ("text", "there", "runs"),
    [
        ('{"prefix": 100, "pieces": [[192, 300]]}', 400, [(0, 100), (192, 300)]),
        ('{"prefix": 100, "pieces": [[192, 300]]}', 250, [(0, 100), (192, 250)]),
        ('{"prefix": 100, "pieces": [[192, 300]]}', 150, [(0, 100)]),
        ('{"prefix": 100, "pieces": [[192, 300]]}', 50, [(0, 50)]),
        ('{"prefix": 100, "pieces": [[100, 300]]}', 400, [(0, 300)]),
        ('{"prefix": 100, "pieces": [[90, 300]]}', 400, []),
        ('{"prefix": 100, "pieces": [[300, 200]]}', 400, []),
        ('{"prefix": 100, "pieces": [[200, 5000]]}', 400, [(0, 100), (200, 400)]),
        ('{"prefix": -1, "pieces": []}', 400, []),
        ('{"prefix": 100}', 400, []),
        ('{"prefix": 100, "pieces": [[1]]}', 400, []),
        ("[]", 400, []),
        ("", 400, []),
        ("\x00\x00\x00", 400, []),
        ("[" * 5000, 400, []),
    ],
)
def test_of_a_map_only_what_is_sure_is_used(
    tmp_path: Path, text: str, there: int, runs: list[tuple[int, int]]
) -> None:
    (tmp_path / "m.part").write_bytes(DATA[:there])
    (tmp_path / "m.part.map").write_text(text)
    part = opened(tmp_path)
    assert [(s.start, s.at) for s in part.spans if s.at > s.start] == runs
    assert (tmp_path / "m.part").stat().st_size == (runs[-1][1] if runs else 0)
    finish(part)
    assert part.digest.wrong() == ""
    part.seal()
    assert (tmp_path / "m.part").read_bytes() == DATA
    assert not (tmp_path / "m.part.map").exists()
    part.close()


class Life:
    """A part that is fetched by several connections and killed now and then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.part = opened(folder)
        self.owned: list[Span] = []
        self.written = 0
        self.refetched = 0

    def do(self, what: str, which: int, count: int) -> None:
        span = self.owned[which % len(self.owned)] if self.owned else None
        if what == "take" and (new := self.part.take(count * 4)) is not None:
            self.owned.append(new)
        elif what == "steal" and (stolen := self.part.steal(math.inf)) is not None:
            self.owned.append(stolen)
        elif what == "write" and span is not None:
            self.written += put(self.part, span, min(count, BLOCK))
        elif what == "release" and span is not None:
            self.owned.remove(span)
            if self.part.release(span):
                self.part.closing = False
        elif what == "hash":
            self.part.catch_up(lambda: None)
        elif what in ("kill", "torn"):
            self.kill(span if what == "torn" else None, min(count, BLOCK))

    def kill(self, torn: Span | None, count: int) -> None:
        """Nothing is closed. `torn`: in the middle of a write, before its journal.

        What the journal does not name is made junk: it must not be used.
        """
        part, path = self.part, self.folder / "m.part"
        if torn is not None:
            end = min(torn.at + count, torn.end)
            os.pwrite(part.handle, DATA[torn.at : end], torn.at)
            (self.folder / "m.part.map.tmp").write_text("{")
        os.close(part.handle)
        runs = Journal(str(path)).read()
        if runs is not None:
            junk = bytearray(b"\xff" * path.stat().st_size)
            for start, end in runs:
                junk[start:end] = path.read_bytes()[start:end]
            path.write_bytes(junk)
        connections = max(1, len(self.owned))
        self.owned = []
        self.part = opened(self.folder)
        assert self.part.valid <= self.written + BLOCK, "a torn write may have come through"
        lost = self.written - self.part.valid
        assert lost <= 0, f"{lost} written bytes are gone, with {connections} connections"
        self.written = self.part.valid


OPS = st.tuples(
    st.sampled_from(["take", "take", "steal", "write", "write", "write", "release", "hash"]),
    st.integers(0, 7),
    st.integers(1, 200),
)
DEATHS = st.tuples(st.sampled_from(["kill", "torn"]), st.integers(0, 7), st.integers(1, 16))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(OPS, OPS, OPS, DEATHS), max_size=80))
def test_whatever_happens_the_bytes_are_right_and_none_is_fetched_twice(
    ops: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in (("BLOCK", BLOCK), ("LEAST_PIECE", LEAST), ("MOST_LAG", 4 * BLOCK)):
            patch.setattr(part_module, name, value)
        life = Life(Path(folder))
        for op in ops:
            life.do(*op)
        for span in life.owned:
            life.part.release(span)
        life.part.closing = False
        before = life.part.valid
        assert before == life.part.gauge.bytes
        finish(life.part)
        assert life.part.digest.wrong() == ""
        life.part.seal()
        assert (Path(folder) / "m.part").read_bytes() == DATA
        assert [path.name for path in Path(folder).iterdir()] == ["m.part"]
        life.part.close()
