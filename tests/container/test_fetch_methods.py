"""Each method of the ladder on this machine: real huggingface_hub, real rsync over a real sshd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from fetchworld import alive, gone
from hub import Hub
from localjob import VENV, LocalJob, kill
from sshd import SSHD, WHY_NOT, Sshd, free_port, start_sshd

pytestmark = pytest.mark.container
needs_xet = pytest.mark.skipif(find_spec("hf_xet") is None, reason="hf-xet is not installed")
needs_rsync = pytest.mark.skipif(
    SSHD is None or shutil.which("rsync") is None, reason=WHY_NOT or "rsync is not installed"
)
MB = 1_000_000
QUICK = {"stall_s": 3.0, "phase_s": 20.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def hub(data: Path) -> Iterator[Hub]:
    with Hub(data, shards=3, mb=24) as hub:
        yield hub


def sent(hub: Hub) -> int:
    """Bytes of bodies that the hub has handed out."""
    return int(sum(hub.stats()["sent"].values()))


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


# ---- range, and what a kill costs


def test_kill_9_of_the_supervisor_leaves_no_worker_and_loses_little(
    hub: Hub, tmp_path: Path
) -> None:
    hub.shared.change({"bps": 8e6})
    job = LocalJob(tmp_path, hub, methods=["range"])
    for share in (0.3, 0.6):
        process = job.start()
        job.wait_until(process, lambda at=share: job.unfinished_bytes() > at * job.total)
        (worker,) = children_of(process.pid)
        kill(process)
        assert gone(worker, 1.0)
    hub.shared.change({"bps": 0.0})
    assert job.run() == 0, job.log
    assert job.verified()
    # A block a connection and kill, and what the kernel held of it: the hub counts that as sent.
    assert sent(hub) <= job.total + 2 * 4 * (2 << 20)


def test_a_complete_model_is_known_by_stats(hub: Hub, tmp_path: Path) -> None:
    job = LocalJob(tmp_path, hub, methods=["range"])
    assert job.run() == 0, job.log
    before = len(hub.stats()["log"])
    began = time.monotonic()
    assert job.run() == 0
    assert time.monotonic() - began < 1.0
    assert len(hub.stats()["log"]) == before


def test_a_range_stall_that_no_retry_cures_goes_to_the_next_method(
    hub: Hub, tmp_path: Path
) -> None:
    """The CDN falls silent for our agent for ever; huggingface_hub's own requests are served."""
    hub.faults([{"where": "cdn", "do": "stall", "at": 0.5, "times": 3}])
    limits = {**QUICK, "recv_timeout_s": 30.0}  # the workers' own patience is longer
    job = LocalJob(tmp_path, hub, methods=["range", "hf-xet"], venv=VENV, limits=limits)
    assert job.run() == 0, job.log
    assert job.verified()
    assert "warning: range stalled at " in job.log and "; killed, going on with hf-xet" in job.log


# ---- hf-xet


@needs_xet
@pytest.mark.parametrize("xet", [False, True])
def test_huggingface_hub_brings_it_all_and_touches_nothing_else(
    hub: Hub, tmp_path: Path, xet: bool
) -> None:
    hub.shared.change({"xet": xet, "token": "hf_good"})
    job = LocalJob(tmp_path, hub, methods=["hf-xet"], venv=VENV)
    job.env |= {"HF_TOKEN": "hf_good", "HF_HOME": str(tmp_path / "users_own"), "HF_DEBUG": "1"}
    assert job.run() == 0, job.log
    assert job.verified()
    assert not list(job.home.iterdir()) and not (tmp_path / "users_own").exists()
    assert not (job.root / ".deployer" / "hf").exists()
    assert hub.stats()["auth_leaks"] == 0
    assert sent(hub) <= 1.02 * job.total
    assert "hf_good" not in job.log
    row = job.progress()
    assert row["received"] >= 0.9 * job.total
    used = {entry["where"] for entry in hub.stats()["log"] if entry["sent"]}
    assert ("cas" in used) is xet


@needs_xet
@pytest.mark.parametrize("xet", [False, True])
def test_huggingface_hub_hangs_and_its_bytes_are_kept(hub: Hub, tmp_path: Path, xet: bool) -> None:
    hub.shared.change({"xet": xet})
    where = "cas" if xet else "cdn"
    job = LocalJob(tmp_path, hub, methods=["hf-xet", "range"], venv=VENV, limits=QUICK)
    job.manifest["limits"]["recv_timeout_s"] = 15.0
    hub.faults([{"where": where, "match": job.biggest, "do": "stall", "at": 0.7, "times": 1}])
    assert job.run() == 0, job.log
    assert job.verified()
    assert "warning: hf-xet stalled at " in job.log and "; killed, going on with range" in job.log
    assert f"{job.biggest}: took over" in job.log
    assert sent(hub) <= (1.3 if xet else 1.1) * job.total


