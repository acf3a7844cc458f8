"""Step `driver`: the host's kernel module and the guest's libraries are the wanted version.

A module that is on disk but not loaded is no failure here: with every GPU on vfio-pci it cannot be
loaded, and the step `gpus` loads it when it has freed one.
"""

from __future__ import annotations

from typing import ClassVar

from deployer import gpu
from deployer.deployment import Deployment
from deployer.model import Change, Facts, Plan, PlanState, Probe, Where
from deployer.state import DeploymentState
from deployer.steps.base import Step
from deployer.steps.driver_facts import GuestDriver, HostDriver, HostSmi, guest_probe, host_probes
from deployer.steps.driver_guest import (
    FOLDER,
    HOST_FLAGS,
    guest_silent,
    install_job,
    plan_guest,
    plan_plain,
)


class DriverStep(Step):
    """Checks versions; installs only what `driver.install` of the playbook allows."""

    name: ClassVar[str] = "driver"

    def probes(self, want: Deployment) -> list[Probe]:
        """Module and nvidia-smi of the host, libraries of the guest."""
        probes = host_probes()
        return probes if want.vmid is None else [*probes, guest_probe()]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """The host first; then the guest, which must equal it."""
        host = facts.get(HostDriver)
        if host is None:
            silent = facts.silent.get(Where.HOST, "it was not asked")
            return Plan.blocked(f"{want.host_name} cannot be looked at: {silent}", "try again")
        on_host = plan_host(want, host, facts.get(HostSmi))
        if on_host.state is not PlanState.NOTHING:
            return on_host
        if want.vmid is None:
            plain = plan_plain(want, host.userspace)
            if plain.state is PlanState.NOTHING:
                return Plan.nothing(f"{on_host.reason}; {plain.reason}")
            return plain
        if guest_silent(want, facts):
            # The container's start is a later step's work, which then sees to its libraries.
            return Plan.nothing(
                f"{on_host.reason}; the libraries in container {want.vmid} are looked at "
                "when it runs"
            )
        on_guest = plan_guest(want, facts.need(GuestDriver))
        if on_guest.state is PlanState.NOTHING:
            return Plan.nothing(f"{on_host.reason}; {on_guest.reason}")
        return on_guest


def plan_host(want: Deployment, host: HostDriver, smi: HostSmi | None) -> Plan:
    """Whether the host has, or can load, the wanted module."""
    wanted = want.playbook.driver.version
    name = want.host_name
    if host.timed_out:
        return Plan.blocked(
            f"{name} did not answer in time about its nvidia module",
            f"look at `dmesg` on {name}: a stuck GPU or unbind needs a host reboot",
        )
    if host.loaded and not gpu.same_version(host.loaded, wanted):
        return _wrong_loaded(want, host)
    if not host.loaded and not gpu.same_version(host.on_disk, wanted):
        return _wrong_on_disk(want, host)
    if not host.loaded and host.rivals:
        rival = " and ".join(host.rivals)
        return Plan.blocked(
            f"{rival} is loaded on {name} and keeps the nvidia module out",
            f"on {name}: blacklist {rival} in /etc/modprobe.d, update-initramfs -u, reboot",
        )
    if smi is not None and smi.timed_out:
        return Plan.blocked(
            f"nvidia-smi on {name} gave no answer in time: a GPU or its driver is stuck",
            f"look for `Xid` in `dmesg` on {name}; such a GPU needs a host reboot",
        )
    if smi is not None and smi.exit == 18:
        versions = " and ".join(host.userspace.versions()) or "unknown"
        return Plan.blocked(
            f"on {name} module {host.loaded} is loaded but its libraries are {versions}",
            f"reboot {name} after the upgrade, or install the {wanted} libraries on it",
        )
    return Plan.nothing(_host_reason(want, host))


def _host_reason(want: Deployment, host: HostDriver) -> str:
    wanted = want.playbook.driver.version
    if not host.loaded:
        return f"module {wanted} is on {want.host_name} for kernel {host.kernel}, not loaded yet"
    flavour = f" ({host.flavour})" if host.flavour else ""
    reason = f"module {host.loaded}{flavour} is loaded on {want.host_name}"
    if not gpu.same_version(host.on_disk, host.loaded):
        found = f"has {host.on_disk}" if host.on_disk else "has no nvidia module"
        reason += (
            f", but after a reboot kernel {host.kernel} {found}: rebuild it (dkms autoinstall)"
        )
    return reason


def _wrong_loaded(want: Deployment, host: HostDriver) -> Plan:
    wanted = want.playbook.driver.version
    reason = f"module {host.loaded} is loaded on {want.host_name}, the playbook wants {wanted}"
    if gpu.same_version(host.on_disk, wanted):
        return Plan.blocked(
            f"{reason}; {wanted} is installed there and waits to be loaded",
            f"stop what uses the GPUs and reboot {want.host_name}",
        )
    return Plan.blocked(
        reason,
        f"install {wanted} on {want.host_name} and reboot it, "
        f"or set driver.version: {host.loaded} in the playbook",
    )


def _wrong_on_disk(want: Deployment, host: HostDriver) -> Plan:
    driver = want.playbook.driver
    found = f"only {host.on_disk}" if host.on_disk else "no nvidia module"
    reason = f"{want.host_name} has {found} for kernel {host.kernel}, not {driver.version}"
    if driver.install != "host-and-guest" or driver.package is None:
        signed = " (Secure Boot is on: the module must be signed)" if host.secure_boot else ""
        return Plan.blocked(
            reason,
            f"install {driver.version} on {want.host_name} with dkms{signed}, or set "
            "driver.install: host-and-guest with driver.package in the playbook",
        )
    if host.rivals:
        return Plan.blocked(
            f"{reason}, and {' and '.join(host.rivals)} is loaded, which the installer refuses",
            f"blacklist it in /etc/modprobe.d, update-initramfs -u, reboot {want.host_name}",
        )
    if host.secure_boot:
        return Plan.blocked(
            f"{reason}, and Secure Boot would reject a module that is not signed",
            f"enrol a signing key and install {driver.version} by hand, or turn Secure Boot off",
        )
    path = driver.package.file or f"{FOLDER}/NVIDIA-{driver.version}.run"
    owned = driver.package.file is None
    job = install_job(Where.HOST, driver.package, path, HOST_FLAGS, "driver-host", owned)
    change = Change(
        f"install driver {driver.version} on {want.host_name}",
        reason,
        job,
        undo="nvidia-uninstall --silent",
    )
    return Plan.change(reason, change)
