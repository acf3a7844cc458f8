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

from deployer import nvidia_kernel_rows, nvidia_rows


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
SECURE_BOOT = next(Cause(*row[1:]) for row in nvidia_kernel_rows.ROWS if row[1] == "key-rejected")
OLD_LIBC = Cause(
    "old-libc",
    "nvidia-smi is made for a newer glibc than there is",
    "install the driver from packages of this distribution, or use a newer system",
)
DISK = Cause(
    "disk-error",
    "the disk cannot be read",
    "look at `dmesg` and the disk of {host} (smartctl -a)",
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


def _sign(pattern: str, cause: Cause) -> Sign:
    return Sign(re.compile(pattern), cause)


SMI_SIGNS: tuple[Sign, ...] = (
    _sign(r"Driver/library version mismatch|NVML/RM version mismatch", MISMATCH),
    _sign(r"API mismatch: the client", MISMATCH),
    _sign(
        r"NVIDIA-SMI has failed because it couldn't communicate|NVML: Driver Not Loaded", EXITS[9]
    ),
    _sign(
        r"NVIDIA-SMI couldn't find libnvidia-ml\.so|NVML: NVML Shared Library Not Found|"
        r"error while loading shared libraries: lib(?:nvidia-ml|cuda)",
        EXITS[12],
    ),
    _sign(r"version `GLIBC_[\d.]+' not found", OLD_LIBC),
    _sign(r"(?:Input/output error|Structure needs cleaning)$", DISK),
    _sign(r"GPU requires reset", EXITS[16]),
    _sign(r"(?i)Unable to determine the device handle for GPU|GPU is lost", EXITS[15]),
    _sign(r"infoROM is corrupted|Corrupted infoROM", EXITS[14]),
    _sign(r"No devices (?:were )?found", NO_GPU),
    _sign(r"Failed to initialize NVML: Unknown Error", CGROUP_LOST),
    _sign(r"NVML: Insufficient Permissions|do not have suff?i?cient permissions", EXITS[4]),
    _sign(r"GPU access blocked by the operating system", EXITS[17]),
    _sign(r"NVML: Function Not Found|undefined symbol: nvml", EXITS[13]),
    _sign(r"NVML: Insufficient External Power", EXITS[8]),
    _sign(r"NVML: Interrupt Request Issue", EXITS[10]),
    _sign(r"Field \"[^\"]*\" is not a valid field|Option \S+ is not recognized", EXITS[2]),
)
SIGNS: tuple[Sign, ...] = (
    *SMI_SIGNS,
    *(
        Sign(re.compile(pattern, re.MULTILINE), Cause(name, cause, action, standing))
        for pattern, name, cause, action, standing in (*nvidia_kernel_rows.ROWS, *nvidia_rows.ROWS)
    ),
)
"""The first that is found counts: the special ones stand before the general ones."""

IN_GOOD = ("no-gpu", "reset", "gpu-lost", "inforom")
"""What an answer that ends with 0 may still tell."""
BEFORE_CODE = ("no-library", "old-libc", "disk-error")
"""What is behind a shell's 126 and 127 when the program is there."""


def diagnose(text: str) -> Cause | None:
    """What the first known text in `text` means; None when there is none."""
    return next((sign.cause for sign in SIGNS if sign.pattern.search(text)), None)


def smi_verdict(exit_code: int, text: str, *, timed_out: bool = False) -> Cause | None:
    """What an answer of nvidia-smi means; None when it is good.

    A text counts only where the code says nothing (1, 255), or less than the text (126, 127).
    Exit 0 is no good answer when it names no GPU (`No devices found.`) or one in trouble.
    """
    if timed_out:
        return TIMED_OUT
    told = diagnose(text)
    if exit_code == 0:
        return told if told is not None and told.name in IN_GOOD else None
    if told is not None and told.name in BEFORE_CODE:
        return told
    known = EXITS.get(exit_code)
    if known is not None:
        return known
    if told is not None:
        return told
    if 128 < exit_code <= 128 + 64:
        return Cause(
            "crashed",
            f"nvidia-smi was ended by signal {exit_code - 128}",
            "look at `dmesg` on {host}: out of memory, or libraries of two drivers are mixed",
        )
    said = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
    return Cause(
        "unknown",
        f"nvidia-smi ended with {exit_code}: {said[:200]}",
        "look at `dmesg` on {host} for NVRM or Xid lines",
    )


_RECOVERED = re.compile(r"GPU recovery action changed from .* to 0x0 \(None\)")


def standing(lines: Iterable[str]) -> tuple[tuple[Cause, str], ...]:
    """Causes in the kernel log that hold until a reboot, each with its last line."""
    found: dict[str, tuple[Cause, str]] = {}
    for line in lines:
        if _RECOVERED.search(line):
            found.pop("reset", None)
            found.pop("node-reboot", None)
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
