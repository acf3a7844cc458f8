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
echo "node $(uname -n)"
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
grep -H '^Device Minor:' "$ROOT"/proc/driver/nvidia/gpus/*/information 2>/dev/null |
  sed -n 's,^.*/gpus/\([^/]*\)/information:,minor \1 ,p'
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
sed -n 's/^ *\([0-9][0-9]*\) \(nvidia[a-z-]*\)$/major \1 \2/p' "$ROOT/proc/devices" 2>/dev/null
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
ours=$(marked)
[ -z "$ours" ] || printf '%s\n' "$ours" | sed 's/^/marked /'
links=$(open_links)
writes=$(printf '%s\n' "$links" | sysfs_writes)
told=
opened=$(
  printf '%s\n' "$links" | sed -n -e 's,^\([0-9]* [0-9]* .*/dev/vfio/.*\)$,open \1,p' \
    -e 's,^\([0-9]* [0-9]* anon_inode:.*vfio-device.*\)$,open \1,p'
  # Memory, terminals and input devices are everywhere and no GPU.
  open_chars | sed -e '/ [145d]:/d' -e '/ 88:/d' -e 's/^/char /'
)
printf '%s\n' "$opened"
printf '%s\n' "$opened" | sed -n 's/^open \([0-9]*\) \([0-9]*\) anon_inode.*/\1 \2/p' |
  while read -r pid fd; do
    sed -n "s,^vfio-device-syspath:[[:space:]]*.*/,syspath $pid ,p" \
      "$ROOT/proc/$pid/fdinfo/$fd" 2>/dev/null
  done
# A write that was only passing is over by now.
printf '%s\n' "$writes" | while read -r pid fd path; do
  [ -n "$pid" ] && [ -L "$ROOT/proc/$pid/fd/$fd" ] || continue
  its_state=$(waiting "$pid" "$fd") && echo "write $pid $its_state $path"
done
[ -z "$opened$writes$ours" ] || for pid in $(
  printf '%s\n' "$opened" | sed -n -e 's/^open \([0-9]*\) .*/\1/p' \
    -e 's/^char \([0-9]*\) a:.*//' -e 's/^char \([0-9]*\) .*/\1/p' | sort -u
  printf '%s\n' "$writes" | sed 's/ .*//'
  printf '%s\n' "$ours" | cut -d ' ' -f 2
); do
  case " $told " in *" $pid "*) continue ;; esac
  told="$told $pid"
  { read -r comm <"$ROOT/proc/$pid/comm"; } 2>/dev/null || continue
  echo "comm $pid $comm"
  echo "cmd $pid $(tr '\0\n' '  ' <"$ROOT/proc/$pid/cmdline" 2>/dev/null)"
  sed "s/^/cgroup $pid /" "$ROOT/proc/$pid/cgroup" 2>/dev/null
done
echo "scanned"
exit 0
"""
)

# Never of a function with a write under way: this read would not return.
OVERRIDE_SCRIPT = (
    FUNCTIONS
    + r"""
busy=$(marked | cut -d ' ' -f 1)
stuck=$(
  open_links | sysfs_writes | while read -r pid fd path; do
    waiting "$pid" "$fd" >/dev/null || continue
    named=$(addresses "$pid" "$path")
    echo "${named:-pending $pid}"
  done
)
# A writer that names no function may be on any of them.
printf '%s\n' "$stuck" | grep -m 1 '^pending' && exit 0
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
