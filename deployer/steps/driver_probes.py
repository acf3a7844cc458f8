"""How the driver step looks: the probes of host and guest, and what their answers say."""

from __future__ import annotations

from collections.abc import Iterable

from deployer import gpu
from deployer.kernels import BootChoice, Kernel, parse_dkms
from deployer.model import Probe, ProbeOutput, Where
from deployer.steps import driver_scripts
from deployer.steps.driver_facts import (
    GuestDriver,
    HostDriver,
    HostGpu,
    HostKernels,
    HostSmi,
    Package,
    System,
    Userspace,
)
from deployer.steps.driver_scripts import rooted

SMI_TIMEOUT_S = 20.0
KERNELS_TIMEOUT_S = 20.0


class _Rows:
    """The answer's lines by their first word."""

    def __init__(self, text: str) -> None:
        self._found: dict[str, list[str]] = {}
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            self._found.setdefault(key, []).append(value.strip())

    def all(self, key: str) -> list[str]:
        return self._found.get(key, [])

    def first(self, key: str) -> str:
        return self._found.get(key, [""])[0]

    def last(self, key: str) -> str:
        return self._found.get(key, [""])[-1]

    def fields(self, key: str, count: int) -> Iterable[list[str]]:
        """The lines of `key` that have at least `count` fields."""
        return (row for row in (value.split() for value in self.all(key)) if len(row) >= count)


def _userspace(rows: _Rows) -> Userspace:
    def named(key: str) -> tuple[tuple[str, str], ...]:
        pairs = {gpu.library_version(path) for path in rows.all(key)}
        return tuple(sorted(pair for pair in pairs if pair[0]))

    return Userspace(named("library"), named("linked"), "nvidia-smi" in rows.all("tool"))


def _system(rows: _Rows) -> System:
    packages = tuple(
        Package(name, version, want == "hold")
        for name, version, want, status, *_ in rows.fields("package", 4)
        if status == "installed"
    )
    words = rows.all("unattended")
    free = tuple(
        (place, int(count) * 1024, system)
        for place, count, system, *_ in rows.fields("free", 3)
        if count.isdigit()
    )
    return System(packages, "on" in words and "kept" not in words, free)


def parse_host(output: ProbeOutput) -> HostDriver:
    """The answer of driver_scripts.HOST."""
    rows = _Rows(output.text)
    secure = rows.first("secureboot")
    return HostDriver(
        loaded=gpu.module_version(rows.first("nvrm")) or rows.first("loaded"),
        flavour=gpu.module_flavour(rows.first("nvrm")),
        on_disk=rows.first("disk"),
        kernel=rows.first("kernel"),
        rivals=tuple(rows.all("rival")),
        secure_boot=None if secure == "" else secure == "1",
        userspace=_userspace(rows),
        references=tuple(
            (name, int(count), int(modules))
            for name, count, modules, *_ in rows.fields("refs", 3)
            if count.isdigit() and modules.isdigit()
        ),
        gpus=tuple(HostGpu(row[0], row[1], "".join(row[2:])) for row in rows.fields("gpu", 2)),
        log=tuple(rows.all("log")),
        system=_system(rows),
        timed_out=output.timed_out,
    )


def parse_kernels(output: ProbeOutput) -> HostKernels:
    """The answer of driver_scripts.KERNELS. With no image known the running kernel is the one."""
    rows = _Rows(output.text)
    running = rows.first("running")
    said: dict[tuple[str, str], str] = {}
    for value in rows.all("module"):
        name, key, text = (*value.split(" ", 2), "", "")[:3]
        said.setdefault((name, key), text)
    listed = [(row[0], row[1] == "yes", row[2] == "yes") for row in rows.fields("kernel", 3)]
    any_image = any(image for _, image, _ in listed)
    found = tuple(
        Kernel(
            name,
            image if any_image else name == running,
            headers,
            said.get((name, "version"), ""),
            _license_flavour(said.get((name, "license"), "")),
        )
        for name, image, headers in listed
    )
    pins = {row[0]: row[1] for row in rows.fields("pin", 2)}
    mok = rows.first("mok")
    return HostKernels(
        running,
        found,
        BootChoice(
            next_pin=pins.get("next-boot-pin", ""),
            pin=pins.get("proxmox-boot-pin", ""),
            grub_default=rows.last("grub"),
            saved_entry=rows.first("saved"),
            next_entry=rows.first("next"),
        ),
        parse_dkms("\n".join(rows.all("dkms"))),
        "dkms" in rows.all("tool"),
        None if not mok else "is already enrolled" in mok,
        tuple(name for name, key in said if key == "signer"),
        output.timed_out,
    )


def _license_flavour(text: str) -> str:
    """`modinfo -F license`: open modules are `Dual MIT/GPL`, the others `NVIDIA`."""
    return "" if not text else "open" if "GPL" in text else "proprietary"


def parse_guest(output: ProbeOutput) -> GuestDriver:
    """The answer of driver_scripts.GUEST."""
    rows = _Rows(output.text)
    module = gpu.module_version(rows.first("nvrm"))
    return GuestDriver(
        _userspace(rows), module, output.timed_out, _system(rows), rows.first("virt")
    )


def parse_smi(output: ProbeOutput) -> HostSmi:
    """The answer of driver_scripts.SMI; nvidia-smi prints its errors on stdout."""
    return HostSmi(output.exit, output.text, gpu.parse_smi(output.text), output.timed_out)


def host_probes(root: str = "") -> list[Probe]:
    """Of the host; nvidia-smi has its own deadline, for it can hang on a sick GPU."""
    host, kernel, smi = (
        rooted(script, root)
        for script in (driver_scripts.HOST, driver_scripts.KERNELS, driver_scripts.SMI)
    )
    return [
        Probe("driver.host", Where.HOST, host, parse_host),
        Probe("driver.smi", Where.HOST, smi, parse_smi, SMI_TIMEOUT_S),
        Probe("driver.kernels", Where.HOST, kernel, parse_kernels, KERNELS_TIMEOUT_S),
    ]


def guest_probe(root: str = "") -> Probe:
    """Of the guest."""
    return Probe("driver.guest", Where.GUEST, rooted(driver_scripts.GUEST, root), parse_guest)
