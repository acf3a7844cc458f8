"""What was verified, and when that is believed."""

from __future__ import annotations

import os
from pathlib import Path

from deployer.agents.fetch.manifest import File
from deployer.agents.fetch.record import Record

HELLO_SHA = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
FILE = File("m.safetensors", 5, HELLO_SHA)


def test_the_record_believes_only_an_untouched_file(tmp_path: Path) -> None:
    (tmp_path / ".deployer").mkdir()
    shard = tmp_path / "m.safetensors"
    shard.write_bytes(b"hello")
    record = Record(str(tmp_path))
    record.add(FILE, shard.stat(), HELLO_SHA)
    again = Record(str(tmp_path))
    assert again.holds(FILE, shard.stat())
    assert not again.holds(File(FILE.path, 5, "0" * 64), shard.stat())
    os.utime(shard, ns=(1, 1))
    assert not again.holds(FILE, shard.stat())
    (tmp_path / ".deployer" / "verified.json").write_text("{")
    assert Record(str(tmp_path)).files == {}


def test_a_wrong_file_leaves_the_record(tmp_path: Path) -> None:
    (tmp_path / ".deployer").mkdir()
    shard = tmp_path / "m.safetensors"
    shard.write_bytes(b"hello")
    record = Record(str(tmp_path))
    record.add(FILE, shard.stat(), HELLO_SHA)
    record.drop(FILE)
    assert not Record(str(tmp_path)).holds(FILE, shard.stat())
