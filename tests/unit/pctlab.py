"""The lab's `pct` in this process: a folder as /etc/pve, containers that only remember their state.

docker/host/lab is held to recorded answers of the real `pct` (test_pct_cases.py); what it then says
of other files stands for the real writer.
"""

from __future__ import annotations

import importlib
import io
import os
import stat
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LAB = Path(__file__).resolve().parents[2] / "docker" / "host" / "lab"
NODE = "node1"
DEVICES = {
    "/dev/dri/renderD128": (stat.S_IFCHR, 226, 128),
    "/dev/exacc/exacc0": (stat.S_IFCHR, 240, 0),
    "/dev/exlink": (stat.S_IFCHR, 240, 0),
    "/dev/exblk": (stat.S_IFBLK, 7, 99),
    "/dev/exregular": (stat.S_IFREG, 0, 0),
    "/dev/exdir": (stat.S_IFDIR, 0, 0),
    "/dev/nvidia0": (stat.S_IFCHR, 195, 0),
    "/dev/nvidia1": (stat.S_IFCHR, 195, 1),
    "/dev/nvidiactl": (stat.S_IFCHR, 195, 255),
    "/dev/nvidia-uvm": (stat.S_IFCHR, 509, 0),
    "/dev/nvidia-uvm-tools": (stat.S_IFCHR, 509, 1),
}


@dataclass(frozen=True)
class Said:
    """What one command left."""

    exit: int
    stdout: bytes
    stderr: bytes


@dataclass
class PctLab:
    """A host with `pct`; `running` are the vmids of running containers."""

    root: Path
    modules: dict[str, ModuleType]
    running: set[str] = field(default_factory=set)
    plugged: list[str] = field(default_factory=list)
    devices: dict[str, tuple[int, int, int]] = field(default_factory=lambda: dict(DEVICES))
    broken: str = ""
    """What a start fails with."""

    @property
    def folder(self) -> Path:
        """/etc/pve/lxc."""
        return self.root / "etc/pve/lxc"

    def conf(self, vmid: str = "101") -> Path:
        """The configuration of a container."""
        return self.folder / f"{vmid}.conf"

    def run(self, *words: str) -> Said:
        """`pct WORDS`."""
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        code = 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                self.modules["pct"].main(list(words))
            except SystemExit as ended:
                code = int(ended.code or 0)
            out.flush()
        said = [stream.buffer.getvalue() for stream in (out, err)]  # type: ignore[attr-defined]
        return Said(code, *said)

    def rewritten(self, text: bytes, vmid: str = "101") -> bytes:
        """What the next write of pct makes of a file."""
        ctconf = self.modules["ctconf"]
        conf = ctconf.parse(vmid, text.decode("latin-1"), told=False)
        written: str = conf.text()
        return written.encode("latin-1")


_LAB: list[PctLab] = []
"""The lab of the test that runs."""


def _device(value: str) -> tuple[str, Any, dict[str, str]]:
    lab = _LAB[-1]
    die = lab.modules["ctconf"].die
    path, options = lab.modules["ctconf"].device_value(value)
    if path not in lab.devices:
        die(f"Device {path} does not exist", 2)
    kind, major, minor = lab.devices[path]
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        die(f"{path} is not a device")
    return path, SimpleNamespace(st_mode=kind, st_rdev=os.makedev(major, minor)), options


def _start(vmid: str, conf: Any) -> None:
    lab = _LAB[-1]
    if lab.broken:
        lab.modules["ctconf"].die(f"{lab.broken}\nstartup for container '{vmid}' failed")
    lab.running.add(vmid)


def _shut_down(vmid: str, seconds: float, force: bool) -> None:
    lab = _LAB[-1]
    if lab.broken and not force:
        lab.modules["ctconf"].die("container did not stop")
    lab.running.discard(vmid)


@cache
def _modules() -> dict[str, ModuleType]:
    """The lab's modules, with containers that only remember whether they run."""
    ct: Any = ModuleType("ct")
    ct.running = lambda vmid: vmid in _LAB[-1].running
    ct.init_pid = lambda vmid: 4711 if vmid in _LAB[-1].running else None
    ct.plug = lambda root, value: _LAB[-1].plugged.append(value)
    ct.kill = lambda vmid: _LAB[-1].running.discard(vmid)
    ct.enter_argv = lambda vmid: []
    ct.device, ct.start, ct.shut_down = _device, _start, _shut_down
    names = (
        "ctschema",
        "ctraw",
        "ctformat",
        "ctconf",
        "ctdisk",
        "pctargs",
        "pctset",
        "pctsnap",
        "pctsnap",
        "pct",
    )
    kept = {name: sys.modules.pop(name, None) for name in ("ct", *names)}
    sys.path.insert(0, str(LAB))
    sys.modules["ct"] = ct
    try:
        return {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(LAB))
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def load_lab(monkeypatch: pytest.MonkeyPatch, root: Path) -> PctLab:
    """The lab's `pct` with its folders below `root`, as root of the node NODE."""
    modules = _modules()
    lab = PctLab(root, modules)
    lab.folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(modules["ctconf"], "CONF", str(lab.folder))
    monkeypatch.setattr(modules["ctconf"], "LOCKS", str(root / "locks"))
    monkeypatch.setattr(modules["ctdisk"], "LXC", str(root / "lxc"))
    monkeypatch.setattr(modules["ctdisk"], "VZ", str(root / "vz"))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=NODE))
    monkeypatch.setattr(sys.modules[__name__], "_LAB", [lab])
    return lab


def argv_of(command: str) -> list[str]:
    """The words of one shell command, as bash expands them."""
    script = f"set -- {command}\nprintf '%s\\0' \"$@\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
