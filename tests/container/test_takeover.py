"""Folders that other downloaders left, taken over: the real `hf download`, curl, aria2c."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fetching import CONNECTIONS, IN_FLIGHT, MODEL, Project, bound_buffers, sent, wrongs
from hub import Hub
from lab import Result, eventually
from other_clients import MOUNTS, HfDownload, aria2_killed, await_sent, put
from target import Target, bridge_address, need_image

pytestmark = pytest.mark.container

SHARDS, SHARD_MIB = 4, 48.0
HF_CHUNK = 10 << 20
"""huggingface_hub writes no less of a connection at once."""
WHOLE = 'cd "$1" 2>/dev/null && find . -name "model-*" ! -path "./.*" -printf "%s\\n" || :'
LEFT = 'cd "$1" && find . -name "*.incomplete" -size +0 -printf "%s %p\\n"'
MTIMES = 'cd "$1" && find . -type f ! -path "./.*" -printf "%p %i %T@\\n" | sort'


@dataclass
class Place:
    """A target, a hub, and the project that brings its model there."""

    target: Target
    hub: Hub
    project: Project

    def sent(self) -> int:
        """Bytes that the hub has sent to the target in this test."""
        return sent(self.hub, self.target)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.hub.repo.size

    def shard(self, number: int) -> str:
        """The name of a shard, from 1."""
        return f"model-{number:05d}-of-{SHARDS:05d}.safetensors"

    def data(self, name: str) -> bytes:
        """The right bytes of a file."""
        return self.hub.repo.blobs[name].path.read_bytes()

    def partials(self) -> list[tuple[int, str]]:
        """(bytes, path) of huggingface_hub's partial files that hold any."""
        found = self.target.sh(LEFT, MODEL).ok().out.splitlines()
        return [(int(size), path) for size, path in (line.split(maxsplit=1) for line in found)]

    def up(self) -> Result:
        """Runs `deploy up` to its end."""
        return self.project.up().end()

    def proven(self) -> str:
        """Runs it, and everything must be right afterwards; what it said."""
        said = self.up().ok().out
        assert not wrongs(self.target, self.project, self.hub), said
        return said


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, Hub, Path]]:
    """One target and one hub for all tests here."""
    need_image()
    folder = tmp_path_factory.mktemp("takeover")
    hub = Hub(folder / "hub", host=bridge_address(), shards=SHARDS, mb=SHARD_MIB)
    bound_buffers(hub)
    with hub:
        target = Target("takeover", folder, MOUNTS)
        try:
            yield target, hub, folder
        finally:
            target.remove()


@pytest.fixture
def place(machine: tuple[Target, Hub, Path], tmp_path: Path) -> Place:
    """An empty folder, a hub that has sent nothing yet."""
    target, hub, _ = machine
    target.sh('rm -rf -- "$1" /root/hf-home', MODEL).ok()
    hub.shared.reset()
    return Place(target, hub, Project(tmp_path / "project", target, hub))


def etag(path: str) -> str:
    """The sha256 in the name of a partial file."""
    return path.split(".")[-3]


def cut_short() -> int:
    """Bytes that may come for nothing: a connection is ended where another has taken over."""
    return CONNECTIONS * IN_FLIGHT


def hf_killed(place: Place, share: float, xet: bool = False) -> int:
    """A real `hf download` dies when the hub has sent `share` of what lacks; returns bytes left."""
    place.hub.shared.set.update(bps=25e6, xet=xet)
    before = int(place.hub.stats(log=False)["sent_total"])
    missing = place.size - sum(map(int, place.target.sh(WHOLE, MODEL).out.split()))
    hf = HfDownload(place.target, place.hub, xet)
    try:
        await_sent(place.hub, hf.process, before + int(missing * share))
        # However long the kill takes, there is something left to send.
        place.hub.shared.set.update(bps=1e4)
        eventually(lambda: bool(place.partials()), "something of a file is there", 20)
    finally:
        hf.kill()
    place.hub.shared.set.update(bps=0.0)
    left = place.partials()
    return sum(size for size, _ in left)


