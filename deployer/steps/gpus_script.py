"""The script that moves PCI functions between drivers; run by the steps, and at boot by a unit.

Every write to sysfs is done by a detached writer with a deadline: an unbind of a GPU that is in use
never returns, and no signal ends its writer. The success of a write proves nothing, so the driver
link is read back. The link is gone as soon as an unbind has begun, so an unbind is finished only
when its writer has ended as well. While a write is under way a mark with the boot id and the
writer's identity lies in /run/deployer/gpus; a later look finds it, and finds any other tool's
writer by its open file.
"""

from __future__ import annotations

from deployer.steps.gpus_guards import GUARDED, IN_USE
from deployer.steps.gpus_scan import FUNCTIONS

STUCK = 75
HELD = 76
FAILED = 77

SCRIPT = (
    r"""#!/bin/sh
# Usage: deployer-gpus DEADLINE_S [-p] [-u MODULES] ADDRESS,TO,FROM[,OVERRIDE]...
#   Moves each PCI function to driver TO (`-`: to none) when it is on FROM or on none; then writes
#   OVERRIDE to its driver_override (`(null)`: none; left out: TO).
#   -p: nvidia-persistenced may be stopped for this. -u: unload these modules at the end.
# Exit: 0 done, 75 a write to sysfs did not return, 76 a GPU is in use, 77 another failure.
export LC_ALL=C
ROOT=${DEPLOYER_ROOT-}
limit=$1
shift
# A driver's start may take longer than a write to sysfs: firmware is loaded, memory is cleared.
patience=120
[ "$limit" -le "$patience" ] || patience=$limit
daemon=
unload=
while :; do
  case $1 in
    -p) daemon=allowed; shift ;;
    -u) unload=$2; shift 2 ;;
    *) break ;;
  esac
done
work=$(mktemp -d) || exit 77
session=
if command -v setsid >/dev/null; then session=setsid; fi
"""
    + FUNCTIONS
    + r"""
say() { echo "$*"; }
fail() { code=$1; shift; echo "$*" >&2; exit "$code"; }
tick() { sleep 0.1 2>/dev/null || sleep 1; }
now() { date +%s; }
stuck() {
  echo "kernel:" >&2
  dmesg 2>/dev/null | grep -e NVRM -e "vfio-pci ${address-}" -e 'blocked until' | tail -n 3 >&2
  fail 75 "$1; only a reboot of this host clears it"
}

paused=
finish() {
  code=$?
  rm -rf "$work"
  [ -n "$paused" ] || exit "$code"
  # On every way out, but not behind a stuck unbind: the daemon would hang there too.
  if [ "$code" = 75 ]; then
    echo "nvidia-persistenced was stopped and stays so" >&2
  elif [ -n "$(on_nvidia)" ]; then
    systemctl --no-block start nvidia-persistenced.service && say "nvidia-persistenced is started"
  else
    say "nvidia-persistenced stays stopped: no GPU is on nvidia"
  fi
  exit "$code"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
# The connection may be cut: what has begun is brought to its end, with nobody to tell.
trap '' PIPE
on_nvidia() {
  for one in "$pci"/drivers/nvidia/*:*:*.*; do [ -e "$one" ] && echo "${one##*/}"; done
}

"""
    + GUARDED
    + IN_USE
    + r"""fields() {
  address=${1%%,*} rest=${1#*,}
  to=${rest%%,*} rest=${rest#*,}
  from=${rest%%,*} override=
  case $rest in *,*) override=${rest#*,} ;; esac
}
load() {
  case $1 in
    -) return 0 ;;
    nvidia) [ ! -d "$ROOT/sys/module/nvidia" ] || return 0 ;;
    *) [ ! -d "$pci/drivers/$1" ] || return 0 ;;
  esac
  case $1 in
    xhci_hcd) module=xhci_pci ;;
    nvidia-gpu) module=i2c_nvidia_gpu ;;
    *) module=$1 ;;
  esac
  patient "modprobe $module" modprobe "$module" ||
    fail 77 "modprobe $module failed: $(cat "$work/text")"
}
free() {
  was=$(driver "$address")
  [ "$was" != "$to" ] || return 0
  [ -z "$was" ] || [ "$was" = "$from" ] ||
    fail 77 "$address is bound to $was, not to $from; it was not touched"
  [ -z "$was" ] || refuse_used "$address"
  if [ "$to" != - ]; then
    put "$address" "the write to driver_override of $address" "$to" \
      "$pci/devices/$address/driver_override" ||
      fail 77 "driver_override of $address cannot be written: $(cat "$work/text")"
  fi
  [ -n "$was" ] || return 0
  put "$address" "the unbind of $address from $was" "$address" "$pci/drivers/$was/unbind" ||
    [ "$(driver "$address")" != "$was" ] ||
    fail 77 "$address cannot be unbound from $was: $(cat "$work/text")"
  wait_driver "$address" != "$was" ||
    stuck "$address is still bound to $was $limit s after its unbind"
  say "$address is free of $was"
}
bind() {
  [ "$to" != - ] || { [ -z "$(driver "$address")" ]; return; }
  if [ "$(driver "$address")" != "$to" ]; then
    span=$patience
    put "$address" "the probe of $address" "$address" "$pci/drivers_probe" ||
      fail 77 "$address cannot be probed: $(cat "$work/text")"
  fi
  span=$limit
  wait_driver "$address" = "$to" ||
    fail 77 "$address is bound to '$(driver "$address")' and not to $to after $limit s"
  say "$address is bound to $to"
}
final_override() {
  [ "$override" != '(null)' ] || value=
  [ "$override" = '(null)' ] || value=$override
  put "$address" "the write to driver_override of $address" "$value" \
    "$pci/devices/$address/driver_override" ||
    fail 77 "driver_override of $address cannot be written: $(cat "$work/text")"
}

node() {
  if [ -c "$ROOT/dev/$1" ] &&
    [ "$(stat -c '%t:%T' "$ROOT/dev/$1")" = "$(printf '%x:%x' "$2" "$3")" ]; then
    return 0
  fi
  rm -f "$ROOT/dev/$1"
  mknod -m 0666 "$ROOT/dev/$1" c "$2" "$3" || fail 77 "/dev/$1 cannot be made"
}
nodes() {
  load_uvm=
  [ -d "$ROOT/sys/module/nvidia_uvm" ] || load_uvm=yes
  if [ -n "$load_uvm" ]; then
    patient "modprobe nvidia_uvm" modprobe nvidia_uvm ||
      fail 77 "modprobe nvidia_uvm failed: $(cat "$work/text")"
  fi
  flags=
  for address in "$@"; do
    file=$ROOT/proc/driver/nvidia/gpus/$address/information
    stop=$(($(now) + limit + 1))
    until minor=$(sed -n 's/^Device Minor:[^0-9]*\([0-9]*\).*/\1/p' "$file" 2>/dev/null) &&
      [ -n "$minor" ]; do
      [ "$(now)" -lt "$stop" ] || fail 77 "the driver names no device minor of $address"
      tick
    done
    flags="$flags -c $minor"
  done
  if command -v nvidia-modprobe >/dev/null; then
    # shellcheck disable=SC2086
    patient nvidia-modprobe nvidia-modprobe -u $flags ||
      say "nvidia-modprobe failed: $(cat "$work/text")"
  fi
  # What nvidia-modprobe has not made, or has left with an old major.
  for minor in $flags; do
    [ "$minor" = -c ] || node "nvidia$minor" 195 "$minor"
  done
  node nvidiactl 195 255
  major=$(sed -n 's/^ *\([0-9][0-9]*\) nvidia-uvm$/\1/p' "$ROOT/proc/devices" | head -n 1)
  [ -n "$major" ] || fail 77 "nvidia-uvm is not in /proc/devices"
  node nvidia-uvm "$major" 0
  node nvidia-uvm-tools "$major" 1
}

moved= served= leaving=
for job in "$@"; do
  fields "$job"
  [ -d "$pci/devices/$address" ] || fail 77 "there is no PCI function $address"
  was=$(driver "$address")
  [ "$to" != nvidia ] || served="$served $address"
  [ "$was" = "$to" ] || [ -z "$was$to" ] || moved="$moved $job"
  [ "$was" != nvidia ] || [ "$to" = nvidia ] || leaving="$leaving $job"
done
# shellcheck disable=SC2086
[ -z "$moved" ] || refuse_pending $moved
# shellcheck disable=SC2086
[ -z "$daemon" ] || [ -z "$leaving" ] || pause_daemon $leaving
for job in $moved; do fields "$job"; free; done
# The module is loaded only now: with every GPU on vfio-pci nvidia refuses (No such device).
for job in $moved; do fields "$job"; load "$to"; done
for job in $moved; do fields "$job"; bind; done
for job in "$@"; do
  fields "$job"
  [ -z "$override" ] || final_override
done
# shellcheck disable=SC2086
[ -z "$served" ] || nodes $served
if [ -n "$unload" ] && [ -z "$(on_nvidia)" ]; then
  for module in $unload; do
    [ -d "$ROOT/sys/module/$module" ] || continue
    patient "modprobe -r $module" modprobe -r "$module" ||
      fail 77 "modprobe -r $module failed: $(cat "$work/text")"
  done
fi
exit 0
"""
)
