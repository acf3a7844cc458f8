"""The script that brings GPUs to nvidia; run by the step, and at boot by a unit of this tool.

Every write to sysfs is done by a detached writer with a deadline: an unbind of a GPU that is in use
never returns, and its writer cannot be killed. The success of a write proves nothing, so the driver
link is read back. The link is gone as soon as an unbind has begun, so an unbind is finished only
when its writer has ended as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployer.shell import assignments, words

STUCK = 75
HELD = 76
FAILED = 77

BOOT_SCRIPT = "/usr/local/sbin/deployer-gpus"
UNIT_FOLDER = "/etc/systemd/system"

SCRIPT = r"""#!/bin/sh
# Usage: deployer-gpus DEADLINE_S ADDRESS...   Brings these PCI functions to nvidia.
# Exit: 0 done, 75 a write to sysfs never returned, 76 a GPU is in use, 77 another failure.
export LC_ALL=C
ROOT=${DEPLOYER_ROOT-}
pci=$ROOT/sys/bus/pci
limit=$1
shift
work=$(mktemp -d) || exit 77
trap 'rm -rf "$work"' EXIT
session=
if command -v setsid >/dev/null; then session=setsid; fi

say() { echo "$*"; }
fail() { code=$1; shift; echo "$*" >&2; exit "$code"; }
driver() { link=$(readlink "$pci/devices/$1/driver") || link=; echo "${link##*/}"; }
tick() { sleep 0.1 2>/dev/null || sleep 1; }
now() { date +%s; }

# guarded WHAT COMMAND...: runs it detached; its exit status, or the script ends with 75.
guarded() {
  what=$1
  shift
  rm -f "$work/end" "$work/text"
  # The folder is named to the writer, which may outlive this script.
  $session sh -c 'work=$1; shift; "$@" >"$work/text" 2>&1; code=$?
    [ ! -d "$work" ] || { echo "$code" >"$work/end.part" && mv "$work/end.part" "$work/end"; }' \
    sh "$work" "$@" </dev/null >/dev/null 2>&1 &
  stop=$(($(now) + limit + 1))
  until [ -f "$work/end" ]; do
    [ "$(now)" -lt "$stop" ] ||
      fail 75 "$what has not returned after $limit s; only a reboot of this host clears it"
    tick
  done
  return "$(cat "$work/end")"
}
put() { guarded "$1" sh -c 'printf "%s\n" "$1" >"$2"' sh "$2" "$3"; }

# wait_driver ADDRESS TEST DRIVER: until the driver link is (=) or is not (!=) DRIVER.
wait_driver() {
  stop=$(($(now) + limit + 1))
  # shellcheck disable=SC2086
  until [ "$(driver "$1")" $2 "$3" ]; do
    [ "$(now)" -lt "$stop" ] || return 1
    tick
  done
}

free() {
  was=$(driver "$1")
  put "writing driver_override of $1" nvidia "$pci/devices/$1/driver_override" ||
    fail 77 "driver_override of $1 cannot be written: $(cat "$work/text")"
  [ -n "$was" ] || return 0
  [ "$was" = vfio-pci ] || fail 77 "$1 is bound to $was, not to vfio-pci; it was not touched"
  group=$(readlink "$pci/devices/$1/iommu_group") || group=
  if [ -n "$group" ]; then
    held=$(printf '%s\n' "$ROOT"/proc/[0-9]*/fd/* | xargs ls -ld 2>/dev/null |
      sed -n "s,^.*/proc/\([0-9]*\)/fd/[0-9]* -> /dev/vfio/${group##*/}\$,\1,p" | sort -u)
    # shellcheck disable=SC2086
    [ -z "$held" ] || fail 76 "$1 is in use by pid" $held
  fi
  put "the unbind of $1 from vfio-pci" "$1" "$pci/drivers/vfio-pci/unbind" ||
    fail 77 "$1 cannot be unbound from vfio-pci: $(cat "$work/text")"
  wait_driver "$1" != vfio-pci ||
    fail 75 "$1 is still bound to vfio-pci $limit s after its unbind; only a reboot clears it"
  say "$1 is free of vfio-pci"
}

node() {
  if [ -c "$ROOT/dev/$1" ] &&
    [ "$(stat -c '%t:%T' "$ROOT/dev/$1")" = "$(printf '%x:%x' "$2" "$3")" ]; then
    return 0
  fi
  rm -f "$ROOT/dev/$1"
  mknod -m 0666 "$ROOT/dev/$1" c "$2" "$3" || fail 77 "/dev/$1 cannot be made"
}

wanted=
for address in "$@"; do
  [ -d "$pci/devices/$address" ] || fail 77 "there is no PCI function $address"
  [ "$(driver "$address")" = nvidia ] || wanted="$wanted $address"
done
for address in $wanted; do free "$address"; done
if [ ! -d "$ROOT/sys/module/nvidia" ]; then
  # Only now: with every GPU on vfio-pci the module refuses to load (No such device).
  guarded "modprobe nvidia" modprobe nvidia ||
    fail 77 "modprobe nvidia failed: $(cat "$work/text")"
fi
for address in $wanted; do
  if [ "$(driver "$address")" != nvidia ]; then
    put "drivers_probe of $address" "$address" "$pci/drivers_probe" ||
      fail 77 "$address cannot be probed: $(cat "$work/text")"
  fi
  wait_driver "$address" = nvidia ||
    fail 77 "$address is bound to '$(driver "$address")' and not to nvidia after $limit s"
  say "$address is bound to nvidia"
done

if [ ! -d "$ROOT/sys/module/nvidia_uvm" ]; then
  guarded "modprobe nvidia_uvm" modprobe nvidia_uvm ||
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
  guarded nvidia-modprobe nvidia-modprobe -u $flags ||
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
"""


def apply_script(addresses: Sequence[str], limit_s: float, root: str = "") -> str:
    """SCRIPT with its arguments, for a transport; `limit_s` is rounded up to whole seconds."""
    arguments = words([str(max(1, round(limit_s))), *addresses])
    return assignments({"DEPLOYER_ROOT": root}) + f"set -- {arguments}\n" + SCRIPT


def unit_name(deployment: str) -> str:
    """The boot unit of one deployment; the name is validated by the inventory."""
    return f"deployer-gpus-{deployment}.service"


def unit_text(deployment: str, addresses: Sequence[str], limit_s: float) -> str:
    """The boot unit: before guests start, since a container with a missing node does not start."""
    arguments = " ".join([str(max(1, round(limit_s))), *addresses])
    return (
        "# Written by deployer; `persist: report` in the playbook stops that.\n"
        "[Unit]\n"
        f"Description=GPUs of deployment {deployment} on the nvidia driver\n"
        "After=systemd-modules-load.service\n"
        "Before=pve-guests.service\n"
        "\n"
        "[Service]\n"
        "Type=oneshot\n"
        "RemainAfterExit=yes\n"
        f"ExecStart=/bin/sh {BOOT_SCRIPT} {arguments}\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def enable_script(unit: str) -> str:
    """Enables the unit as `systemctl enable` does; works before systemd has read the file."""
    return assignments({"UNIT": unit, "FOLDER": UNIT_FOLDER}) + (
        'mkdir -p "$FOLDER/multi-user.target.wants" || exit 1\n'
        'ln -sfn "$FOLDER/$UNIT" "$FOLDER/multi-user.target.wants/$UNIT" || exit 1\n'
        "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n"
    )
