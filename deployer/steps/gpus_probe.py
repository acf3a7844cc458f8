"""The scripts by which the gpus step looks at a host; gpus_facts parses what they print.

What is safe comes first. The scan of all open files comes last: it may hang on a dead network file
system, and then `scanned` is missing and nothing is believed about who holds a GPU.
"""

from __future__ import annotations

from deployer.steps.gpus_scan import FUNCTIONS

TIMEOUT_S = 20.0
OVERRIDE_TIMEOUT_S = 10.0

SCRIPT = (
    FUNCTIONS
    + r"""
{ read -r name <"$ROOT/proc/sys/kernel/hostname"; } 2>/dev/null || name=$(uname -n)
echo "node $name"
echo "now $(date +%s)"
{ read -r boot <"$ROOT/proc/sys/kernel/random/boot_id"; } 2>/dev/null && echo "bootid $boot"
# Links as `ls` shows them, for all devices at once: a process a device would be slow.
ls -ld "$pci"/devices/*/driver "$pci"/devices/*/iommu_group 2>/dev/null |
  sed -n 's,^.*/devices/\([^/]*\)/\([a-z_]*\) -> .*/\([^/]*\)$,link \1 \2 \3,p'
for path in "$pci"/devices/*; do
  { read -r vendor <"$path/vendor" && read -r device <"$path/device" &&
    read -r class <"$path/class"; } 2>/dev/null || continue
  bridge=-
  [ ! -d "$path/pci_bus" ] || bridge=+
  echo "pci ${path##*/} $vendor $device $class $bridge"
done
for file in "$ROOT"/proc/driver/nvidia/gpus/*/information; do
  [ -r "$file" ] || continue
  address=${file%/information}
  while read -r line; do
    case $line in 'Device Minor:'*) echo "minor ${address##*/} $line" ;; esac
  done <"$file"
done
for address in "$@"; do
  for node in "$pci/devices/$address"/drm/card*/dev "$pci/devices/$address"/drm/renderD*/dev \
    "$pci/devices/$address"/vfio-dev/vfio*/dev; do
    { read -r number <"$node"; } 2>/dev/null && echo "number $address $number"
  done
  for vfio in "$pci/devices/$address"/vfio-dev/vfio*; do
    [ -e "$vfio" ] && echo "vfiodev $address ${vfio##*/}"
  done
done
for node in "$ROOT"/sys/class/vfio/*/dev; do
  { read -r number <"$node"; } 2>/dev/null || continue
  node=${node%/dev}
  echo "groupnumber ${node##*/} $number"
done
for module in nvidia nvidia_uvm nvidia_modeset nvidia_drm vfio_pci; do
  [ -d "$ROOT/sys/module/$module" ] || continue
  { read -r initstate <"$ROOT/sys/module/$module/initstate"; } 2>/dev/null || initstate=live
  echo "module $module $initstate"
done
if { read -r count <"$ROOT/sys/module/nvidia/refcnt"; } 2>/dev/null; then
  dependents=0
  for one in "$ROOT"/sys/module/nvidia/holders/*; do
    [ -e "$one" ] && dependents=$((dependents + 1))
  done
  echo "refs $count $dependents"
fi
[ -r "$ROOT/proc/devices" ] && while read -r major name; do
  case $name in nvidia | nvidia-[a-z-]*) echo "major $major $name" ;; esac
done <"$ROOT/proc/devices"
stat -c 'devnode %n|%F|%t:%T' "$ROOT"/dev/nvidia* 2>/dev/null
for file in "$ROOT"/run/qemu-server/*.pid; do
  [ -r "$file" ] || continue
  { read -r pid <"$file"; } 2>/dev/null
  [ -n "$pid" ] && [ -d "$ROOT/proc/$pid" ] || continue
  vmid=${file##*/}
  echo "vm ${vmid%.pid} $pid"
done
[ -r "$ROOT/run/qemu-server/pci-id-reservations" ] &&
  while read -r address vmid until; do
    alive=-
    case $until in pid:*) [ -d "$ROOT/proc/${until#pid:}" ] && alive=+ ;; esac
    echo "reserved $address $vmid $until $alive"
  done <"$ROOT/run/qemu-server/pci-id-reservations"
for file in "$ROOT"/etc/pve/qemu-server/*.conf; do
  [ -r "$file" ] || continue
  vmid=${file##*/}
  counts=yes
  # A snapshot's section says nothing about the next start; [PENDING] does.
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in
      '[PENDING]'*) counts=yes ;;
      '['*) counts= ;;
      hostpci[0-9]* | onboot:* | name:*) [ -z "$counts" ] || echo "conf ${vmid%.conf} $line" ;;
    esac
  done <"$file"
done
[ -r "$ROOT/etc/pve/mapping/pci.cfg" ] && sed 's/^/mapping /' "$ROOT/etc/pve/mapping/pci.cfg"
ours=
for mark in "$marks"/*; do
  [ ! -f "$mark" ] || { ours=$(marked); break; }
done
# One look at all links, for what is of interest here: driver files and vfio's.
links=$(open_links | grep -E -e "$sysfs_write" -e /dev/vfio/ -e ' anon_inode:.*vfio-device')
# Memory, terminals and input devices are everywhere and no GPU.
chars=$(open_chars | grep -v -E ' ([145d]|88):')
pids=" "
also() { case $pids in *" $1 "*) ;; *) pids="$pids$1 " ;; esac; }
# Read from here-documents, not from pipes: what is found out must outlive the loop.
while read -r one pid rest; do
  [ -n "$one" ] || continue
  echo "marked $one $pid $rest"
  also "$pid"
done <<EOF
$ours
EOF
while read -r pid fd path; do
  [ -n "$pid" ] || continue
  case $path in
    /sys/*) # A write that was only passing is over by now.
      [ -L "$ROOT/proc/$pid/fd/$fd" ] || continue
      also "$pid"
      ! waiting "$pid" "$fd" || echo "write $pid $its_state $path"
      continue ;;
  esac
  echo "open $pid $fd $path"
  also "$pid"
  case $path in anon_inode*) ;; *) continue ;; esac
  [ -r "$ROOT/proc/$pid/fdinfo/$fd" ] && while read -r line; do
    case $line in vfio-device-syspath:*) echo "syspath $pid ${line##*/}" ;; esac
  done <"$ROOT/proc/$pid/fdinfo/$fd"
done <<EOF
$links
EOF
while read -r pid number; do
  [ -n "$pid" ] || continue
  echo "char $pid $number"
  case $number in a:*) ;; *) also "$pid" ;; esac
done <<EOF
$chars
EOF
for pid in $pids; do
  { read -r comm <"$ROOT/proc/$pid/comm"; } 2>/dev/null || continue
  echo "comm $pid $comm"
  printf 'cmd %s ' "$pid"
  tr '\0\n' '  ' <"$ROOT/proc/$pid/cmdline" 2>/dev/null
  echo
  { while read -r line; do echo "cgroup $pid $line"; done <"$ROOT/proc/$pid/cgroup"; } 2>/dev/null
done
echo "scanned"
exit 0
"""
)

# Never of a function with a write under way: this read would not return.
OVERRIDE_SCRIPT = (
    FUNCTIONS
    + r"""
busy=
for mark in "$marks"/*; do
  [ ! -f "$mark" ] || { busy=$(marked | cut -d ' ' -f 1); break; }
done
stuck=$(
  open_links | sysfs_writes | while read -r pid fd path; do
    waiting "$pid" "$fd" || continue
    named=$(addresses "$pid" "$path")
    echo "${named:-pending $pid}"
  done
)
# A writer that names no function may be on any of them.
case $stuck in *pending*) printf '%s\n' "$stuck" | grep -m 1 '^pending'; exit 0 ;; esac
for address in "$@"; do
  for path in "$pci/devices/${address%.*}".* "$pci/devices/$address"/iommu_group/devices/*; do
    case " $busy $stuck " in *"${path##*/}"*) continue ;; esac
    file=$pci/devices/${path##*/}/driver_override
    [ -e "$file" ] && echo "reading ${path##*/}"
    { read -r value <"$file"; } 2>/dev/null && echo "override ${path##*/} $value"
  done
done
exit 0
"""
)
