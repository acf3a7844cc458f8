"""The jobs that install a driver: from NVIDIA's `.run` file or by apt. Pure: plan data.

Each runs detached and is joined by a later run under the same job name. The file's sha256 is proven
before it is executed; the installer works below our own folder, not in /tmp; on failure the end of
/var/log/nvidia-installer.log (or dkms' make.log) is in the job's log.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployer.gpu import version_key
from deployer.model import RunJob, Where
from deployer.nvidia_arch import FIRST_OPEN, MODULE_TYPE_OPTION
from deployer.playbook import DriverPackage
from deployer.shell import assignments, words

FOLDER = "/var/lib/deployer/driver"
INSTALL_TIMEOUT_S = 3600.0
STALL_S = 900.0
"""A build of the modules is silent for minutes; what it writes to its logs counts as progress."""

LOCK_WAIT_S = 300
"""How long another program that installs packages is waited for."""

PACKAGE_BYTES = 500_000_000
UNPACKED_BYTES = 1_500_000_000
LIBRARY_BYTES = 1_200_000_000
"""A 580 installer: some 400 MB, 1.1 GB unpacked, and as much again when it is installed."""

GUEST_FLAGS = (
    "--silent --no-kernel-modules --no-x-check --no-nouveau-check --no-nvidia-modprobe "
    "--no-rebuild-initramfs"
)
"""In a guest: no module, and no setuid helper that would make nodes."""

_HEAD = r"""
set -eu
FOLDER=${DEST%/*}
mkdir -p "$FOLDER"
tell() {
  printf '{"what":"%s","done":%s,"total":0,"unit":"B"}\n' "$1" "$2" >progress.new
  mv -f progress.new progress
}
bytes() {
  total=0
  for file in "$@"; do
    [ -f "$file" ] || continue
    size=$(stat -c %s "$file" 2>/dev/null) || size=0
    total=$((total + size))
  done
  echo "$total"
}
main=$$
watch() {
  # $1 what, $2.. files that grow while it works. Ends with the script, also with a killed one.
  what=$1
  shift
  last=
  while kill -0 "$main" 2>/dev/null; do
    now=$(bytes "$@")
    [ "$now" = "$last" ] || { tell "$what" "$now"; last=$now; }
    sleep 2
  done
}
"""

_FETCH = r"""
if [ ! -f "$DEST" ]; then
  watch 'the driver package' "$DEST.part" >/dev/null 2>&1 &
  watcher=$!
  if command -v curl >/dev/null; then
    set -- -fL --retry 3 --connect-timeout 30 --speed-limit 1000 --speed-time 60
    [ -z "$CA_BUNDLE" ] || set -- "$@" --cacert "$CA_BUNDLE"
    [ -z "$PROXY" ] || set -- "$@" --proxy "$PROXY"
    # A server that cannot resume, or a part that is already whole, ends the first in an error.
    curl "$@" -sS -C - -o "$DEST.part" "$URL" ||
      { rm -f "$DEST.part"; curl "$@" -sS -o "$DEST.part" "$URL"; }
  elif command -v python3 >/dev/null; then
    python3 -c 'import shutil, ssl, sys, urllib.request
url, path, bundle, proxy = sys.argv[1:]
handlers = [urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=bundle or None))]
if proxy:
    handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
with urllib.request.build_opener(*handlers).open(url, timeout=60) as answer:
    with open(path, "wb") as out:
        shutil.copyfileobj(answer, out)' "$URL" "$DEST.part" "$CA_BUNDLE" "$PROXY"
  else
    echo "there is neither curl nor python3 here to fetch $URL with" >&2
    exit 69
  fi
  kill "$watcher" 2>/dev/null || :
  mv -f "$DEST.part" "$DEST"
fi
"""

_PROVE = r"""
found=$(sha256sum "$DEST" | cut -d ' ' -f 1)
if [ "$found" != "$SHA256" ]; then
  echo "$DEST has sha256 ${found:-none}, the playbook wants $SHA256; it was not run" >&2
  [ "$OWNED" = no ] || rm -f "$DEST"
  exit 1
fi
"""

_RUN = r"""
LOG=/var/log/nvidia-installer.log
rm -rf "$FOLDER/tmp"
mkdir -p "$FOLDER/tmp"
MAKE_LOG=/var/lib/dkms/nvidia/$VERSION/build/make.log
state() { stat -c '%i %s %Y' "$1" 2>/dev/null || echo none; }
log_was=$(state "$LOG")
make_was=$(state "$MAKE_LOG")
watch 'what the installer has written to its log:' "$LOG" "$MAKE_LOG" log >/dev/null 2>&1 &
watcher=$!
status=0
TMPDIR=$FOLDER/tmp sh "$DEST" $FLAGS --tmpdir="$FOLDER/tmp" || status=$?
kill "$watcher" 2>/dev/null || :
rm -rf "$FOLDER/tmp"
if [ "$status" -ne 0 ]; then
  # Of this installation only: an older log would blame the wrong one.
  if [ "$(state "$LOG")" != "$log_was" ]; then
    echo "--- the end of $LOG:" >&2
    tail -n 30 "$LOG" >&2
  fi
  if [ "$(state "$MAKE_LOG")" != "$make_was" ]; then
    echo "--- the end of $MAKE_LOG:" >&2
    tail -n 30 "$MAKE_LOG" >&2
  fi
  exit "$status"
fi
[ "$OWNED" = no ] || rm -f "$DEST"
if command -v ldconfig >/dev/null; then ldconfig; fi
"""

# What dkms calls a success may be a skipped build: only the module file counts.
_MODULE = r"""
kernel=$(uname -r)
found=$(modinfo -k "$kernel" -F version nvidia 2>/dev/null) || found=
if [ "$found" != "$VERSION" ]; then
  echo "kernel $kernel has nvidia module ${found:-none} after the installation, not $VERSION" >&2
  if command -v dkms >/dev/null; then dkms status >&2 || :; fi
  exit 1
fi
"""

# `update` waits for nobody: without the loop another apt would end it at once. That it fails is no
# end either: one repository of many may refuse (Proxmox' own does, without a subscription), and
# what it said is told again when the packages then cannot be had.
_APT = r"""
set -eu
export DEBIAN_FRONTEND=noninteractive
main=$$
watch() {
  while kill -0 "$main" 2>/dev/null; do
    line=$(tail -c 400 log | tr '\r' '\n' | sed -e 's/["\\]//g' -e '/^ *$/d' | tail -n 1)
    printf '{"what":"apt-get","done":0,"total":0,"unit":"","detail":"%s"}\n' "$line" >progress.new
    mv -f progress.new progress
    sleep 2
  done
}
(exec >/dev/null 2>&1 && watch) &
watcher=$!
trap 'kill "$watcher" 2>/dev/null || :' EXIT
stop=$(($(date +%s) + LOCK_WAIT))
while :; do
  updated=0
  apt-get -q update >update.log 2>&1 || updated=$?
  cat update.log
  if [ "$updated" -eq 0 ] || ! grep -q 'Could not get lock' update.log; then break; fi
  [ "$(date +%s)" -lt "$stop" ] || exit "$updated"
  sleep 5
done
apt-get -q -o DPkg::Lock::Timeout="$LOCK_WAIT" -o Dpkg::Options::=--force-confold install -y \
  --no-install-recommends --allow-downgrades --allow-change-held-packages $PACKAGES </dev/null || {
  status=$?
  # What dpkg says of packages comes after the cause, and may be long.
  grep -h -e '^Error!' log | tail -n 3 >&2 || :
  if grep -q '^[EW]: ' update.log; then
    echo "--- apt-get update had said:" >&2
    grep '^[EW]: ' update.log | tail -n 4 >&2
  fi
  exit "$status"
}
apt-mark hold $NAMES
"""

_DKMS = r"""
set -eu
dkms install "nvidia/$VERSION" -k "$KERNEL"
found=$(modinfo -k "$KERNEL" -F version nvidia 2>/dev/null) || found=
if [ "$found" != "$VERSION" ]; then
  echo "kernel $KERNEL has nvidia module ${found:-none} after dkms, not $VERSION" >&2
  dkms status >&2 || :
  exit 1
fi
"""

# Only in this order; modprobe refuses a module in use, and nothing is forced.
UNLOAD = r"""
for module in nvidia_drm nvidia_modeset nvidia_uvm nvidia_peermem nvidia; do
  if [ -d "/sys/module/$module" ]; then modprobe -r "$module" || exit $?; fi
done
[ ! -d /sys/module/nvidia ] || { echo 'the nvidia module is still loaded' >&2; exit 1; }
"""


def host_flags(version: str, flavour: str) -> str:
    """Flags of the installer on a host. The module is loaded later, when a GPU is free for it."""
    flags = "--silent --dkms --no-x-check --skip-module-load"
    key = version_key(version)
    if key >= MODULE_TYPE_OPTION:
        return f"{flags} --kernel-module-type={flavour}"
    if key >= FIRST_OPEN and flavour == "open":
        return f"{flags} --kernel-module-build-directory=kernel-open"
    return flags


def run_job(
    where: Where,
    package: DriverPackage,
    path: str,
    version: str,
    flags: str,
    name: str,
    *,
    owned: bool,
    module: bool = False,
) -> RunJob:
    """Runs the installer at `path` after its sha256 was proven; an `url` is fetched first.

    `owned`: the file is our copy and is removed when it has served. `module`: it must leave a
    module of `version` for the running kernel. `flags` are ours, never the user's.
    """
    # A guest can have no file of the host's; the folder is then only where the installer works.
    dest = path if owned else f"{FOLDER}/{path.rpartition('/')[2]}"
    values = {
        "DEST": dest,
        "FILE": path,
        "VERSION": version,
        "SHA256": package.sha256,
        "FLAGS": flags,
        "OWNED": "yes" if owned else "no",
        "URL": package.url or "",
        "CA_BUNDLE": package.ca_bundle or "",
        "PROXY": package.proxy or "",
    }
    script = assignments(values) + _HEAD + (_FETCH if package.url else "")
    if not owned:
        script += "DEST=$FILE\n"
    script += _PROVE + _RUN + (_MODULE if module else "")
    return RunJob(where, name, script, timeout_s=INSTALL_TIMEOUT_S, stall_s=STALL_S)


def apt_job(packages: Sequence[str], version: str) -> RunJob:
    """Installs NAME=VERSION packages on the host and holds them."""
    values = {
        "PACKAGES": words(packages),
        "NAMES": words(one.partition("=")[0] for one in packages),
        "VERSION": version,
        "LOCK_WAIT": str(LOCK_WAIT_S),
    }
    script = assignments(values) + _APT + _MODULE
    return RunJob(Where.HOST, "driver-host", script, timeout_s=INSTALL_TIMEOUT_S, stall_s=STALL_S)


def dkms_job(version: str, kernel: str) -> RunJob:
    """Builds the module for another kernel of the host."""
    script = assignments({"VERSION": version, "KERNEL": kernel}) + _DKMS
    return RunJob(Where.HOST, "driver-dkms", script, timeout_s=INSTALL_TIMEOUT_S, stall_s=STALL_S)
