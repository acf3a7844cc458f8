"""What a host does with its GPUs at the next boot: the files that say so, read whole.

`BootFacts` holds texts; boot_sources tells what they mean. Nothing is mounted and no boot tool is
asked: `proxmox-boot-tool status` mounts partitions, and reading an initramfs takes seconds.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from deployer.model import Probe, ProbeOutput, Where
from deployer.steps.driver_scripts import rooted

MAX_FILE_BYTES = 65536
LOADER_VARIABLE = "LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
"""EFI variable that systemd-boot sets (Boot Loader Interface, systemd.io/BOOT_LOADER_INTERFACE)."""

SCRIPT = r"""
set -- "$ROOT"/etc/modprobe.d/*.conf "$ROOT"/run/modprobe.d/*.conf \
  "$ROOT"/usr/lib/modprobe.d/*.conf "$ROOT"/etc/modules "$ROOT"/etc/modules-load.d/*.conf \
  "$ROOT"/etc/initramfs-tools/modules "$ROOT"/etc/initramfs-tools/scripts/*/* \
  "$ROOT"/etc/default/grub.d/*.cfg "$ROOT"/etc/udev/rules.d/*.rules \
  "$ROOT"/run/udev/rules.d/*.rules "$ROOT"/etc/systemd/system/*.service \
  "$ROOT"/etc/systemd/system/*.service.d/*.conf "$ROOT/etc/rc.local"
found=$(grep -s -l -i -e vfio -e nvidia -e driver_override \
  -e '[0-9a-f][0-9a-f]:[0-9a-f][0-9a-f]\.[0-7]' "$@")
set --
for file in "$ROOT/etc/default/grub" "$ROOT/etc/kernel/cmdline" \
  "$ROOT"/etc/driverctl.d/*:*:*.? "$ROOT/usr/local/sbin/deployer-gpus"; do
  [ ! -f "$file" ] || set -- "$@" "$file"
done
IFS='
'
set -f
# shellcheck disable=SC2086
set -- "$@" $found
set +f
unset IFS
[ $# -eq 0 ] || stat -c '%Y %s %a %n' "$@" | while read -r time size mode file; do
  if [ "$size" -gt @LIMIT@ ]; then echo "large ${file#"$ROOT"}"; continue; fi
  # Where base64 knows -w there is one process a file; elsewhere its lines are joined.
  coded=$(base64 -w 0 <"$file" 2>/dev/null) || coded=$(base64 <"$file" | tr -d '\n')
  echo "file ${file#"$ROOT"} $time $mode $coded"
done
for link in "$ROOT"/etc/systemd/system/multi-user.target.wants/deployer-gpus-*.service; do
  [ -L "$link" ] && echo "enabled ${link##*/}"
done
{ read -r line <"$ROOT/proc/cmdline" || [ -n "$line" ]; } 2>/dev/null && echo "cmdline $line"
{ read -r boot <"$ROOT/proc/sys/kernel/random/boot_id"; } 2>/dev/null && echo "bootid $boot"
{ read -r kernel <"$ROOT/proc/sys/kernel/osrelease"; } 2>/dev/null || kernel=$(uname -r)
echo "kernel $kernel"
set --
for image in "$ROOT"/boot/initrd.img-*; do
  case $image in *.bak | *.dpkg-* | *.old-dkms) continue ;; esac
  [ ! -f "$image" ] || set -- "$@" "$image"
done
[ $# -eq 0 ] || stat -c '%Y %n' "$@" | while read -r time image; do
  echo "initrd ${image##*/initrd.img-} $time"
done
[ -e "$ROOT/sys/firmware/efi/efivars/@LOADER@" ] && echo "loader systemd-boot"
[ -s "$ROOT/etc/kernel/proxmox-boot-uuids" ] && echo "tool esp"
for tool in update-grub proxmox-boot-tool update-initramfs driverctl; do
  command -v "$tool" >/dev/null && echo "tool $tool"
done
grep -q -e '/vfio-pci\.ko' "$ROOT/lib/modules/$kernel/modules.builtin" 2>/dev/null &&
  echo "builtin vfio-pci"
exit 0
""".replace("@LIMIT@", str(MAX_FILE_BYTES)).replace("@LOADER@", LOADER_VARIABLE)


@dataclass(frozen=True)
class BootFile:
    """One file. `mtime` in Unix seconds of the host's clock."""

    path: str
    content: bytes
    mtime: int = 0
    mode: int = 0o644

    def lines(self) -> list[tuple[int, str]]:
        """(number, text) from 1 on."""
        text = self.content.decode("utf-8", "replace")
        return list(enumerate(text.splitlines(), 1))


@dataclass(frozen=True)
class BootFacts:
    """The boot configuration around GPUs. Files that mention none of them are left out."""

    files: tuple[BootFile, ...] = ()
    cmdline: str = ""
    """Of the running kernel."""
    boot_id: str = ""
    kernel: str = ""
    initrds: tuple[tuple[str, int], ...] = ()
    """Kernel and mtime of each initramfs."""
    tools: tuple[str, ...] = ()
    """update-grub, proxmox-boot-tool, update-initramfs, driverctl; `esp`: proxmox-boot-tool keeps
    partitions of its own."""
    systemd_boot: bool = False
    """The running system was started by systemd-boot; else by GRUB or something unknown."""
    vfio_built_in: bool = False
    """vfio-pci is part of the kernel: modprobe.d does not reach it, only the command line."""
    enabled: tuple[str, ...] = ()
    """Boot units of this tool that are enabled."""
    large: tuple[str, ...] = ()
    """Files over MAX_FILE_BYTES, not read."""
    timed_out: bool = False

    def file(self, path: str) -> BootFile | None:
        """The file at `path`, None when there is none or it mentions no GPU."""
        return next((one for one in self.files if one.path == path), None)

    def has_unit(self, unit: str) -> bool:
        """Whether this boot unit is enabled or lies there."""
        return unit in self.enabled or self.file(f"/etc/systemd/system/{unit}") is not None


def parse(output: ProbeOutput, root: str = "") -> BootFacts:
    """The answer of SCRIPT."""
    found: dict[str, list[str]] = {}
    for line in output.text.splitlines():
        key, _, rest = line.partition(" ")
        found.setdefault(key, []).append(rest.removeprefix(root))

    def one(key: str) -> str:
        return next(iter(found.get(key, ())), "")

    pairs = [line.split(" ") for line in found.get("initrd", ())]
    return BootFacts(
        files=tuple(made for line in found.get("file", ()) if (made := _file(line))),
        cmdline=one("cmdline").strip(),
        boot_id=one("bootid"),
        kernel=one("kernel"),
        initrds=tuple((kernel, int(time)) for kernel, time in pairs if time.isdigit()),
        tools=tuple(found.get("tool", ())),
        systemd_boot="systemd-boot" in found.get("loader", ()),
        vfio_built_in="vfio-pci" in found.get("builtin", ()),
        enabled=tuple(found.get("enabled", ())),
        large=tuple(found.get("large", ())),
        timed_out=output.timed_out,
    )


def _file(line: str) -> BootFile | None:
    path, mtime, mode, content = (*line.rsplit(" ", 3), "", "", "")[:4]
    try:
        return BootFile(path, base64.b64decode(content, validate=True), int(mtime), int(mode, 8))
    except (ValueError, binascii.Error):
        # An answer that was cut off at the deadline: `timed_out` says so.
        return None


def probe(root: str = "") -> Probe:
    """Of the host."""
    return Probe("gpus.boot", Where.HOST, rooted(SCRIPT, root), lambda output: parse(output, root))
