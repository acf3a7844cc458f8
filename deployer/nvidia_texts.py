"""What nvidia-smi, modprobe, dkms, the installer and the kernel log say, and what to do. Pure data.

Sources: nvidia-smi(1) and nvml.h for exit codes; texts from NVIDIA/open-gpu-kernel-modules
595.45.04, nvidia-installer 590.48.01, kmod, dkms, and public reports (field notes). nvidia-smi
prints its errors on stdout; NVML prints two components of its version only, so versions are never
taken from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deployer import nvidia_rows


@dataclass(frozen=True)
class Cause:
    """`name` is a stable word; `{host}` in `action` is the machine's name.

    `standing`: once the kernel has said it, it holds until the next reboot.
    """

    name: str
    cause: str
    action: str
    standing: bool = False

    def on(self, host: str) -> str:
        """The action with the machine's name."""
        return self.action.replace("{host}", host)


@dataclass(frozen=True)
class Sign:
    """A text and what it means."""

    pattern: re.Pattern[str]
    cause: Cause


MISMATCH = Cause(
    "version-mismatch",
    "library and kernel module have different versions",
    "install the libraries of exactly the loaded module; after a driver upgrade: reboot {host}",
)
NOT_LOADED = Cause(
    "not-loaded",
    "the nvidia module is not loaded, or /dev/nvidiactl cannot be opened",
    "the steps driver, gpus and container of `deploy up` see to it",
)
NO_GPU = Cause(
    "no-gpu",
    "no GPU is usable: its node is missing or may not be opened, or it is on another driver",
    "look at the nodes in /dev and at the drivers of the PCI functions",
)
CGROUP_LOST = Cause(
    "cgroup",
    "the cgroup of this container has lost its GPU devices; restart the container",
    "restart the container (`pct reboot`)",
)
TIMED_OUT = Cause(
    "hangs",
    "nvidia-smi gave no answer in time: a GPU or its driver is stuck",
    "look for `Xid` in `dmesg` on {host}; such a GPU needs a host reboot",
)
SECURE_BOOT = Cause(
    "key-rejected",
    "Secure Boot rejects the module: it is not signed with an enrolled key",
    "enrol the signing key on {host} (`mokutil --import`, then at the console during the reboot), "
    "or turn Secure Boot off in the firmware",
)
OTHER_DRIVER = Cause(
    "other-driver",
    "another driver has the GPUs, so the nvidia module finds none",
    "free a GPU first: the step gpus does for vfio-pci; nouveau and nova: blacklist and reboot",
)

EXITS: dict[int, Cause] = {
    2: Cause("bad-argument", "nvidia-smi does not know an argument or field", "a newer driver"),
    3: Cause("unsupported", "the operation is not supported", "nothing: this GPU cannot do it"),
    4: Cause(
        "permission",
        "no permission to talk to the driver",
        "run as root, or open the nodes in /dev to that user (devN: gid=, mode=)",
    ),
    6: NO_GPU,
    8: Cause(
        "power-cable",
        "a power cable of a GPU is not attached",
        "attach the GPU's power cable on {host}",
    ),
    9: NOT_LOADED,
    10: Cause("irq", "a GPU has interrupt trouble", "look at `dmesg` on {host}, then reboot it"),
    12: Cause(
        "no-library",
        "libnvidia-ml.so is not installed",
        "install the driver's libraries (driver.install in the playbook)",
    ),
    13: Cause(
        "old-library",
        "libnvidia-ml.so lacks a function that nvidia-smi needs",
        "install nvidia-smi and its libraries from one driver package",
    ),
    14: Cause(
        "inforom",
        "the infoROM of a GPU is corrupted",
        "reboot {host}; if it comes back, the GPU goes to its vendor",
    ),
    15: Cause(
        "gpu-lost",
        "a GPU is lost (fallen off the bus)",
        "reboot {host}; if it comes back: power, riser or the GPU itself",
    ),
    16: Cause("reset", "a GPU needs a reset", "end what uses it, then reboot {host}"),
    17: Cause(
        "blocked",
        "the operating system or a cgroup blocks the GPU",
        "compare the allowed devices of the container with /proc/devices on {host}",
    ),
    18: MISMATCH,
    124: TIMED_OUT,
    126: Cause("not-executable", "nvidia-smi cannot be executed", "install the driver again"),
    127: Cause(
        "not-installed",
        "nvidia-smi is not installed",
        "install the driver's libraries (driver.install in the playbook)",
    ),
}
"""Exit codes of nvidia-smi (NVML's), and those of a shell round it."""