def test_a_killed_hf_download_is_taken_over(place: Place) -> None:
    left = hf_killed(place, 0.6)
    assert left > place.size * 0.2, "nothing worth taking over was left"
    theirs = place.sent()
    said = place.proven()
    assert place.sent() - theirs <= place.size - left + cut_short(), said
    assert place.sent() <= place.size + SHARDS * (HF_CHUNK + IN_FLIGHT), said
    assert place.partials() == []


def test_a_killed_xet_download_is_taken_over(place: Place) -> None:
    left = hf_killed(place, 0.6, xet=True)
    assert {row["where"] for row in place.hub.stats()["log"] if row["sent"]} >= {"cas"}
    theirs = place.sent()
    said = place.proven()
    assert place.sent() - theirs <= place.size - left + cut_short(), said
    assert place.partials() == []


def test_of_two_killed_hf_downloads_the_longer_parts_are_used_and_the_rest_is_cleaned(
    place: Place,
) -> None:
    hf_killed(place, 0.4)
    first = place.partials()
    hf_killed(place, 0.9)
    best: dict[str, int] = {}
    for size, path in place.partials():
        best[etag(path)] = max(best.get(etag(path), 0), size)
    theirs = place.sent()
    said = place.proven()
    assert place.sent() - theirs <= place.size - sum(best.values()) + cut_short(), said
    left = place.partials()
    assert 0 < len(left) <= len(first), left
    cleaned = place.project.doctor("--clean-partials", "--yes")
    assert place.partials() == [], cleaned.out + cleaned.err
    assert not wrongs(place.target, place.project, place.hub), cleaned.out


def test_an_hf_download_that_lives_is_named_and_left_alone(place: Place) -> None:
    place.hub.shared.set.update(bps=2e6)
    hf = HfDownload(place.target, place.hub)
    try:
        await_sent(place.hub, hf.process, place.size // 20)
        refused = place.up()
        pids = hf.pids()
        assert refused.exit == 1, refused.out
        assert any(f"pid {pid}" in refused.out for pid in pids), (pids, refused.out)
        assert hf.process.poll() is None
        place.hub.shared.set.update(bps=0.0)
        assert hf.process.wait(60) == 0, hf.said()
    finally:
        if hf.process.poll() is None:
            hf.kill()
    assert place.sent() <= place.size, "its download was disturbed"
    place.proven()


def test_a_finished_hf_download_is_hashed_not_fetched(place: Place) -> None:
    hf = HfDownload(place.target, place.hub)
    assert hf.process.wait(60) == 0, hf.said()
    before, theirs = place.target.sh(MTIMES, MODEL).ok().out, place.sent()
    place.proven()
    assert place.sent() == theirs
    assert place.target.sh(MTIMES, MODEL).ok().out == before


@pytest.mark.parametrize("damaged", [False, True], ids=["right", "damaged"])
def test_a_partial_under_the_final_name_is_resumed(
    place: Place, tmp_path: Path, damaged: bool
) -> None:
    name = place.shard(2)
    data = bytearray(place.data(name))
    there = int(len(data) * 0.6)
    if damaged:
        data[there // 2] ^= 1
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / name).write_bytes(data[:there])
    put(place.target, tmp_path / "left")
    said = place.proven()
    again = len(data) if damaged else 0
    assert place.sent() <= place.size - there + again + cut_short(), said


@pytest.mark.skipif(shutil.which("aria2c") is None, reason="no aria2c here (apt install aria2)")
def test_what_a_killed_aria2c_left_is_not_taken_for_a_file(place: Place, tmp_path: Path) -> None:
    name = place.shard(3)
    (tmp_path / "left").mkdir()
    place.hub.shared.set.update(bps=8e6)
    aria2_killed(place.hub, tmp_path / "left", name, int(len(place.data(name)) * 0.7))
    place.hub.shared.set.update(bps=0.0)
    assert (tmp_path / "left" / f"{name}.aria2").exists()
    put(place.target, tmp_path / "left")
    said = place.proven()
    assert place.sent() <= place.size + cut_short(), said