@needs_xet
def test_an_error_that_huggingface_hub_answers_by_deleting_costs_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    """It unlinks its partial file on any exception; a reset in the body is one."""
    hub.shared.change({"bps": 4e6})  # long enough for the second name to be made
    job = LocalJob(tmp_path, hub, methods=["hf-xet", "range"], venv=VENV)
    hub.faults([{"where": "cdn", "match": job.biggest, "do": "reset", "at": 0.8, "times": 1}])
    assert job.run() == 0, job.log
    assert job.verified()
    assert "warning: hf-xet failed: " + job.biggest in job.log
    assert f"{job.biggest}: took over" in job.log
    assert sent(hub) <= 1.1 * job.total


@needs_xet
def test_kill_9_of_the_supervisor_takes_huggingface_hub_along(hub: Hub, tmp_path: Path) -> None:
    hub.shared.change({"bps": 6e6})
    job = LocalJob(tmp_path, hub, methods=["hf-xet"], venv=VENV)
    process = job.start()
    job.wait_until(process, lambda: job.unfinished_bytes() > 0.6 * job.total)
    workers = children_of(process.pid)
    kill(process)
    assert all(gone(worker, 1.0) for worker in workers)
    hub.shared.change({"bps": 0.0})
    job.manifest["methods"] = ["range"]
    assert job.run() == 0, job.log
    assert job.verified()
    assert sent(hub) <= 1.1 * job.total


@needs_xet
def test_a_gated_repository_ends_the_job(hub: Hub, tmp_path: Path) -> None:
    hub.shared.change({"token": "hf_good"})
    job = LocalJob(tmp_path, hub, methods=["hf-xet", "range"], venv=VENV)
    assert job.run() == 11, job.log
    assert "error: " in job.log.splitlines()[-1] and "GatedRepo" in job.log.splitlines()[-1]


@needs_xet
def test_wrong_bytes_of_huggingface_hub_are_found(hub: Hub, tmp_path: Path) -> None:
    job = LocalJob(tmp_path, hub, methods=["hf-xet", "range"], venv=VENV)
    hub.faults([{"where": "cdn", "match": job.biggest, "do": "corrupt", "at": 0.5, "times": 1}])
    assert job.run() == 0, job.log
    assert (job.root / (job.biggest + ".bad")).exists()
    (job.root / (job.biggest + ".bad")).unlink()
    assert job.verified()


# ---- mirror


def test_a_mirror_helps_and_never_sees_the_token(hub: Hub, data: Path, tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    hub.shared.change({"token": "hf_good"})
    with Hub(data, shards=3, mb=24) as mirror:
        limits = {**QUICK, "idle_tries": 1, "backoff_s": 0.1}
        job = LocalJob(
            tmp_path,
            hub,
            methods=["range", "mirror"],
            mirrors=["http://127.0.0.1:9", mirror.url],
            endpoint=dead,
            limits=limits,
        )
        job.env["HF_TOKEN"] = "hf_good"
        assert job.run() == 0, job.log
        assert job.verified()
        assert not any(entry["auth"] for entry in mirror.stats()["log"])
    assert "warning: range failed: " in job.log
    assert ", going on with mirror http://127.0.0.1:9\n" in job.log
    assert f", going on with mirror {mirror.url}\n" in job.log


# ---- peer


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Peer]]:
    """Starts sshds whose host keys this machine's ssh knows."""
    started: list[Sshd] = []
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()

    def start(hub: Hub, folder: str = "weights", known: bool = True, **options: Any) -> Peer:
        # A home of its own: what this machine's .bashrc does is no part of the test.
        clean = {"bashrc": ":", **options}
        server = start_sshd(tmp_path / f"sshd{len(started)}", **clean)
        started.append(server)
        # Stands for what is in the target's own known_hosts.
        known_hosts = server.known_hosts if known else tmp_path / "nobody"
        wrapper = bin_folder / "ssh"
        wrapper.write_text(
            f"#!/bin/sh\nexec {shutil.which('ssh')} -o UserKnownHostsFile={known_hosts} "
            '-o GlobalKnownHostsFile=/dev/null "$@"\n'
        )
        wrapper.chmod(0o755)
        return Peer(server, tmp_path / folder, hub)

    yield start
    for server in started:
        server.stop()