def _sign(pattern: str, name: str, cause: str, action: str, standing: bool = False) -> Sign:
    return Sign(re.compile(pattern), Cause(name, cause, action, standing))


SIGNS: tuple[Sign, ...] = (
    *(_sign(*row) for row in nvidia_rows.ROWS),
    Sign(re.compile(r"Driver/library version mismatch"), MISMATCH),
    Sign(re.compile(r"API mismatch: the client"), MISMATCH),
    Sign(re.compile(r"NVIDIA-SMI has failed because it couldn't communicate"), NOT_LOADED),
    Sign(re.compile(r"NVIDIA-SMI couldn't find libnvidia-ml\.so"), EXITS[12]),
    _sign(
        r"Unable to determine the device handle for GPU",
        "gpu-lost",
        EXITS[15].cause,
        EXITS[15].action,
    ),
    Sign(re.compile(r"No devices (?:were )?found"), NO_GPU),
    Sign(re.compile(r"Failed to initialize NVML: Unknown Error"), CGROUP_LOST),
    Sign(re.compile(r"Failed to initialize NVML: Insufficient Permissions"), EXITS[4]),
    Sign(
        re.compile(r"Field \"[^\"]*\" is not a valid field|Option \S+ is not recognized"), EXITS[2]
    ),
    Sign(re.compile(r"Key was rejected by service|Required key not available"), SECURE_BOOT),
    Sign(
        re.compile(r"Loading of (?:unsigned module|module with unavailable key) is rejected"),
        SECURE_BOOT,
    ),
    _sign(
        r"is already bound to (?:NovaCore|nova)",
        "nova",
        "nova has the GPU (a blacklist of nouveau does not stop it)",
        "on {host}: blacklist nova_core and nova_drm in /etc/modprobe.d, update-initramfs -u, "
        "reboot",
        True,
    ),
    _sign(
        r"is already bound to nouveau|Nouveau kernel driver is (?:currently in use|.*incompatible)",
        "nouveau",
        "nouveau has the GPU",
        "on {host}: blacklist nouveau in /etc/modprobe.d, update-initramfs -u, reboot",
        True,
    ),
    Sign(re.compile(r"is already bound to |No NVIDIA devices probed"), OTHER_DRIVER),
    Sign(re.compile(r"probe routine was not called for \d+ device"), OTHER_DRIVER),
    Sign(re.compile(r"could not insert 'nvidia\w*': No such device"), OTHER_DRIVER),
    _sign(
        r"Module nvidia\S* not found",
        "no-module",
        "there is no nvidia module for the running kernel",
        "install the driver on {host} with dkms and the headers of its kernel",
    ),
    _sign(
        r"could not insert 'nvidia\w*': (?:Exec format error|Invalid argument|Unknown symbol)",
        "wrong-kernel",
        "the nvidia module was built for another kernel",
        "build it for the running kernel on {host}: `dkms autoinstall`",
    ),
    _sign(
        r"Module nvidia\S* is in use",
        "in-use",
        "the nvidia module is in use",
        "stop what has /dev/nvidia* open: containers, nvidia-persistenced, exporters",
    ),
    _sign(
        r"with non-zero usage count",
        "stuck-removal",
        "a GPU is stuck in removal: it was unbound while in use",
        "only a reboot of {host} clears it",
        True,
    ),
    _sign(
        r"requires use of the NVIDIA open kernel modules",
        "needs-open",
        "a GPU needs the open kernel module, the proprietary one is loaded",
        "install the driver on {host} with --kernel-module-type=open",
        True,
    ),
    _sign(
        r"not supported by open nvidia\.ko|GPU System Processor \(GSP\)",
        "needs-proprietary",
        "a GPU needs the proprietary kernel module, the open one is loaded",
        "install the driver on {host} with --kernel-module-type=proprietary",
        True,
    ),
    _sign(
        r"Xid .*: 79,|has fallen off the bus",
        "gpu-lost",
        EXITS[15].cause,
        EXITS[15].action,
        True,
    ),
    _sign(
        r"RmInitAdapter failed",
        "init-failed",
        "the driver could not start a GPU",
        "reboot {host}; if it comes back: another driver version, power or the GPU itself",
        True,
    ),
    _sign(
        r"[Kk]ernel headers for kernel \S+ cannot be found",
        "no-headers",
        "the headers of the kernel are missing",
        "install proxmox-headers-KERNEL (Debian: linux-headers-KERNEL) on {host}",
    ),
    _sign(
        r"Module build for kernel \S+ was skipped",
        "build-skipped",
        "dkms built nothing: the headers of the kernel are missing, though it ended well",
        "install proxmox-headers-KERNEL (Debian: linux-headers-KERNEL) on {host}",
    ),
    _sign(
        r"Bad return status for module build|The kernel module failed to build",
        "build-failed",
        "the module does not compile for this kernel: mostly the driver is too old for it",
        "a newer driver, or an older kernel on {host}",
    ),
    _sign(
        r"kernel module '[^']*' appears to already be loaded",
        "already-loaded",
        "the installer found an nvidia module loaded",
        "in a container: only --no-kernel-modules; on {host}: unload the old module first",
    ),
    _sign(
        r"Unable to (?:find|determine) the kernel (?:source|header)",
        "no-headers",
        "the headers of the kernel are missing",
        "install proxmox-headers-KERNEL (Debian: linux-headers-KERNEL) on {host}",
    ),
    _sign(
        r"No space left on device",
        "disk-full",
        "the disk is full",
        "free space where the installer works (/tmp, /usr, /var)",
    ),
    _sign(
        r"Another instance of the (?:NVIDIA )?[Ii]nstaller|Could not get lock /var/lib/dpkg/lock",
        "busy",
        "another installation is at work",
        "wait for it to end",
    ),
    _sign(
        r"has no installation candidate|Version '[^']*' for '[^']*' was not found|"
        r"Unable to locate package",
        "no-package",
        "apt does not know a package in that version",
        "correct driver.packages, or add the repository to {host}'s apt sources",
    ),
)
"""The first that is found counts: the special ones stand before the general ones."""


