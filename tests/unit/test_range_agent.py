"""The download agent's own judgement, without a network."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from deployer.agents.fetch.common import Again, Fatal
from deployer.agents.fetch.digest import Digest, broken_header, check_content
from deployer.agents.fetch.gauge import Gauge
from deployer.agents.fetch.hubhttp import Hub, origin, resumes_at, retry_after
from deployer.agents.fetch.manifest import File, Job
from deployer.agents.fetch.orphans import adopt_orphan
from deployer.agents.fetch.part import Part
from deployer.agents.fetch.record import Record

EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
HELLO_BLOB = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"  # git hash-object of "hello"
HELLO_SHA = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"


JOB = Job("a/b", "c", "/m", (), endpoint="http://h")


class Answer:
    """What the agent reads of an http.client response."""

    reason = "x"

    def __init__(self, status: int, **headers: str) -> None:
        self.status = status
        self.headers = {name.replace("_", "-").lower(): v for name, v in headers.items()}

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return self.headers.get(name.lower(), default)


def file(**changes: Any) -> Any:
    row = {"path": "m.safetensors", "size": 5, "sha256": HELLO_SHA, "blob_id": "", **changes}
    return File.parse(row)


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", "a\nb", "a\x1bb", "./a"])
def test_a_name_that_leaves_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unsafe"):
        file(path=name)


def test_our_own_folder_and_a_file_without_hash_are_refused() -> None:
    with pytest.raises(ValueError, match="unsafe"):
        file(path=".deployer/verified.json")
    with pytest.raises(ValueError, match="no hash"):
        file(sha256="")


def test_git_files_are_judged_by_blob_id() -> None:
    digest = Digest(file(sha256="", blob_id=HELLO_BLOB))
    digest.update(b"hello")
    assert digest.wrong() == ""
    other = Digest(file(sha256="", blob_id=EMPTY_BLOB))
    other.update(b"hello")
    assert EMPTY_BLOB in other.wrong()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 0.0),
        ("2", 2.0),
        ("-3", 0.0),
        ("soon", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
    ],
)
def test_retry_after(value: str | None, seconds: float) -> None:
    assert retry_after(value, 10.0) == seconds


def test_only_the_exact_range_is_taken() -> None:
    assert resumes_at(Answer(206, Content_Range="bytes 2-4/5"), file(), 2)
    assert not resumes_at(Answer(200, Content_Length="5"), file(), 2)
    for wrong in ("bytes 1-4/5", "bytes 2-4/6", "bytes 2-3/5", ""):
        with pytest.raises(Again):
            resumes_at(Answer(206, Content_Range=wrong), file(), 2)
    with pytest.raises(Again, match="7 bytes"):
        resumes_at(Answer(200, Content_Length="7"), file(), 0)
    with pytest.raises(Again, match="compressed"):
        resumes_at(Answer(200, Content_Encoding="gzip"), file(), 0)


@pytest.mark.parametrize(
    ("status", "elsewhere", "code"),
    [(401, False, 11), (403, False, 11), (404, False, 12), (410, False, 12)],
)
def test_the_hubs_refusals_are_final(status: int, elsewhere: bool, code: int) -> None:
    hub = Hub(JOB, "", "http://h")
    with pytest.raises(Fatal) as caught:
        hub.check_status(file(), Answer(status, X_Error_Code="GatedRepo"), elsewhere)
    assert caught.value.code == code and "GatedRepo" in str(caught.value)


@pytest.mark.parametrize("status", [403, 404, 416, 429, 500, 503])
def test_the_cdns_refusals_pass(status: int) -> None:
    hub = Hub(JOB, "", "http://h")
    with pytest.raises(Again) as caught:
        hub.check_status(file(), Answer(status, Retry_After="4000"), True)
    assert caught.value.range_refused == (status == 416)
    assert caught.value.pause_s == (300.0 if status in (429, 503) else 0.0)


def test_another_version_at_the_hub_is_an_error() -> None:
    with pytest.raises(Fatal, match="another version"):
        Hub.check_linked(file(), Answer(302, X_Linked_Etag='"' + "0" * 64 + '"'))
    with pytest.raises(Fatal, match="9 bytes"):
        Hub.check_linked(file(), Answer(302, X_Linked_Size="9"))


def test_origins() -> None:
    assert origin("https://h/x") == origin("https://H:443/y")
    assert origin("http://h/x") != origin("https://h/x")
    assert origin("http://h:1/x") != origin("http://h:2/x")


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


def test_a_part_is_hashed_again_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.part"
    path.write_bytes(b"hel")
    gauge = Gauge(5, 1)
    part = Part(str(path), file(), gauge)
    assert (part.offset, gauge.bytes, gauge.received) == (3, 3, 0)
    part.write(b"lo")
    assert part.digest.wrong() == "" and path.read_bytes() == b"hello"
    part.restart()
    assert (part.offset, gauge.bytes, path.stat().st_size) == (0, 0, 0)
    part.close()


def test_a_part_that_is_too_long_starts_over_and_a_symlink_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "m.part"
    path.write_bytes(b"hello and more")
    part = Part(str(path), file(), Gauge(5, 1))
    assert part.offset == 0 and path.stat().st_size == 0
    part.close()
    link = tmp_path / "n.part"
    link.symlink_to(path)
    with pytest.raises(Fatal) as caught:
        Part(str(link), file(), Gauge(5, 1))
    assert caught.value.code == 18


def test_the_record_believes_only_an_untouched_file(tmp_path: Path) -> None:
    (tmp_path / ".deployer").mkdir()
    shard = tmp_path / "m.safetensors"
    shard.write_bytes(b"hello")
    record = Record(str(tmp_path))
    record.add(file(), shard.stat(), HELLO_SHA)
    again = Record(str(tmp_path))
    assert again.holds(file(), shard.stat())
    assert not again.holds(file(sha256="0" * 64), shard.stat())
    os.utime(shard, ns=(1, 1))
    assert not again.holds(file(), shard.stat())
    (tmp_path / ".deployer" / "verified.json").write_text("{")
    assert Record(str(tmp_path)).files == {}


def test_an_orphan_of_a_killed_client_is_adopted(tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / f"abc=.{HELLO_SHA}.0a1b2c3d.incomplete").write_bytes(b"hel")
    (cache / f"abc=.{HELLO_SHA}.11111111.incomplete").write_bytes(b"h")
    part = tmp_path / "m.safetensors.part"
    adopt_orphan(str(tmp_path), file(), str(part))
    assert part.read_bytes() == b"hel"


def test_an_index_that_names_an_unknown_shard_is_malformed(tmp_path: Path) -> None:
    index = file(path="model.safetensors.index.json")
    path = tmp_path / index.path
    path.write_text(json.dumps({"weight_map": {"w": "m.safetensors", "v": "lost.safetensors"}}))
    with pytest.raises(Fatal, match=r"lost\.safetensors") as caught:
        check_content(index, str(path), ["m.safetensors"])
    assert caught.value.code == 17


def test_the_progress_line() -> None:
    gauge = Gauge(10, 2)
    gauge.add(valid=4, moved=6, received=3)
    row = json.loads(gauge.line())
    assert (row["bytes"], row["total"], row["moved"], row["files"]) == (4, 10, 6, 2)
