"""The lab's hub against the real clients: huggingface_hub's library and command line, and hf-xet.

What they accept is a fair hub; a fault that they meet is one of the real world.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from certs import Authority
from hub import Hub
from proxy import Proxy

pytestmark = pytest.mark.container
xet = pytest.mark.skipif(find_spec("hf_xet") is None, reason="hf-xet is not installed")
REPO = "acme/tiny-hybrid"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture
def hub(data: Path) -> Iterator[Hub]:
    """Shards of 24 MiB: more than hf's blocks of 10 MiB, more than one xorb."""
    with Hub(data, shards=3, mb=24) as hub:
        yield hub


class Client:
    """A real client in a child, so that it reads its environment anew."""

    def __init__(self, hub: Hub, folder: Path, **env: str) -> None:
        self.hub, self.folder = hub, folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "SSL_"))}
        self.env = {
            **kept,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "no_proxy": "",
            **env,
        }

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=120)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", code)

    def snapshot(self, options: str = "") -> subprocess.CompletedProcess[str]:
        return self.python(
            "from huggingface_hub import snapshot_download\n"
            f"snapshot_download({REPO!r}, local_dir={str(self.out)!r}, {options})"
        )

    def hf(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(Path(sys.executable).with_name("hf")), *words)

    def is_whole(self) -> bool:
        return all(
            hashlib.sha256((self.out / name).read_bytes()).hexdigest() == blob.sha256
            for name, blob in self.hub.repo.blobs.items()
        )

    def origins(self) -> dict[str, int]:
        """Bodies that each origin sent."""
        rows = [row for row in self.hub.stats()["log"] if row["body"] and row["method"] == "GET"]
        return {where: sum(row["where"] == where for row in rows) for where in ("cdn", "cas")}


HTTP = {"HF_HUB_DISABLE_XET": "1"}
XET = {"HF_XET_CLIENT_READ_TIMEOUT": "2s", "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms"}


