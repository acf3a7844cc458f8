"""Bad input to the download: one clear line each, nothing half-done under a final name.

The lists that lie come from a hub whose listing is bent; the disks are real ones (mounts need
root); what lies on the target is put there before the run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fault_bench import Bench, truth
from hub import Hub

from deployer import hub as hub_client
from deployer import hub_manifest
from deployer.agents.bundle import fetch_agent
from deployer.agents.fetch.common import DISK_FULL, Fatal, disk
from deployer.errors import DeployError

pytestmark = pytest.mark.container
SHARD = "model-00002-of-00003.safetensors"
root_only = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system: needs root")

Lie = Callable[[str, dict[str, Any]], dict[str, Any] | None]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", shards=3, mb=2) as hub:
        yield hub


@pytest.fixture
def bench(hub: Hub, tmp_path: Path) -> Bench:
    return Bench(hub.url, hub.repo.name, tmp_path / "box")


def bend(hub: Hub, lie: Lie) -> None:
    """Passes every row of this hub's file list through `lie`; None leaves the row out."""
    kind: Any = hub.servers[0].RequestHandlerClass
    honest_about = kind.about

    def about(self: Any, siblings: list[dict[str, Any]]) -> Any:
        bent = [lie(row["rfilename"], row) for row in siblings]
        return honest_about(self, [row for row in bent if row is not None])

    kind.about = about


def failed(bench: Bench, code: int = 0, within_s: float = 45.0) -> DeployError:
    """The error of a run, checked for its form: one line, a fix, the agent's exit code."""
    before = set(bench.folder.parent.iterdir())
    with pytest.raises(DeployError) as caught:
        bench.run_within(within_s)
    error = caught.value
    shown = (str(error), error.fix, bench.agent_log())
    assert "\n" not in str(error) and "\r" not in str(error), shown
    assert error.fix and "\n" not in error.fix, shown
    assert type(error).__name__ != "Defect" and "Traceback" not in str(shown), shown
    assert bench.agent_ends() == ([f"code {code}"] if code else []), shown
    assert set(bench.folder.parent.iterdir()) == before, "something was written beside the folder"
    assert not bench.processes()
    return error


def names(bench: Bench) -> set[str]:
    """What lies below the model's folder, without the record's own folder."""
    found = (path.relative_to(bench.model).as_posix() for path in bench.model.rglob("*"))
    return {name for name in found if not name.startswith(".deployer")}


def says(error: DeployError, *words: str) -> None:
    text = f"{error} {error.fix}"
    assert all(word in text for word in words), text


# ---- what is asked for
def test_a_repository_that_does_not_exist(bench: Bench) -> None:
    bench.repo = "acme/nothing"
    error = failed(bench)
    assert isinstance(error, hub_client.RepositoryMissing)
    says(error, "acme/nothing", bench.url, "model.repo")
    assert not bench.model.exists()


def test_a_revision_that_does_not_exist(bench: Bench) -> None:
    bench.revision = "v9"
    error = failed(bench)
    assert isinstance(error, hub_client.RevisionMissing)
    says(error, "v9", bench.repo, "model.revision")
    assert not bench.model.exists()


# ---- lists that lie
BAD_NAMES = {
    "above": "../x.json",
    "above, deeper": "sub/../../x.json",
    "newline": "a\nb.json",
    "absolute": "/etc/x.json",
    "empty part": "a//b.json",
    "escape": "a\x1b[2Jb.json",
}
OURS = ".deployer/verified.json"


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_listed_name_that_must_not_be_written(bench: Bench, hub: Hub, name: str) -> None:
    bend(hub, lambda path, row: {**row, "rfilename": name} if path == "config.json" else row)
    error = failed(bench)
    assert isinstance(error, hub_manifest.HubError), repr(error)
    says(error, repr(name))
    assert not bench.model.exists()


