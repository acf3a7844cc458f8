"""What the gpus step looks at on the host, in one probe that opens nothing which could hang.

`driver_override` and `uevent` are never read: during a stuck unbind such a read hangs and cannot be
killed. Links, ids and /proc texts are safe. `GpuFacts` is the public fact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from deployer import gpu, proxmox
from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import words
from deployer.steps.driver_facts import rooted

TIMEOUT_S = 20.0

SCRIPT = r"""
pci=$ROOT/sys/bus/pci/devices
echo "node $(uname -n)"
for address in "$@"; do
  device=$pci/$address
  if [ ! -d "$device" ]; then echo "absent $address"; continue; fi
  driver=$(readlink "$device/driver") || driver=
  group=$(readlink "$device/iommu_group") || group=
  echo "gpu $address $(cat "$device/vendor") $(cat "$device/device") $(cat "$device/class")" \
    "${driver##*/}"
  [ -z "$group" ] || echo "group $address ${group##*/}"
  for member in "$device"/iommu_group/devices/*; do
    [ -e "$member" ] || [ -L "$member" ] || continue
    [ -d "$member/pci_bus" ] && continue
    driver=$(readlink "$pci/${member##*/}/driver") || driver=
    echo "member $address ${member##*/} ${driver##*/}"
  done
  for vfio in "$device"/vfio-dev/vfio*; do
    [ -e "$vfio" ] && echo "vfiodev $address ${vfio##*/}"
  done
  information=$ROOT/proc/driver/nvidia/gpus/$address/information
  [ -r "$information" ] && sed -n "s/^Device Minor:.*/minor $address &/p" "$information"
done
for module in nvidia nvidia_uvm vfio_pci; do
  [ -d "$ROOT/sys/module/$module" ] && echo "module $module"
done
sed -n 's/^ *\([0-9][0-9]*\) \(nvidia[a-z-]*\)$/major \1 \2/p' "$ROOT/proc/devices" 2>/dev/null
for node in "$ROOT"/dev/nvidia*; do
  [ -e "$node" ] && stat -c 'devnode %n|%F|%t:%T' "$node"
done
scan() { printf '%s\n' "$ROOT"/proc/[0-9]*/fd/*; }
# By link text for vfio; by device number for nvidia, since a container's node has its own inode.
opened=$(
  scan | xargs ls -ld 2>/dev/null |
    sed -n 's,^.*/proc/\([0-9]*\)/fd/[0-9]* -> \(.*vfio.*\)$,open \1 \2,p'
  scan | xargs stat -L -c '%F|%t:%T|%n' 2>/dev/null |
    sed -n 's,^character special file|c3:\([0-9a-f]*\)|.*/proc/\([0-9]*\)/fd/.*$,nvfd \2 \1,p'
)
printf '%s\n' "$opened"
for pid in $(printf '%s\n' "$opened" | sed -n 's/^[a-z]* \([0-9]*\) .*/\1/p' | sort -u); do
  [ -r "$ROOT/proc/$pid/comm" ] || continue
  echo "comm $pid $(cat "$ROOT/proc/$pid/comm")"
  echo "cmd $pid $(tr '\0\n' '  ' <"$ROOT/proc/$pid/cmdline")"
  [ -r "$ROOT/proc/$pid/cgroup" ] && sed "s/^/cgroup $pid /" "$ROOT/proc/$pid/cgroup"
done
for file in "$ROOT"/run/qemu-server/*.pid; do
  [ -r "$file" ] || continue
  pid=$(cat "$file")
  [ -n "$pid" ] && [ -d "$ROOT/proc/$pid" ] || continue
  vmid=${file##*/}
  echo "vm ${vmid%.pid} $pid"
done
for file in "$ROOT"/etc/pve/qemu-server/*.conf; do
  [ -r "$file" ] || continue
  vmid=${file##*/}
  sed -n -e '/^\[/q' -e "/^hostpci/s/^/conf ${vmid%.conf} /p" \
    -e "/^onboot:/s/^/conf ${vmid%.conf} /p" -e "/^name:/s/^/conf ${vmid%.conf} /p" "$file"
