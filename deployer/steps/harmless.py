"""Asking NVIDIA's programs without side effects: sh text for probes.

Both nvidia-smi and cuInit change what they look at. Seen on an H200 with driver 580.159.04, as
root: a missing /dev/nvidiaN or nvidia-uvm is made, one with other numbers is removed and made anew,
modes and owners are set back to the module's (0666 root:root). A probe must do none of that, so
they run with a read-only /dev of their own (devices still open for writing there), without the
capabilities to make nodes and load modules, and without setuid helpers: then nothing changed there.
"""

from __future__ import annotations

HARMLESS = r"""
cannot_harm() {
  # $1.. a command. 125: there is no way to run it so.
  if unshare -m --propagation private true 2>/dev/null; then
    # Places where these programs make nothing are left alone: a process for each mount is slow.
    unshare -m --propagation private sh -c '
      places=
      while read -r id parent device root place rest; do
        case $place in
          /dev/pts | /dev/shm | /dev/mqueue | /dev/hugepages | /dev/console) ;;
          /dev/null | /dev/zero | /dev/full | /dev/random | /dev/urandom | /dev/tty | /dev/ptmx) ;;
          /dev | /dev/*) places="$places $place" ;;
        esac
      done </proc/self/mountinfo
      for place in $places; do mount -o remount,bind,ro "$place" 2>/dev/null; done
      exec setpriv --no-new-privs --bounding-set=-mknod,-sys_module -- "$@"' sh "$@"
  elif setpriv --no-new-privs --bounding-set=-mknod,-sys_module true 2>/dev/null; then
    setpriv --no-new-privs --bounding-set=-mknod,-sys_module -- "$@"
  elif [ "$(id -u)" != 0 ] && setpriv --no-new-privs true 2>/dev/null; then
    setpriv --no-new-privs -- "$@"
  else
    return 125
  fi
}
"""
