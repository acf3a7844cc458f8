"""What the controller asks for: the job and its files."""

from __future__ import annotations

from typing import Any

from deployer.agents.fetch.common import safe_name

LIMITS: dict[str, float] = {
    "recv_timeout_s": 20.0,
    "slow_bytes_per_s": 32 * 1024,
    "slow_window_s": 30.0,
    "idle_tries": 6,  # tries in a row that bring nothing
    "tries": 200,  # of one file
    "backoff_s": 1.0,
    "max_backoff_s": 30.0,
    "max_pause_s": 300.0,
}


class File:
    """One file of the manifest."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.path = str(row["path"])
        self.size = int(row["size"])
        self.sha256 = str(row.get("sha256") or "")
        self.blob_id = str(row.get("blob_id") or "")
        if not safe_name(self.path) or self.size < 0 or self.path.split("/")[0] == ".deployer":
            raise ValueError(f"unsafe file in the manifest: {self.path!r}")
        if not (self.sha256 or self.blob_id):
            raise ValueError(f"no hash in the manifest: {self.path!r}")
