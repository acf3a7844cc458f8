"""The child of huggingface_hub, over a stand-in for it: what is counted, kept and said."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployer.agents.fetch import xet
from deployer.agents.fetch.common import Fatal
from deployer.agents.fetch.manifest import Job
from deployer.agents.fetch.methods import LEAST_BUFFERS_MB, MOST_BUFFERS_MB, xet_buffers_mb
from deployer.agents.fetch.stock import HF, HF_CACHE, Stock, untwin
from deployer.agents.fetch.xet import Counter, Fetch, code_of, one_line, silent_bar

CONTENT = b"x" * 100


def job(root: Path, *names: str, **changes: Any) -> Job:
    sha = hashlib.sha256(CONTENT).hexdigest()
    files = [{"path": name, "size": len(CONTENT), "sha256": sha} for name in names]
    base = {"repo": "a/b", "commit": "c0ffee", "path": str(root), "files": files}
    return Job.parse({**base, "endpoint": "https://hub", **changes})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A huggingface_hub whose download is set by the test."""
    package: Any = types.ModuleType("huggingface_hub")
    constants: Any = types.ModuleType("huggingface_hub.constants")
    constants.DOWNLOAD_CHUNK_SIZE = 10 << 20
    package.constants = constants
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    return package


def serve(hub: Any, download: Callable[..., None]) -> list[dict[str, Any]]:
    """Makes `download(words)` the package's; returns the calls."""
    calls: list[dict[str, Any]] = []

    def hf_hub_download(repo_id: str, filename: str, tqdm_class: type, **words: Any) -> None:
        call = {"repo_id": repo_id, "filename": filename, "tqdm_class": tqdm_class, **words}
        calls.append(call)
        download(call)

    hub.hf_hub_download = hf_hub_download
    return calls


def test_every_missing_file_is_asked_for_at_the_pinned_commit(hub: Any, tmp_path: Path) -> None:
    def download(call: dict[str, Any]) -> None:
        with call["tqdm_class"](desc=call["filename"], total=100) as bar:
            bar.update(60)
            bar.set_postfix_str("fast", refresh=False)
            bar.update(40)

    calls = serve(hub, download)
    lines: list[str] = []
    assert Fetch(job(tmp_path, "a", "b"), "hf_x").run(lines.append) == 0
    assert sorted(call["filename"] for call in calls) == ["a", "b"]
    for call in calls:
        assert (call["repo_id"], call["revision"]) == ("a/b", "c0ffee")
        assert (call["endpoint"], call["token"]) == ("https://hub", "hf_x")
        assert call["local_dir"] == str(tmp_path / HF)
    last = json.loads(lines[-1])
    assert (last["received"], last["phase"]) == (200, "downloading")
    assert json.loads(lines[0])["phase"] in ("metadata", "downloading")
    assert hub.constants.DOWNLOAD_CHUNK_SIZE == xet.CHUNK


def test_without_a_token_none_is_looked_for(hub: Any, tmp_path: Path) -> None:
    calls = serve(hub, lambda call: None)
    Fetch(job(tmp_path, "a"), "").run(lambda line: None)
    assert calls[0]["token"] is False


def test_an_older_package_without_our_bars(hub: Any, tmp_path: Path) -> None:
    seen = []

    def hf_hub_download(repo_id: str, filename: str, revision: str, local_dir: str, token: Any,
                        endpoint: str, etag_timeout: float) -> None:  # fmt: skip
        seen.append(filename)

    hub.hf_hub_download = hf_hub_download
    assert Fetch(job(tmp_path, "a"), "").run(lambda line: None) == 0
    assert seen == ["a"]


def test_an_error_before_the_first_bytes_is_tried_again(hub: Any, tmp_path: Path) -> None:
    left = [ConnectionError("refused"), TimeoutError("HEAD")]

    def download(call: dict[str, Any]) -> None:
        if left:
            raise left.pop()

    calls = serve(hub, download)
    fetch = Fetch(job(tmp_path, "a"), "")
    assert fetch.run(lambda line: None) == 0
    assert len(calls) == 3 and fetch.row()["retries"] == 2


def test_an_error_after_bytes_is_not_begun_again_from_0(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xet, "CHUNK", 50)
    given = job(tmp_path, "a")
    place = tmp_path / HF_CACHE
    place.mkdir(parents=True)

    def download(call: dict[str, Any]) -> None:
        (place / f"h.{given.files[0].sha256}.0123abcd.incomplete").write_bytes(CONTENT[:60])
        raise ConnectionError("reset by peer")

    calls = serve(hub, download)
    with pytest.raises(Fatal, match="a: ConnectionError: reset by peer") as caught:
        Fetch(given, "").run(lambda line: None)
    assert caught.value.code == 14 and len(calls) == 1


