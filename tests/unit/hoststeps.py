"""What the tests of the host steps share: a deployment, a tree that stands for a host, shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deployer.deployment import Deployment
from deployer.events import Bus
from deployer.inventory import Host
from deployer.model import Facts, ProbeOutput, Where
from deployer.playbook import Playbook
from deployer.remote.transport import Answer
from deployer.state import DeploymentState
from deployer.steps.base import StepContext

ROOT = Path(__file__).parents[2]
SHELLS = [
    shell for shell in (["dash"], ["busybox", "sh"], ["bash", "--posix"]) if shutil.which(shell[0])
]
A, B = "0000:21:00.0", "0000:41:00.0"
BOOT_ID = "6f1d3c0a-1111-4222-8333-444455556666"
PACKAGE = {"file": "/srv/NVIDIA.run", "sha256": "a" * 64}


def deployment(
    *, vmid: int | None = 129, restart: str = "allowed", **playbook: Mapping[str, Any]
) -> Deployment:
    """The sample deployment, with sections of its playbook updated."""
    document = yaml.safe_load((ROOT / "playbooks" / "qwen3.6-27b.yaml").read_text())
    for section, values in playbook.items():
        document[section].update(values)
    hosts = yaml.safe_load((ROOT / "inventory" / "kpro5.yaml").read_text())["hosts"]
    hosts["kpro5"]["containers"][129]["restart"] = restart
    hosts["kpro5"]["deployments"]["qwen"]["container"] = vmid
    host = Host.model_validate(hosts["kpro5"])
    return Deployment(
        "kpro5", "qwen", host, host.deployments["qwen"], Playbook.model_validate(document), "q", ""
    )


def facts(*values: object, silent: str = "") -> Facts:
    """Facts keyed by type."""
    quiet = {Where.GUEST: silent} if silent else {}
    return Facts({type(value): value for value in values}, quiet)


def run_script(
    script: str, shell: list[str], path: Path | None = None, timeout: float = 30.0
) -> subprocess.CompletedProcess[bytes]:
    """Runs `script` as a target would; `path` comes first in PATH."""
    search = os.environ["PATH"] if path is None else f"{path}:{os.environ['PATH']}"
    return subprocess.run(
        [*shell, "-c", script],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        env={"LC_ALL": "C", "PATH": search},
        check=False,
    )


def output(done: subprocess.CompletedProcess[bytes]) -> ProbeOutput:
    """As a probe's answer."""
    return ProbeOutput(done.returncode, done.stdout, done.stderr)


