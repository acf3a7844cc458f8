"""The hash record: what was checked, and how the file looked then."""

# Paths are plain strings here: the file's names are bytes of a protocol, not of this machine.
# ruff: noqa: PTH118, PTH123

from __future__ import annotations

import json
import os
import threading
from typing import Any

from deployer.agents.fetch.common import log, replace_file
from deployer.agents.fetch.manifest import File


class Record:
    """`.deployer/verified.json`: what was hashed, and how the file looked then."""

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, ".deployer", "verified.json")
        self.lock = threading.Lock()
        self.files: dict[str, dict[str, Any]] = {}
        try:
            with open(self.path, encoding="utf-8") as stream:
                rows = json.load(stream)["files"]
            self.files = {str(k): dict(v) for k, v in rows.items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log(f"{self.path} is unreadable ({error}): all files are hashed again")

    def holds(self, file: File, facts: os.stat_result) -> bool:
        """True when the file was verified and has not been touched since."""
        row = self.files.get(file.path, {})
        if (row.get("size"), row.get("mtime_ns")) != (facts.st_size, facts.st_mtime_ns):
            return False
        if facts.st_size != file.size:
            return False
        if file.sha256:
            return bool(row.get("sha256") == file.sha256)
        return bool(row.get("blob_id") == file.blob_id)

    def drop(self, file: File) -> None:
        """Forgets a file that is wrong."""
        with self.lock:
            if self.files.pop(file.path, None) is not None:
                self._save()

    def _save(self) -> None:
        replace_file(self.path, json.dumps({"version": 1, "files": self.files}, indent=1))

    def add(self, file: File, facts: os.stat_result, sha256: str) -> None:
        row = {
            "size": facts.st_size,
            "mtime_ns": facts.st_mtime_ns,
            "sha256": sha256,
            "blob_id": file.blob_id,
        }
        with self.lock:
            self.files[file.path] = row
            self._save()
