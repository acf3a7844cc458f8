"""What the lines of a boot configuration do to GPUs, each as file:line. Pure.

Kinds of effect, for a GPU that shall be on nvidia:
- `takes`: vfio-pci has it first after a boot; a boot unit of ours can still bring it back;
- `forbids`: the nvidia module cannot be loaded at all, which no unit can mend;
- `claims`: something else acts on it at boot, in an order that cannot be told;
- `tells`: worth knowing, and harmless alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from deployer.steps.boot_facts import BootFacts, BootFile

GRUB = re.compile(r"^\s*(?:export\s+)?GRUB_CMDLINE_LINUX(?:_DEFAULT|_PROXMOX)?\+?=")
_IDS = re.compile(r"(?:^|\s)ids=\"?([^\s\"]+)")
_TOKEN_IDS = re.compile(r"^vfio[-_]pci\.ids=(\S+)$")
_TOKEN_BLACKLIST = re.compile(r"^(?:modprobe\.blacklist|rd\.driver\.blacklist)=(\S+)$")
_TOKEN_FORBID = re.compile(r"^module_blacklist=(\S+)$")
_INSTALL_NOTHING = re.compile(r"^install\s+nvidia\s+(?:/usr)?/bin/(?:false|true)\b")


@dataclass(frozen=True)
class BootSource:
    """One line that acts on GPUs at boot."""

    path: str
    line: int
    text: str
    effect: str
    """takes|forbids|claims|tells"""
    why: str
    span: int = 1
    """Lines of the file that make up this one, by a backslash at their ends."""

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{self.path}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text} ({self.why})"


def sources(boot: BootFacts, functions: Mapping[str, str]) -> tuple[BootSource, ...]:
    """All lines that act on these GPUs, worst first. `functions`: address -> `10de:2230`."""
    found: list[BootSource] = []
    for file in boot.files:
        found.extend(_of_file(file, functions, boot))
    for token in boot.cmdline.split():
        if named := _token(token, functions):
            source = BootSource("/proc/cmdline", 1, token, *named)
            found.append(replace(source, why=f"{source.why}; of the running kernel"))
    order = ("forbids", "takes", "claims", "tells")
    return tuple(sorted(found, key=lambda one: (order.index(one.effect), one.path, one.line)))


def _of_file(file: BootFile, functions: Mapping[str, str], boot: BootFacts) -> Iterator[BootSource]:
    path = file.path
    if path.rpartition("/")[2].startswith("deployer-gpus"):
        return
    for number, raw, span in _joined(file):
        text = raw.strip()
        if not text or text.startswith(("#", ";")):
            continue
        for effect, why, shown in _of_line(path, text, functions, boot):
            yield BootSource(path, number, shown, effect, why, span)


def _joined(file: BootFile) -> Iterator[tuple[int, str, int]]:
    """(number of the first, text, how many) of lines that go on behind a backslash."""
    # To modprobe a comment goes on too; to the shell, which reads GRUB's files, it does not.
    modprobe = "/modprobe.d/" in file.path
    first, text, span = 0, "", 0
    for number, raw in file.lines():
        first, span = (first, span + 1) if span else (number, 1)
        if raw.endswith("\\") and (modprobe or text or not raw.lstrip().startswith("#")):
            text += raw[:-1]
            continue
        yield first, text + raw, span
        text, span = "", 0
    if span:
        yield first, text, span


def _of_line(
    path: str, text: str, functions: Mapping[str, str], boot: BootFacts
) -> Iterator[tuple[str, str, str]]:
    if path.startswith("/etc/driverctl.d/"):
        if path.rpartition("/")[2] in functions and text != "nvidia":
            yield "takes", f"driverctl binds it to {text} at boot", text
    elif path == "/etc/kernel/cmdline" or path.startswith("/etc/default/grub"):
        kernel_line = path == "/etc/kernel/cmdline"
        if not kernel_line:
            if not (found := GRUB.match(text)):
                return
            text = text[found.end() :]
        unused = "" if kernel_line == boot.systemd_boot else _not_used(boot)
        for token in text.replace('"', " ").replace("'", " ").split():
            if named := _token(token, functions):
                yield ("tells" if unused else named[0]), named[1] + unused, token
    elif "/modprobe.d/" in path:
        yield from ((*named, text) for named in _modprobe(text, functions, boot))
    elif "/udev/" in path:
        if any(address in text for address in functions) or (
            "vfio-pci" in text and _names_ids(text, functions)
        ):
            yield "claims", "a udev rule acts on it when it appears", text
    elif "/systemd/" in path or "/initramfs-tools/scripts/" in path or path == "/etc/rc.local":
        if any(address in text for address in functions) or re.search(
            r"driver_override|vfio-pci|new_id", text
        ):
            yield "claims", "something at boot that binds devices; its order is not known", text
    elif re.match(r"vfio[-_]pci\b", text):
        if ids := _IDS.search(text):
            if _listed(ids.group(1)) & set(functions.values()):
                yield "takes", "vfio-pci takes every GPU of this id", text
        else:
            yield "tells", "vfio-pci is loaded early", text


def _not_used(boot: BootFacts) -> str:
    started = "was" if boot.systemd_boot else "was not"
    return f"; not used: this system {started} started by systemd-boot"


def _token(token: str, functions: Mapping[str, str]) -> tuple[str, str] | None:
    """Of a kernel command line: (effect, why)."""
    if found := _TOKEN_IDS.match(token):
        if _listed(found.group(1)) & set(functions.values()):
            return "takes", "vfio-pci takes every GPU of this id"
    elif found := _TOKEN_FORBID.match(token):
        if "nvidia" in found.group(1).split(","):
            return "forbids", "the kernel refuses to load nvidia"
    elif found := _TOKEN_BLACKLIST.match(token):
        if "nvidia" in found.group(1).split(","):
            return "takes", "nvidia is not loaded by itself"
    elif token == "rd.driver.pre=vfio-pci":
        return "tells", "vfio-pci is loaded early"
    return None


def _modprobe(
    text: str, functions: Mapping[str, str], boot: BootFacts
) -> Iterator[tuple[str, str]]:
    plain = text.replace("_", "-")
    if plain.startswith("options vfio-pci ") and (ids := _IDS.search(text)):
        if _listed(ids.group(1)) & set(functions.values()):
            if boot.vfio_built_in:
                yield "tells", "without effect: vfio-pci is built into the kernel"
            else:
                yield "takes", "vfio-pci takes every GPU of this id"
    elif re.match(r"^blacklist\s+nvidia\s*$", text):
        yield "takes", "nvidia is not loaded by itself"
    elif _INSTALL_NOTHING.match(text):
        yield "forbids", "modprobe nvidia does nothing"
    elif re.match(r"^softdep\s+(nvidia|nouveau|drm|snd-hda-intel)\b.*pre:.*vfio-pci", plain):
        yield "tells", "vfio-pci is loaded before it"
    elif re.match(r"^install\s+(nvidia|vfio-pci)\b", plain):
        yield "claims", "runs a command of its own in place of the module"


def _listed(ids: str) -> set[str]:
    """`10de:2230` of each entry `vendor:device[:subvendor[:subdevice[:class[:mask]]]]`."""
    return {":".join(one.split(":")[:2]).lower() for one in ids.split(",")}


def _names_ids(text: str, functions: Mapping[str, str]) -> bool:
    low = text.lower()
    return any(all(part in low for part in one.split(":")) for one in functions.values())


def kept_by_ids(source: BootSource, functions: Mapping[str, str]) -> set[str]:
    """The ids of these GPUs that the line names."""
    found = _IDS.search(source.text) or _TOKEN_IDS.match(source.text)
    return (_listed(found.group(1)) if found else set()) & set(functions.values())


def stale_initrds(boot: BootFacts, found: Iterable[BootSource]) -> tuple[str, ...]:
    """Kernels whose initramfs is older than a modprobe.d or module file that acts on GPUs."""
    inside = {
        one.path
        for one in found
        if one.path.startswith(("/etc/modprobe.d/", "/etc/initramfs-tools/", "/etc/modules"))
    }
    newest = max((file.mtime for file in boot.files if file.path in inside), default=0)
    return tuple(kernel for kernel, made in boot.initrds if made < newest)
