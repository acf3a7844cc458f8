"""`torch.cuda` of the stand-in.

A GPU is usable when its node is a character device with NVIDIA's numbers, nvidiactl and nvidia-uvm
are there too, libcuda's cuInit succeeds and nvidia-smi answers. SGLANG_LOOKALIKE_DEV names another
/dev, where no libcuda is asked (tests).
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass

NVIDIA_MAJOR, CONTROL_MINOR = 195, 255
QUERY = "index,name,memory.total,memory.used,compute_cap"
SMI_TIMEOUT_S = 20.0
UNEXPECTED = {
    803: "system has unsupported display driver / cuda driver combination",
    999: "unknown error",
}
_found: list[Gpu] = []


@dataclass(frozen=True)
class Gpu:
    """One usable GPU; memory in MiB. `minor` is the number in /dev/nvidiaN."""

    minor: int
    name: str
    total_mib: int
    used_mib: int
    capability: tuple[int, int]


def dev_root() -> str:
    return os.environ.get("SGLANG_LOOKALIKE_DEV", "/dev")


def _numbers(name: str) -> tuple[int, int] | None:
    """(major, minor) of a character device, or None."""
    try:
        found = os.stat(os.path.join(dev_root(), name))
    except OSError:
        return None
    if not stat.S_ISCHR(found.st_mode):
        return None
    return os.major(found.st_rdev), os.minor(found.st_rdev)


def _node_minors() -> list[int]:
    """Minors of the GPU nodes; empty when the control or uvm node is missing or wrong."""
    if _numbers("nvidiactl") != (NVIDIA_MAJOR, CONTROL_MINOR):
        return []
    uvm = _numbers("nvidia-uvm")
    if uvm is None or uvm[1] != 0:
        return []
    try:
        names = os.listdir(dev_root())
    except OSError:
        return []
    minors = sorted(int(m[1]) for n in names if (m := re.fullmatch(r"nvidia(\d+)", n)))
    return [n for n in minors if _numbers(f"nvidia{n}") == (NVIDIA_MAJOR, n)]


def _smi(fields: str) -> list[list[str]] | None:
    """Rows of an nvidia-smi query; None when it is missing, fails or hangs."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    argv = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return [[part.strip() for part in line.split(",")] for line in lines]


def gpus() -> list[Gpu]:
    """The usable GPUs, in the order of CUDA_VISIBLE_DEVICES; as found by the first success."""
    if not _found:
        _found.extend(look())
    return list(_found)


def look() -> list[Gpu]:
    """The same, looked up anew: `used_mib` is of this moment."""
    minors = _node_minors()
    if not minors or _driver_error() != 0:
        return []
    rows = _smi(QUERY)
    if rows is None:
        # An older nvidia-smi does not know compute_cap.
        rows = _smi("index,name,memory.total,memory.used")
    if not rows:
        return []
    found = []
    for minor, row in zip(minors, rows, strict=False):  # a GPU without a node is not usable
        cap = re.fullmatch(r"(\d+)\.(\d+)", row[4]) if len(row) > 4 else None
        capability = (int(cap[1]), int(cap[2])) if cap else (8, 6)
        total, used = (int(float(v)) if v[:1].isdigit() else 0 for v in row[2:4])
        found.append(Gpu(minor, row[1], total or 49140, used, capability))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen: list[Gpu] = []
    for part in visible.split(","):
        if not part.strip().isdigit() or int(part) >= len(found):
            break  # CUDA stops at the first index it does not know
        chosen.append(found[int(part)])
    return chosen


def _driver_error() -> int | None:
    """What cuInit of the installed libcuda says (0 is good); None when there is no libcuda."""
    if "SGLANG_LOOKALIKE_DEV" in os.environ:
        return 0
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except (OSError, AttributeError):
        return None


def _lazy_init() -> None:
    """Raises RuntimeError as CUDA's initialisation does."""
    if gpus():
        return
    error = _driver_error()
    if error is None:
        raise RuntimeError(
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
            "installed a driver from http://www.nvidia.com/Download/index.aspx"
        )
    if error in UNEXPECTED:
        raise RuntimeError(
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
            "calling NumCudaDevices() that might have already set an error? Error "
            f"{error}: {UNEXPECTED[error]}"
        )
    raise RuntimeError("No CUDA GPUs are available")


def is_available() -> bool:
    return bool(gpus())


def device_count() -> int:
    return len(gpus())


def _gpu(index: int | None) -> Gpu:
    _lazy_init()
    found = gpus()
    if (index or 0) >= len(found):
        from torch import AcceleratorError

        raise AcceleratorError("CUDA error: invalid device ordinal")
    return found[index or 0]


def get_device_name(index: int | None = None) -> str:
    return _gpu(index).name


def get_device_capability(index: int | None = None) -> tuple[int, int]:
    return _gpu(index).capability


def mem_get_info(index: int | None = None) -> tuple[int, int]:
    """(free, total) bytes."""
    _gpu(index)
    gpu = look()[index or 0]
    return (gpu.total_mib - gpu.used_mib) << 20, gpu.total_mib << 20


def get_arch_list() -> list[str]:
    return ["sm_80", "sm_86", "sm_90", "sm_120"] if is_available() else []


def init() -> None:
    _lazy_init()


def synchronize(index: int | None = None) -> None:
    _gpu(index)


def set_device(index: int) -> None:
    _gpu(index)
