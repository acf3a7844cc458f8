"""Shell functions that the gpus probe and the gpus script share: who has what open, what is stuck.

Only links, /proc texts and stat of open files are read: none of them waits for a device that is in
the middle of an unbind. `driver_override` and `uevent` would (seen on Linux 6.1: the read hangs and
no signal ends it).
"""

from __future__ import annotations

MARKS = "/run/deployer/gpus"
"""One file an address while a write to its sysfs files is under way; see gpus_script."""

FUNCTIONS = r"""
pci=$ROOT/sys/bus/pci
marks=$ROOT/run/deployer/gpus
driver_files="unbind|bind|driver_override|uevent|remove|reset|drivers_probe|new_id|remove_id"
sysfs_write="^[0-9]+ [0-9]+ /sys/.*pci.*/($driver_files)\$"
driver() { link=$(readlink "$pci/devices/$1/driver") || link=; echo "${link##*/}"; }
# Every open file as `PID FD TARGET`. A newline in a name would begin a line of its own: busybox's
# ls shows none, GNU's quotes such a name.
open_links() {
  printf '%s\n' "$ROOT"/proc/[0-9]*/fd/* | QUOTING_STYLE=c-maybe xargs ls -ld 2>/dev/null |
    sed -n 's,^.*/proc/\([0-9]*\)/fd/\([0-9]*\) -> \(.*\)$,\1 \2 \3,p'
}
# Every open character device as `PID MAJOR:MINOR` (hex). By number and not by name: a container's
# own node has another name and another inode.
open_chars() {
  printf '%s\n' "$ROOT"/proc/[0-9]*/fd/* | xargs stat -L -c '%F|%t:%T|%n' 2>/dev/null |
    sed -n 's,^character special file|\([0-9a-f]*:[0-9a-f]*\)|.*/proc/\([0-9]*\)/fd/.*$,\2 \1,p' |
    sort -u
}
# A sysfs number `MAJOR:MINOR` (decimal) in hex, as stat prints it.
hex() {
  { read -r number <"$1"; } 2>/dev/null || return 1
  printf '%x:%x\n' "${number%:*}" "${number#*:}"
}
# state PID [START]: sets its_state, the state letter; fails when it is gone, a zombie, or started
# at another time. A variable, for what is asked of many processes must not fork for each.
state() {
  { read -r line <"$ROOT/proc/$1/stat"; } 2>/dev/null || return 1
  line=${line##*) }
  # shellcheck disable=SC2086
  set -- "${2-}" $line
  [ "$2" != Z ] && [ "$2" != X ] || return 1
  [ -z "$1" ] || [ "$1" = "${21}" ] || return 1
  its_state=$2
}
# waiting PID FD: sets its_state, when it is inside a system call on this very file. Who only has it
# open waits for nothing; where the kernel does not tell, only state D counts.
waiting() {
  state "$1" || return 1
  its_call=
  for call in "$ROOT/proc/$1/syscall" "$ROOT/proc/$1"/task/*/syscall; do
    { read -r its_number its_first its_rest <"$call"; } 2>/dev/null || continue
    its_call=$its_number
    # Its first argument is hexadecimal; what is longer than a descriptor is an address.
    case $its_first in
      0x[0-9a-f]*) [ "${#its_first}" -gt 11 ] || [ $(($its_first)) -ne "$2" ] || return 0 ;;
    esac
  done
  [ -z "$its_call" ] && [ "$its_state" = D ]
}
# addresses PID TEXT: the PCI functions that the text or the process's command line names.
addresses() {
  { printf '%s\n' "$2"; tr '\0' ' ' <"$ROOT/proc/$1/cmdline"; } 2>/dev/null |
    grep -o -E '[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]' | tail -n 1
}
# From `PID FD TARGET` lines those that have a driver file of a PCI device open.
sysfs_writes() {
  grep -E "$sysfs_write"
}
# Writes of this tool that have not returned: `ADDRESS PID STATE WHAT`.
marked() {
  read -r boot <"$ROOT/proc/sys/kernel/random/boot_id" || boot=
  for mark in "$marks"/*; do
    [ -f "$mark" ] || continue
    { read -r its_boot its_pid its_start its_what <"$mark"; } 2>/dev/null || continue
    [ "$its_boot" = "$boot" ] || continue
    state "$its_pid" "$its_start" || continue
    echo "${mark##*/} $its_pid $its_state $its_what"
  done
}
# char_numbers ADDRESS: the character devices (hex) by which this function is used.
char_numbers() {
  device=$pci/devices/$1
  minor=$(sed -n 's/^Device Minor:[^0-9]*\([0-9]*\).*/\1/p' \
    "$ROOT/proc/driver/nvidia/gpus/$1/information" 2>/dev/null)
  [ -z "$minor" ] || printf 'c3:%x\n' "$minor"
  for node in "$device"/drm/card*/dev "$device"/drm/renderD*/dev "$device"/vfio-dev/vfio*/dev; do
    [ -e "$node" ] && hex "$node"
  done
  group=$(readlink "$device/iommu_group") || return 0
  [ ! -e "$ROOT/sys/class/vfio/${group##*/}/dev" ] || hex "$ROOT/sys/class/vfio/${group##*/}/dev"
}
"""
