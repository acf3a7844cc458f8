"""Why no driver can be installed on a host now: one refusal, one action. Pure.

Refused: with nouveau or nova loaded, without the running kernel's headers or dkms, where Secure
Boot would reject the result, beside packages of another driver, where the disk is too small.
"""

from __future__ import annotations

from deployer.deployment import Deployment
from deployer.model import Plan
from deployer.steps import driver_install as install
from deployer.steps.driver_facts import HostDriver, HostKernels
from deployer.steps.driver_table import headers_package


def may_install(want: Deployment) -> bool:
    """Does the playbook allow it, and name what to install?"""
    driver = want.playbook.driver
    return driver.install == "host-and-guest" and bool(driver.package or driver.packages)


def unfit(
    want: Deployment, host: HostDriver, kernels: HostKernels | None, reason: str
) -> Plan | None:
    """Why nothing can be installed now."""
    driver, name = want.playbook.driver, want.host_name
    if host.rivals:
        rival = " and ".join(host.rivals)
        return Plan.blocked(
            f"{reason}, and {rival} is loaded, which the installer refuses",
            blacklist(name, rival),
        )
    running = kernels.kernel(kernels.running) if kernels is not None else None
    if running is not None and not running.headers:
        return Plan.blocked(
            f"{reason}, and the headers of the running kernel {running.name} are missing",
            f"on {name}: apt-get install {headers_package(running.name)}; if they are gone from "
            "the repository: boot a kernel that has them",
        )
    if kernels is not None and not driver.packages and not kernels.has_dkms:
        return Plan.blocked(
            f"{reason}, and dkms is missing on {name}: the next kernel would have no module",
            f"on {name}: apt-get install dkms",
        )
    if host.secure_boot and not (kernels is not None and kernels.mok_enrolled):
        return Plan.blocked(
            f"{reason}, and Secure Boot would reject a module that is not signed",
            f"on {name}: `mokutil --import /var/lib/dkms/mok.pub`, enrol it at the console during "
            f"a reboot, or install {driver.version} by hand, or turn Secure Boot off",
        )
    others = host.system.driver_packages()
    if others and not driver.packages:
        named = ", ".join(f"{one.name} {one.version}" for one in others[:4])
        return Plan.blocked(
            f"{reason}, and packages of a driver are installed ({named}): a .run file beside "
            "them breaks both",
            f"on {name}: apt-get purge {' '.join(one.name for one in others)}; or use "
            "driver.packages in the playbook",
        )
    needs = [("/usr", install.LIBRARY_BYTES), ("/var", install.UNPACKED_BYTES)]
    if driver.packages or (driver.package is not None and driver.package.file is None):
        needs.append(("/var", install.PACKAGE_BYTES))
    if lacking := host.system.lacks(needs):
        return Plan.blocked(f"{reason}; on {name} {lacking}", f"free space on {name}")
    return None


def blacklist(name: str, rival: str) -> str:
    """What keeps another driver of NVIDIA GPUs away for good."""
    words = rival.replace("nova_core", "nova_core and nova_drm")
    return f"on {name}: blacklist {words} in /etc/modprobe.d, update-initramfs -u -k all, reboot"
