"""The sh text of the driver step's looks. Read-only: no module is loaded, no node made or changed.

Values come as shell variables; ROOT is the file system's root, empty on a real machine.
"""

from __future__ import annotations

from deployer import gpu
from deployer.shell import assignments
from deployer.steps.harmless import HARMLESS

_LOADED = r"""
[ -r "$ROOT/proc/driver/nvidia/version" ] && sed -n 's/^NVRM version:/nvrm &/p' \
  "$ROOT/proc/driver/nvidia/version"
"""

_LIBRARIES = r"""
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

_PACKAGES = r"""
if [ -r "$ROOT/var/lib/dpkg/status" ] && command -v dpkg-query >/dev/null; then
  dpkg-query --admindir="$ROOT/var/lib/dpkg" -W \
    -f 'package ${Package} ${Version} ${db:Status-Want} ${db:Status-Status}\n' \
    '*nvidia*' 'libcuda1' 'cuda-drivers*' 2>/dev/null
fi
for file in "$ROOT"/etc/apt/apt.conf.d/*; do
  [ -f "$file" ] && sed -n -e 's,^[[:space:]]*//.*,,' \
    -e '/Unattended-Upgrade[[:space:]]*"1"/s,.*,unattended on,p' \
    -e '/^[[:space:]]*"[^"]*nvidia[^"]*"[[:space:]]*;/s,.*,unattended kept,p' "$file"
done
for place in /usr /var; do
  df -Pk "$ROOT$place" 2>/dev/null | awk -v place="$place" \
    'NR == 2 && $4 ~ /^[0-9]+$/ { print "free", place, $4, $1 ":" $6 }'
done
"""

HOST = (
    _LOADED
    + r"""
{ read -r loaded <"$ROOT/sys/module/nvidia/version"; } 2>/dev/null && echo "loaded $loaded"
kernel=$(uname -r)
echo "kernel $kernel"
disk=$(modinfo -k "$kernel" -F version nvidia 2>/dev/null) && echo "disk $disk"
for module in nouveau nova_core; do
  [ -d "$ROOT/sys/module/$module" ] && echo "rival $module"
done
for variable in "$ROOT"/sys/firmware/efi/efivars/SecureBoot-*; do
  [ -r "$variable" ] && echo "secureboot $(od -An -t u1 -j 4 -N 1 "$variable" | tr -d ' ')"
done
for module in nvidia nvidia_uvm nvidia_modeset nvidia_drm nvidia_peermem; do
  { read -r count <"$ROOT/sys/module/$module/refcnt"; } 2>/dev/null || continue
  users=0
  for user in "$ROOT/sys/module/$module/holders"/*; do
    if [ -e "$user" ] || [ -L "$user" ]; then users=$((users + 1)); fi
  done
  echo "refs $module $count $users"
done
for device in "$ROOT"/sys/bus/pci/devices/*; do
  # `read`, not `cat`: a host has hundreds of functions, and a process for each is slow.
  { read -r vendor <"$device/vendor" && read -r class <"$device/class" &&
    read -r id <"$device/device"; } 2>/dev/null || continue
  case $vendor:$class in 0x10de:0x0300* | 0x10de:0x0302*) ;; *) continue ;; esac
  driver=$(readlink "$device/driver") || driver=
  echo "gpu ${device##*/} $id ${driver##*/}"
done
dmesg 2>/dev/null | grep -a -E 'NVRM|NovaCore|unavailable key is rejected|unsigned module' |
  tail -n 20 | sed 's/^/log /'
"""
    + _LIBRARIES
    + _PACKAGES
    + "exit 0\n"
)

# `modinfo` only reads the module file; `dkms status` only its own folders.
KERNELS = r"""
echo "running $(uname -r)"
for folder in "$ROOT"/lib/modules/*; do
  [ -d "$folder" ] || continue
  name=${folder##*/}
  image=no headers=no
  for file in "$ROOT/boot/vmlinuz-$name" "$ROOT/boot/vmlinux-$name" "$folder/vmlinuz"; do
    [ -e "$file" ] && image=yes
  done
  [ -e "$folder/build/Makefile" ] && headers=yes
  echo "kernel $name $image $headers"
  modinfo -k "$name" nvidia 2>/dev/null | sed -n \
    -e "s,^version: *,module $name version ,p" -e "s,^license: *,module $name license ,p" \
    -e "s,^signer: *,module $name signer ,p"
done
for pin in next-boot-pin proxmox-boot-pin; do
  [ -s "$ROOT/etc/kernel/$pin" ] && echo "pin $pin $(sed -n 1p "$ROOT/etc/kernel/$pin")"
done
for file in "$ROOT/etc/default/grub" "$ROOT"/etc/default/grub.d/*.cfg; do
  [ -f "$file" ] && sed -n 's/^ *GRUB_DEFAULT=/grub /p' "$file" | tr -d "\"'"
done
[ -r "$ROOT/boot/grub/grubenv" ] &&
  sed -n -e 's/^saved_entry=/saved /p' -e 's/^next_entry=/next /p' "$ROOT/boot/grub/grubenv"
if command -v dkms >/dev/null; then
  echo "tool dkms"
  dkms status 2>/dev/null | sed 's/^/dkms /'
fi
mok=$ROOT/var/lib/dkms/mok.pub
if [ -r "$mok" ] && command -v mokutil >/dev/null; then
  echo "mok $(mokutil --test-key "$mok" 2>&1 | head -n 1)"
fi
exit 0
"""

GUEST = (
    _LOADED
    + r"""
command -v systemd-detect-virt >/dev/null && echo "virt $(systemd-detect-virt -c)"
"""
    + _LIBRARIES
    + _PACKAGES
    + "exit 0\n"
)

# Only with the module loaded and every GPU's node there is anything to ask.
SMI = (
    HARMLESS
    + rf"""
[ -e "$ROOT/proc/driver/nvidia/version" ] && [ -c "$ROOT/dev/nvidiactl" ] || exit 200
for information in "$ROOT"/proc/driver/nvidia/gpus/*/information; do
  [ -r "$information" ] || continue
  minor=$(sed -n 's/^Device Minor:[^0-9]*//p' "$information")
  [ -c "$ROOT/dev/nvidia$minor" ] || exit 200
done
command -v nvidia-smi >/dev/null || exit 127
cannot_harm nvidia-smi {gpu.SMI_QUERY}
status=$?
[ "$status" -ne 125 ] || exit 200
exit "$status"
"""
)


def rooted(script: str, root: str = "") -> str:
    """`script` with its ROOT prefix set."""
    return assignments({"ROOT": root}) + script
