"""`deploy up HOST --only shards` at a bare target, and an independent look at what it brought."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import yaml
from lab import INVENTORY, Result, run
from target import RECEIVE_BUFFER, Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker" / "hub"))
from hub import Hub

HOST = "bare"
DEPLOYMENT = "tiny"
MODEL = "/srv/models/tiny-hybrid"
JOB = f"/var/lib/deployer/jobs/shards-{DEPLOYMENT}"
PROGRAM = str(Path(sys.executable).parent / "deploy")
CONNECTIONS = 4
SEND_BUFFER = 64 * 1024
IN_FLIGHT = 2 * SEND_BUFFER + RECEIVE_BUFFER
"""Most bytes of one connection that the hub has sent and a dying client has not read.

Linux doubles SO_SNDBUF. Measured with a stopped agent: 254 KiB a connection; with the kernel's own
limits it was 1.5 to 3 MB. An agent that reads leaves one block of the hub.
"""
SUMS = (
    'cd "$1" && find . -path ./.deployer -prune -o -path ./.cache -prune -o -type f -print0 |'
    + (" xargs -0 -r sha256sum")
)


def bound_buffers(hub: Hub) -> None:
    """Connections that the hub accepts from now on get a send buffer of a known size."""
    for server in hub.servers:
        server.socket.setsockopt(SOL_SOCKET, SO_SNDBUF, SEND_BUFFER)


def sent(hub: Hub, target: Target) -> int:
    """Bytes of files that the hub has sent to a target; what the controller got is left out."""
    clients: dict[str, int] = hub.stats(log=False)["clients"]
    return sum(clients.get(address, 0) for address in target.addresses)


class Project:
    """Inventory, playbook and state of one target, in a folder of their own."""

    def __init__(
        self, folder: Path, target: Target, hub: Hub, download: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        (folder / "inventory").mkdir(parents=True)
        shutil.copytree(INVENTORY.parent / "playbooks", folder / "playbooks")
        ssh = {
            "address": "127.0.0.1",
            "port": target.port,
            "user": "root",
            "identity_file": str(target.user_key),
            "known_hosts": str(target.known_hosts),
            "connect_timeout_s": 10,
        }
        host = {
            "kind": "plain",
            "ssh": ssh,
            "gpus": [{"address": "0000:21:00.0"}],
            "deployments": {DEPLOYMENT: {"playbook": "tiny-hybrid"}},
        }
        self._write("inventory/bare.yaml", {"hosts": {HOST: host}})
        playbook = yaml.safe_load((folder / "playbooks/tiny-hybrid.yaml").read_text("utf-8"))
        playbook["model"]["path"] = MODEL
        playbook["download"] = {
            "endpoint": hub.url,
            "connections": CONNECTIONS,
            "margin_bytes": 1_000_000,
            **(download or {}),
        }
        self._write("playbooks/tiny-hybrid.yaml", playbook)

    def _write(self, name: str, document: Any) -> None:
        text = yaml.safe_dump(document, sort_keys=False)
        (self.folder / name).write_text(text, encoding="utf-8")

    def up(self) -> Up:
        """Starts the download."""
        return Up(self.folder)

    def doctor(self, *words: str) -> Result:
        """`deploy doctor HOST WORDS`, to its end."""
        argv = [PROGRAM, "-i", str(self.folder / "inventory"), "doctor", HOST, *words]
        return run(argv, NO_COLOR="1", NO_PROXY="*")

    def manifest(self) -> list[dict[str, Any]]:
        """The pinned file list."""
        text = (self.folder / f".deploy/state/{HOST}.json").read_text(encoding="utf-8")
        files: list[dict[str, Any]] = json.loads(text)["deployments"][DEPLOYMENT]["manifest"][
            "files"
        ]
        return files


class Up:
    """A started `deploy up --only shards --yes`; what it says goes to a file."""

    def __init__(self, folder: Path) -> None:
        words = ["-i", str(folder / "inventory"), "up", HOST, "--only", "shards", "--yes"]
        self.log = folder / f"up-{len(list(folder.glob('up-*')))}.log"
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1", "NO_PROXY": "*"},
            )

    @property
    def alive(self) -> bool:
        """Does it still run?"""
        return self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL to the process itself, and to nothing that it started."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def end(self, timeout_s: float = 90) -> Result:
        """Waits for its end; one that is not over by then is killed and named."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"`deploy up` runs for {timeout_s:g} s:\n{self.said}") from None
        return Result(code, self.said, "")

    @property
    def said(self) -> str:
        """All that it has said."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def wrongs(target: Target, project: Project, hub: Hub) -> list[str]:
    """What is wrong in the model's folder, by sha256sum and find; nothing of ours is asked."""
    found = {}
    for line in target.sh(SUMS, MODEL).ok().out.splitlines():
        digest, name = line.split(maxsplit=1)
        found[name.removeprefix("./")] = digest
    blobs = hub.repo.blobs
    wanted = {row["path"] for row in project.manifest()}
    shards = {name for name in blobs if name.endswith(".safetensors")}
    told = [f"{name} is not in the manifest" for name in sorted(shards - wanted)]
    told += [f"{name} is missing" for name in sorted(wanted - set(found))]
    told += [f"{name} is left behind" for name in sorted(set(found) - set(blobs))]
    told += [
        f"{name} has {digest}, not {blobs[name].sha256}"
        for name, digest in sorted(found.items())
        if name in blobs and digest != blobs[name].sha256
    ]
    return told
