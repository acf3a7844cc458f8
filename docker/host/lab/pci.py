"""PCI sysfs of a lab host: folders, files and FIFOs of /sys/bus/pci, and the driver core's rules.

A write to a FIFO always succeeds, so it proves nothing, as on a real kernel; only the `driver`
link tells. Not shown: the error numbers of bind and unbind.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from dataclasses import dataclass

ROOT = "/sys/bus/pci"
IOMMU = "/sys/kernel/iommu_groups"
FIFOS = ("bind", "unbind", "new_id", "remove_id")
SETTLE_S = (0.03, 0.15)
"""How long after the write a link changes."""


@dataclass
class Function:
    """One PCI function."""

    address: str
    vendor: str
    device: str
    kind: str
    """Class code, such as 0x030000."""
    group: str
    driver: str = ""

    @property
    def folder(self) -> str:
        """Its sysfs folder."""
        return f"{ROOT}/devices/{self.address}"

    @property
    def override(self) -> str:
        """driver_override, '' when unset."""
        with open(f"{self.folder}/driver_override") as file:
            text = file.read().strip()
        return "" if text in ("", "(null)") else text


def functions() -> list[Function]:
    """Two GPUs with their audio functions, and a root port that is nobody's business."""
    found = [Function("0000:00:01.0", "0x1022", "0x1453", "0x060400", "1", "pcieport")]
    for slot, group in (("0000:21:00", "14"), ("0000:41:00", "27")):
        found.append(Function(f"{slot}.0", "0x10de", "0x2230", "0x030000", group))
        found.append(Function(f"{slot}.1", "0x10de", "0x1aef", "0x040300", group))
    return found