def tool(folder: Path, name: str, script: str) -> None:
    """An executable of `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n" + script)
    (folder / name).chmod(0o755)


def write(path: Path, text: str) -> None:
    """A file and its parents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Tree:
    """A host's sysfs, procfs and /dev below a folder, with two GPUs and their audio functions."""

    def __init__(self, root: Path, driver: str = "vfio-pci") -> None:
        self.root = root
        self.pci = root / "sys/bus/pci"
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        for name in ("vfio-pci", "nvidia"):
            (self.pci / "drivers" / name).mkdir(parents=True)
        for slot, group in (("0000:21:00", "14"), ("0000:41:00", "27")):
            for function, kind, device in (
                ("0", "0x030000", "0x2230"),
                ("1", "0x040300", "0x1aef"),
            ):
                address = f"{slot}.{function}"
                folder = self.pci / "devices" / address
                for name, text in (
                    ("vendor", "0x10de"),
                    ("device", device),
                    ("class", kind),
                    ("driver_override", "(null)"),
                ):
                    write(folder / name, text + "\n")
                members = root / "sys/kernel/iommu_groups" / group / "devices"
                members.mkdir(parents=True, exist_ok=True)
                (members / address).symlink_to(folder)
                (folder / "iommu_group").symlink_to(members.parent)
                self.bind(address, driver if function == "0" else "vfio-pci")
        write(root / "proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n")
        write(root / "proc/sys/kernel/random/boot_id", BOOT_ID + "\n")
        write(root / "proc/cmdline", "quiet vfio-pci.ids=10de:2230 iommu=pt\n")
        (root / "dev").mkdir()
        if driver == "nvidia":
            self.load()

    def bind(self, address: str, driver: str) -> None:
        """Sets the driver link and what /proc then says."""
        device, folder = self.pci / "devices" / address, self.pci / "drivers" / driver
        folder.mkdir(exist_ok=True)
        (device / "driver").symlink_to(folder)
        (folder / address).symlink_to(device)
        if driver == "nvidia":
            minor = 0 if address == A else 1
            write(
                self.root / f"proc/driver/nvidia/gpus/{address}/information",
                f"Model: \t\t NVIDIA RTX A6000\nDevice Minor: \t {minor}\n",
            )

    def unbind(self, address: str) -> None:
        """Takes the links away."""
        if driver := self.driver(address):
            (self.pci / "drivers" / driver / address).unlink()
        (self.pci / "devices" / address / "driver").unlink(missing_ok=True)

    def driver(self, address: str) -> str:
        """What is bound."""
        link = self.pci / "devices" / address / "driver"
        return link.readlink().name if link.is_symlink() else ""

    def override(self, address: str) -> str:
        """driver_override."""
        return (self.pci / "devices" / address / "driver_override").read_text().strip()

    def load(self, version: str = "580.126.09") -> None:
        """The nvidia and nvidia_uvm modules are there."""
        for module in ("nvidia", "nvidia_uvm"):
            write(self.root / f"sys/module/{module}/version", version + "\n")
        nvrm = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release\n"
        write(self.root / "proc/driver/nvidia/version", nvrm + "GCC version:  gcc\n")
        write(
            self.root / "proc/devices",
            "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n509 nvidia-uvm\n\nBlock:\n",
        )

    def process(self, pid: int, comm: str, opens: str, cgroup: str, cmdline: str = "") -> None:
        """A process with one open file."""
        write(self.root / f"proc/{pid}/comm", comm + "\n")
        write(self.root / f"proc/{pid}/cmdline", cmdline.replace(" ", "\0"))
        write(self.root / f"proc/{pid}/cgroup", f"0::{cgroup}\n")
        fd = self.root / f"proc/{pid}/fd/7"
        fd.parent.mkdir()
        fd.symlink_to(opens)

    def fifo(self, name: str, react: Any) -> None:
        """`name` below sys/bus/pci is a FIFO; `react(address)` is called for each line written."""
        path = self.pci / name
        os.mkfifo(path)
        # Opened for both, so that the reader neither blocks nor sees an end.
        descriptor = os.open(path, os.O_RDWR)

        def serve() -> None:
            with os.fdopen(descriptor, "r+b", buffering=0) as pipe:
                while not self._stop.is_set():
                    line = pipe.readline().decode().strip()
                    if line and not self._stop.is_set():
                        react(line)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self._threads.append(thread)


class Door:
    """A transport that records scripts and answers from a list, then with success."""

    def __init__(
        self, name: str = "kpro5", answers: list[Answer | Exception] | None = None
    ) -> None:
        self.name = name
        self.scripts: list[str] = []
        self.answers = list(answers or [])

    def run(self, script: str, **_: Any) -> Answer:
        self.scripts.append(script)
        answer = self.answers.pop(0) if self.answers else Answer(0, b"", b"")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Nothing to close."""


def context(want: Deployment, door: Door, reprobe: Any = None) -> StepContext:
    """A context whose two targets are `door`."""
    return StepContext(
        want=want,
        run_id="r",
        bus=Bus(),
        transports={Where.HOST: door, Where.GUEST: door},
        reprobe=reprobe or (lambda: Facts()),
        state=DeploymentState(),
        save=lambda: None,
    )