class Peer:
    """A machine that has the model in `folder`."""

    def __init__(self, server: Sshd, folder: Path, hub: Hub) -> None:
        self.server, self.folder = server, folder
        for path, blob in hub.repo.blobs.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(blob.path, folder / path)

    def manifest(self, **changes: Any) -> dict[str, Any]:
        """The job's `peer`."""
        return {
            "address": "127.0.0.1",
            "user": self.server.user,
            "port": self.server.port,
            "path": str(self.folder),
            "identity_file": str(self.server.user_key),
            **changes,
        }

    def job(self, tmp_path: Path, hub: Hub, **manifest: Any) -> LocalJob:
        job = LocalJob(
            tmp_path / "target",
            hub,
            **{"methods": ["peer"], "peer": self.manifest(), "limits": QUICK, **manifest},
        )
        job.env["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
        return job


@needs_rsync
@pytest.mark.parametrize("folder", ["weights", 'we\'ird $HOME [a]* "q" dir/über'])
def test_a_peer_brings_it_all(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer], folder: str
) -> None:
    source = peer(hub, folder, bashrc="echo noise of a login >&2")
    (tmp_path / "weights").mkdir(exist_ok=True)
    job = source.job(tmp_path, hub)
    assert job.run() == 0, job.log
    assert job.verified()
    assert sent(hub) == 0
    assert job.progress()["received"] >= job.total
    assert not list((job.root / ".deployer").glob("incoming/*"))