class Bus:
    """The bus, its drivers, and their rules."""

    def __init__(self) -> None:
        self.functions = {function.address: function for function in functions()}
        self.loaded = {"vfio-pci", "pcieport"}
        self.ids: dict[str, set[str]] = {"vfio-pci": {"10de:2230", "10de:1aef"}}
        self.readers: dict[str, int] = {}
        self.later: list[tuple[float, str, str]] = []

    def build(self) -> None:
        """Makes the tree, every GPU function bound to vfio-pci."""
        os.makedirs(f"{ROOT}/devices")
        os.makedirs(f"{ROOT}/drivers")
        os.mkfifo(f"{ROOT}/drivers_probe")
        for name in self.loaded:
            self.add_driver(name)
        for function in self.functions.values():
            self.add_function(function)
            self.bind(function, function.driver or "vfio-pci")

    def add_driver(self, name: str) -> None:
        """The folder of a driver whose module is loaded."""
        self.loaded.add(name)
        self.ids.setdefault(name, set())
        folder = f"{ROOT}/drivers/{name}"
        if not os.path.isdir(folder):
            os.makedirs(folder + ".new")
            for fifo in FIFOS:
                os.mkfifo(f"{folder}.new/{fifo}")
            os.rename(folder + ".new", folder)

    def remove_driver(self, name: str) -> None:
        """The module goes: its devices have no driver any more."""
        for function in self.functions.values():
            if function.driver == name:
                self.unbind(function)
        self.loaded.discard(name)
        for fifo in FIFOS:
            self.close(f"{ROOT}/drivers/{name}/{fifo}")
        for leaf in FIFOS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{ROOT}/drivers/{name}/{leaf}")
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(f"{ROOT}/drivers/{name}")

    def add_function(self, function: Function) -> None:
        """The folder of one function and its IOMMU group."""
        folder = function.folder
        os.makedirs(folder)
        files = {
            "vendor": function.vendor,
            "device": function.device,
            "class": function.kind,
            "subsystem_vendor": function.vendor,
            "subsystem_device": "0x1459",
            "revision": "0xa1",
            "enable": "0",
            "numa_node": "0",
            "driver_override": "(null)",
            "modalias": f"pci:v0000{function.vendor[2:].upper()}d0000{function.device[2:].upper()}",
            "resource": "\n".join(["0x00000000f0000000 0x00000000f0ffffff 0x0000000000040200"] * 6),
        }
        for name, text in files.items():
            with open(f"{folder}/{name}", "w") as file:
                file.write(text + "\n")
        config = bytearray(64)
        config[0:2] = int(function.vendor, 16).to_bytes(2, "little")
        config[2:4] = int(function.device, 16).to_bytes(2, "little")
        config[8:12] = bytes([0xA1]) + int(function.kind, 16).to_bytes(3, "little")
        config[14] = 1 if function.kind.startswith("0x0604") else 0
        with open(f"{folder}/config", "wb") as file:
            file.write(config)
        if function.kind.startswith("0x0604"):
            os.mkdir(f"{folder}/pci_bus")
        members = f"{IOMMU}/{function.group}/devices"
        os.makedirs(members, exist_ok=True)
        os.symlink(folder, f"{members}/{function.address}")
        os.symlink(f"{IOMMU}/{function.group}", f"{folder}/iommu_group")

    def bind(self, function: Function, driver: str) -> None:
        """Sets the links."""
        function.driver = driver
        os.symlink(f"../../drivers/{driver}", f"{function.folder}/driver")
        name = function.address
        os.symlink(f"../../devices/{name}", f"{ROOT}/drivers/{driver}/{name}")

    def unbind(self, function: Function) -> None:
        """Removes the links."""
        for link in (
            f"{function.folder}/driver",
            f"{ROOT}/drivers/{function.driver}/{function.address}",
        ):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(link)
        function.driver = ""

    def match(self, function: Function) -> str:
        """Which loaded driver would take it: driver_override alone, else ids, else the class."""
        if override := function.override:
            return override if override in self.loaded else ""
        name = f"{function.vendor[2:]}:{function.device[2:]}"
        for driver in sorted(self.loaded):
            if name in self.ids.get(driver, ()):
                return driver
        if function.vendor == "0x10de" and function.kind.startswith("0x03"):
            return "nvidia" if "nvidia" in self.loaded else ""
        if function.kind.startswith("0x0403"):
            return "snd_hda_intel" if "snd_hda_intel" in self.loaded else ""
        return ""

    def probe(self, function: Function) -> None:
        """drivers_probe: nothing happens when it is bound or nothing matches."""
        if not function.driver and (driver := self.match(function)):
            self.bind(function, driver)

    def request(self, path: str, text: str) -> None:
        """A line written to a FIFO; acted on a moment later."""
        self.later.append((time.monotonic() + random.uniform(*SETTLE_S), path, text.strip()))

    def settle(self) -> bool:
        """Acts on what is due; True when a link may have changed."""
        now = time.monotonic()
        due = [item for item in self.later if item[0] <= now]
        self.later = [item for item in self.later if item[0] > now]
        for _, path, text in due:
            self.act(path, text)
        return bool(due)

    def act(self, path: str, text: str) -> None:
        """The rules of one write."""
        verb = os.path.basename(path)
        driver = os.path.basename(os.path.dirname(path))
        if verb in ("new_id", "remove_id"):
            name = ":".join(text.split()[:2]).lower()
            if verb == "remove_id":
                self.ids.setdefault(driver, set()).discard(name)
                return
            self.ids.setdefault(driver, set()).add(name)
            for function in self.functions.values():
                self.probe(function)
            return
        function = self.functions.get(text)
        if function is None:
            return
        if verb == "drivers_probe":
            self.probe(function)
        elif verb == "unbind" and function.driver == driver:
            self.unbind(function)
        elif verb == "bind" and not function.driver and self.match(function) == driver:
            self.bind(function, driver)

    def tidy_overrides(self) -> None:
        """A lone newline in driver_override reads back as (null)."""
        for function in self.functions.values():
            name = f"{function.folder}/driver_override"
            with open(name) as file:
                text = file.read()
            if text and not text.strip():
                with open(name, "w") as file:
                    file.write("(null)\n")

    def fifos(self, blocked: set[str]) -> None:
        """Opens the FIFOs; those of a driver with a held device stay shut: its writers block."""
        wanted = {f"{ROOT}/drivers_probe"}
        wanted |= {f"{ROOT}/drivers/{name}/{fifo}" for name in self.loaded for fifo in FIFOS}
        wanted -= {f"{ROOT}/drivers/{name}/unbind" for name in blocked}
        for path in wanted - set(self.readers):
            self.readers[path] = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        for path in set(self.readers) - wanted:
            self.close(path)

    def close(self, path: str) -> None:
        """Stops reading a FIFO."""
        reader = self.readers.pop(path, None)
        if reader is not None:
            os.close(reader)
