"""What the container step looks at: pct's view on the host, device nodes inside the guest.

`ContainerFacts` (host), `GuestNodes` and `CudaCheck` (guest) are public facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from deployer import gpu, pct_config, proxmox
from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import assignments
from deployer.steps.driver_facts import rooted

PCT_TIMEOUT_S = 30.0
CUDA_TIMEOUT_S = 60.0
MARK = "=== "

HOST_SCRIPT = r"""
echo "=== version"
dpkg-query -W -f '${Version}\n' pve-container 2>/dev/null
echo "=== status"
pct status "$VMID" 2>&1
echo "=== conf"
cat "$ROOT/etc/pve/lxc/$VMID.conf" 2>/dev/null && echo "=== whole"
exit 0
"""

GUEST_SCRIPT = r"""
for node in "$ROOT"/dev/nvidia*; do
  [ -e "$node" ] && stat -c '%n|%F|%t:%T' "$node"
done
exit 0
"""

# cuInit is the proof: nvidia-smi passes without a usable nvidia-uvm.
CUDA_SCRIPT = r"""
[ -c "$ROOT/dev/nvidiactl" ] || exit 0
if command -v nvidia-smi >/dev/null; then
  echo "smi $(nvidia-smi -L >/dev/null 2>&1; echo $?)"
fi
if [ -c "$ROOT/dev/nvidia-uvm" ] && command -v python3 >/dev/null; then
  python3 -c 'import ctypes
try:
    print("cuinit", ctypes.CDLL("libcuda.so.1").cuInit(0))
except (OSError, AttributeError) as error:
    print("nocuda", error)' 2>/dev/null
fi
exit 0
"""


@dataclass(frozen=True)
class ContainerFacts:
    """pct's view. `status` is running|stopped|'' (then `status_text` says why)."""

    status: str = ""
    status_text: str = ""
    conf: str | None = None
    """The whole conf file; None when it does not exist or could not be read to its end."""
    version: tuple[int, ...] = ()
    """pve-container; () when unknown."""
    timed_out: bool = False

    @property
    def exists(self) -> bool:
        """There is a container of this id on this node."""
        return self.conf is not None

    def config(self) -> pct_config.PctConfig:
        """The conf, parsed."""
        return pct_config.parse_conf(self.conf or "")


@dataclass(frozen=True)
class GuestNodes:
    """NVIDIA nodes below the guest's /dev, by path."""

    nodes: tuple[gpu.Node, ...] = ()
    timed_out: bool = False

    def node(self, path: str) -> gpu.Node:
        """What lies at `path` in the guest."""
        return next((node for node in self.nodes if node.path == path), gpu.Node(path, "missing"))


@dataclass(frozen=True)
class CudaCheck:
    """Whether the driver works in the guest; None: it could not be tried."""

    smi_exit: int | None = None
    cu_init: int | None = None
    """CUresult of cuInit(0); 0 is success, 999 mostly a wrong nvidia-uvm."""
    timed_out: bool = False


def parse_container(output: ProbeOutput) -> ContainerFacts:
    """The answer of HOST_SCRIPT."""
    text = output.text
    head, _, conf = text.partition(f"{MARK}conf\n")
    version, _, status = head.partition(f"{MARK}status\n")
    status_text = status.strip()
    word = next(
        (line.split(":", 1)[1].strip() for line in status.splitlines() if _is_status(line)), ""
    )
    whole = conf.removesuffix("\n").endswith(f"{MARK}whole")
    body = conf.removesuffix("\n").removesuffix(f"{MARK}whole")
    return ContainerFacts(
        status=word,
        status_text=status_text,
        conf=body if whole else None,
        version=proxmox.package_version(version.removeprefix(f"{MARK}version\n")),
        timed_out=output.timed_out,
    )


def _is_status(line: str) -> bool:
    return line.startswith("status: ")


def parse_nodes(output: ProbeOutput, root: str = "") -> GuestNodes:
    """The answer of GUEST_SCRIPT."""
    lines = [line.removeprefix(root) for line in output.text.splitlines()]
    return GuestNodes(tuple(gpu.parse_nodes(lines).values()), output.timed_out)


def parse_cuda(output: ProbeOutput) -> CudaCheck:
    """The answer of CUDA_SCRIPT."""
    smi: int | None = None
    cuda: int | None = None
    for line in output.text.splitlines():
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            smi = int(value) if key == "smi" else smi
            cuda = int(value) if key == "cuinit" else cuda
    return CudaCheck(smi, cuda, output.timed_out)


def probes(vmid: int, root: str = "") -> list[Probe]:
    """Of the host and the guest."""
    host = assignments({"VMID": str(vmid)}) + rooted(HOST_SCRIPT, root)
    parse_guest = partial(parse_nodes, root=root)
    return [
        Probe("container.pct", Where.HOST, host, parse_container, PCT_TIMEOUT_S),
        Probe("container.nodes", Where.GUEST, rooted(GUEST_SCRIPT, root), parse_guest),
        Probe(
            "container.cuda",
            Where.GUEST,
            rooted(CUDA_SCRIPT, root),
            parse_cuda,
            CUDA_TIMEOUT_S,
        ),
    ]
