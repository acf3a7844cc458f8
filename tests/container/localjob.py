"""One download job on this machine, run as the target runs it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
from hub import Hub

from deployer.agents.bundle import fetch_agent

VENV = str(Path(sys.prefix))


class LocalJob:
    """`manifest` may be changed between two runs. `env` is the job's environment."""

    def __init__(self, folder: Path, hub: Hub, **manifest: Any) -> None:
        self.folder, self.root, self.hub = folder / "job", folder / "model", hub
        self.folder.mkdir(parents=True)
        self.home = folder / "home"
        self.home.mkdir()
        self.env = {"HOME": str(self.home)}
        rows = [
            {
                "path": path,
                "size": blob.size,
                "sha256": blob.sha256 if blob.lfs else "",
                "blob_id": blob.oid,
            }
            for path, blob in hub.repo.blobs.items()
        ]
        self.manifest: dict[str, Any] = {
            "repo": hub.repo.name,
            "commit": hub.repo.commit,
            "path": str(self.root),
            "files": rows,
            "endpoint": hub.url,
            **manifest,
        }

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(row["size"] for row in self.manifest["files"])

    @property
    def biggest(self) -> str:
        """The path of the largest shard."""
        return str(max(self.manifest["files"], key=lambda row: row["size"])["path"])

    def start(self) -> subprocess.Popen[str]:
        """The supervisor; its log goes to the job's `log`."""
        (self.folder / "fetch.pyz").write_bytes(fetch_agent())
        (self.folder / "manifest.json").write_text(json.dumps(self.manifest))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "fetch.pyz"],
                cwd=self.folder,
                env={**kept, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )

    def run(self, limit_s: float = 120.0) -> int:
        """To the end; the exit code."""
        process = self.start()
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(timeout=10)
            raise

    @property
    def log(self) -> str:
        """All that was logged."""
        return (self.folder / "log").read_text()

    def progress(self) -> dict[str, Any]:
        """The last progress line, {} before there is one."""
        try:
            row: dict[str, Any] = json.loads((self.folder / "progress").read_text())
        except FileNotFoundError:
            return {}
        return row

    def wait_until(
        self,
        process: subprocess.Popen[str],
        seen: Callable[[], bool],
        limit_s: float = 60.0,
    ) -> None:
        """Returns once `seen`; raises when the supervisor ends before."""
        ends = time.monotonic() + limit_s
        while not seen():
            if process.poll() is not None:
                raise AssertionError(f"ended with {process.returncode}:\n{self.log}")
            if time.monotonic() > ends:
                process.kill()
                raise AssertionError(f"not seen within {limit_s} s:\n{self.log}")
            time.sleep(0.01)

    def unfinished_bytes(self) -> int:
        """What partial files hold, wherever."""
        found = [*self.root.rglob("*.part"), *self.root.rglob("*.incomplete")]
        found += [p for p in (self.root / ".deployer" / "incoming").rglob("*") if p.is_file()]
        return sum(p.stat().st_size for p in found if p.exists())

    def verified(self) -> bool:
        """Every file under its name with the right bytes, and nothing else but our own folder."""
        names = {row["path"] for row in self.manifest["files"]}
        there = {
            str(p.relative_to(self.root))
            for p in self.root.rglob("*")
            if p.is_file() and ".deployer" not in p.parts
        }
        return names == there and all(
            hashlib.sha256((self.root / name).read_bytes()).hexdigest() == blob.sha256
            for name, blob in self.hub.repo.blobs.items()
        )


def kill(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    """Signals and reaps it."""
    process.send_signal(number)
    process.wait(timeout=10)
