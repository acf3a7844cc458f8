"""What the agent accepts as a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployer.agents.fetch.manifest import METHODS, File, Job, Limits

SHA = "ab" * 32
ROW = {"path": "m.safetensors", "size": 5, "sha256": SHA, "blob_id": ""}
JOB = {"repo": "a/b", "commit": "c", "path": "/m", "files": [ROW]}


def job(**changes: Any) -> Job:
    return Job.parse({**JOB, **changes})


def two(first: str, second: str) -> Job:
    return job(files=[{**ROW, "path": first}, {**ROW, "path": second}])


def test_the_defaults() -> None:
    plain = job()
    assert plain.files == (File("m.safetensors", 5, SHA),) and plain.total == 5
    assert plain.endpoint == "https://huggingface.co" and plain.methods == METHODS
    assert (plain.connections, plain.peer, plain.proxy, plain.venv) == (4, None, None, "")
    assert plain.limits == Limits() and plain.limits.recv_timeout_s == 20
    assert job(limits={"stall_s": 10}).limits.recv_timeout_s == 5
    assert job(limits={"stall_s": 10, "recv_timeout_s": 7}).limits.recv_timeout_s == 7


@pytest.mark.parametrize(
    "name", ["", "/etc/x", "../x", "a/../b", "a//b", "a\nb", "a\x1bb", "./a", ".deployer/x", 7]
)
def test_a_name_that_leaves_the_folder_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="unsafe file name"):
        job(files=[{**ROW, "path": name}])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": -1}, "no number of bytes"),
        ({"size": "5"}, "no number of bytes"),
        ({"size": True}, "no number of bytes"),
        ({"sha256": ""}, "no hash"),
        ({"sha256": "ab"}, "64 hex digits"),
        ({"blob_id": "zz"}, "40 hex digits"),
    ],
)
def test_a_bad_file_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        job(files=[{**ROW, **change}])
    assert "m.safetensors" in str(caught.value)


def test_names_that_get_in_each_others_way_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' is listed twice"):
        two("a", "a")
    with pytest.raises(ValueError, match="'a/b' is also a folder"):
        two("a/b/c", "a/b")
    for suffix in (".part", ".part.map", ".bad"):
        with pytest.raises(ValueError, match="our own partial file"):
            two("a", "a" + suffix)
    assert len(two("a.part", "b").files) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"repo": ""}, "repo"),
        ({"commit": None}, "commit"),
        ({"path": "models"}, "not absolute"),
        ({"path": "/"}, "root of the file system"),
        ({"path": "//./"}, "root of the file system"),
        ({"files": {}}, "files: not a list"),
        ({"files": ["m"]}, "must be an object"),
        ({"endpoint": "ftp://h"}, "endpoint"),
        ({"endpoint": "http://h:x"}, "[Pp]ort"),
        ({"mirrors": "https://h"}, "mirrors"),
        ({"methods": ["range", "torrent"]}, "torrent"),
        ({"connections": 0}, "connections"),
        ({"connections": 65}, "connections"),
        ({"peer": {"address": "h", "user": "u", "port": 0, "path": "/m"}}, "port 0"),
        ({"peer": {"address": "h", "user": "u", "port": 22}}, "peer: path"),
        ({"limits": {"stall": 1}}, "unknown name 'stall'"),
        ({"limits": {"stall_s": -1}}, "stall_s"),
        ({"limits": {"stall_s": 0}}, "above 0"),
        ({"limits": {"tries": float("nan")}}, "tries"),
    ],
)
def test_a_bad_job_says_what_is_wrong(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        job(**change)


@pytest.mark.parametrize("proxy", ["https://u:geheim@h:1", "u:geheim@h:1", "http://u:geheim@h:x"])
def test_an_unusable_proxy_is_refused_without_its_password(proxy: str) -> None:
    with pytest.raises(ValueError, match="proxy") as caught:
        job(proxy=proxy)
    assert "geheim" not in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    with pytest.raises(ValueError, match=r"manifest\.json"):
        Job.load(str(path))
    for text in ("{", "[]", "[" * 100_000, json.dumps({**JOB, "files": None})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            Job.load(str(path))
    path.write_text(json.dumps(JOB))
    assert Job.load(str(path)).repo == "a/b"
