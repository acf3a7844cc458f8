"""The lab's hub against the real clients: huggingface_hub's library and its command line."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
from hub import Hub

pytestmark = pytest.mark.container


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub", shards=3, mb=1) as hub:
        yield hub


def run(hub: Hub, code: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Python code in a child, so that the client reads its environment anew."""
    full = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **env}
    full["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return subprocess.run(
        [sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=120
    )


def same(hub: Hub, folder: Path) -> bool:
    return all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == blob.sha256
        for name, blob in hub.repo.blobs.items()
    )


def test_snapshot_download_gets_every_byte(hub: Hub, tmp_path: Path) -> None:
    code = f"""
from huggingface_hub import snapshot_download
snapshot_download("acme/tiny-hybrid", local_dir={str(tmp_path / "out")!r}, token="hf_secret")
"""
    done = run(hub, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(hub, tmp_path / "out")
    assert hub.stats()["auth_leaks"] == 0


def test_hf_download_command(hub: Hub, tmp_path: Path) -> None:
    hf = Path(sys.executable).with_name("hf")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    out = tmp_path / "out"
    done = subprocess.run(
        [str(hf), "download", "acme/tiny-hybrid", "--local-dir", str(out)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert same(hub, out)


def test_a_short_body_is_resumed_by_the_real_client(hub: Hub, tmp_path: Path) -> None:
    hub.faults([{"where": "cdn", "match": "00002", "do": "truncate", "after": 0.5, "times": 1}])
    code = f"""
from huggingface_hub import snapshot_download
snapshot_download("acme/tiny-hybrid", local_dir={str(tmp_path / "out")!r})
"""
    done = run(hub, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert same(hub, tmp_path / "out")


def test_metadata_calls(hub: Hub, tmp_path: Path) -> None:
    code = """
from huggingface_hub import HfApi
api = HfApi()
info = api.model_info("acme/tiny-hybrid", files_metadata=True)
rows = {f.path: f for f in api.list_repo_tree("acme/tiny-hybrid", info.sha, recursive=True)}
for s in info.siblings:
    assert rows[s.rfilename].size == s.size, s
    assert rows[s.rfilename].blob_id == s.blob_id, s
    if s.rfilename.endswith(".safetensors"):
        assert s.lfs.sha256 == rows[s.rfilename].lfs.sha256
api.auth_check("acme/tiny-hybrid")
print(info.sha)
"""
    done = run(hub, code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == hub.repo.commit


@pytest.mark.parametrize(
    ("repo", "revision", "error"),
    [
        ("acme/none", "main", "RepositoryNotFoundError"),
        ("acme/tiny-hybrid", "v9", "RevisionNotFoundError"),
    ],
)
def test_named_errors(hub: Hub, tmp_path: Path, repo: str, revision: str, error: str) -> None:
    code = f"""
from huggingface_hub import HfApi
HfApi().model_info({repo!r}, revision={revision!r})
"""
    done = run(hub, code, tmp_path)
    assert done.returncode == 1
    assert error in done.stderr


def test_a_gated_repository(hub: Hub, tmp_path: Path) -> None:
    hub.shared.set["token"] = "hf_good"
    code = """
import sys
from huggingface_hub import HfApi
HfApi(token=sys.argv[1] if len(sys.argv) > 1 else None).auth_check("acme/tiny-hybrid")
"""
    bad = run(hub, code, tmp_path)
    assert "GatedRepoError" in bad.stderr
    good = run(
        hub, code.replace("sys.argv[1] if len(sys.argv) > 1 else None", "'hf_good'"), tmp_path
    )
    assert good.returncode == 0, good.stderr
