"""What the driver step looks at: modules and libraries of the host, libraries of the guest.

`HostDriver`, `HostSmi` (host) and `GuestDriver` (guest) are public facts. Scripts take the file
system's root as a prefix, empty on a real machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployer import gpu
from deployer.model import Probe, ProbeOutput, Where
from deployer.shell import assignments

SMI_TIMEOUT_S = 20.0

LIBRARY_SCRIPT = r"""
for folder in /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64 /usr/lib \
  /usr/local/lib /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu/nvidia/current; do
  for file in "$ROOT$folder"/libcuda.so.*.* "$ROOT$folder"/libnvidia-ml.so.*.*; do
    [ -f "$file" ] && echo "library ${file#"$ROOT"}"
  done
  for file in "$ROOT$folder"/libcuda.so.1 "$ROOT$folder"/libnvidia-ml.so.1; do
    [ -L "$file" ] && echo "linked $(readlink -f "$file")"
  done
done
command -v nvidia-smi >/dev/null && echo "tool nvidia-smi"
"""

HOST_SCRIPT = (
    r"""
[ -r "$ROOT/proc/driver/nvidia/version" ] && sed -n 's/^NVRM version:/nvrm &/p' \
  "$ROOT/proc/driver/nvidia/version"
[ -r "$ROOT/sys/module/nvidia/version" ] && echo "loaded $(cat "$ROOT/sys/module/nvidia/version")"
kernel=$(uname -r)
echo "kernel $kernel"
disk=$(modinfo -k "$kernel" -F version nvidia 2>/dev/null) && echo "disk $disk"
for module in nouveau nova_core; do
  [ -d "$ROOT/sys/module/$module" ] && echo "rival $module"
done
for variable in "$ROOT"/sys/firmware/efi/efivars/SecureBoot-*; do
  [ -r "$variable" ] && echo "secureboot $(od -An -t u1 -j 4 -N 1 "$variable" | tr -d ' ')"
done
"""
    + LIBRARY_SCRIPT
    + "exit 0\n"
)

GUEST_SCRIPT = (
    r"""
[ -r "$ROOT/proc/driver/nvidia/version" ] && sed -n 's/^NVRM version:/nvrm &/p' \
  "$ROOT/proc/driver/nvidia/version"
"""
    + LIBRARY_SCRIPT
    + "exit 0\n"
)

# nvidia-smi loads modules and makes nodes when they are missing; a probe must not.
SMI_SCRIPT = rf"""
[ -e "$ROOT/proc/driver/nvidia/version" ] && [ -c "$ROOT/dev/nvidiactl" ] || exit 200
command -v nvidia-smi >/dev/null || exit 127
nvidia-smi {gpu.SMI_QUERY}
"""


def rooted(script: str, root: str = "") -> str:
    """`script` with its ROOT prefix set."""
    return assignments({"ROOT": root}) + script


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
    timed_out: bool = False


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


def _values(output: ProbeOutput) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in output.text.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value.strip())
    return found


def _userspace(values: dict[str, list[str]]) -> Userspace:
    def named(key: str) -> tuple[tuple[str, str], ...]:
        pairs = {gpu.library_version(path) for path in values.get(key, ())}
        return tuple(sorted(pair for pair in pairs if pair[0]))

    return Userspace(named("library"), named("linked"), "nvidia-smi" in values.get("tool", ()))


def parse_host(output: ProbeOutput) -> HostDriver:
    """The answer of HOST_SCRIPT."""
    values = _values(output)

    def first(key: str) -> str:
        return values.get(key, [""])[0]

    secure = first("secureboot")
    return HostDriver(
        loaded=gpu.module_version(first("nvrm")) or first("loaded"),
        flavour=gpu.module_flavour(first("nvrm")),
        on_disk=first("disk"),
        kernel=first("kernel"),
        rivals=tuple(values.get("rival", ())),
        secure_boot=None if secure == "" else secure == "1",
        userspace=_userspace(values),
        timed_out=output.timed_out,
    )


def parse_guest(output: ProbeOutput) -> GuestDriver:
    """The answer of GUEST_SCRIPT."""
    values = _values(output)
    nvrm = values.get("nvrm", [""])[0]
    return GuestDriver(_userspace(values), gpu.module_version(nvrm), output.timed_out)


def parse_smi(output: ProbeOutput) -> HostSmi:
    """The answer of SMI_SCRIPT; nvidia-smi prints its errors on stdout."""
    return HostSmi(output.exit, output.text, gpu.parse_smi(output.text), output.timed_out)


def host_probes(root: str = "") -> list[Probe]:
    """Of the host; nvidia-smi has its own deadline, for it can hang on a sick GPU."""
    return [
        Probe("driver.host", Where.HOST, rooted(HOST_SCRIPT, root), parse_host),
        Probe("driver.smi", Where.HOST, rooted(SMI_SCRIPT, root), parse_smi, SMI_TIMEOUT_S),
    ]


def guest_probe(root: str = "") -> Probe:
    """Of the guest."""
    return Probe("driver.guest", Where.GUEST, rooted(GUEST_SCRIPT, root), parse_guest)