@needs_rsync
def test_names_that_a_shell_or_a_pattern_would_change(
    data: Path, hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    job = source.job(tmp_path, hub)
    blob = job.manifest["files"][0]
    content = (source.folder / blob["path"]).read_bytes()
    odd = [
        "x[1].bin",
        "star*.bin",
        "sub dir/$HOME `id` 'q\".bin",
        "-e.bin",
        "back\\slash.bin",
        "é;.bin",
    ]
    for name in odd:
        (source.folder / name).parent.mkdir(exist_ok=True)
        (source.folder / name).write_bytes(content)
    (source.folder / "x1.bin").write_bytes(b"what x[1].bin means as a pattern")
    job.manifest["files"] = [{**blob, "path": name} for name in odd]
    assert job.run() == 0, job.log
    for name in odd:
        assert (job.root / name).read_bytes() == content


@needs_rsync
def test_a_prefix_is_continued_and_a_killed_copy_too(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    limits = {**QUICK, "bwlimit_bytes_per_s": 12e6}
    job = source.job(tmp_path, hub, limits=limits)
    shard = job.biggest
    half = (source.folder / shard).read_bytes()[: 12 * MB]
    job.root.mkdir()
    (job.root / (shard + ".part")).write_bytes(half)
    process = job.start()
    job.wait_until(process, lambda: job.unfinished_bytes() > 0.6 * job.total)
    workers = [process.pid, *descendants(process.pid)]
    received = job.progress()["received"]
    kill(process)
    assert all(gone(worker, 2.0) for worker in workers[1:])
    left = job.unfinished_bytes()
    assert received <= left - 12 * MB + 4 * MB
    job.manifest["limits"] = QUICK
    assert job.run() == 0, job.log
    assert job.verified()
    assert job.progress()["received"] <= job.total - left + 6 * MB
    assert "going on at" in job.log


@needs_rsync
def test_pieces_of_other_connections_are_not_sent_again(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    job = source.job(tmp_path, hub)
    shard = job.biggest
    content = (source.folder / shard).read_bytes()
    runs = [(0, 2 * MB), (8 * MB, 14 * MB), (16 * MB, 23 * MB)]
    job.root.mkdir()
    with (job.root / (shard + ".part")).open("wb") as part:
        for start, end in runs:
            part.seek(start)
            part.write(content[start:end])
    rows = {"prefix": runs[0][1], "pieces": runs[1:]}
    (job.root / (shard + ".part.map")).write_text(json.dumps(rows))
    job.manifest["files"] = [row for row in job.manifest["files"] if row["path"] == shard]
    job.manifest["limits"] = {**QUICK, "bwlimit_bytes_per_s": 8e6}
    process = job.start()  # killed in the middle: what counted still counts
    job.wait_until(process, lambda: job.progress().get("received", 0) > MB)
    kill(process)
    job.manifest["limits"] = QUICK
    assert job.run() == 0, job.log
    assert (job.root / shard).read_bytes() == content
    assert not (job.root / (shard + ".part.map")).exists()
    assert "filling gaps" in job.log
    assert job.progress()["received"] <= len(content) - 15 * MB + 2 * MB


def descendants(pid: int) -> list[int]:
    found = children_of(pid)
    return [*found, *(deeper for child in found for deeper in descendants(child))]


@needs_rsync
def test_a_killed_rsync_alone_is_tried_again(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    limits = {**QUICK, "bwlimit_bytes_per_s": 12e6, "backoff_s": 0.1}
    job = source.job(tmp_path, hub, limits=limits)
    process = job.start()
    job.wait_until(process, lambda: job.unfinished_bytes() > 0.3 * job.total)
    (worker,) = children_of(process.pid)
    for pid in children_of(worker):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=60) == 0, job.log
    assert job.verified()
    assert "rsync ended with -9" in job.log
    assert job.progress()["received"] <= 1.2 * job.total


@needs_rsync
def test_a_peer_that_hangs_is_a_stall_and_the_next_method_goes_on(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    limits = {**QUICK, "bwlimit_bytes_per_s": 12e6}
    job = source.job(tmp_path, hub, methods=["peer", "range"], limits=limits)
    process = job.start()
    job.wait_until(process, lambda: job.unfinished_bytes() > 0.4 * job.total)
    frozen = descendants(source.server.process.pid)
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert process.wait(timeout=60) == 0, job.log
    finally:
        for pid in frozen:
            if alive(pid):
                os.kill(pid, signal.SIGCONT)
    assert job.verified()
    assert "warning: peer stalled at " in job.log and "; killed, going on with range" in job.log
    assert sent(hub) <= 0.65 * job.total


@needs_rsync
def test_wrong_bytes_of_a_peer_never_get_the_name(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    job = source.job(tmp_path, hub, methods=["peer", "range"])
    path = source.folder / job.biggest
    with path.open("r+b") as stream:
        stream.seek(1000_000)
        stream.write(b"wrong")
    assert job.run() == 0, job.log
    (job.root / (job.biggest + ".bad")).unlink()
    assert job.verified()
    assert sent(hub) < 0.5 * job.total


@needs_rsync
def test_a_peer_that_lacks_files_gives_what_it_has(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub)
    job = source.job(tmp_path, hub, methods=["peer", "range"])
    (source.folder / job.biggest).unlink()
    (source.folder / "README.md").write_text("another size")
    assert job.run() == 0, job.log
    assert job.verified()
    assert "lacks 2 files, first README.md, going on with range" in job.log
    assert set(hub.stats()["sent"]) == {job.biggest, "README.md"}


@needs_rsync
@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        ({}, {"path": "/nowhere at all"}, "the folder is not there, or may not be entered"),
        ({"known": False}, {}, "no ssh to "),
        ({}, {"user": "nobody-here"}, "Permission denied"),
        (
            {"login": 'PATH=$HERE exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'},
            {},
            "rsync is not installed there",
        ),
        ({"bashrc": "echo welcome"}, {}, "its login shell prints 'welcome' before every command"),
        ({"login": "exit 0"}, {}, "its answer was cut off"),
        ({"login": "exec sleep 100"}, {}, "no answer within 25 s"),
    ],
)
def test_a_peer_that_cannot_be_used_is_said_in_one_line(
    hub: Hub,
    tmp_path: Path,
    peer: Callable[..., Peer],
    options: dict[str, Any],
    changes: dict[str, Any],
    why: str,
) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "sh").symlink_to("/bin/sh")
    if "login" in options:
        options = {"login": options["login"].replace("$HERE", str(tmp_path / "few"))}
    source = peer(hub, **options)
    job = source.job(tmp_path, hub, methods=["peer", "range"])
    job.manifest["peer"] = source.manifest(**changes)
    job.manifest["limits"] = {**QUICK, "phase_s": 60.0}
    assert job.run() == 0, job.log
    assert job.verified()
    (line,) = [line for line in job.log.splitlines() if "warning: peer failed: " in line]
    assert why in line and line.endswith(", going on with range")


@needs_rsync
def test_a_peer_without_the_fast_cipher(
    hub: Hub, tmp_path: Path, peer: Callable[..., Peer]
) -> None:
    source = peer(hub, options=("Ciphers aes256-ctr",))
    job = source.job(tmp_path, hub)
    assert job.run() == 0, job.log
    assert job.verified()


def test_a_machine_without_rsync(hub: Hub, tmp_path: Path) -> None:
    job = LocalJob(tmp_path, hub, methods=["peer", "range"])
    job.manifest["peer"] = {"address": "127.0.0.1", "user": "x", "port": 1, "path": "/x"}
    job.env["PATH"] = str(tmp_path)
    assert job.run() == 0, job.log
    assert "peer cannot be used: rsync and ssh not installed on this machine" in job.log
