"""What the machine says of itself: GPU, driver, memory in use, who uses it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

QUERY = "pci.bus_id,name,driver_version,memory.total,memory.used,compute_cap"


@dataclass(frozen=True)
class Gpu:
    """A GPU; memory in MiB."""

    address: str
    name: str
    driver: str
    total_mib: int
    capability: str


def smi(*words: str) -> str:
    """nvidia-smi's answer. Raises CalledProcessError with its own code."""
    done = subprocess.run(
        ["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def gpus() -> list[Gpu]:
    """All GPUs, as nvidia-smi lists them. Raises RuntimeError when there is none."""
    rows = smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits").splitlines()
    found = []
    for row in rows:
        bus, name, driver, total, _, capability = (part.strip() for part in row.split(","))
        found.append(Gpu(bus.lower()[-12:], name, driver, int(total), capability))
    if not found:
        raise RuntimeError("nvidia-smi lists no GPU")
    return found


def used_mib(index: int = 0) -> int:
    """Memory in use now on the GPU of this index."""
    rows = smi("--query-gpu=memory.used", "--format=csv,noheader,nounits").splitlines()
    return int(rows[index])


def minor(address: str) -> int:
    """The N of /dev/nvidiaN. Raises OSError or ValueError where the driver does not tell it."""
    told = Path(f"/proc/driver/nvidia/gpus/{address}/information").read_text()
    line = next(line for line in told.splitlines() if line.startswith("Device Minor:"))
    return int(line.partition(":")[2])


def holders() -> list[str]:
    """`pid, name, MiB` of every process that nvidia-smi shows on the GPU."""
    said = smi("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    return [line.strip() for line in said.splitlines() if line.strip()]


def command_line(pid: int) -> str:
    """The title of a process, '' when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def status_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the name: state, ppid, pgrp, session, ...; [] when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def pids() -> list[int]:
    """All processes that can be seen."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def session_members(session: int) -> dict[int, str]:
    """Pid and title of every running process of a session; {} for 0, which is no launch's."""
    found: dict[int, str] = {}
    if session == 0:
        return found
    for pid in pids():
        fields = status_fields(pid)
        if fields and fields[0] not in "ZX" and int(fields[3]) == session:
            found[pid] = command_line(pid)
    return found


def leaks(secret: str) -> list[str]:
    """Processes whose command line shows `secret`."""
    return [f"pid {pid}" for pid in pids() if secret in command_line(pid)]


def facts() -> dict[str, str]:
    """For the result file; no host name, no address."""
    return {
        "kernel": platform.release().partition("-")[0],
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", "unknown"),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "uv": _first_line("uv", "--version"),
        "nvcc": _first_line("nvcc", "--version", line=-1),
        "executable": Path(sys.executable).name,
    }


def _first_line(*argv: str, line: int = 0) -> str:
    if shutil.which(argv[0]) is None:
        return "none"
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return said[line].strip() if said else "none"
