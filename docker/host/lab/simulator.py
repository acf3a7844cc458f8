"""The simulator of a lab host: PCI sysfs, kernel modules, procfs answers, device nodes.

One process. Writers talk to it through the FIFOs of /sys/bus/pci; the stand-ins of modprobe and
nvidia-modprobe through /run/lab/simulator.sock: one JSON request a connection, one JSON answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import stat

from pci import Bus

PROC = "/run/lab/proc"
MODULES = "/sys/module"
SOCKET = "/run/lab/simulator.sock"
FAULTS = "/etc/lab/faults"
UVM_MAJOR = 509
VFIO_NODE = {"14": os.makedev(1, 7), "27": os.makedev(1, 5)}
"""Group nodes get numbers of nodes that can be opened here, so that a holder can be real."""
UUIDS = ("GPU-6f0c1a52-2100-4a5e-9d3c-0a6000000001", "GPU-6f0c1a52-4100-4a5e-9d3c-0a6000000002")
INFORMATION = """\
Model: \t\t NVIDIA RTX A6000
IRQ:   \t\t 9{minor}
GPU UUID: \t {uuid}
Video BIOS: \t 94.02.5c.00.02
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Firmware: \t {version}
GPU Excluded:\t No
"""


def driver_version() -> str:
    """The version of the host's driver package, '' when no module lies on disk."""
    try:
        with open(f"/lib/modules/{os.uname().release}/updates/dkms/nvidia.ko") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def fault(name: str) -> bool:
    """Is this fault on?"""
    try:
        with open(FAULTS) as file:
            return name in file.read().split("\n")
    except FileNotFoundError:
        return False


