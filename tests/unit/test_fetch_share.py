"""Who fetches what: the pool's choice of work, without a network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from deployer.agents.fetch import pool as pool_module
from deployer.agents.fetch.common import BLOCK, Stopped
from deployer.agents.fetch.gauge import Reporter
from deployer.agents.fetch.manifest import File, Job
from deployer.agents.fetch.part import LEAST_PIECE
from deployer.agents.fetch.pieces import Span
from deployer.agents.fetch.pool import Download, in_order

SHA = hashlib.sha256(b"").hexdigest()
MIB = BLOCK


def pool(root: Path, sizes: list[int], connections: int = 4) -> Download:
    files = tuple(File(f"f{n}", size, SHA) for n, size in enumerate(sizes))
    job = Job("a/b", "c", str(root), files, connections=connections)
    download = Download(job, "", Reporter(None, str(root / "progress")), job.endpoint)
    download.queue.extend(in_order(list(files)))
    return download


def begin(download: Download) -> File:
    """The next work, which must be a file that nobody has looked at."""
    work = download.next()
    assert isinstance(work, File)
    download.begin(work)
    return work


def span(download: Download) -> Span:
    """The next work, which must be bytes of a file under way."""
    work = download.next()
    assert isinstance(work, tuple)
    return work[1]


def test_small_files_come_first_then_the_largest() -> None:
    sizes = [5 * MIB, 7, 9 * MIB, 3, MIB]
    files = [File(str(size), size, SHA) for size in sizes]
    assert [file.size for file in in_order(files)] == [3, 7, 9 * MIB, 5 * MIB, MIB]


def test_files_are_taken_whole_while_there_are_many(tmp_path: Path) -> None:
    download = pool(tmp_path, [64 * MIB] * 8)
    for _ in range(4):
        begin(download)
        whole = span(download)
        assert (whole.at, whole.end) == (0, 64 * MIB)


def test_the_last_file_is_cut_into_shares_and_never_below_the_least(tmp_path: Path) -> None:
    download = pool(tmp_path, [64 * MIB])
    begin(download)
    runs = [span(download) for _ in range(6)]
    assert [(run.at // MIB, run.end // MIB) for run in runs[:3]] == [(0, 16), (16, 28), (28, 37)]
    assert runs[-1].end == 64 * MIB
    assert all(run.left >= LEAST_PIECE for run in runs)


def test_one_connection_cuts_nothing(tmp_path: Path) -> None:
    download = pool(tmp_path, [64 * MIB], connections=1)
    begin(download)
    assert span(download).left == 64 * MIB
    assert not (tmp_path / "f0.part.map").exists()


def test_a_file_under_way_is_finished_before_the_next_is_begun(tmp_path: Path) -> None:
    download = pool(tmp_path, [64 * MIB, 40 * MIB])
    begin(download)
    assert span(download).left == 26 * MIB
    assert span(download).at == 26 * MIB
    assert not isinstance(download.next(), File)


def test_an_empty_file_is_complete_at_once(tmp_path: Path) -> None:
    download = pool(tmp_path, [0])
    begin(download)
    assert (tmp_path / "f0").read_bytes() == b"" and not (tmp_path / "f0.part").exists()
    assert download.next() is None and download.gauge.files_done == 1


def test_a_worker_without_work_waits_for_what_another_may_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = pool(tmp_path, [2 * MIB])
    begin(download)
    mine = span(download)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        download.stop.set()
        return True

    monkeypatch.setattr(download.changed, "wait", wait)
    with pytest.raises(Stopped):
        download.next()
    assert waits == [pool_module.LOOK_AGAIN_S] and mine.owned