done
[ -r "$ROOT/etc/pve/mapping/pci.cfg" ] && sed 's/^/mapping /' "$ROOT/etc/pve/mapping/pci.cfg"
for file in "$ROOT"/etc/modprobe.d/*.conf "$ROOT/etc/modules" \
  "$ROOT"/etc/modules-load.d/*.conf; do
  [ -f "$file" ] && grep -n -i -e vfio -e nvidia "$file" /dev/null |
    sed "s,^$ROOT,," | sed -n 's,^\([^:]*\):\([0-9]*\):,boot \1:\2 ,p'
done
for file in "$ROOT"/etc/driverctl.d/*; do
  [ -f "$file" ] && echo "boot ${file#"$ROOT"}:1 $(head -n 1 "$file")"
done
tr ' ' '\n' <"$ROOT/proc/cmdline" 2>/dev/null |
  sed -n -e '/vfio-pci/s,^,boot /proc/cmdline:1 ,p' -e '/blacklist=/s,^,boot /proc/cmdline:1 ,p'
for file in "$ROOT"/usr/local/sbin/deployer-gpus \
  "$ROOT"/etc/systemd/system/deployer-gpus-*.service; do
  [ -f "$file" ] && echo "ours ${file#"$ROOT"} $(sha256sum <"$file" | cut -d ' ' -f 1)"
done
for link in "$ROOT"/etc/systemd/system/multi-user.target.wants/deployer-gpus-*.service; do
  [ -L "$link" ] && echo "enabled ${link##*/}"
done
exit 0
"""


@dataclass(frozen=True)
class PciFunction:
    """One wanted PCI function. `driver` '' means none is bound; `minor` only under nvidia."""

    address: str
    present: bool = False
    vendor: str = ""
    device: str = ""
    pci_class: str = ""
    driver: str = ""
    group: str = ""
    members: tuple[tuple[str, str], ...] = ()
    """Other functions of the IOMMU group and their drivers; bridges are left out."""
    minor: int | None = None

    @property
    def is_nvidia_gpu(self) -> bool:
        """Vendor 10de and a display class (0300 VGA, 0302 3D)."""
        return self.vendor == "0x10de" and self.pci_class[:6] in ("0x0300", "0x0302")

    @property
    def id(self) -> str:
        """`10de:2230`."""
        return f"{self.vendor[2:]}:{self.device[2:]}"


@dataclass(frozen=True)
class Holder:
    """A process with a GPU open. `vm` / `container`: whose it is, None when of the host."""

    pid: int
    process: str
    vm: int | None = None
    container: int | None = None

    def __str__(self) -> str:
        if self.vm is not None:
            return f"pid {self.pid} ({self.process}) of VM {self.vm}"
        if self.container is not None:
            return f"pid {self.pid} ({self.process}) of container {self.container}"
        return f"pid {self.pid} ({self.process})"


@dataclass(frozen=True)
class GpuFacts:
    """The wanted GPUs and everything around them that decides what may be done."""

    functions: tuple[PciFunction, ...] = ()
    modules: tuple[str, ...] = ()
    majors: tuple[tuple[str, int], ...] = ()
    """/proc/devices: name and character major."""
    nodes: tuple[gpu.Node, ...] = ()
    holders: tuple[tuple[str, Holder], ...] = ()
    """PCI address and who has it open, through vfio or through /dev/nvidiaN."""
    claims: tuple[proxmox.Claim, ...] = ()
    boot: tuple[proxmox.BootSource, ...] = ()
    ours: tuple[tuple[str, str], ...] = ()
    """Boot files of this tool: path and sha256."""
    enabled: tuple[str, ...] = ()
    """Boot units of this tool that are enabled."""
    timed_out: bool = False

    def node(self, path: str) -> gpu.Node:
        """What lies at `path` on the host."""
        return next((node for node in self.nodes if node.path == path), gpu.Node(path, "missing"))

    def held_by(self, address: str) -> tuple[Holder, ...]:
        """Who has this GPU open."""
        return tuple(holder for held, holder in self.holders if held == address)

    def needed(self) -> tuple[str, ...]:
        """The nodes that the wanted GPUs need; those of GPUs without a minor are left out."""
        minors = [one.minor for one in self.functions if one.minor is not None]
        return gpu.needed_nodes(minors)

    def wrong_nodes(self) -> tuple[str, ...]:
        """Needed nodes that are missing on the host, no device, or of a stale major."""
        return tuple(path for path in self.needed() if not self._right(self.node(path)))

    def _right(self, node: gpu.Node) -> bool:
        name = PurePosixPath(node.path).name
        majors = dict(self.majors)
        if name in gpu.UVM_NODES:
            expected = majors.get("nvidia-uvm", node.major)
            return node.is_char and node.major == expected
        return node.is_char and node.major == gpu.NVIDIA_MAJOR

    @property
    def ready(self) -> bool:
        """Every wanted GPU is on nvidia, its minor is known and all nodes are right."""
        bound = all(one.driver == "nvidia" and one.minor is not None for one in self.functions)
        return bool(self.functions) and bound and not self.wrong_nodes()


class _Lines:
    """The answer's lines by their first word."""

    def __init__(self, text: str) -> None:
        self._found: dict[str, list[str]] = defaultdict(list)
        for line in text.splitlines():
            key, _, rest = line.partition(" ")
            self._found[key].append(rest)

    def fields(self, key: str, count: int) -> Iterable[list[str]]:
        """The lines of `key` in exactly `count` fields, the last with the rest of the line."""
        for rest in self._found[key]:
            parts = rest.split(" ", count - 1)
            yield parts + [""] * (count - len(parts))

    def plain(self, key: str) -> list[str]:
        """The lines of `key` as they are."""
        return list(self._found[key])