def diagnose(text: str) -> Cause | None:
    """What the first known text in `text` means; None when there is none."""
    return next((sign.cause for sign in SIGNS if sign.pattern.search(text)), None)


def smi_verdict(exit_code: int, text: str, *, timed_out: bool = False) -> Cause | None:
    """What an answer of nvidia-smi means; None when it is good.

    A text counts only where the code says nothing (1, 255); exit 0 without a GPU
    (`No devices found.`) is no good answer.
    """
    if timed_out:
        return TIMED_OUT
    told = diagnose(text)
    if exit_code == 0:
        return NO_GPU if told is NO_GPU else None
    known = EXITS.get(exit_code)
    if known is not None:
        return known
    if told is not None:
        return told
    said = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
    return Cause(
        "unknown",
        f"nvidia-smi ended with {exit_code}: {said[:200]}",
        "look at `dmesg` on {host} for NVRM or Xid lines",
    )


def standing(lines: Iterable[str]) -> tuple[tuple[Cause, str], ...]:
    """Causes in the kernel log that hold until a reboot, each with its last line."""
    found: dict[str, tuple[Cause, str]] = {}
    for line in lines:
        cause = diagnose(line)
        if cause is not None and cause.standing:
            found[cause.name] = (cause, line.strip())
    return tuple(found.values())


_CLIENT = re.compile(
    r"the client (?:'(?P<name>[^']*)' \(pid (?P<pid>\d+)\)\s+)?has the version (?P<client>[\d.]*\d)"
)
_MODULE = re.compile(r"kernel module has (?:the version )?(?P<module>[\d.]*\d)")


@dataclass(frozen=True)
class ApiMismatch:
    """Who came with the wrong library version; `process` and `pid` only in the newer wording."""

    client: str
    module: str
    process: str = ""
    pid: int | None = None


def api_mismatches(log: str) -> tuple[ApiMismatch, ...]:
    """`NVRM: API mismatch` of the kernel log, both wordings.

    The message goes over several lines, each with `NVRM:` in front and perhaps a time stamp:
    `the client has the version X, but` / `this kernel module has the version Y`, since 595
    `the client 'NAME' (pid N)` / `has the version X, but this kernel module has` / `the version Y`.
    """
    lines = [
        re.sub(r"^.*?NVRM:\s*", "", line).strip() for line in log.splitlines() if "NVRM:" in line
    ]
    text = " ".join(lines)
    found = []
    for part in text.split("API mismatch:")[1:]:
        client, module = _CLIENT.search(part), _MODULE.search(part)
        if client is None or module is None:
            continue
        pid = client["pid"]
        found.append(
            ApiMismatch(
                client["client"], module["module"], client["name"] or "", int(pid) if pid else None
            )
        )
    return tuple(found)
