"""The guest's driver libraries: they must equal the host's loaded module in all components."""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.model import Change, Facts, Plan, RunJob, Shell, Where
from deployer.playbook import DriverPackage
from deployer.shell import assignments, quote
from deployer.steps.driver_facts import GuestDriver, Userspace

FOLDER = "/var/lib/deployer/driver"
INSTALL_TIMEOUT_S = 1800.0
DOWNLOAD_STALL_S = 300.0

_COPY = r"""
sum() { sha256sum "$1" | cut -d ' ' -f 1; }
if [ ! -f "$FILE" ]; then
  echo "the driver package $FILE is not on this host" >&2
  exit 1
fi
found=$(sum "$FILE")
if [ "$found" != "$SHA256" ]; then
  echo "$FILE has sha256 $found, the playbook wants $SHA256" >&2
  exit 1
fi
# Not `pct push`: it may report success for a copy that failed.
pct exec "$VMID" -- sh -c 'mkdir -p "${1%/*}" && cat >"$1.part" && mv -f "$1.part" "$1"' \
  sh "$DEST" <"$FILE" || exit 1
got=$(pct exec "$VMID" -- sha256sum "$DEST" </dev/null | cut -d ' ' -f 1)
if [ "$got" != "$SHA256" ]; then
  echo "the copy of $FILE in container $VMID has sha256 ${got:-none}, not $SHA256" >&2
  exit 1
fi
"""

_FETCH = r"""
mkdir -p "${DEST%/*}"
if [ ! -f "$DEST" ]; then
  if command -v curl >/dev/null; then
    # A server that cannot resume, or a part that is already whole, ends the first in an error.
    curl -fL --retry 5 -C - -o "$DEST.part" "$URL" ||
      { rm -f "$DEST.part"; curl -fL --retry 5 -o "$DEST.part" "$URL"; }
  else
    python3 -c 'import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as answer, open(sys.argv[2], "wb") as out:
    shutil.copyfileobj(answer, out)' "$URL" "$DEST.part"
  fi
  mv -f "$DEST.part" "$DEST"
fi
"""

_INSTALL = r"""
found=$(sha256sum "$DEST" | cut -d ' ' -f 1)
if [ "$found" != "$SHA256" ]; then
  echo "$DEST has sha256 ${found:-none}, the playbook wants $SHA256; it was not run" >&2
  [ "$OWNED" = no ] || rm -f "$DEST"
  exit 1
fi
status=0
sh "$DEST" $FLAGS || status=$?
if [ "$status" -ne 0 ]; then
  [ ! -f /var/log/nvidia-installer.log ] || tail -n 30 /var/log/nvidia-installer.log >&2
  exit "$status"
fi
[ "$OWNED" = no ] || rm -f "$DEST"
if command -v ldconfig >/dev/null; then ldconfig; fi
"""

GUEST_FLAGS = "--silent --no-kernel-modules --no-x-check --no-nouveau-check"
HOST_FLAGS = "--silent --dkms --no-x-check"


def install_job(
    where: Where, package: DriverPackage, path: str, flags: str, name: str, owned: bool
) -> RunJob:
    """Runs the package at `path` after its sha256 was checked; an `url` is fetched first.

    `owned`: the file is our copy and is removed when it has served.
    """
    values = {
        "DEST": path,
        "SHA256": package.sha256,
        "FLAGS": flags,
        "OWNED": "yes" if owned else "no",
        "URL": package.url or "",
    }
    fetch = _FETCH if package.url and not package.file else ""
    script = "set -eu\n" + assignments(values) + fetch + _INSTALL
    return RunJob(where, name, script, timeout_s=INSTALL_TIMEOUT_S, stall_s=DOWNLOAD_STALL_S)


def plan_guest(want: Deployment, guest: GuestDriver) -> Plan:
    """Whether the container has the wanted driver libraries; installs them when it may."""
    wanted = want.playbook.driver.version
    name = f"container {want.vmid}"
    if guest.timed_out:
        return Plan.blocked(
            f"{name} did not answer in time about its driver libraries",
            f"look at its load and disks: `pct exec {want.vmid} -- uptime`",
        )
    if guest.userspace.is_version(wanted):
        return Plan.nothing(f"{name} has driver libraries {wanted}")
    reason = f"in {name} {guest.userspace.describe(wanted)}"
    driver = want.playbook.driver
    if driver.install == "never" or driver.package is None:
        return Plan.blocked(
            reason,
            "set driver.install: guest with driver.package in the playbook, or run in the "
            f"container: sh NVIDIA-Linux-x86_64-{wanted}.run --silent --no-kernel-modules",
        )
    return Plan.change(reason, *_changes(want, driver.package, reason))


def plan_plain(want: Deployment, userspace: Userspace) -> Plan:
    """The same for a model that runs on the host itself."""
    wanted = want.playbook.driver.version
    if userspace.is_version(wanted):
        return Plan.nothing(f"{want.host_name} has driver libraries {wanted}")
    reason = f"on {want.host_name} {userspace.describe(wanted)}"
    driver = want.playbook.driver
    if driver.install == "never" or driver.package is None:
        return Plan.blocked(
            reason,
            f"install the {wanted} libraries there, or set driver.install and driver.package "
            "in the playbook",
        )
    path = driver.package.file or f"{FOLDER}/NVIDIA-{wanted}.run"
    job = install_job(
        Where.HOST,
        driver.package,
        path,
        GUEST_FLAGS,
        "driver-userspace",
        driver.package.file is None,
    )
    title = f"install driver libraries {wanted} on {want.host_name}"
    return Plan.change(reason, Change(title, reason, job, undo="nvidia-uninstall --silent"))


def _changes(want: Deployment, package: DriverPackage, reason: str) -> list[Change]:
    wanted = want.playbook.driver.version
    path = f"{FOLDER}/NVIDIA-{wanted}.run"
    changes = []
    if package.file:
        values = {
            "VMID": str(want.vmid),
            "FILE": package.file,
            "DEST": path,
            "SHA256": package.sha256,
        }
        changes.append(
            Change(
                f"copy the driver package into container {want.vmid}",
                "the installer runs inside the container",
                Shell(Where.HOST, assignments(values) + _COPY, timeout_s=600.0),
                undo=f"pct exec {want.vmid} -- rm -f {quote(path)}",
            )
        )
    changes.append(
        Change(
            f"install driver libraries {wanted} in container {want.vmid}",
            reason,
            install_job(Where.GUEST, package, path, GUEST_FLAGS, "driver-userspace", True),
            undo="nvidia-uninstall --silent",
        )
    )
    return changes


def guest_silent(want: Deployment, facts: Facts) -> str:
    """Why the container's libraries cannot be seen, '' when they can."""
    if facts.get(GuestDriver) is not None:
        return ""
    return facts.silent.get(Where.GUEST) or f"container {want.vmid} was not asked"
