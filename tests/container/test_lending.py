"""A copy between hosts over a real sshd: the key can do nothing else; what a kill costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import serverworld as world
from fetchworld import gone
from hub import Hub
from localjob import LocalJob, kill
from sshd import SSHD, WHY_NOT, Sshd, children, start_sshd

from deployer import migrate_weights
from deployer.agents.fetch.common import BLOCK
from deployer.agents.fetch.lend import MARK
from deployer.migrate_weights import Lending
from deployer.state import Manifest, ManifestFile
from tests.local_transport import SHELLS, LocalTransport, shell_path

pytestmark = [
    pytest.mark.container,
    pytest.mark.skipif(SSHD is None, reason=WHY_NOT),
]
SHARDS, STREAMS = 15, 4
LIMITS = {"stall_s": 40.0, "phase_s": 40.0}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(tmp_path_factory.mktemp("hub"), shards=SHARDS, mb=5) as hub:
        yield hub


@dataclass
class Pair:
    """A source with the model and a destination, on this machine, each with a home of its own."""

    lending: Lending
    server: Sshd
    manifest: Manifest
    hub: Hub
    folder: Path
    keys: Path

    def job(self, name: str = "target", **changes: Any) -> LocalJob:
        peer = {**self.lending.peer().model_dump(), "user": self.server.user}
        manifest = {"methods": ["peer"], "peer": peer, "limits": LIMITS, "connections": STREAMS}
        return LocalJob(self.folder / name, self.hub, **{**manifest, **changes})

    def ssh(self, *words: str) -> subprocess.CompletedProcess[str]:
        """By the key of the migration."""
        peer = self.lending.peer()
        argv = ["ssh", "-F", "none", "-i", str(peer.identity_file), "-o", "BatchMode=yes"]
        argv += ["-o", f"UserKnownHostsFile={self.lending.folder}/known_hosts"]
        argv += ["-p", str(peer.port), f"{self.server.user}@127.0.0.1", *words]
        return subprocess.run(argv, input="", capture_output=True, text=True, timeout=20)


@pytest.fixture(params=["dash"])
def pair(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Pair]:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    # A link, as on Proxmox; with a line of somebody else.
    keys = tmp_path / "cluster_keys"
    keys.write_text("ssh-ed25519 AAAAother other@desk\n")
    keys.chmod(0o640)
    (home / ".ssh" / "authorized_keys").symlink_to(keys)
    server = start_sshd(tmp_path / "sshd", options=(f"AuthorizedKeysFile {keys}",))
    source = tmp_path / "weights"
    for path, blob in hub.repo.blobs.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).symlink_to(blob.path)
    monkeypatch.setattr(migrate_weights, "FOLDER", str(tmp_path / "lending"))
    monkeypatch.setattr(migrate_weights, "ADDRESSES", "echo 127.0.0.1\n")
    monkeypatch.setattr(migrate_weights, "HOST_KEYS", f"cat {server.host_key}.pub\n")
    want = world.deployment(model={"path": str(source)})
    ssh = want.host.ssh.model_copy(update={"address": "127.0.0.1", "port": server.port})
    host = want.host.model_copy(update={"ssh": ssh, "containers": {}})
    entry = want.entry.model_copy(update={"container": None})
    want = type(want)(**{**want.__dict__, "host": host, "entry": entry})
    tools = shell_path(request.param, tmp_path) + (
        ":/usr/bin" if request.param == "busybox" else ""
    )
    here = LocalTransport(tools, env={"HOME": str(home)})
    side: Any = SimpleNamespace(want=want, guest=here, host=here)
    rows = [
        ManifestFile(
            path=path, size=blob.size, sha256=blob.sha256 if blob.lfs else "", blob_id=blob.oid
        )
        for path, blob in hub.repo.blobs.items()
    ]
    manifest = Manifest(repo=hub.repo.name, asked="main", commit=hub.repo.commit, files=rows)
    try:
        yield Pair(Lending(side, side, "m1"), server, manifest, hub, tmp_path, keys)
    finally:
        server.stop()


@pytest.mark.parametrize("pair", SHELLS, indirect=True)
def test_the_key_reads_the_files_of_the_list_and_can_do_nothing_else(pair: Pair) -> None:
    pair.lending.open(pair.manifest)
    pair.lending.open(pair.manifest)  # a second time, as after a kill: one key, one line
    lines = pair.keys.read_text().splitlines()
    assert len(lines) == 2 and lines[0] == "ssh-ed25519 AAAAother other@desk"
    assert lines[1].startswith('restrict,from="127.0.0.1",command="exec ')
    assert (pair.keys.stat().st_mode & 0o777) == 0o640
    assert (Path(pair.lending.folder) / "key").stat().st_mode & 0o077 == 0
    said = pair.ssh("cat /etc/passwd")
    assert said.stdout == MARK.decode() and not said.stderr
    forward = pair.ssh("-N", "-o", "ExitOnForwardFailure=yes", "-R", "0:127.0.0.1:1")
    assert forward.returncode == 255 and "forwarding" in forward.stderr.lower()
    pair.lending.close()
    assert pair.keys.read_text() == "ssh-ed25519 AAAAother other@desk\n"
    assert not Path(migrate_weights.FOLDER).exists()
    pair.lending.close()
    assert pair.keys.is_file() and not pair.keys.is_symlink()


def test_fifteen_shards_killed_twice(pair: Pair) -> None:
    pair.lending.open(pair.manifest)
    slow = {**LIMITS, "bwlimit_bytes_per_s": 40e6}
    job = pair.job(limits=slow)
    lost = received = 0
    for share in (0.3, 0.65):
        process = job.start()
        job.wait_until(process, lambda share=share: done(job) > share * job.total)
        workers = [process.pid, *children(process.pid)]
        kill(process)
        assert all(gone(pid, 2.0) for pid in workers[1:])
        received += job.progress()["received"]
        lost += STREAMS * BLOCK
    job.manifest["limits"] = LIMITS
    assert job.run() == 0, job.log
    assert job.verified()
    received += job.progress()["received"]
    # What a killed run had not told yet is not in the sum; what was sent twice is.
    assert received <= job.total + lost, (received, job.total)
    assert not [row for row in pair.hub.stats()["sent"].values() if row]


def test_what_the_source_lacks_or_has_wrong_comes_from_the_hub(pair: Pair) -> None:
    pair.lending.open(pair.manifest)
    shards = [file.path for file in pair.manifest.files if file.path.endswith(".safetensors")]
    damaged, gone_, changed = (Path(pair.folder / "weights" / shards[at]) for at in (4, 6, 14))
    data = bytearray(damaged.read_bytes())
    data[12_345] ^= 1
    damaged.unlink()
    damaged.write_bytes(data)
    gone_.unlink()
    job = pair.job(methods=["peer", "range"], limits={**LIMITS, "bwlimit_bytes_per_s": 60e6})
    before = dict(pair.hub.stats()["sent"])
    process = job.start()
    job.wait_until(process, lambda: done(job) > 0.2 * job.total)
    later = changed.read_bytes()[:-1] + b"!"
    changed.unlink()  # another file of the same size, as a re-download would leave it
    changed.write_bytes(later)
    assert process.wait(60) == 0, job.log
    (bad,) = {path.name for path in job.root.glob("*.bad")} - {f"{changed.name}.bad"}
    assert bad == f"{damaged.name}.bad"
    for path in job.root.glob("*.bad"):
        path.unlink()
    assert job.verified()
    sent = {name for name, row in pair.hub.stats()["sent"].items() if row != before.get(name, 0)}
    assert {damaged.name, gone_.name} <= sent <= {damaged.name, gone_.name, changed.name}
    assert f"{damaged.name}: the bytes of {pair.server.user}@127.0.0.1 are wrong" in job.log
    assert f"{gone_.name}: 404 No such file" in job.log and "going on with range" in job.log


def test_without_the_key_it_says_so_and_the_next_method_goes_on(pair: Pair) -> None:
    pair.lending.open(pair.manifest)
    pair.keys.write_text("")
    job = pair.job()
    assert job.run() != 0
    assert "no ssh to" in job.log and "Permission denied" in job.log
    both = pair.job("both", methods=["peer", "range"])
    assert both.run() == 0, both.log
    assert both.verified()


def test_measured(pair: Pair) -> None:
    pair.lending.open(pair.manifest)
    job = pair.job()
    job.start().wait(timeout=60)  # leaves the agent and its manifest in the folder
    words = [sys.executable, "-I", "-S", "fetch.pyz", "measure"]
    for source in ("peer", "hub"):
        done_ = subprocess.run(
            [*words, source, "1", str(4 << 20)],
            cwd=job.folder,
            capture_output=True,
            timeout=30,
            check=True,
        )
        row = json.loads(done_.stdout)
        assert row["bytes_per_s"] > 0 and row["bytes"] >= 4 << 20 and not row["error"], row


def done(job: LocalJob) -> int:
    """Bytes that stand under a name or in a part."""
    whole = [job.root / row["path"] for row in job.manifest["files"]]
    return job.unfinished_bytes() + sum(p.stat().st_size for p in whole if p.exists())