def parse(output: ProbeOutput, addresses: Sequence[str], root: str = "") -> GpuFacts:
    """The answer of SCRIPT."""
    lines = _Lines(output.text)
    functions = tuple(_function(lines, address) for address in addresses)
    node_name = (lines.plain("node") or [""])[0].split(".")[0]
    mappings = proxmox.parse_mappings("\n".join(lines.plain("mapping")), node_name)
    conf = [(int(vmid), line) for vmid, line in lines.fields("conf", 2) if vmid.isdigit()]
    running = [int(vmid) for vmid, _ in lines.fields("vm", 2) if vmid.isdigit()]
    nodes = gpu.parse_nodes([line.removeprefix(root) for line in lines.plain("devnode")])
    return GpuFacts(
        functions=functions,
        modules=tuple(lines.plain("module")),
        majors=tuple((name, int(number)) for number, name in lines.fields("major", 2)),
        nodes=tuple(nodes.values()),
        holders=_holders(lines, functions),
        claims=proxmox.parse_claims(conf, mappings, running),
        boot=tuple(
            proxmox.BootSource(place, text.strip())
            for place, text in lines.fields("boot", 2)
            if not text.lstrip().startswith("#") and "/deployer-" not in place
        ),
        ours=tuple((path, digest) for path, digest in lines.fields("ours", 2)),
        enabled=tuple(lines.plain("enabled")),
        timed_out=output.timed_out,
    )


def _function(lines: _Lines, address: str) -> PciFunction:
    found = [row for row in lines.fields("gpu", 5) if row[0] == address]
    if not found:
        return PciFunction(address)
    _, vendor, device, pci_class, driver = found[0]
    minors = [
        gpu.device_minor(text) for owner, text in lines.fields("minor", 2) if owner == address
    ]
    return PciFunction(
        address,
        True,
        vendor,
        device,
        pci_class,
        driver.strip(),
        next((group for owner, group in lines.fields("group", 2) if owner == address), ""),
        tuple(
            (member, driver)
            for owner, member, driver in lines.fields("member", 3)
            if owner == address and member != address
        ),
        minors[0] if minors and driver.strip() == "nvidia" else None,
    )


def _holders(lines: _Lines, functions: Sequence[PciFunction]) -> tuple[tuple[str, Holder], ...]:
    by_path = {f"/dev/vfio/{one.group}": one.address for one in functions if one.group}
    for owner, name in lines.fields("vfiodev", 2):
        by_path[f"/dev/vfio/devices/{name}"] = owner
    by_minor = {one.minor: one.address for one in functions if one.minor is not None}
    held: dict[tuple[str, int], None] = {}
    for pid, path in lines.fields("open", 2):
        if path in by_path:
            held[by_path[path], int(pid)] = None
    for pid, minor in lines.fields("nvfd", 2):
        if (address := by_minor.get(int(minor or "0", 16))) is not None:
            held[address, int(pid)] = None
    return tuple((address, _who(lines, pid)) for address, pid in held)


def _who(lines: _Lines, pid: int) -> Holder:
    def of(key: str) -> str:
        return "\n".join(rest for owner, rest in lines.fields(key, 2) if owner == str(pid))

    vm = next((int(vmid) for vmid, owner in lines.fields("vm", 2) if owner == str(pid)), None)
    return Holder(
        pid,
        of("comm") or "?",
        vm if vm is not None else proxmox.vm_of(of("cmd")),
        proxmox.container_of(of("cgroup")),
    )


def probe(addresses: Sequence[str], root: str = "") -> Probe:
    """Of the host. The answer is complete without root, but holders are then not all seen."""
    script = rooted(f"set -- {words(addresses)}\n{SCRIPT}", root)
    parser = partial(parse, addresses=tuple(addresses), root=root)
    return Probe("gpus", Where.HOST, script, parser, TIMEOUT_S)
