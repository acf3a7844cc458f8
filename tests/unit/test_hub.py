"""File lists and access errors of the Hub, without a Hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployer import hub
from deployer.hub_manifest import (
    HubError,
    HubFile,
    IncompleteRepository,
    NoWeights,
    UnsafeFileName,
    choose_files,
    index_complete,
    manifest_from_info,
)
from deployer.playbook import Playbook

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "hub"
IGNORE = ["*.bin", "*.pth", "*.gguf", "original/*"]
COMMIT = "a" * 40


def playbook(**model: Any) -> Playbook:
    return Playbook.model_validate(
        {
            "model": {"repo": "acme/tiny", "path": "/srv/m", "served_name": "m", **model},
            "driver": {"version": "580.1"},
            "engine": {"version": "0.5.11", "lock": "l.txt", "venv": "/opt/v"},
        }
    )


def info(name: str) -> SimpleNamespace:
    """A recorded answer in the shape of huggingface_hub's ModelInfo."""
    raw = json.loads((FIXTURES / name).read_text())
    siblings = [
        SimpleNamespace(
            rfilename=row["rfilename"],
            size=row.get("size"),
            blob_id=row.get("blobId"),
            lfs=SimpleNamespace(**row["lfs"]) if row.get("lfs") else None,
        )
        for row in raw["siblings"]
    ]
    return SimpleNamespace(sha=raw.get("sha"), siblings=siblings)


def test_what_a_server_reads_is_chosen_and_the_rest_is_not() -> None:
    manifest = manifest_from_info("acme/tiny", "main", info("mixed-repo.json"), IGNORE)
    assert [file.path for file in manifest.files] == [
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "modeling_tiny.py",
        "tokenizer.model",
    ]
    shard = manifest.files[3]
    assert (shard.size, shard.sha256) == (3_500_000_000, "1" * 64)
    assert manifest.commit == COMMIT and manifest.asked == "main"
    assert manifest.files[1].sha256 == "" and manifest.files[1].blob_id == "c" * 40


@pytest.mark.parametrize(
    "path",
    ["../x.json", "/etc/x.json", "a/../../x.safetensors", "a//b.json", "a\nb.json", "\x1b[2J.json"],
)
def test_names_that_leave_the_folder_or_the_line_are_refused(path: str) -> None:
    files = [HubFile("model.safetensors", 1, "1" * 64), HubFile(path, 1, "", "c" * 40)]
    with pytest.raises(UnsafeFileName) as caught:
        choose_files(files, [])
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_ignore_is_by_path_and_by_name() -> None:
    files = [
        HubFile("model.safetensors", 1, "1" * 64),
        HubFile("original/w.safetensors", 1, "1" * 64),
        HubFile("sub/extra.safetensors", 1, "1" * 64),
    ]
    chosen = choose_files(files, ["original/*", "extra.*"])
    assert [file.path for file in chosen] == ["model.safetensors"]


def test_no_weights_is_said() -> None:
    with pytest.raises(NoWeights):
        choose_files([HubFile("config.json", 1), HubFile("w.bin", 9)], IGNORE)


def test_a_list_without_commit_sizes_or_hashes_is_refused() -> None:
    with pytest.raises(HubError, match="no commit"):
        manifest_from_info("a/b", "main", info("no-commit.json"), [])
    with pytest.raises(HubError, match="no size or hash"):
        manifest_from_info("a/b", "main", info("no-sizes.json"), [])


def test_an_index_is_complete_or_names_what_lacks() -> None:
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    assert index_complete(index, ["1.safetensors", "2.safetensors", "config.json"]) == ()
    assert index_complete(index, ["1.safetensors"]) == ("2.safetensors",)
    for bad in ("", "[]", "{}", '{"weight_map": []}'):
        with pytest.raises(IncompleteRepository):
            index_complete(bad, [])


def error_named(name: str, text: str = "", status: int = 0, **headers: str) -> Exception:
    """An error as the library raises it: its class is known by name."""
    kind = type(name, (OSError,), {})
    error: Any = kind(text)
    if status:
        lower = {key.replace("_", "-"): value for key, value in headers.items()}
        error.response = SimpleNamespace(status_code=status, headers=lower)
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (error_named("GatedRepoError", "x", 403), hub.AccessGated),
        (error_named("RepositoryNotFoundError", "x", 404), hub.RepositoryMissing),
        (
            error_named("RepositoryNotFoundError", "x", 404, content_type="text/html"),
            hub.EndpointWrong,
        ),
        (error_named("RevisionNotFoundError", "x", 404), hub.RevisionMissing),
        (
            error_named("HfHubHTTPError", "401: Invalid credentials in Authorization header", 401),
            hub.TokenRefused,
        ),
        (error_named("HfHubHTTPError", "no", 403), hub.TokenRefused),
        (error_named("HfHubHTTPError", "no", 404), hub.EndpointWrong),
        (error_named("HfHubHTTPError", "no", 502), hub.EndpointUnreachable),
        (error_named("ConnectError", "[Errno 111] Connection refused"), hub.EndpointUnreachable),
        (error_named("ReadTimeout", "The read operation timed out"), hub.HubSilent),
        (ValueError("Expecting value: line 1"), hub.EndpointWrong),
    ],
)
def test_each_cause_has_its_own_error_in_one_line(error: Exception, kind: type[HubError]) -> None:
    ours = hub.explain(error, playbook(), "the file list", has_token=False)
    assert type(ours) is kind
    assert "\n" not in str(ours) and ours.fix


def test_what_passes_is_tried_again_and_what_does_not_is_not() -> None:
    for status in (429, 500, 502, 503):
        assert hub.passing(error_named("HfHubHTTPError", "x", status))
    for status in (401, 403, 404):
        assert not hub.passing(error_named("HfHubHTTPError", "x", status))
    assert hub.passing(error_named("ConnectError", "refused"))
    assert not hub.passing(ValueError("x")) and not hub.passing(HubError("x"))


def test_importing_the_module_does_not_import_the_library() -> None:
    import subprocess
    import sys

    code = "import sys, deployer.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