def test_a_listed_name_that_is_our_own_record_is_not_fetched(bench: Bench, hub: Hub) -> None:
    bend(hub, lambda path, row: {**row, "rfilename": OURS} if path == "config.json" else row)
    bench.run_within(60)
    assert set(truth(hub)) - {"config.json"} == names(bench)
    assert SHARD in json.loads((bench.model / OURS).read_text())["files"]


def test_a_list_without_weights(bench: Bench, hub: Hub) -> None:
    bend(hub, lambda path, row: None if path.endswith(".safetensors") else row)
    error = failed(bench)
    assert isinstance(error, hub_manifest.HubError), repr(error)
    says(error, "safetensors")
    assert not bench.model.exists()


def test_an_empty_list(bench: Bench, hub: Hub) -> None:
    bend(hub, lambda path, row: None)
    says(failed(bench), "safetensors")


@pytest.mark.parametrize("key", ["lfs", "size"])
def test_a_list_without_hash_or_size(bench: Bench, hub: Hub, key: str) -> None:
    def lie(path: str, row: dict[str, Any]) -> dict[str, Any]:
        if path != SHARD:
            return row
        row = {k: v for k, v in row.items() if k != "lfs"}
        return {**row, "blobId": None} if key == "lfs" else {**row, "size": None}

    bend(hub, lie)
    error = failed(bench)
    says(error, SHARD, "size or hash")
    assert not bench.model.exists()


def test_an_index_that_names_a_shard_the_list_lacks(bench: Bench, hub: Hub) -> None:
    bend(hub, lambda path, row: None if path == SHARD else row)
    error = failed(bench)
    assert isinstance(error, hub_manifest.IncompleteRepository), repr(error)
    says(error, SHARD, "model.safetensors.index.json")
    assert not bench.model.exists()


@pytest.mark.parametrize("cache", [True, False], ids=["redirected", "direct"])
@pytest.mark.parametrize(("name", "delta"), [(SHARD, -4096), (SHARD, 4096), ("config.json", 9)])
def test_a_list_that_lies_about_a_size(
    bench: Bench, hub: Hub, name: str, delta: int, cache: bool
) -> None:
    def lie(path: str, row: dict[str, Any]) -> dict[str, Any]:
        if path != name:
            return row
        size = max(1, row["size"] + delta)
        return {**row, "size": size, **({"lfs": {**row["lfs"], "size": size}} if lfs else {})}

    lfs = name == SHARD
    hub.shared.set["resolve_cache"] = cache
    bend(hub, lie)
    # Without a redirect's word on the size it is an answer of the wrong length: tried again.
    error = failed(bench, code=10 if cache or lfs else 14, within_s=90)
    says(error, name, str(hub.repo.blobs[name].size))
    assert name not in names(bench)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_list_that_lies_about_a_hash(bench: Bench, hub: Hub, name: str) -> None:
    def lie(path: str, row: dict[str, Any]) -> dict[str, Any]:
        if path != name:
            return row
        if path == SHARD:
            return {**row, "lfs": {**row["lfs"], "sha256": "0" * 64}}
        return {**row, "blobId": "0" * 40}

    bend(hub, lie)
    says(failed(bench, code=10), name)
    assert name not in names(bench)


def swap(hub: Hub, name: str, data: bytes) -> None:
    """Another content for a file, with honest hashes."""
    blob = hub.repo.blobs[name]
    blob.path.write_bytes(data)
    fresh = type(blob)(
        blob.path,
        len(data),
        hashlib.sha256(data).hexdigest(),
        hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        blob.lfs,
    )
    hub.repo.blobs[name] = fresh
    hub.repo.by_sha[fresh.sha256] = name


def test_files_without_a_byte(bench: Bench, hub: Hub) -> None:
    swap(hub, "generation_config.json", b"")
    bench.run_within(60)
    assert (bench.model / "generation_config.json").read_bytes() == b""
    assert set(truth(hub)) == names(bench)


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


