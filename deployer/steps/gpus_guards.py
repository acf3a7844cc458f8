"""What keeps the gpus script from hanging, and from touching a GPU that is in use. Sh text.

Parts of gpus_script.SCRIPT, which sets `limit`, `patience`, `work`, `session` and has `say`,
`fail`, `stuck`, `tick` and `now`.
"""

from __future__ import annotations

GUARDED = r"""
# guarded WHAT COMMAND...: runs it detached; its exit status, or the script ends with 75.
# A module or a service may take longer than a write: see `patient`.
span=$limit
patient() {
  span=$patience
  guarded "$@"
  code=$?
  span=$limit
  return "$code"
}
guarded() {
  what=$1
  shift
  rm -f "$work/end" "$work/text"
  # The folder is named to the writer, which may outlive this script.
  # shellcheck disable=SC2016
  $session sh -c 'work=$1; shift; "$@" >"$work/text" 2>&1; code=$?
    [ ! -d "$work" ] || { echo "$code" >"$work/end.part" && mv "$work/end.part" "$work/end"; }' \
    sh "$work" "$@" </dev/null >/dev/null 2>&1 &
  stop=$(($(now) + span + 1))
  until [ -f "$work/end" ]; do
    [ "$(now)" -lt "$stop" ] || stuck "$what has not returned after $span s"
    tick
  done
  return "$(cat "$work/end")"
}

# put ADDRESS WHAT VALUE FILE: a write to sysfs, with a mark while it lasts.
put() {
  # shellcheck disable=SC2016
  guarded "$2" sh -c 'mark=$1 what=$2 value=$3 file=$4
    read -r boot </proc/sys/kernel/random/boot_id
    read -r stat </proc/$$/stat
    set -- ${stat##*) }
    mkdir -p "${mark%/*}" && printf "%s %s %s %s\n" "$boot" "$$" "${20}" "$what" >"$mark" || exit 1
    printf "%s\n" "$value" >"$file"
    code=$?
    rm -f "$mark"
    exit "$code"' sh "$marks/$1" "$2" "$3" "$4"
}

# wait_driver ADDRESS TEST DRIVER: until the driver link is (=) or is not (!=) DRIVER.
wait_driver() {
  stop=$(($(now) + limit + 1))
  # shellcheck disable=SC2086
  until [ "$(driver "$1")" $2 "$3" ]; do
    [ "$(now)" -lt "$stop" ] || return 1
    tick
  done
}

""".removeprefix("\n")
"""Every write and every program that may hang is run by a detached process with a deadline."""

IN_USE = r"""
# users ADDRESS: the pids that have it open.
users() {
  group=$(readlink "$pci/devices/$1/iommu_group") || group=
  numbers=$(char_numbers "$1")
  [ "$(driver "$1")" != nvidia ] || numbers="$numbers c3:fe"
  {
    [ -z "$group" ] || sed -n "s,^\([0-9]*\) [0-9]* /dev/vfio/${group##*/}\$,\1,p" "$work/links"
    for vfio in "$pci/devices/$1"/vfio-dev/vfio*; do
      sed -n "s,^\([0-9]*\) [0-9]* /dev/vfio/devices/${vfio##*/}\$,\1,p" "$work/links"
    done
    for number in $numbers; do sed -n "s/^\([0-9]*\) $number\$/\1/p" "$work/chars"; done
  } | sort -u
}
scan() {
  ( open_links >"$work/links"; open_chars >"$work/chars"; : >"$work/scanned" ) </dev/null 2>&1 &
  stop=$(($(now) + 30))
  until [ -f "$work/scanned" ]; do
    [ "$(now)" -lt "$stop" ] ||
      fail 77 "the open files of all processes could not be looked at in 30 s"
    tick
  done
  rm -f "$work/scanned"
}
named() {
  for one in "$@"; do
    { read -r comm <"$ROOT/proc/$one/comm"; } 2>/dev/null || comm=?
    printf ' %s (%s)' "$one" "$comm"
  done
}
refuse_used() {
  scan
  held=$(users "$1")
  # shellcheck disable=SC2086
  [ -z "$held" ] || fail 76 "$1 is in use by pid$(named $held)"
}
# Stops nvidia-persistenced when it is all that holds the GPUs that leave nvidia.
pause_daemon() {
  scan
  held=
  for job in "$@"; do
    address=${job%%,*}
    [ "$(driver "$address")" = nvidia ] && held="$held $(users "$address")"
  done
  for one in $held; do
    { read -r comm <"$ROOT/proc/$one/comm"; } 2>/dev/null || comm=
    [ "$comm" = nvidia-persiste ] || return 0
  done
  [ -n "${held# }" ] && systemctl is-active --quiet nvidia-persistenced.service || return 0
  paused=yes
  patient "the stop of nvidia-persistenced" systemctl stop nvidia-persistenced.service ||
    fail 77 "nvidia-persistenced cannot be stopped: $(cat "$work/text")"
  say "nvidia-persistenced is stopped"
}

# Nothing is touched while a write by anybody is under way on one of these functions.
refuse_pending() {
  scan
  : >"$work/pending"
  ours=
  for job in "$@"; do ours="$ours ${job%%,*}"; done
  marked >"$work/marked"
  while read -r one pid its what; do
    case "$ours " in *" $one "*) echo "$what by pid $pid has not returned (state $its)" ;; esac
  done <"$work/marked" >>"$work/pending"
  passing=$(sysfs_writes <"$work/links")
  [ -z "$passing" ] || { tick; tick; }
  printf '%s\n' "$passing" | while read -r pid fd path; do
    [ -n "$pid" ] && [ -L "$ROOT/proc/$pid/fd/$fd" ] && waiting "$pid" "$fd" >/dev/null || continue
    one=$(addresses "$pid" "$path")
    case "$ours " in
      *" ${one:-$ours} "*) echo "a write to ${path##*/} by pid$(named "$pid") has not returned" ;;
    esac
  done >>"$work/pending"
  [ ! -s "$work/pending" ] || stuck "$(head -n 1 "$work/pending")"
}

""".removeprefix("\n")
"""Who has a GPU open, and whose write to a driver file is under way: refusals that never hang."""
