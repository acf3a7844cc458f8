"""Are these the right bytes? Hashes and weight files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from deployer.agents.fetch.common import DISK_ERROR, MALFORMED, Fatal
from deployer.agents.fetch.digest import Digest, broken_header, check_content, hash_file
from deployer.agents.fetch.manifest import File

EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
HELLO_BLOB = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"  # git hash-object of "hello"
HELLO_SHA = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
FILE = File("m.safetensors", 5, HELLO_SHA)


def test_git_files_are_judged_by_blob_id() -> None:
    digest = Digest(File("c.json", 5, "", HELLO_BLOB))
    digest.update(b"hello")
    assert digest.wrong() == ""
    other = Digest(File("c.json", 5, "", EMPTY_BLOB))
    other.update(b"hello")
    assert EMPTY_BLOB in other.wrong() and HELLO_BLOB in other.wrong()


def test_a_file_is_hashed_in_blocks_that_are_told(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"hello")
    told: list[int] = []
    assert hash_file(str(tmp_path / "m"), FILE, told.append).wrong() == ""
    assert told == [5]
    with pytest.raises(Fatal, match="No such file") as caught:
        hash_file(str(tmp_path / "lost"), FILE, told.append)
    assert caught.value.code == DISK_ERROR


def tensor_file(path: Path, header: object, data: bytes, length: int | None = None) -> str:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return str(path)


def test_safetensors_headers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    good = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    }
    assert broken_header(tensor_file(path, good, b"12345")) == ""
    assert "data at 4" in broken_header(tensor_file(path, good, b"1234"))
    assert "header of" in broken_header(tensor_file(path, good, b"1", 1 << 40))
    assert "JSON" in broken_header(tensor_file(path, [1], b"1"))
    hole = {"a": {"data_offsets": [0, 2]}, "b": {"data_offsets": [3, 5]}}
    assert "hole" in broken_header(tensor_file(path, hole, b"12345"))
    path.write_bytes(b"abc")
    assert broken_header(str(path))


def test_an_index_that_names_an_unknown_shard_is_malformed(tmp_path: Path) -> None:
    index = File("model.safetensors.index.json", 5, HELLO_SHA)
    path = tmp_path / index.path
    path.write_text(json.dumps({"weight_map": {"w": "m.safetensors", "v": "lost.safetensors"}}))
    with pytest.raises(Fatal, match=r"lost\.safetensors") as caught:
        check_content(index, str(path), ["m.safetensors"])
    assert caught.value.code == MALFORMED
    check_content(index, str(path), ["m.safetensors", "lost.safetensors"])
