"""Weights through the controller: real shells on both sides, cut off and gone on with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from deployer import migrate_relay
from deployer.errors import StepFailed, Unreachable
from deployer.migrate_relay import relay
from deployer.state import ManifestFile
from tests.local_transport import SHELLS, LocalTransport, shell_path


class Cut(LocalTransport):
    """Ends after so many runs."""

    left = 10**6

    def run(self, *args: Any, **words: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Unreachable("cut", where=self.name)
        return super().run(*args, **words)


@pytest.fixture(params=SHELLS)
def shells(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return shell_path(request.param, tmp_path)


def model(folder: Path) -> list[ManifestFile]:
    rows = []
    for name, size in (("a.bin", 10_000), ("sub dir/it's $x.bin", 4096), ("empty", 0), ("b", 5)):
        data = bytes(index * 7 % 256 for index in range(size))
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sha = hashlib.sha256(data).hexdigest()
        rows.append(ManifestFile(path=name, size=size, sha256=sha))
    return rows


def test_all_of_it_cut_off_and_gone_on_with(
    shells: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_relay, "BLOCK", 3000)
    source, target = tmp_path / "source", tmp_path / "target"
    files = model(source)
    (target).mkdir()
    (target / "b").write_bytes(b"is there")  # under its name: the shards step judges it
    told: list[int] = []
    there = Cut(shells, "there")
    there.left = 4
    with pytest.raises(Unreachable):
        relay((Cut(shells), str(source)), (there, str(target)), files, lambda d, t: None)
    kept = (target / "a.bin.part").read_bytes()
    assert len(kept) == 9000 and kept == (source / "a.bin").read_bytes()[:9000]
    there.left = 10**6
    sent = relay(
        (Cut(shells), str(source)),
        (there, str(target)),
        files,
        lambda done, total: told.append(done),
    )
    assert sent == 1000 + 4096
    for file in files[:2]:
        assert (target / f"{file.path}.part").read_bytes() == (source / file.path).read_bytes()
    assert (target / "b").read_bytes() == b"is there"
    assert told[-1] == sum(file.size for file in files)
    again = relay((Cut(shells), str(source)), (there, str(target)), files, lambda d, t: None)
    assert again == 0


def test_a_source_that_changed_and_a_link_are_refused(shells: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    files = model(source)
    target.mkdir()
    (source / "a.bin").write_bytes(b"other")
    with pytest.raises(StepFailed, match="not there with its 10000 bytes"):
        relay((Cut(shells), str(source)), (Cut(shells), str(target)), files, lambda d, t: None)
    (target / "b.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StepFailed, match="b could not be brought"):
        relay((Cut(shells), str(source)), (Cut(shells), str(target)), files[3:], lambda d, t: None)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("there", "map_", "kept"),
    [
        (9000, '{"prefix": 2000, "pieces": [[5000, 9000]]}', 2000),
        (1500, '{"prefix": 2000, "pieces": []}', 1500),
        (9000, "{}", 0),
        (9000, "", 0),
        (12_000, '{"prefix": 11000, "pieces": []}', 0),  # longer than the file: of another one
        (None, '{"prefix": 2000, "pieces": []}', 0),
    ],
)
def test_pieces_of_an_earlier_download_are_gone_on_with_from_their_prefix(
    shells: str, tmp_path: Path, there: int | None, map_: str, kept: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    [file, *_] = model(source)
    target.mkdir()
    part = target / "a.bin.part"
    if there is not None:
        part.write_bytes((source / "a.bin").read_bytes().ljust(there, b"x")[:there])
    (target / "a.bin.part.map").write_text(map_.ljust(4096))
    ends = (Cut(shells), str(source)), (Cut(shells), str(target))
    assert relay(*ends, [file], lambda d, t: None) == 10_000 - kept
    assert part.read_bytes() == (source / "a.bin").read_bytes()
    assert not (target / "a.bin.part.map").exists()
