"""Whether CUDA starts where the model runs: cuInit of libcuda.so.1 itself, not nvidia-smi.

nvidia-smi passes without a usable /dev/nvidia-uvm, and says nothing about CUDA. The probe needs a
Python (the system's, else the engine's), no package. It calls cuInit only when the module is loaded
and the nodes are devices of the right numbers, and in a way that changes nothing (`harmless`).
`CudaProof` is the public fact.

Names and causes: cuda.h (CUresult); 0, 100 and 999 as an H200 with driver 580.159.04 answered with
good, missing and stale nodes; 803 from public reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deployer.model import Probe, ProbeOutput, Where
from deployer.nvidia_texts import Cause
from deployer.shell import assignments
from deployer.steps.harmless import HARMLESS

TIMEOUT_S = 45.0
"""A first cuInit without persistence starts every GPU: some seconds each."""

PYTHON = r"""
import ctypes, sys
try:
    cuda = ctypes.CDLL(sys.argv[1])
    code = cuda.cuInit(0)
except (OSError, AttributeError) as error:
    print("nolibrary", str(error).replace("\n", " "))
    sys.exit(0)
name = ctypes.c_char_p()
try:
    cuda.cuGetErrorName(code, ctypes.byref(name))
except AttributeError:
    pass
print("cuinit", code, (name.value or b"").decode("ascii", "replace"))
if code == 0:
    count, version = ctypes.c_int(-1), ctypes.c_int(0)
    if cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        print("devices", count.value)
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        print("cuda", version.value)
"""

SCRIPT = (
    HARMLESS
    + r"""
closed() {
  # The error of opening a node tells a cgroup rule from a file mode from a driver that is gone.
  # Only nodes of a driver that is there: opening another makes the kernel look for its module.
  [ -r "$ROOT/proc/driver/nvidia/version" ] && [ -c "$ROOT/dev/nvidiactl" ] || return 0
  for node in "$ROOT"/dev/nvidia[0-9]* "$ROOT"/dev/nvidiactl "$ROOT"/dev/nvidia-uvm \
    "$ROOT"/dev/nvidia-uvm-tools; do
    [ -c "$node" ] || continue
    major=$(stat -c %t "$node")
    case $majors in *" $((0x$major)) nvidia"*) ;; *) continue ;; esac
    said=$( (: <>"$node") 2>&1) || printf 'open %s|%s\n' "${node#"$ROOT"}" "$said"
  done
}
skip() { echo "skip $1"; closed; exit 0; }
majors= right=
[ -r "$ROOT/proc/devices" ] && while read -r major name; do
  majors="$majors $major $name"
  [ "$name" != nvidia-uvm ] || right=$major
done <"$ROOT/proc/devices"
[ -r "$ROOT/proc/driver/nvidia/version" ] || skip 'the nvidia module is not loaded'
for node in nvidiactl nvidia-uvm; do
  [ -c "$ROOT/dev/$node" ] || skip "/dev/$node is no device here"
