"""The methods of a job: their order, their environments, and why one cannot be used."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

from deployer.agents.fetch import methods
from deployer.agents.fetch.manifest import Job
from deployer.agents.fetch.methods import Method, hf_environment, ladder, version_of

FILE = {"path": "a", "size": 1, "sha256": "0" * 64}
PEER = {"address": "h", "user": "u", "port": 22, "path": "/p"}


def job(**changes: object) -> Job:
    base = {"repo": "a/b", "commit": "c", "path": "/models/a", "files": [FILE]}
    return Job.parse({**base, "endpoint": "https://hub", **changes})


def rungs(given: Job, token: str = "hf_secret") -> dict[str, Method]:
    return {one.name: one for one in ladder(given, token, {"PATH": "/bin", "HF_TOKEN": "old"})}


def test_the_order_is_the_jobs_and_every_mirror_is_a_method() -> None:
    mirrors = ["https://m1", "https://m2"]
    found = rungs(job(methods=["mirror", "peer", "range"], mirrors=mirrors, peer=PEER))
    assert list(found) == ["mirror https://m1", "mirror https://m2", "peer", "range"]
    assert found["mirror https://m2"].words[-2:] == ["range", "https://m2"]
    assert found["range"].words[-1] == "range"


def test_the_token_goes_to_the_jobs_own_endpoint_only_and_never_to_a_command_line() -> None:
    found = rungs(job(mirrors=["https://m1"], peer=PEER, venv="/v"))
    with_token = {name for name, one in found.items() if "HF_TOKEN" in one.environ}
    assert with_token == {"range", "hf-xet"}
    assert {found[name].environ["HF_TOKEN"] for name in with_token} == {"hf_secret"}
    assert not any("hf_secret" in word for one in found.values() for word in one.words)
    assert not any("HF_TOKEN" in one.environ for one in rungs(job(venv="/v"), "").values())


def test_what_another_source_lacks_says_nothing_of_the_hub() -> None:
    found = rungs(job(mirrors=["https://m1"], peer=PEER))
    assert {11, 12, 10} <= found["mirror https://m1"].passing
    assert {11, 12, 10} <= found["peer"].passing
    assert not found["range"].passing and not found["hf-xet"].passing


def test_what_is_not_configured() -> None:
    found = rungs(job())
    assert found["mirror"].obstacle() == "none is configured"
    assert found["peer"].obstacle() == "none is configured"
    assert found["hf-xet"].obstacle() == "no venv is configured"
    assert found["range"].obstacle() == ""


def test_tools_that_the_peer_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    found = rungs(job(peer=PEER))
    assert found["peer"].obstacle() == "rsync not installed on this machine"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A venv without any package."""
    folder = tmp_path_factory.mktemp("engine") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


def install(engine: Path, name: str, version: str) -> None:
    """What the metadata of an installed package looks like."""
    (site,) = engine.glob("lib/python*/site-packages")
    for old in site.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    if version:
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )


@pytest.mark.parametrize(
    ("hub", "xet", "why"),
    [
        ("", "", "huggingface_hub is not installed in {venv}"),
        ("1.18.0", "", "hf_xet is not installed in {venv}"),
        ("1.18.0", "1.5.1", "hf_xet 1.5.1 in {venv} is older than 1.5.2"),
        ("1.18.0", "1.10.0", ""),
        ("0.36.2", "1.5.2", ""),
        ("2.4.0", "2.0.0rc1", ""),
    ],
)
def test_versions_in_the_venv(engine: Path, hub: str, xet: str, why: str) -> None:
    install(engine, "huggingface_hub", hub)
    install(engine, "hf_xet", xet)
    found = rungs(job(venv=str(engine)))
    assert found["hf-xet"].obstacle() == why.format(venv=engine)


def test_a_venv_that_is_not_there_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rungs(job(venv="/none"))["hf-xet"].obstacle() == "/none/bin/python is not there"
    limited = rungs(job(venv="/none", limits={"bwlimit_bytes_per_s": 1e6}))["hf-xet"]
    assert limited.obstacle() == "it cannot be held to bwlimit_bytes_per_s"
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'libpython is gone' >&2\nexit 127\n")
    python.chmod(0o755)
    why = rungs(job(venv=str(tmp_path)))["hf-xet"].obstacle()
    assert why == f"{python} ended with 127: libpython is gone"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(methods, "ASK_VENV_S", 0.2)
    assert "did not answer in" in rungs(job(venv=str(tmp_path)))["hf-xet"].obstacle()


def test_nothing_of_the_users_own_settings_reaches_huggingface_hub() -> None:
    users = {
        "HOME": "/root",
        "HF_HOME": "/root/.cache/huggingface",
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "https://elsewhere",
        "HUGGING_FACE_HUB_TOKEN": "hf_other",
        "PYTHONPATH": "/x",
        "HF_TOKEN": "hf_job",
    }
    found = hf_environment(job(proxy="http://p:1", ca_bundle="/ca.pem"), users)
    assert found["HF_ENDPOINT"] == "https://hub"
    assert found["HF_TOKEN"] == "hf_job"
    assert found["HF_HOME"] == "/models/a/.deployer/hf/home"
    assert {"HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "PYTHONPATH"}.isdisjoint(found)
    assert found["HF_XET_CLIENT_READ_TIMEOUT"] == "30s"
    assert found["HTTPS_PROXY"] == "http://p:1" and found["SSL_CERT_FILE"] == "/ca.pem"
    assert "HTTPS_PROXY" not in hf_environment(job(), {})


@pytest.mark.parametrize(
    ("text", "version"),
    [("1.8.0", (1, 8, 0)), ("1.10.0rc1", (1, 10, 0)), ("2", (2,)), ("unknown", ())],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_the_agent_runs_itself() -> None:
    words = methods.agent("settle")
    assert words[:3] == [sys.executable, "-I", "-S"] and words[-1] == "settle"
    assert Path(words[3]).is_absolute()
