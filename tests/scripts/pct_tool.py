"""`pct` of a test host: pct_tool.py ROOT WORDS...; the lab's pct, with containers as marks in ROOT.

ROOT/running/ID marks a running container; ROOT/devices lists host nodes (PATH MAJOR MINOR); what
ROOT/broken says is why a start fails.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LAB = Path(__file__).resolve().parents[2] / "docker" / "host" / "lab"


def main(root: Path, words: list[str]) -> None:
    """One command; ends as pct does."""
    sys.path.insert(0, str(LAB))
    ct: Any = ModuleType("ct")
    sys.modules["ct"] = ct
    import ctconf
    import ctdisk
    import pct

    def mark(vmid: str) -> Path:
        return root / "running" / vmid

    def device(value: str) -> tuple[str, Any, dict[str, str]]:
        path, options = ctconf.device_value(value)
        known = dict(
            (line.split()[0], line.split()[1:])
            for line in (root / "devices").read_text().splitlines()
        )
        if path not in known:
            ctconf.die(f"Device {path} does not exist", 2)
        major, minor = (int(number) for number in known[path])
        node = SimpleNamespace(st_mode=stat.S_IFCHR, st_rdev=os.makedev(major, minor))
        return path, node, options

    def start(vmid: str, conf: Any) -> None:
        if (root / "broken").exists():
            text = (root / "broken").read_text().strip()
            ctconf.die(f"{text}\nstartup for container '{vmid}' failed")
        mark(vmid).touch()

    def attach(vmid: str, words: list[str], env: dict[str, str]) -> None:
        os.execvpe(words[0], words, {**env, "PATH": os.environ["PATH"]})

    ct.running = lambda vmid: mark(vmid).exists()
    ct.init_pid = lambda vmid: 1 if mark(vmid).exists() else None
    ct.device, ct.start, ct.attach = device, start, attach
    ct.plug = lambda base, value: device(value)
    ct.kill = lambda vmid: mark(vmid).unlink()
    ct.shut_down = lambda vmid, seconds, force: mark(vmid).unlink()
    ctconf.CONF, ctconf.LOCKS = str(root / "etc/pve/lxc"), str(root / "locks")
    ctdisk.LXC, ctdisk.VZ = str(root / "lxc"), str(root / "vz")
    os.getuid = lambda: 0
    with (root / "calls").open("a") as file:
        file.write(" ".join(words) + "\n")
    pct.main(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