def ok(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


# ---- downloads
@pytest.mark.parametrize("small", [True, False])
def test_snapshot_download_over_http(hub: Hub, tmp_path: Path, small: bool) -> None:
    """`small`: small files come through the hub's resolve-cache, or at once."""
    hub.shared.set["resolve_cache"] = small
    client = Client(hub, tmp_path)
    ok(client.snapshot("token='hf_secret'"))
    assert client.is_whole()
    stats = hub.stats()
    assert stats["auth_leaks"] == 0
    assert stats["sent_total"] == hub.repo.size
    assert client.origins() == {"cdn": 3, "cas": 0}


@xet
def test_snapshot_download_over_xet(hub: Hub, tmp_path: Path) -> None:
    hub.shared.set["xet"] = True
    client = Client(hub, tmp_path)
    ok(client.snapshot("token='hf_secret'"))
    assert client.is_whole()
    stats = hub.stats()
    assert stats["auth_leaks"] == 0
    assert stats["sent_total"] < 1.01 * hub.repo.size
    assert client.origins()["cdn"] == 0 and client.origins()["cas"] >= 6


@xet
def test_xet_can_be_declined(hub: Hub, tmp_path: Path) -> None:
    hub.shared.set["xet"] = True
    client = Client(hub, tmp_path, **HTTP)
    ok(client.snapshot())
    assert client.is_whole()
    assert client.origins() == {"cdn": 3, "cas": 0}


@pytest.mark.parametrize("mode", ["http", pytest.param("xet", marks=xet)])
def test_hf_download_and_hf_cache_verify(hub: Hub, tmp_path: Path, mode: str) -> None:
    hub.shared.set["xet"] = mode == "xet"
    client = Client(hub, tmp_path, HF_TOKEN="hf_secret")
    ok(client.hf("download", REPO, "--local-dir", str(client.out)))
    assert client.is_whole()
    assert hub.stats()["auth_leaks"] == 0
    ok(client.hf("cache", "verify", REPO, "--local-dir", str(client.out)))
    sent = hub.stats()["sent_total"]
    ok(client.hf("download", REPO, "--local-dir", str(client.out)))
    assert hub.stats()["sent_total"] == sent, "a complete folder costs no bytes"


def test_a_listing_of_many_pages(hub: Hub, tmp_path: Path) -> None:
    hub.shared.set["page"] = 2
    client = Client(hub, tmp_path)
    ok(client.snapshot())
    assert client.is_whole()
    pages = [row for row in hub.stats()["log"] if "/tree/" in row["path"]]
    assert len(pages) == -(-len(hub.repo.blobs) // 2)


@pytest.mark.parametrize("mode", ["http", pytest.param("xet", marks=xet)])
def test_tls_and_a_proxy_with_a_password(data: Path, tmp_path: Path, mode: str) -> None:
    authority = Authority(tmp_path)
    pair = authority.server()
    with Hub(data, shards=3, mb=24, tls=pair, xet=mode == "xet") as hub, Proxy("u", "p w") as proxy:
        trust = {"SSL_CERT_FILE": str(authority.bundle)}
        client = Client(hub, tmp_path, https_proxy=proxy.url, **trust)
        ok(client.snapshot("token='hf_secret'"))
        assert client.is_whole()
        assert hub.stats()["auth_leaks"] == 0
        assert proxy.opened and not proxy.refused
        if mode == "http":
            assert proxy.passed > hub.repo.size, "every byte came through the proxy"
        ask = f"from huggingface_hub import HfApi; HfApi().model_info({REPO!r})"
        distrust = Client(hub, tmp_path, https_proxy=proxy.url).python(ask)
        assert distrust.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in distrust.stderr


# ---- faults that the real clients survive, and one that they do not
@pytest.mark.parametrize(
    "name", ["hub-short", "hub-no-range", "hub-chunked", "hub-head-503", "hub-tree-429"]
)
def test_http_survives(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.faults([name])
    client = Client(hub, tmp_path, **HTTP)
    ok(client.snapshot())
    assert client.is_whole()
    assert all(fault["hits"] for fault in hub.stats()["faults"]), "the fault never struck"


@xet
def test_xet_survives_a_stall_once_its_timeout_is_short(hub: Hub, tmp_path: Path) -> None:
    hub.faults(["hub-xet-stall"])
    client = Client(hub, tmp_path, **XET)
    ok(client.snapshot())
    assert client.is_whole()
    assert hub.stats()["faults"][0]["hits"] >= 1


@pytest.mark.parametrize("mode", ["http", pytest.param("xet", marks=xet)])
def test_wrong_bytes_go_unnoticed(hub: Hub, tmp_path: Path, mode: str) -> None:
    """Why our own download checks every byte."""
    hub.faults(["hub-corrupt-always" if mode == "http" else "hub-xet-corrupt"])
    client = Client(hub, tmp_path)
    ok(client.snapshot())
    assert not client.is_whole()
    assert hub.stats()["faults"][0]["hits"] >= 1


# ---- metadata and access
def test_metadata_calls(hub: Hub, tmp_path: Path) -> None:
    code = f"""
from huggingface_hub import HfApi
api = HfApi()
info = api.model_info({REPO!r}, files_metadata=True)
rows = {{f.path: f for f in api.list_repo_tree({REPO!r}, revision=info.sha, recursive=True)}}
some = {{f.path: f for f in api.get_paths_info({REPO!r}, ["config.json"])}}
assert list(some) == ["config.json"] and some["config.json"].size == rows["config.json"].size
for s in info.siblings:
    assert rows[s.rfilename].size == s.size, s
    assert rows[s.rfilename].blob_id == s.blob_id, s
    if s.rfilename.endswith(".safetensors"):
        assert s.lfs.sha256 == rows[s.rfilename].lfs.sha256
api.auth_check({REPO!r})
print(info.sha)
"""
    done = Client(hub, tmp_path).python(code)
    ok(done)
    assert done.stdout.strip() == hub.repo.commit


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("model_info('acme/none')", "RepositoryNotFoundError"),
        ("model_info('acme/tiny-hybrid', revision='v9')", "RevisionNotFoundError"),
        ("hf_hub_download('acme/tiny-hybrid', 'none.bin')", "EntryNotFoundError"),
    ],
)
def test_named_errors(hub: Hub, tmp_path: Path, call: str, error: str) -> None:
    done = Client(hub, tmp_path).python(f"from huggingface_hub import HfApi; HfApi().{call}")
    assert done.returncode == 1
    assert error in done.stderr


@pytest.mark.parametrize(
    ("token", "private", "error"),
    [
        ("", False, "GatedRepoError"),
        ("hf_other", False, "GatedRepoError"),
        ("hf_unknown", False, "Invalid credentials"),
        ("hf_good", False, ""),
        ("", True, "RepositoryNotFoundError"),
        ("hf_other", True, "RepositoryNotFoundError"),
        ("hf_unknown", True, "Invalid credentials"),
        ("hf_good", True, ""),
    ],
)
def test_auth_check(hub: Hub, tmp_path: Path, token: str, private: bool, error: str) -> None:
    hub.shared.change({"token": "hf_good", "denied": "hf_other", "private": private})
    code = f"from huggingface_hub import HfApi; HfApi(token={token or False!r})"
    done = Client(hub, tmp_path).python(f"{code}.auth_check({REPO!r})")
    assert (done.returncode == 0) == (not error), done.stderr
    assert error in done.stderr
