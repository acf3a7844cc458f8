"""The sh text of the driver step's looks. Read-only: no module is loaded, no node made or changed.

Values come as shell variables; ROOT is the file system's root, empty on a real machine.
"""

from __future__ import annotations

from deployer import gpu
from deployer.shell import assignments
from deployer.steps.harmless import HARMLESS

_LOADED = r"""
[ -r "$ROOT/proc/driver/nvidia/version" ] && while IFS= read -r line || [ -n "$line" ]; do
  case $line in 'NVRM version:'*) printf 'nvrm %s\n' "$line" ;; esac
done <"$ROOT/proc/driver/nvidia/version"
"""

_LIBRARIES = r"""
set --
for folder in /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64 /usr/lib \
  /usr/local/lib /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu/nvidia/current; do
  for file in "$ROOT$folder"/libcuda.so.*.* "$ROOT$folder"/libnvidia-ml.so.*.*; do
    [ -f "$file" ] && echo "library ${file#"$ROOT"}"
  done
  for file in "$ROOT$folder"/libcuda.so.1 "$ROOT$folder"/libnvidia-ml.so.1; do
    [ ! -L "$file" ] || set -- "$@" "$file"
  done
done
# All at once, where readlink takes more than one.
[ $# -eq 0 ] || { readlink -f "$@" 2>/dev/null || for file; do readlink -f "$file"; done; } |
  while IFS= read -r file; do echo "linked $file"; done
command -v nvidia-smi >/dev/null && echo "tool nvidia-smi"
"""

_PACKAGES = r"""
if [ -r "$ROOT/var/lib/dpkg/status" ] && command -v dpkg-query >/dev/null; then
  dpkg-query --admindir="$ROOT/var/lib/dpkg" -W \
    -f 'package ${Package} ${Version} ${db:Status-Want} ${db:Status-Status}\n' \
    '*nvidia*' 'libcuda1' 'cuda-drivers*' 2>/dev/null
fi
set --
for file in "$ROOT"/etc/apt/apt.conf.d/*; do [ ! -f "$file" ] || set -- "$@" "$file"; done
[ $# -eq 0 ] || sed -n -e 's,^[[:space:]]*//.*,,' \
  -e '/Unattended-Upgrade[[:space:]]*"1"/s,.*,unattended on,p' \
  -e '/^[[:space:]]*"[^"]*nvidia[^"]*"[[:space:]]*;/s,.*,unattended kept,p' "$@"
# One line a place, in their order; one that cannot be told leaves none, and then nothing is said.
df -Pk "$ROOT/usr" "$ROOT/var" 2>/dev/null | awk '
  NR > 1 { free[NR - 1] = $4; disk[NR - 1] = $1 ":" $6 }
  END { if (NR == 3) for (n = 1; n <= 2; n++) if (free[n] ~ /^[0-9]+$/)
    print "free", n == 1 ? "/usr" : "/var", free[n], disk[n] }'
"""

_KERNEL = r"""
{ read -r kernel <"$ROOT/proc/sys/kernel/osrelease"; } 2>/dev/null || kernel=$(uname -r)
"""

HOST = (
    _LOADED
    + r"""
{ read -r loaded <"$ROOT/sys/module/nvidia/version"; } 2>/dev/null && echo "loaded $loaded"
"""
    + _KERNEL
    + r"""echo "kernel $kernel"
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
  driver=
  # `cd` instead of a process for readlink; a link whose target is hidden has it by name only.
  if [ -L "$device/driver" ]; then
    cd -P "$device/driver" 2>/dev/null && driver=$PWD || driver=$(readlink "$device/driver")
  fi
  echo "gpu ${device##*/} $id ${driver##*/}"
done
cd /
# The last 20 lines that tell of trouble, and the last 20 others: a driver that chatters must not
# push out what it said an hour ago.
dmesg 2>/dev/null | awk '
  /NVRM: Xid|NVRM.*([Ff]ail|fallen|usage count|requires|supported|only ready|bound to)/ ||
    /NVRM.*(BAR|IRQ|cables|[Ff]irmware|[Tt]ime.?out|WPR2|required GPU|initialize|invalid)/ ||
    /NovaCore|unavailable key is rejected|unsigned module|nvidia.*(probe|firmware|version)/ ||
    /probe.*nvidia|(vfio|nvidia).*(D3cold|D3 to|reserve|not ready)/ {
    line[NR] = $0
    kind[NR] = 1
    next
  }
  /NVRM/ { line[NR] = $0; kind[NR] = 2 }
  END {
    for (i = NR; i > 0; i--) if (i in kind && count[kind[i]]++ < 20) keep[i] = 1
    for (i = 1; i <= NR; i++) if (i in keep) print "log " line[i]
  }'
"""
    + _LIBRARIES
    + _PACKAGES
    + "exit 0\n"
)

# `modinfo` only reads the module file; `dkms status` only its own folders.
KERNELS = (
    _KERNEL
    + r"""echo "running $kernel"
for folder in "$ROOT"/lib/modules/*; do
  [ -d "$folder" ] || continue
  name=${folder##*/}
  image=no headers=no
  for file in "$ROOT/boot/vmlinuz-$name" "$ROOT/boot/vmlinux-$name" "$folder/vmlinuz"; do
    [ -e "$file" ] && image=yes
  done
  [ -e "$folder/build/Makefile" ] && headers=yes
  echo "kernel $name $image $headers"
  modinfo -k "$name" nvidia 2>/dev/null | while read -r key value; do
    case $key in version: | license: | signer:) echo "module $name ${key%:} $value" ;; esac
  done
done
for pin in next-boot-pin proxmox-boot-pin; do
  { read -r value <"$ROOT/etc/kernel/$pin" || [ -n "$value" ]; } 2>/dev/null &&
    echo "pin $pin $value"
done
set --
for file in "$ROOT/etc/default/grub" "$ROOT"/etc/default/grub.d/*.cfg; do
  [ ! -f "$file" ] || set -- "$@" "$file"
done
[ $# -eq 0 ] || sed -n -e '/^ *GRUB_DEFAULT=/{' -e 's//grub /' -e "s/[\"']//g" -e p -e '}' "$@"
[ -r "$ROOT/boot/grub/grubenv" ] && while IFS= read -r line || [ -n "$line" ]; do
  case $line in
    saved_entry=*) echo "saved ${line#*=}" ;;
    next_entry=*) echo "next ${line#*=}" ;;
  esac
done <"$ROOT/boot/grub/grubenv"
if command -v dkms >/dev/null; then
  echo "tool dkms"
  dkms status 2>/dev/null | while IFS= read -r line; do echo "dkms $line"; done
fi
mok=$ROOT/var/lib/dkms/mok.pub
if [ -r "$mok" ] && command -v mokutil >/dev/null; then
  echo "mok $(mokutil --test-key "$mok" 2>&1 | head -n 1)"
fi
exit 0
"""
)

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
  minor=
  while read -r line; do
    case $line in 'Device Minor:'*) minor=${{line##*[!0-9]}} ;; esac
  done <"$information"
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
