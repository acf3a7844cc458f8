"""What the VM lab's tests drive and look at: `deploy` as a user types it, and the host's own facts.

One inventory for all: host kpro5 with the GPUs 0000:01:00.0 and 0000:02:00.0, container 129 reached
through `pct exec`. Deployments: `one` wants the first GPU, `two` the second, `both` both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from deployer.catalog import Catalog
from deployer.events import Bus
from deployer.migrate_retire import retire
from deployer.migrate_side import Side
from deployer.model import Plan
from deployer.session import HostSession
from deployer.state_file import StateFile
from deployer.steps.gpus import GpusStep
from tests.vmlab.machine import Answer, Machine

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
VMID = 129
VERSION, OTHER_VERSION = "580.126.09", "575.57.08"
PACKAGE = "/var/lib/vz/template/cache/NVIDIA-Linux-x86_64-{}.run"
UNBIND_LIMIT_S = 4
CONF = f"/etc/pve/lxc/{VMID}.conf"

# Back to the state after boot, as far as tests change it; $1: the pristine files.
RESET = r"""
for pid in $(cat /run/lab/holders 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
rm -f /run/lab/holders /run/qemu-server/*
pct status 129 | grep -q running && pct stop 129 >/dev/null 2>&1
[ ! -e /sys/module/nvidia/parameters/stuck ] || echo 0 >/sys/module/nvidia/parameters/stuck
sleep 0.2
rm -rf /run/lab/dev/129 /etc/deployer* /var/lib/deployer /run/deployer*
umount /etc/systemd/system/multi-user.target.wants 2>/dev/null
rm -f /usr/local/sbin/deployer-* /etc/systemd/system/deployer-* \
  /etc/systemd/system/*.wants/deployer-*
cp -a "$1/etc/pve/." /etc/pve/
for folder in modprobe.d modules-load.d; do
  rm -rf "/etc/$folder"; cp -a "$1/etc/$folder" "/etc/$folder"
done
cp -a "$1/etc/modules" /etc/modules
find /etc/pve -type f | while read -r file; do [ -e "$1$file" ] || rm -f "$file"; done
guest=/var/lib/lxc/129/rootfs
if [ "$(readlink $guest/usr/lib/x86_64-linux-gnu/libcuda.so.1)" != libcuda.so.580.126.09 ]; then
  rm -f $guest/usr/lib/x86_64-linux-gnu/libcuda.so* $guest/usr/lib/x86_64-linux-gnu/libnvidia-*
  cp /var/lib/vz/template/cache/NVIDIA-Linux-x86_64-580.126.09.run $guest/root/driver.run
  chroot $guest sh /root/driver.run --silent --no-kernel-modules >/dev/null
  rm $guest/root/driver.run
fi
for address in 0000:01:00.0 0000:02:00.0; do
  device=/sys/bus/pci/devices/$address
  [ "$(basename "$(readlink "$device/driver")")" != vfio-pci ] || continue
  echo >"$device/driver_override"
  [ ! -e "$device/driver" ] || echo "$address" >"$device/driver/unbind"
done
for module in nvidia_uvm nvidia; do [ ! -e "/sys/module/$module" ] || rmmod "$module"; done
rm -f /dev/nvidia*
for address in 0000:01:00.0 0000:02:00.0; do
  device=/sys/bus/pci/devices/$address
  echo >"$device/driver_override"
  echo "$address" >/sys/bus/pci/drivers_probe
  echo "$address $(basename "$(readlink "$device/driver")")"
done
"""

# Brings functions to nvidia by hand; $@: addresses.
GIVE = r"""
for address in "$@"; do
  device=/sys/bus/pci/devices/$address
  echo nvidia >"$device/driver_override"
  echo "$address" >"$device/driver/unbind"
done
modprobe nvidia && modprobe nvidia_uvm || exit 1
flags=
for address in "$@"; do
  echo "$address" >/sys/bus/pci/drivers_probe
  file=/proc/driver/nvidia/gpus/$address/information
  flags="$flags -c $(sed -n 's/^Device Minor:[^0-9]*//p' "$file")"
done
nvidia-modprobe -u $flags
"""

# A process that holds a device as QEMU does; $1: address. `hidden`: its file sits in the queue of a
# socket, where no look at /proc finds it.
VFIO_HOLDER = r"""
import array, fcntl, os, signal, socket, struct, sys
address = sys.argv[1]
group = os.path.basename(os.readlink(f"/sys/bus/pci/devices/{address}/iommu_group"))
container = os.open("/dev/vfio/vfio", os.O_RDWR)
owner = os.open(f"/dev/vfio/{group}", os.O_RDWR)
fcntl.ioctl(owner, 0x3B68, struct.pack("i", container))  # VFIO_GROUP_SET_CONTAINER
fcntl.ioctl(container, 0x3B66, 1)  # VFIO_SET_IOMMU: type 1
device = fcntl.ioctl(owner, 0x3B6A, bytearray(address.encode() + b"\0"))  # VFIO_GROUP_GET_DEVICE_FD
if sys.argv[2:] == ["hidden"]:
    near, far = socket.socketpair()
    near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
    for fd in (device, owner, container):
        os.close(fd)
print("held", flush=True)
signal.pause()
"""
HOLD = r"""
out=/run/lab/held.$$
setsid "$@" </dev/null >"$out" 2>&1 &
holder=$!
echo "$holder" >>/run/lab/holders
until grep -q held "$out"; do
  kill -0 "$holder" 2>/dev/null || { cat "$out" >&2; exit 1; }
  sleep 0.1
done
echo "$holder"
"""


# What a failed step must leave as it was: a line for each link, node, module and file.
LISTING = r"""
cd /sys/bus/pci/devices
for address in *; do
  echo "driver $address $(readlink "$address/driver") $(cat "$address/driver_override")"
done
lsmod | sed -n 's/^\(nvidia[^ ]*\|vfio[^ ]*\) .*/module \1/p' | sort
find /dev -name 'nvidia*' -exec stat -c 'node %n %F %t:%T %a' {} + 2>/dev/null | sort
find /etc /usr/local/sbin -type l -printf 'link %p %l\n' | sort
find /etc /usr/local/sbin -type f -printf '%m ' -exec sha256sum {} \; | sort -k 3
"""


class World:
    """The machine, and a project folder with inventory and playbook."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.folder = folder
        self.changes: dict[str, dict[str, Any]] = {}
        self.container: dict[str, Any] = {"restart": "allowed"}
        self.write()

    def write(self) -> None:
        """Writes inventory and playbook anew."""
        image = self.machine.image
        host = {
            "kind": "proxmox",
            "ssh": {
                "address": "127.0.0.1",
                "port": self.machine.port,
                "user": "root",
                "identity_file": str(image.key),
                "known_hosts": str(self.machine.folder / "known_hosts"),
            },
            "gpus": [{"address": FIRST}, {"address": SECOND}],
            "containers": {VMID: self.container},
            "deployments": {
                name: {"container": VMID, "playbook": "tiny", "gpus": gpus, "port": port}
                for name, gpus, port in (
                    ("one", [FIRST], 30001),
                    ("two", [SECOND], 30002),
                    ("both", [FIRST, SECOND], 30000),
                )
            },
        }
        document = yaml.safe_load(
            (ROOT / "docker" / "playbooks" / "tiny-hybrid.yaml").read_text(encoding="utf-8")
        )
        package = PACKAGE.format(VERSION)
        document["driver"] = {
            "version": VERSION,
            "install": "guest",
            "package": {"file": package, "sha256": image.packages[package]},
        }
        document["gpus"] = {
            "rebind": "allowed",
            "persist": "report",
            "unbind_timeout_s": UNBIND_LIMIT_S,
        }
        for section, values in self.changes.items():
            document[section].update(values)
        (self.folder / "inventory").mkdir(exist_ok=True)
        (self.folder / "playbooks" / "locks").mkdir(parents=True, exist_ok=True)
        (self.folder / "playbooks" / "locks" / "lab.txt").write_text(
            (ROOT / "docker" / "playbooks" / "locks" / "lab.txt").read_text()
        )
        (self.folder / "inventory" / "kpro5.yaml").write_text(
            yaml.safe_dump({"hosts": {"kpro5": host}}, sort_keys=False)
        )
        (self.folder / "playbooks" / "tiny.yaml").write_text(
            yaml.safe_dump(document, sort_keys=False)
        )

    def playbook(self, **changes: Mapping[str, Any]) -> None:
        """Some keys of some sections changed."""
        for section, values in changes.items():
            self.changes.setdefault(section, {}).update(values)
        self.write()

    def deploy(self, *words: str, limit_s: float = 400) -> Answer:
        """`deploy -i INVENTORY WORDS`."""
        done = subprocess.run(
            self.argv(*words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            env={**os.environ, "NO_COLOR": "1"},
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def argv(self, *words: str) -> list[str]:
        """The command line of `deploy`."""
        program = str(Path(sys.executable).parent / "deploy")
        return [program, "-i", str(self.folder / "inventory"), *words]

    def up(self, name: str, step: str, *words: str, limit_s: float = 400) -> Answer:
        """`deploy up kpro5/NAME --only STEP --yes WORDS`."""
        return self.deploy("up", f"kpro5/{name}", "--only", step, "--yes", *words, limit_s=limit_s)

    def driver(self, address: str) -> str:
        """The driver that a PCI function is bound to, '' when none."""
        link = self.machine.sh('readlink "/sys/bus/pci/devices/$1/driver"', address).out
        return link.strip().rpartition("/")[2]

    def listing(self) -> list[str]:
        """Drivers, overrides, modules, nodes, links and files of the host, a line each."""
        return self.machine.sh(LISTING).ok().splitlines()

    def reset(self) -> None:
        """As after boot: both GPUs on vfio-pci, no nvidia module, container stopped."""
        said = self.machine.sh(RESET, "/run/lab/pristine", limit_s=60)
        assert said.out.split("\n")[-3:] == [f"{FIRST} vfio-pci", f"{SECOND} vfio-pci", ""], said

    # What tests do by hand, where no test is about it.

    def give(self, *addresses: str) -> None:
        """These GPUs to nvidia, with their nodes."""
        self.machine.sh(GIVE, *addresses).ok()

    def vm(self, address: str, *words: str) -> int:
        """A process that holds the device as VM 101 would; returns its pid."""
        pid = int(self.machine.sh(HOLD, "python3", "-c", VFIO_HOLDER, address, *words).ok().strip())
        if not words:
            self.machine.sh('echo "$1" >/run/qemu-server/101.pid', str(pid)).ok()
        return pid

    def hold_in_container(self, node: str) -> None:
        """A process in the container that has a node open."""
        script = 'exec 3<>"$1" && echo held && exec sleep 600'
        argv = ("lxc-attach", "-n", str(VMID), "--", "sh", "-c", script, "sh", node)
        self.machine.sh(HOLD, *argv).ok()

    def container_with(self, *lines: str) -> None:
        """Adds lines to the container's configuration and starts it."""
        text = "".join(f"{line}\n" for line in lines)
        self.machine.sh('printf %s "$1" >>"$2" && pct start 129', text, CONF).ok()

    def install_inside(self, version: str) -> None:
        """The container's driver libraries, of this version and no other."""
        self.machine.sh(
            'pct exec 129 -- sh -c "cat >/root/driver.run" <"$1" && pct exec 129 -- sh -c "$2"',
            PACKAGE.format(version),
            "rm -f /usr/lib/x86_64-linux-gnu/libcuda.so* /usr/lib/x86_64-linux-gnu/libnvidia-*;"
            " sh /root/driver.run --silent --no-kernel-modules && rm /root/driver.run",
        ).ok()

    def back_to_vfio(self, name: str) -> Plan:
        """What `deploy migrate --retire` does with the source's GPUs; here is no second host."""
        catalog = Catalog.load(self.folder / "inventory")
        [want] = catalog.select([f"kpro5/{name}"])
        with ExitStack() as stack:
            session = HostSession("kpro5", want.host, self.folder / "inventory")
            stack.callback(session.close, print)
            file = StateFile(self.folder / ".deploy" / "state", "kpro5")
            side = Side(
                want,
                session,
                file,
                file.load(),
                Bus(),
                "run-vmlab",
                {},
                lambda step: None,
                [GpusStep()],
            )
            return retire(side)

    def writers(self) -> list[str]:
        """Unbind files that a process has open."""
        return self.machine.sh(
            "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -o '/sys/.*/unbind$'; true"
        ).out.split()

    def inside(self, script: str, *args: str) -> Answer:
        """sh text in the container."""
        argv = ("pct", "exec", str(VMID), "--", "sh", "-c", script, "sh", *args)
        return self.machine.sh('"$@"', *argv)

    def nodes_inside(self) -> dict[str, str]:
        """What lies at /dev/nvidia* in the container: `char MAJOR:MINOR`, or its kind."""
        said = self.inside("for n in /dev/nvidia*; do stat -c '%n %F %t:%T' $n; done").ok()
        found = {}
        for line in said.splitlines():
            path, _, rest = line.partition(" ")
            kind, _, numbers = rest.rpartition(" ")
            major, minor = (int(number, 16) for number in numbers.split(":"))
            found[path] = f"char {major}:{minor}" if kind == "character special file" else kind
        return found

    def cuda_inside(self) -> int:
        """What cuInit answers in the container."""
        code = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
        return int(self.inside('python3 -c "$1"', code).ok())

    def boot_id(self) -> str:
        """Another one after each boot."""
        return self.machine.sh("cat /proc/sys/kernel/random/boot_id").ok().strip()

    def uvm_major(self) -> int:
        """The kernel's."""
        return int(self.machine.sh("sed -n 's/ nvidia-uvm$//p' /proc/devices").ok())