class Simulator:
    """What a kernel would do."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.modules = {"vfio", "vfio_iommu_type1", "vfio_pci"}
        self.version = ""
        with open("/proc/devices") as file:
            self.devices = file.read()
        self.shown: object = None

    def build(self) -> None:
        """Everything as after the boot of a host with its GPUs on vfio-pci."""
        self.bus.build()
        os.makedirs("/dev/vfio", exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mknod("/dev/vfio/vfio", 0o666 | stat.S_IFCHR, os.makedev(10, 196))
        self.show()

    def gpus(self) -> list[tuple[int, str]]:
        """(minor, address) of the GPUs that the nvidia driver has; minors follow the address."""
        listed = [f for f in self.bus.functions.values() if f.kind.startswith("0x03")]
        return [(n, f.address) for n, f in enumerate(listed) if f.driver == "nvidia"]

    def show(self) -> None:
        """Brings procfs, /sys/module and /dev/vfio in line."""
        facts = (
            sorted(self.modules),
            self.version,
            [(f.address, f.driver) for f in self.bus.functions.values()],
        )
        if facts == self.shown:
            return
        self.shown = facts
        text = self.devices
        extra = ""
        if "nvidia" in self.modules:
            extra = "195 nvidia\n195 nvidiactl\n"
        if "nvidia_uvm" in self.modules:
            extra += f"{UVM_MAJOR} nvidia-uvm\n"
        head, mark, tail = text.partition("\nBlock devices:")
        with open(f"{PROC}/devices", "w") as file:
            file.write(head.rstrip("\n") + "\n" + extra + mark + tail)
        with open(f"{PROC}/modules", "w") as file:
            for name in sorted(self.modules):
                file.write(f"{name} 40960 0 - Live 0x0000000000000000\n")
        for name in sorted(self.modules):
            os.makedirs(f"{MODULES}/{name}/parameters", exist_ok=True)
            for leaf, value in (
                ("refcnt", "0"),
                ("initstate", "live"),
                *((("version", self.version),) if "nvidia" in name else ()),
            ):
                with open(f"{MODULES}/{name}/{leaf}", "w") as file:
                    file.write(value + "\n")
        for name in os.listdir(MODULES):
            if name not in self.modules:
                shutil.rmtree(f"{MODULES}/{name}")
        self.show_driver()
        self.show_vfio()

    def show_driver(self) -> None:
        """/proc/driver/nvidia."""
        folder = f"{PROC}/driver/nvidia"
        if "nvidia" not in self.modules:
            shutil.rmtree(folder, ignore_errors=True)
            return
        os.makedirs(f"{folder}/gpus", exist_ok=True)
        with open(f"{folder}/version", "w") as file:
            file.write(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                f"{self.version}  Release Build  (dvs-builder@U22-I3-H04-01-5)  "
                "Wed Jan  7 06:36:06 UTC 2026\nGCC version:  gcc version 14.2.0 (Debian)\n"
            )
        bound = {address: minor for minor, address in self.gpus()}
        for address in os.listdir(f"{folder}/gpus"):
            if address not in bound:
                shutil.rmtree(f"{folder}/gpus/{address}")
        for address, minor in bound.items():
            os.makedirs(f"{folder}/gpus/{address}", exist_ok=True)
            with open(f"{folder}/gpus/{address}/information", "w") as file:
                file.write(
                    INFORMATION.format(
                        minor=minor, uuid=UUIDS[minor], address=address, version=self.version
                    )
                )

    def show_vfio(self) -> None:
        """/dev/vfio/GROUP comes with the first bound function of the group, goes with the last."""
        groups = {f.group for f in self.bus.functions.values() if f.driver == "vfio-pci"}
        for group, number in VFIO_NODE.items():
            node = f"/dev/vfio/{group}"
            if group in groups and not os.path.exists(node):
                os.mknod(node, 0o600 | stat.S_IFCHR, number)
            if group not in groups:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(node)

    def held_groups(self) -> set[str]:
        """IOMMU groups whose node a process has open."""
        if not os.path.exists("/run/qemu-server") or not os.listdir("/run/qemu-server"):
            return set()
        held = set()
        for name in os.listdir("/run/qemu-server"):
            with contextlib.suppress(OSError, ValueError), open(f"/run/qemu-server/{name}") as file:
                pid = int(file.read())
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        target = os.readlink(f"/proc/{pid}/fd/{fd}")
                        if target.startswith("/dev/vfio/"):
                            held.add(target.rpartition("/")[2])
        return held

    def load(self, name: str) -> str:
        """modprobe NAME; returns modprobe's error text, '' when it worked."""
        name = name.replace("-", "_")
        if name in self.modules:
            return ""
        if name == "vfio_pci":
            self.bus.add_driver("vfio-pci")
            self.modules |= {"vfio", "vfio_pci"}
            return ""
        if name == "snd_hda_intel":
            self.bus.add_driver("snd_hda_intel")
            self.modules.add(name)
            return ""
        if name not in ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"):
            return (
                f"modprobe: FATAL: Module {name} not found in directory /lib/modules/"
                + os.uname().release
            )
        version = driver_version()
        if not version:
            return (
                f"modprobe: FATAL: Module {name} not found in directory /lib/modules/"
                + os.uname().release
            )
        if "nvidia" not in self.modules:
            self.bus.add_driver("nvidia")
            for function in self.bus.functions.values():
                if function.kind.startswith("0x03"):
                    self.bus.probe(function)
            if not self.gpus():
                self.bus.remove_driver("nvidia")
                return "modprobe: ERROR: could not insert 'nvidia': No such device"
            self.version = version
            self.modules.add("nvidia")
        self.modules.add(name)
        if name == "nvidia_drm":
            self.modules.add("nvidia_modeset")
        return ""

    def unload(self, name: str) -> str:
        """rmmod NAME, with modprobe's texts."""
        name = name.replace("-", "_")
        if name not in self.modules:
            return f"modprobe: FATAL: Module {name} not found."
        users = {"nvidia": {"nvidia_uvm", "nvidia_modeset"}, "nvidia_modeset": {"nvidia_drm"}}
        if users.get(name, set()) & self.modules or (name == "vfio_pci" and self.held_groups()):
            return f"modprobe: FATAL: Module {name} is in use."
        self.modules.discard(name)
        if name in ("nvidia", "vfio_pci"):
            self.bus.remove_driver(name.replace("_", "-"))
        return ""

    def nodes(self, gpus: list[int], uvm: bool) -> str:
        """nvidia-modprobe: loads and makes nodes."""
        error = self.load("nvidia") or (self.load("nvidia_uvm") if uvm else "")
        if error:
            return error
        wanted = [("nvidiactl", 195, 255)]
        wanted += [(f"nvidia{n}", 195, n) for n in gpus]
        if uvm:
            wanted += [("nvidia-uvm", UVM_MAJOR, 0), ("nvidia-uvm-tools", UVM_MAJOR, 1)]
        for name, major, minor in wanted:
            with contextlib.suppress(FileExistsError):
                os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
            os.chmod(f"/dev/{name}", 0o666)
        return ""

    def answer(self, request: dict[str, object]) -> dict[str, object]:
        """One request of a stand-in."""
        if "load" in request:
            error = self.load(str(request["load"]))
        elif "unload" in request:
            error = self.unload(str(request["unload"]))
        elif "nodes" in request:
            error = self.nodes(list(request["nodes"]), bool(request.get("uvm")))  # type: ignore[call-overload]
        else:
            return {"gpus": self.gpus(), "modules": sorted(self.modules)}
        self.show()
        return {"error": error}

    def run(self) -> None:
        """For ever."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(SOCKET)
        server.listen(16)
        while True:
            held = self.held_groups()
            users = [f for f in self.bus.functions.values() if f.group in held]
            blocked = {function.driver for function in users if function.driver}
            self.bus.fifos(blocked)
            names = {reader: path for path, reader in self.bus.readers.items()}
            ready, _, _ = select.select([server, *names], [], [], 0.05)
            for source in ready:
                if source is server:
                    client, _ = server.accept()
                    with client, client.makefile("rw") as stream:
                        answer = self.answer(json.loads(stream.readline()))
                        stream.write(json.dumps(answer) + "\n")
                    continue
                for line in os.read(source, 65536).decode("ascii", "replace").splitlines():
                    self.bus.request(names[source], line)
            if self.bus.settle():
                self.show()
            self.bus.tidy_overrides()


if __name__ == "__main__":
    simulator = Simulator()
    simulator.build()
    simulator.run()