done
here=$(stat -c %t "$ROOT/dev/nvidia-uvm")
here=$((0x$here))
[ -z "$right" ] || [ "$right" = "$here" ] || { echo "stale $here $right"; closed; exit 0; }
python=
for one in python3 "$VENV/bin/python" /opt/deployer/uv/python/*/bin/python3; do
  python=$(command -v "$one" 2>/dev/null) && break
done
[ -n "$python" ] || skip 'there is no Python to ask CUDA with'
answer=$(cannot_harm "$python" -I -S -c "$CODE" libcuda.so.1)
status=$?
[ "$status" -ne 125 ] || skip 'there is no way to ask CUDA here without side effects'
printf '%s\n' "$answer"
case $answer in "cuinit 0"*) ;; *) closed ;; esac
exit "$status"
"""
)

NAMES: dict[int, str] = {
    0: "CUDA_SUCCESS",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    34: "CUDA_ERROR_STUB_LIBRARY",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    100: "CUDA_ERROR_NO_DEVICE",
    101: "CUDA_ERROR_INVALID_DEVICE",
    304: "CUDA_ERROR_OPERATING_SYSTEM",
    800: "CUDA_ERROR_NOT_PERMITTED",
    802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
    999: "CUDA_ERROR_UNKNOWN",
}

CAUSES: dict[int, Cause] = {
    34: Cause(
        "cuda-stub",
        "libcuda.so.1 is the toolkit's stub, not the driver's library",
        "take the stubs folder out of the library path, install the driver's libraries",
    ),
    46: Cause(
        "cuda-busy",
        "a GPU is taken exclusively by another process, or is in prohibited mode",
        "end that process, or set its compute mode back (`nvidia-smi -c 0` on {host})",
    ),
    100: Cause(
        "cuda-no-device",
        "CUDA sees no GPU: no /dev/nvidiaN here can be opened, or CUDA_VISIBLE_DEVICES hides them",
        "compare /dev/nvidia* here with those of {host}, by type and numbers",
    ),
    304: Cause(
        "cuda-system",
        "the operating system refused a call of CUDA: mostly the cgroup blocks a node",
        "compare the allowed devices of the container with /proc/devices on {host}",
    ),
    800: Cause("cuda-permission", "the nodes may not be opened", "open them to this user"),
    802: Cause(
        "cuda-not-ready",
        "the GPUs are not ready: on NVSwitch machines the fabric manager does not run",
        "start nvidia-fabricmanager of the driver's version on {host}",
    ),
    803: Cause(
        "cuda-mismatch",
        "library and kernel module have different versions",
        "install the libraries of exactly the loaded module here",
    ),
    804: Cause(
        "cuda-compat",
        "a forward-compatibility libcuda (cuda-compat) is used on a GPU that has none",
        "take cuda-compat out of the library path",
    ),
    999: Cause(
        "cuda-unknown",
        "/dev/nvidia-uvm cannot be used: mostly its major number here is not that of the host, or "
        "the container may not open it",
        "restart the container, so that its devices are made anew; then compare /dev/nvidia-uvm "
        "here with /proc/devices of {host}",
    ),
}


@dataclass(frozen=True)
class CudaProof:
    """cuInit(0) where the model runs. `code` None: it was not called, `skipped` says why.

    `devices`: GPUs that CUDA sees; `cuda`: its version as (13, 0), () when unknown; `library`: why
    libcuda.so.1 cannot be loaded; `stale`: major of /dev/nvidia-uvm here and the right one (cuInit
    would answer 999).
    """

    code: int | None = None
    name: str = ""
    devices: int | None = None
    cuda: tuple[int, ...] = ()
    skipped: str = ""
    library: str = ""
    stale: tuple[int, int] | None = None
    timed_out: bool = False
    refused: tuple[tuple[str, str], ...] = ()
    """Nodes that cannot be opened and why; looked at only when CUDA does not start."""

    @property
    def good(self) -> bool:
        """CUDA started and sees a GPU."""
        return self.code == 0 and self.devices != 0

    @property
    def cause(self) -> Cause | None:
        """What is wrong; None when it is good or was not tried."""
        if self.timed_out:
            return Cause(
                "cuda-hangs",
                "cuInit gave no answer in time: a GPU or its driver is stuck",
                "look for `Xid` in `dmesg` on {host}; such a GPU needs a host reboot",
            )
        if self.library:
            return Cause(
                "cuda-library",
                f"libcuda.so.1 cannot be loaded: {self.library}",
                "install the libraries of exactly the loaded module here",
            )
        if self.stale is not None:
            here, right = self.stale
            return Cause(
                "cuda-stale-uvm",
                f"/dev/nvidia-uvm has major {here} here, the module has {right}: CUDA would answer "
                "999 (CUDA_ERROR_UNKNOWN)",
                CAUSES[999].action,
            )
        if self.code is None or self.good:
            return None
        if self.code == 0:
            return CAUSES[100]
        known = CAUSES.get(self.code)
        return known or Cause(
            "cuda-failed", "CUDA does not start", "look at `dmesg` on {host} for NVRM or Xid lines"
        )

    def describe(self) -> str:
        """`cuInit answers 999 (CUDA_ERROR_UNKNOWN): cause`; '' when there is nothing to say."""
        cause = self.cause
        if cause is None:
            return ""
        if self.code is None:
            return cause.cause
        return f"cuInit answers {self.code} ({self.name or 'no name'}): {cause.cause}"


def parse(output: ProbeOutput) -> CudaProof:
    """The answer of SCRIPT; a process that died without a word is told by its status."""
    if output.timed_out:
        return CudaProof(timed_out=True)
    rows: dict[str, str] = {}
    refused = []
    for line in output.text.splitlines():
        key, _, value = line.partition(" ")
        rows.setdefault(key, value.strip())
        if key == "open":
            path, _, said = value.partition("|")
            refused.append((path, said.rpartition(": ")[2].strip()))
    return replace(_answer(rows, output), refused=tuple(refused))


def _answer(rows: dict[str, str], output: ProbeOutput) -> CudaProof:
    if "nolibrary" in rows:
        return CudaProof(library=rows["nolibrary"][:300])
    code, _, name = rows.get("cuinit", "").partition(" ")
    if code.lstrip("-").isdigit():
        number = int(code)
        devices, version = rows.get("devices", ""), rows.get("cuda", "")
        return CudaProof(
            code=number,
            name=name or NAMES.get(number, ""),
            devices=int(devices) if devices.isdigit() else None,
            cuda=(int(version) // 1000, int(version) % 1000 // 10) if version.isdigit() else (),
        )
    if "skip" in rows:
        return CudaProof(skipped=rows["skip"])
    here, _, right = rows.get("stale", "").partition(" ")
    if here.isdigit() and right.isdigit():
        return CudaProof(stale=(int(here), int(right)))
    said = output.error_text.strip().splitlines()
    last = said[-1][:200] if said else "no word"
    return CudaProof(skipped=f"asking CUDA ended with {output.exit}: {last}")


def probe(where: Where, venv: str = "", root: str = "") -> Probe:
    """Of where the model runs; `venv`: the engine's environment, used when there is no python3."""
    values = {"ROOT": root, "CODE": PYTHON, "VENV": venv}
    return Probe("driver.cuda", where, assignments(values) + SCRIPT, parse, TIMEOUT_S)
