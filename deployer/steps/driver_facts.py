"""What is known of drivers: modules and libraries of the host, libraries of the guest.

`HostDriver`, `HostKernels`, `HostSmi` (host) and `GuestDriver` (guest) are public facts;
driver_probes makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from deployer import gpu
from deployer.kernels import (
    BootChoice,
    DkmsBuild,
    Kernel,
    NextBoot,
    kernel_key,
    next_boot,
)

_DRIVER_PACKAGE = re.compile(
    r"libcuda1|libnvidia-(?:ml1|compute|cfg1).*|cuda-drivers.*|"
    r"nvidia-(?:driver|kernel|dkms|open|utils|smi|alternative|headless).*"
)
"""Packages that bring the driver itself; nvidia-modprobe and the container toolkit do not."""


@dataclass(frozen=True)
class Userspace:
    """Driver libraries of one machine: soname -> versions; the one that `.so.1` leads to counts."""

    libraries: tuple[tuple[str, str], ...] = ()
    linked: tuple[tuple[str, str], ...] = ()
    smi: bool = False
    """nvidia-smi is in the PATH."""

    def versions(self) -> tuple[str, ...]:
        """All versions in use, lowest first."""
        used = {dict(self.linked).get(name, version) for name, version in self.libraries}
        return tuple(sorted(used, key=gpu.version_key))

    def is_version(self, wanted: str) -> bool:
        """Both libraries are there in `wanted`, nothing else is in use, and nvidia-smi exists."""
        names = {name for name, _ in self.libraries}
        versions = self.versions()
        right = len(versions) == 1 and gpu.same_version(versions[0], wanted)
        return right and names >= set(gpu.LIBRARIES) and self.smi

    def describe(self, wanted: str) -> str:
        """For messages: what is not as wanted."""
        versions = self.versions()
        if not versions:
            return "no driver libraries are installed"
        if len(versions) > 1 or not gpu.same_version(versions[0], wanted):
            return f"driver libraries are {' and '.join(versions)}, not {wanted}"
        missing = sorted(set(gpu.LIBRARIES) - {name for name, _ in self.libraries})
        return f"{' and '.join(missing)} missing" if missing else "nvidia-smi is not installed"


@dataclass(frozen=True)
class Package:
    """An installed package with NVIDIA in its name. `held`: apt does not upgrade it."""

    name: str
    version: str
    held: bool = False

    @property
    def is_driver(self) -> bool:
        """Does it bring the driver itself?"""
        return _DRIVER_PACKAGE.fullmatch(self.name) is not None


@dataclass(frozen=True)
class System:
    """What of a machine's packages and disks concerns an installation of the driver."""

    packages: tuple[Package, ...] = ()
    unattended: bool = False
    """Unattended upgrades are on and would take NVIDIA's packages."""
    free: tuple[tuple[str, int, str], ...] = ()
    """Place, free bytes, file system."""

    def driver_packages(self) -> tuple[Package, ...]:
        """Those that bring the driver itself."""
        return tuple(package for package in self.packages if package.is_driver)

    def lacks(self, needs: Iterable[tuple[str, int]]) -> str:
        """Which file system has too little for `needs` (place, bytes); '' when none is known to."""
        wanted: dict[str, int] = {}
        known = {place: (free, system) for place, free, system in self.free}
        places: dict[str, list[str]] = {}
        for place, count in needs:
            if place in known:
                system = known[place][1]
                wanted[system] = wanted.get(system, 0) + count
                places.setdefault(system, []).append(place)
        for system, count in wanted.items():
            free = known[places[system][0]][0]
            if free < count:
                return (
                    f"{' and '.join(dict.fromkeys(places[system]))} has {free / 1e9:.1f} GB free, "
                    f"the installation needs {count / 1e9:.1f} GB"
                )
        return ""


@dataclass(frozen=True)
class HostGpu:
    """An NVIDIA display function of the host. `device`: PCI device id; `driver` '': none bound."""

    address: str
    device: str
    driver: str = ""


@dataclass(frozen=True)
class HostDriver:
    """The host's kernel module. Versions are '' when absent; `timed_out`: it did not answer."""

    loaded: str = ""
    flavour: str = ""
    """open|proprietary|''."""
    on_disk: str = ""
    """Version that `modprobe nvidia` would load under the running kernel."""
    kernel: str = ""
    rivals: tuple[str, ...] = ()
    """Other drivers of NVIDIA GPUs that are loaded."""
    secure_boot: bool | None = None
    userspace: Userspace = Userspace()
    references: tuple[tuple[str, int, int], ...] = ()
    """Module, its references, how many of them are other modules."""
    gpus: tuple[HostGpu, ...] = ()
    """All of the host, also those that the inventory does not name."""
    log: tuple[str, ...] = ()
    """Last lines of the kernel log about the driver."""
    system: System = System()
    timed_out: bool = False

    @property
    def busy(self) -> tuple[str, ...]:
        """Modules that processes use: more references than other modules account for."""
        return tuple(name for name, count, modules in self.references if count > modules)

    @property
    def devices(self) -> tuple[str, ...]:
        """PCI device ids of all GPUs."""
        return tuple(one.device for one in self.gpus)


@dataclass(frozen=True)
class HostKernels:
    """Installed kernels, what boots next, dkms."""

    running: str = ""
    kernels: tuple[Kernel, ...] = ()
    choice: BootChoice = field(default_factory=BootChoice)
    dkms: tuple[DkmsBuild, ...] = ()
    has_dkms: bool = False
    mok_enrolled: bool | None = None
    """Is the key that dkms signs with enrolled? None: not known."""
    signed: tuple[str, ...] = ()
    """Kernels whose nvidia module carries a signature."""
    timed_out: bool = False

    def kernel(self, name: str) -> Kernel | None:
        """The kernel of this name; None when it has no folder of modules."""
        return next((one for one in self.kernels if one.name == name), None)

    def next_boot(self) -> NextBoot:
        """The kernel that a reboot starts."""
        return next_boot(self.kernels, self.choice, self.running)

    def bootable(self) -> tuple[Kernel, ...]:
        """Those with an image, newest first."""
        found = [one for one in self.kernels if one.bootable]
        return tuple(sorted(found, key=lambda one: kernel_key(one.name), reverse=True))


@dataclass(frozen=True)
class HostSmi:
    """nvidia-smi on the host. `exit` 200: not asked (no module or no node), 127: not installed."""

    exit: int
    text: str
    gpus: tuple[gpu.SmiGpu, ...] = ()
    timed_out: bool = False

    @property
    def asked(self) -> bool:
        """Whether nvidia-smi ran (asking it without a driver would load modules)."""
        return self.timed_out or self.exit not in (127, 200)


@dataclass(frozen=True)
class GuestDriver:
    """The guest's driver libraries; `kernel_module` is the host's loaded version as seen there."""

    userspace: Userspace = Userspace()
    kernel_module: str = ""
    timed_out: bool = False
    system: System = System()
    virt: str = ""
    """What systemd-detect-virt says: lxc, docker, none; '' when it is not there."""