def test_a_partial_file_outlives_its_own_unlink(hub: Any, tmp_path: Path) -> None:
    given = job(tmp_path, "a")
    place = tmp_path / HF_CACHE
    place.mkdir(parents=True)
    partial = place / f"h.{given.files[0].sha256}.0123abcd.incomplete"
    partial.write_bytes(CONTENT[:60])
    fetch = Fetch(given, "")
    fetch.keep_partials()
    fetch.keep_partials()
    names = {path.name for path in place.iterdir()}
    assert len(names) == 2
    partial.unlink()
    (twin,) = place.iterdir()
    assert twin.read_bytes() == CONTENT[:60]
    assert Stock(str(tmp_path), given.files).hf_partials(given.files[0]) == [str(twin)]


def test_one_name_for_each_file_and_the_final_one_first(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "z.bin").write_bytes(b"1")
    os.link(tmp_path / "sub" / "z.bin", tmp_path / "a.0.incomplete")
    (tmp_path / "b.1.incomplete").write_bytes(b"2")
    os.link(tmp_path / "b.1.incomplete", tmp_path / "b.2.incomplete")
    untwin(str(tmp_path))
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["b.1.incomplete", "z.bin"]


def test_no_room_beside_what_is_there(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = types.SimpleNamespace(f_bavail=1, f_frsize=99)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(
        Fatal, match="it would need 100 bytes beside what is there, and 99 are free"
    ):
        Fetch(job(tmp_path, "a"), "").run(lambda line: None)


def test_a_denied_file_ends_it_while_others_are_under_way(hub: Any, tmp_path: Path) -> None:
    release = threading.Event()

    class GatedRepoError(Exception):
        pass

    def download(call: dict[str, Any]) -> None:
        if call["filename"] == "b":
            raise GatedRepoError("401 Client Error.\n\nAccess to model a/b is restricted.")
        release.wait(30)

    serve(hub, download)
    try:
        with pytest.raises(Fatal, match=r"b: GatedRepoError: 401 Client Error\. Access") as caught:
            Fetch(job(tmp_path, "a", "b"), "").run(lambda line: None)
        assert caught.value.code == 11
    finally:
        release.set()


def _error(name: str, base: type[Exception] = Exception, **facts: Any) -> Exception:
    error = type(name, (base,), {})("text")
    for key, value in facts.items():
        setattr(error, key, value)
    return error


HUB = "https://hub"


def _answer(status: int, url: str = "") -> Exception:
    """An error of the library with the answer behind it."""
    answer = types.SimpleNamespace(status_code=status, url=url)
    return _error("HfHubHTTPError", response=answer)


def test_what_its_exceptions_mean() -> None:
    assert code_of(_error("RevisionNotFoundError"), HUB) == 12
    assert code_of(_error("RemoteEntryNotFoundError"), HUB) == 12
    assert code_of(_answer(403), HUB) == code_of(_answer(401, f"{HUB}/a/b"), HUB) == 11
    assert code_of(_answer(403, "https://cdn.hub/signed?token"), HUB) == 14  # its url was too old
    assert code_of(_answer(503), HUB) == 14
    assert code_of(OSError(errno.ENOSPC, "full"), HUB) == 13
    assert code_of(OSError(errno.EDQUOT, "quota"), HUB) == 13
    assert code_of(OSError(errno.EROFS, "read-only"), HUB) == 18
    assert code_of(ConnectionResetError(errno.ECONNRESET, "reset"), HUB) == 14
    wrapped = RuntimeError("Data processing error")
    wrapped.__cause__ = OSError(errno.ENOSPC, "full")
    assert code_of(wrapped, HUB) == 13
    assert one_line(RuntimeError("a\n b\x1b[0m")) == "RuntimeError: a b[0m"
    signed = RuntimeError("403 at https://cdn/f?Expires=1&Signature=5ec. Gone")
    assert one_line(signed) == "RuntimeError: 403 at https://cdn/f?... Gone"


def test_bars_count_the_network_and_not_the_putting_together() -> None:
    counter = Counter()
    bar: Any = silent_bar(counter)
    network, disk = bar(desc="m.bin: downloading bytes"), bar(desc="m.bin: reconstructing file")
    network.update(5)
    disk.update(7)
    network.update(None)
    network.update(-3)  # a retry from the beginning takes its count back; ours never falls
    assert counter.received == 5
    assert (network.n, disk.n) == (2, 7)
    assert not hasattr(network, "update_transfer")
    network.refresh()
    network.set_description("x")
    network.close()
    assert list(bar([1, 2])) == [1, 2]


def test_buffers_have_a_bound() -> None:
    assert LEAST_BUFFERS_MB <= xet_buffers_mb() <= MOST_BUFFERS_MB
