"""Which files make a model, and whether they are all there. Pure: no network, no library.

A manifest is pinned to one commit; every file has a size and a hash, so that what lies on the
target can be judged without asking the Hub again.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from deployer.errors import DeployError
from deployer.state import Manifest, ManifestFile

INDEX = "model.safetensors.index.json"
SERVED = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.py",
    "*.spm",
    "*.tiktoken",
    "*.txt",
    "*.vocab",
)
"""fnmatch patterns of what a server reads: weights, config, tokenizer, templates, model code."""
LONGEST_NAME = 230
"""Bytes of one name: `.part.map` and a temporary ending must fit into the 255 of a file system."""


class HubError(DeployError):
    """Base of everything that stands between us and a file list."""


class UnsafeFileName(HubError):
    """The Hub lists a name that would leave the model's folder or break a line."""


class CollidingFileNames(HubError):
    """Two names of the list cannot both be files: twins, or one is the folder of another."""


class NoWeights(HubError):
    """The repository has no safetensors files that are not ignored."""


class IncompleteRepository(HubError):
    """The weight index names files that the repository, or our choice of it, lacks."""


@dataclass(frozen=True)
class HubFile:
    """One row of the Hub's list. `sha256` for LFS files, else only `blob_id` (git)."""

    path: str
    size: int
    sha256: str = ""
    blob_id: str = ""


def unsafe(path: str) -> str:
    """Why `path` must not be written below a folder; '' when it is fine."""
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if not path.isprintable():
        return "has control characters"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "leaves its folder"
    if len(path.encode()) > 1000 or any(len(p.encode()) > LONGEST_NAME for p in path.split("/")):
        return "is too long"
    return ""


def check_names(paths: Iterable[str]) -> None:
    """Raises UnsafeFileName or CollidingFileNames unless all can be files below one folder."""
    seen: set[str] = set()
    folders: dict[str, str] = {}
    for path in paths:
        if why := unsafe(path):
            raise UnsafeFileName(
                f"the Hub lists a file whose name {why}: {path!r}",
                fix="do not use this repository, or add the name to model.ignore",
            )
        if path in seen:
            raise CollidingFileNames(
                f"the Hub lists {path} twice", fix="check the endpoint: a Hub lists a name once"
            )
        seen.add(path)
        folders.update({"/".join(path.split("/")[:n]): path for n in range(1, path.count("/") + 1)})
    if both := sorted(seen & folders.keys()):
        raise CollidingFileNames(
            f"the Hub lists {both[0]} as a file and {folders[both[0]]} below it",
            fix="do not use this repository, or add one of the names to model.ignore",
        )


def choose_files(files: Iterable[HubFile], ignore: Sequence[str]) -> list[HubFile]:
    """The files to fetch, sorted by path: what a server reads, minus `ignore` (fnmatch).

    Nothing in a hidden folder is chosen: no server reads it, and `.deployer` is ours.
    Raises UnsafeFileName, CollidingFileNames and NoWeights.
    """
    chosen = []
    for file in files:
        name = posixpath.basename(file.path)
        if not any(fnmatchcase(name, pattern) for pattern in SERVED):
            continue
        if any(fnmatchcase(file.path, p) or fnmatchcase(name, p) for p in ignore):
            continue
        hidden = any(part.startswith(".") for part in file.path.split("/")[:-1])
        if hidden and not unsafe(file.path):
            continue
        chosen.append(file)
    check_names(file.path for file in chosen)
    if not any(file.path.endswith(".safetensors") for file in chosen):
        raise NoWeights(
            "no safetensors file is left to fetch",
            fix="choose a repository with safetensors weights, or shorten model.ignore",
        )
    return sorted(chosen, key=lambda file: file.path)


def manifest_from_info(repo: str, asked: str, info: Any, ignore: Sequence[str]) -> Manifest:
    """The manifest of a `ModelInfo` that was asked for with file metadata.

    Raises HubError when it has no commit, or a file has no size or no hash.
    """
    commit = str(getattr(info, "sha", None) or "")
    if len(commit) != 40 or not all(c in "0123456789abcdef" for c in commit):
        raise HubError(f"the Hub names no commit for {repo} at {asked}", fix="check the endpoint")
    rows: list[HubFile] = []
    for sibling in getattr(info, "siblings", None) or []:
        lfs = getattr(sibling, "lfs", None)
        size = lfs.size if lfs is not None else getattr(sibling, "size", None)
        rows.append(
            HubFile(
                path=str(sibling.rfilename),
                size=-1 if size is None else int(size),
                sha256=str(lfs.sha256 or "") if lfs is not None else "",
                blob_id=str(getattr(sibling, "blob_id", None) or ""),
            )
        )
    chosen = choose_files(rows, ignore)
    for file in chosen:
        if file.size < 0 or not (file.sha256 or file.blob_id):
            raise HubError(
                f"the Hub gives no size or hash for {file.path}",
                fix="check the endpoint: a mirror may leave out file metadata",
            )
    return Manifest(
        repo=repo,
        asked=asked,
        commit=commit,
        files=[
            ManifestFile(path=f.path, size=f.size, sha256=f.sha256, blob_id=f.blob_id)
            for f in chosen
        ],
    )


def index_complete(index_json: str | bytes, files: Iterable[str]) -> tuple[str, ...]:
    """The shards that the index names and `files` lacks, sorted; () when complete.

    Raises IncompleteRepository when the text is not a weight index at all.
    """
    try:
        shards = {str(name) for name in json.loads(index_json)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IncompleteRepository(
            f"{INDEX} is not a weight index ({error})", fix="check the repository"
        ) from error
    return tuple(sorted(shards - set(files)))


LONGEST_LIST = 256
"""Entries kept of a list in a config: layers have fewer, lists of unquantised modules have more."""


def short_config(text: str) -> str:
    """A config.json for the state file: compact, long lists cut; '' when it is no JSON object."""
    try:
        config = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(config, dict):
        return ""
    # Names of classes for labels: up to megabytes, and nothing that a plan needs.
    kept = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    return json.dumps(_cut(kept), separators=(",", ":"))


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_cut(one) for one in value[:LONGEST_LIST]]
    return value
