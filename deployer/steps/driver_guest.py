"""The guest's driver libraries: they must equal the host's loaded module in all components."""

from __future__ import annotations

from deployer import gpu
from deployer.deployment import Deployment
from deployer.model import Change, Facts, Plan, Shell, Where
from deployer.playbook import DriverPackage
from deployer.shell import assignments, quote
from deployer.steps import driver_install as install
from deployer.steps.driver_facts import GuestDriver, System, Userspace
from deployer.steps.driver_host import send

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
    if guest.kernel_module and not gpu.same_version(guest.kernel_module, wanted):
        return Plan.blocked(
            f"{reason}; but module {guest.kernel_module} is loaded on {want.host_name}, and "
            "libraries of another version cannot talk to it",
            f"load {wanted} on {want.host_name} first, or set driver.version: "
            f"{guest.kernel_module} in the playbook",
        )
    driver = want.playbook.driver
    if driver.install == "never" or driver.package is None:
        return Plan.blocked(
            reason,
            "set driver.install: guest with driver.package in the playbook, or run in the "
            f"container: sh NVIDIA-Linux-x86_64-{wanted}.run --silent --no-kernel-modules",
        )
    if refusal := _unfit(guest.system, name, reason, driver.package):
        return refusal
    return Plan.change(reason, *_changes(want, driver.package, reason))


def plan_plain(want: Deployment, userspace: Userspace, system: System) -> Plan:
    """The same for a model that runs on the host itself."""
    wanted, name = want.playbook.driver.version, want.host_name
    if userspace.is_version(wanted):
        return Plan.nothing(f"{name} has driver libraries {wanted}")
    reason = f"on {name} {userspace.describe(wanted)}"
    driver = want.playbook.driver
    if driver.install == "never" or driver.package is None:
        return Plan.blocked(
            reason,
            f"install the {wanted} libraries there, or set driver.install and driver.package "
            "in the playbook",
        )
    if refusal := _unfit(system, name, reason, driver.package):
        return refusal
    package = driver.package
    path = package.file or f"{install.FOLDER}/NVIDIA-{wanted}.run"
    changes = []
    if package.local is not None:
        changes.append(send(want, package.local, path, package.sha256, Where.HOST))
    job = install.run_job(
        Where.HOST,
        package,
        path,
        wanted,
        install.GUEST_FLAGS,
        "driver-userspace",
        owned=package.file is None,
    )
    title = f"install driver libraries {wanted} on {name}"
    changes.append(Change(title, reason, job, undo="nvidia-uninstall --silent"))
    return Plan.change(reason, *changes)


def _unfit(system: System, name: str, reason: str, package: DriverPackage) -> Plan | None:
    """Why nothing can be installed there now."""
    others = system.driver_packages()
    if others:
        named = ", ".join(f"{one.name} {one.version}" for one in others[:4])
        return Plan.blocked(
            f"{reason}, and packages of a driver are installed ({named}): a .run file beside them "
            "breaks both",
            f"in {name}: apt-get purge {' '.join(one.name for one in others)}",
        )
    needs = [("/usr", install.LIBRARY_BYTES), ("/var", install.UNPACKED_BYTES)]
    if package.file is None or name.startswith("container"):
        needs.append(("/var", install.PACKAGE_BYTES))
    if lacking := system.lacks(needs):
        return Plan.blocked(f"{reason}; in {name} {lacking}", f"give {name} more disk")
    return None


def _changes(want: Deployment, package: DriverPackage, reason: str) -> list[Change]:
    wanted = want.playbook.driver.version
    path = f"{install.FOLDER}/NVIDIA-{wanted}.run"
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
    elif package.local is not None:
        changes.append(send(want, package.local, path, package.sha256, Where.GUEST))
    changes.append(
        Change(
            f"install driver libraries {wanted} in container {want.vmid}",
            reason,
            install.run_job(
                Where.GUEST,
                package,
                path,
                wanted,
                install.GUEST_FLAGS,
                "driver-userspace",
                owned=True,
            ),
            undo="nvidia-uninstall --silent",
        )
    )
    return changes


def guest_silent(want: Deployment, facts: Facts) -> str:
    """Why the container's libraries cannot be seen, '' when they can."""
    if facts.get(GuestDriver) is not None:
        return ""
    return facts.silent.get(Where.GUEST) or f"container {want.vmid} was not asked"