LYING_HEADERS = {
    "no byte": b"",
    "four bytes": b"\1\0\0\0",
    "length over the file": header(b"{}", 1 << 60),
    "length of 40 MB": header(b" " * (40 << 20)),
    "not JSON": header(b"<html>", None, b"x" * 64),
    "a list": header(b"[1, 2]"),
    "hole": header(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}', None, b"12345678"),
    "short": header(b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', None, b"1234"),
    "tail": header(b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', None, b"1234"),
    "negative": header(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}}', None, b""),
    "nested": header(b"[" * 100_000),
}


@pytest.mark.parametrize("data", LYING_HEADERS.values(), ids=LYING_HEADERS)
def test_a_shard_whose_header_lies_although_its_hash_is_right(
    bench: Bench, hub: Hub, data: bytes
) -> None:
    swap(hub, SHARD, data)
    error = failed(bench, code=17)
    says(error, SHARD)
    assert SHARD not in names(bench), "it has its final name"


def test_an_index_that_is_none(bench: Bench, hub: Hub) -> None:
    swap(hub, "model.safetensors.index.json", b"<html>sign in</html>")
    error = failed(bench)
    says(error, "model.safetensors.index.json")
    assert not bench.model.exists()


# ---- manifest.json on the target
def run_agent(bench: Bench, change: Callable[[dict[str, Any]], None], hub: Hub) -> tuple[int, str]:
    """The bare agent on a manifest that was changed: exit code and output."""
    job = bench.folder / "job"
    job.mkdir()
    rows = [
        {"path": name, "size": b.size, "sha256": b.sha256 if b.lfs else "", "blob_id": b.oid}
        for name, b in hub.repo.blobs.items()
        if name in truth(hub)
    ]
    manifest: dict[str, Any] = {
        "endpoint": hub.url,
        "repo": hub.repo.name,
        "commit": hub.repo.commit,
        "path": str(bench.model),
        "files": rows,
        "limits": {"backoff_s": 0.05},
    }
    change(manifest)
    (job / "manifest.json").write_text(json.dumps(manifest))
    (job / "fetch.pyz").write_bytes(fetch_agent())
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "fetch.pyz"],
        cwd=job,
        env={"PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def last_word(output: str) -> str:
    """The one line that says what went wrong."""
    lines = output.splitlines()
    assert "Traceback" not in output, output
    assert " error: " in lines[-1] and output.count(" error: ") == 1, output
    return lines[-1]


@pytest.mark.parametrize("name", [*BAD_NAMES.values(), OURS], ids=[*BAD_NAMES, "record"])
def test_the_agent_refuses_a_name_of_its_manifest(bench: Bench, hub: Hub, name: str) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["path"] = name

    code, output = run_agent(bench, change, hub)
    assert code == 2, output
    assert repr(name) in last_word(output)
    assert not bench.model.exists() or not names(bench)
    assert not (bench.folder / "x.json").exists() and not Path("/etc/x.json").exists()
    assert hub.stats()["sent_total"] == 0


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no hash": lambda m: m["files"][0].update(sha256="", blob_id=""),
    "negative size": lambda m: m["files"][0].update(size=-1),
    "size in words": lambda m: m["files"][0].update(size="many"),
    "path missing": lambda m: m.pop("path"),
    "files missing": lambda m: m.pop("files"),
    "relative folder": lambda m: m.update(path="model"),
    "ftp": lambda m: m.update(endpoint="ftp://host"),
    "the same name twice": lambda m: m["files"].append(dict(m["files"][0])),
    "a file below a file": lambda m: m["files"][0].update(path=m["files"][1]["path"] + "/x.json"),
    "a name that is another's partial": lambda m: m["files"][0].update(
        path=m["files"][1]["path"] + ".part"
    ),
    "not a table": lambda m: m.update(files=[["a", 1]]),
    "limits in words": lambda m: m.update(limits={"stall_s": "long"}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_agent_refuses_a_manifest_that_makes_no_sense(
    bench: Bench, hub: Hub, name: str
) -> None:
    code, output = run_agent(bench, CHANGES[name], hub)
    assert code == 2, output
    last_word(output)
    assert not bench.model.exists() or not names(bench)
    assert hub.stats()["sent_total"] == 0


def test_the_agent_wants_every_shard_of_the_index(bench: Bench, hub: Hub) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"] = [row for row in manifest["files"] if row["path"] != SHARD]

    code, output = run_agent(bench, change, hub)
    assert code == 17, output
    word = last_word(output)
    assert SHARD in word and "model.safetensors.index.json" in word


# ---- the folder
def test_a_folder_that_is_a_file(bench: Bench) -> None:
    bench.model.write_text("precious")
    error = failed(bench)
    says(error, str(bench.model), "not a folder")
    assert bench.model.read_text() == "precious"


def test_a_folder_below_a_file(bench: Bench) -> None:
    file = bench.folder / "file"
    file.write_text("precious")
    bench.model = file / "model"
    error = failed(bench)
    says(error, str(file), "not a folder")
    assert file.read_text() == "precious"


def test_a_folder_that_is_a_dangling_link(bench: Bench) -> None:
    bench.model.symlink_to(bench.folder / "nowhere")
    error = failed(bench)
    says(error, str(bench.model))
    assert not (bench.folder / "nowhere").exists()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A mount point; what is mounted there goes at the end."""
    place = tmp_path / "box" / "disk"
    place.mkdir(parents=True)
    yield place
    # Not Path.is_mount: it does not see a bind mount of the same file system.
    while any(line.split()[1] == str(place) for line in mounts()):
        subprocess.run(["umount", "-l", str(place)], check=True)


def mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


@root_only
@pytest.mark.parametrize("how", ["bind", "tmpfs"])
@pytest.mark.parametrize("there", [True, False], ids=["folder there", "no folder"])
def test_a_read_only_file_system(bench: Bench, place: Path, how: str, there: bool) -> None:
    if how == "tmpfs":
        mount("-t", "tmpfs", "tmpfs", str(place))
    bench.model = place / "model"
    if there:
        bench.model.mkdir()
    if how == "bind":
        mount("--bind", str(place), str(place))
    mount("-o", f"remount,{'bind,' if how == 'bind' else ''}ro", str(place))
    error = failed(bench)
    says(error, str(bench.model if there else place), "read-only")


@root_only
def test_a_file_system_without_inodes(bench: Bench, place: Path) -> None:
    mount("-t", "tmpfs", "-o", "size=64m,nr_inodes=8", "tmpfs", str(place))
    bench.model = place / "model"
    error = failed(bench)
    says(error, str(place), "inodes")


AS_NOBODY = """#!/bin/dash
[ "$(id -u)" = 0 ] || exec /bin/dash "$@"
script=$(cat "$1"); name=$1; shift
exec setpriv --reuid=65534 --regid=65534 --clear-groups /bin/dash -c "$script" "$name" "$@"
"""


@root_only
@pytest.mark.skipif(not shutil.which("setpriv"), reason="no setpriv (util-linux) here")
@pytest.mark.parametrize("there", [True, False], ids=["folder there", "no folder"])
def test_a_folder_that_this_user_may_not_write(hub: Hub, there: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bad-input-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        bench = Bench(hub.url, hub.repo.name, folder / "box")
        shell = folder / "box" / "bin-dash" / "sh"
        shell.unlink()
        shell.write_text(AS_NOBODY)
        shell.chmod(0o755)
        Path(bench.jobs_root).mkdir()
        os.chown(bench.jobs_root, 65534, 65534)
        if there:
            bench.model.mkdir()
        error = failed(bench)
        says(error, str(bench.model if there else bench.folder), "not writable")
        # And the whole download as that user, where it may write: the shell above is a real one.
        bench.model = Path(bench.jobs_root) / "model"
        bench.run_within(60, "r2")
        assert set(truth(hub)) == names(bench)


@root_only
@pytest.mark.skipif(not shutil.which("mkfs.btrfs"), reason="no mkfs.btrfs (btrfs-progs) here")
def test_a_quota(bench: Bench, hub: Hub, place: Path) -> None:
    image = bench.folder.parent / "image"
    with image.open("wb") as stream:
        stream.truncate(160 << 20)
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=False).returncode:
        pytest.skip("this kernel mounts no btrfs")
    bench.model = place / "volume" / "model"
    volume = str(bench.model.parent)
    subprocess.run(["btrfs", "quota", "enable", str(place)], **quiet)  # type: ignore[call-overload]
    subprocess.run(["btrfs", "subvolume", "create", volume], **quiet)  # type: ignore[call-overload]
    limit = ["btrfs", "qgroup", "limit"]
    subprocess.run([*limit, "4M", volume], **quiet)  # type: ignore[call-overload]
    error = failed(bench, code=13)
    says(error, str(bench.model), "quota")
    done = {name for name in names(bench) if name.endswith(".safetensors")}
    assert len(done) < 3 and {n for n in names(bench) if n.endswith(".part")}
    subprocess.run([*limit, "none", volume], **quiet)  # type: ignore[call-overload]
    bench.run_within(60, "r2")
    assert set(truth(hub)) == names(bench)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_the_agent_tells_a_quota_from_a_full_disk(number: int) -> None:
    with pytest.raises(Fatal) as caught, disk("/model/x"):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == DISK_FULL
    assert ("quota" in str(caught.value)) == (number == errno.EDQUOT)
    assert "/model/x" in str(caught.value)


# ---- what lies under a final name
def clutter(bench: Bench, kind: str, path: Path) -> Path:
    """Puts something that is no file at `path`; returns what must stay as it is."""
    outside = bench.folder / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
        (path / "file").write_text("precious")
    elif kind == "link":
        path.symlink_to(outside / "file")
    elif kind == "dangling link":
        path.symlink_to(outside / "nothing")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    return outside


KINDS = ["folder", "link", "dangling link", "fifo", "socket"]


@pytest.mark.parametrize("name", [SHARD, "config.json"])
@pytest.mark.parametrize("kind", ["link", "dangling link"])
def test_a_final_name_that_is_a_link(bench: Bench, hub: Hub, kind: str, name: str) -> None:
    """The link is moved away or replaced; what it leads to is left as it is."""
    final = bench.model / name
    outside = clutter(bench, kind, final)
    bench.run_within(60)
    assert final.is_file() and not final.is_symlink()
    assert hashlib.sha256(final.read_bytes()).hexdigest() == truth(hub)[name]
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "precious"


@pytest.mark.parametrize("name", [SHARD, "config.json"])
@pytest.mark.parametrize("kind", ["folder", "fifo", "socket"])
def test_a_final_name_that_is_no_file(bench: Bench, kind: str, name: str) -> None:
    """Named, and left for its owner to move."""
    final = bench.model / name
    clutter(bench, kind, final)
    before = final.stat()
    error = failed(bench, code=18)
    says(error, str(final), "no regular file")
    assert (final.stat().st_ino, final.stat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("kind", KINDS)
def test_a_partial_that_is_no_file(bench: Bench, hub: Hub, kind: str) -> None:
    """Never written through: named, or moved out of the way."""
    outside = clutter(bench, kind, bench.model / f"{SHARD}.part")
    try:
        bench.run_within(60)
    except DeployError as error:
        assert bench.agent_ends() == ["code 18"], (str(error), bench.agent_log())
        says(error, f"{SHARD}.part")
        assert not (bench.model / SHARD).exists()
    else:
        got = hashlib.sha256((bench.model / SHARD).read_bytes()).hexdigest()
        assert got == truth(hub)[SHARD]
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "precious"


@pytest.mark.parametrize("folder", ["sub", ".deployer"])
def test_a_subfolder_that_leads_outside(bench: Bench, hub: Hub, folder: str) -> None:
    """A link inside the model's folder is no way out of it."""
    outside = bench.folder / "outside"
    outside.mkdir()
    bench.model.mkdir()
    (bench.model / folder).symlink_to(outside)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["path"] = "sub/deeper/config.json"

    code, output = run_agent(bench, change, hub)
    assert code == 18, output
    assert str(bench.model / folder) in last_word(output)
    assert not list(outside.iterdir())
