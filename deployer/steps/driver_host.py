"""Whether the host has, or can load, the wanted module; what installs it if it may. Pure."""

from __future__ import annotations

from deployer import gpu
from deployer.deployment import Deployment
from deployer.model import Change, Plan, PlanState, SendFile, Shell, Where
from deployer.nvidia_arch import flavour_for, wrong_flavour
from deployer.nvidia_texts import SECURE_BOOT, smi_verdict, standing
from deployer.playbook import DriverPackage
from deployer.steps import driver_install as install
from deployer.steps.driver_cuda import cuda_need
from deployer.steps.driver_facts import HostDriver, HostKernels, HostSmi
from deployer.steps.driver_table import next_boot_problem
from deployer.steps.driver_unfit import blacklist, may_install, unfit
from deployer.steps.gpus_facts import GpuFacts, Holder

_SICK = frozenset({3, 4, 8, 10, 14, 15, 16, 17})
"""Exit codes of nvidia-smi that speak against a GPU itself; others are other steps' work."""


def plan_host(
    want: Deployment,
    host: HostDriver,
    smi: HostSmi | None,
    kernels: HostKernels | None,
    gpus: GpuFacts | None,
) -> Plan:
    """The decision about the host; nothing to do when the module is, or can be, loaded."""
    if host.timed_out:
        return Plan.blocked(
            f"{want.host_name} did not answer in time about its nvidia module",
            f"look at `dmesg` on {want.host_name}: a stuck GPU or unbind needs a host reboot",
        )
    if refusal := _never_fits(want, host):
        return refusal
    wanted = want.playbook.driver.version
    if host.loaded:
        if not gpu.same_version(host.loaded, wanted):
            return _wrong_loaded(want, host, kernels, gpus)
        if wrong := wrong_flavour(host.devices, host.flavour):
            return _replace(want, host, kernels, gpus, f"{wrong} on {want.host_name}")
        if refusal := _sick(want, host, smi):
            return refusal
    else:
        if not gpu.same_version(host.on_disk, wanted):
            return _install(want, host, kernels, _missing(want, host))
        if refusal := _kept_out(want, host, kernels):
            return refusal
    return _next_kernel(want, host, kernels)


def _never_fits(want: Deployment, host: HostDriver) -> Plan | None:
    """What no step can mend: the wanted version itself."""
    driver = want.playbook.driver
    need = cuda_need(want)
    if need is not None and (why := need.refuses(driver.version)):
        return Plan.blocked(
            why,
            f"driver.version {need.driver} or newer in the playbook, or an engine lock for an "
            "older CUDA",
            stands=True,
        )
    flavour = flavour_for(host.devices, driver.version, driver.flavour)
    if flavour.problem:
        fix = "another driver.version or driver.flavour in the playbook"
        return Plan.blocked(f"{want.host_name}: {flavour.problem}", fix, stands=True)
    return None


def _sick(want: Deployment, host: HostDriver, smi: HostSmi | None) -> Plan | None:
    """The right module is loaded: does the driver answer?"""
    name = want.host_name
    if smi is None or not smi.asked:
        return None
    verdict = smi_verdict(smi.exit, smi.text, timed_out=smi.timed_out)
    if verdict is None:
        return None
    if smi.timed_out:
        return Plan.blocked(
            f"nvidia-smi on {name} gave no answer in time: a GPU or its driver is stuck",
            verdict.on(name),
        )
    if verdict.name == "version-mismatch":
        return _host_libraries(want, host)
    if smi.exit in _SICK or verdict.standing or verdict.name == "gpu-lost":
        told = [cause.cause for cause, _ in standing(host.log) if cause.cause != verdict.cause]
        more = f" ({'; '.join(told)})" if told else ""
        return Plan.blocked(f"on {name}: {verdict.cause}{more}", verdict.on(name))
    return None


def _host_libraries(want: Deployment, host: HostDriver) -> Plan:
    versions = " and ".join(host.userspace.versions()) or "unknown"
    name, wanted = want.host_name, want.playbook.driver.version
    reason = f"on {name} module {host.loaded} is loaded but its libraries are {versions}"
    if host.userspace.is_version(host.loaded):
        return Plan.blocked(
            f"on {name} module and libraries are {host.loaded}, and nvidia-smi still finds them "
            "different: it loads another copy",
            f"on {name}: ldconfig -p | grep nvidia-ml, and see ldd of nvidia-smi; or reboot it",
        )
    driver = want.playbook.driver
    if driver.install == "host-and-guest" and driver.package is not None and not driver.packages:
        return _with_run(
            want, driver.package, reason, install.GUEST_FLAGS, "driver-userspace", False
        )
    return Plan.blocked(
        reason, f"reboot {name} after the upgrade, or install the {wanted} libraries on it"
    )


def _missing(want: Deployment, host: HostDriver) -> str:
    found = f"only {host.on_disk}" if host.on_disk else "no nvidia module"
    wanted = want.playbook.driver.version
    return f"{want.host_name} has {found} for kernel {host.kernel}, not {wanted}"


def _kept_out(want: Deployment, host: HostDriver, kernels: HostKernels | None) -> Plan | None:
    """The module is on disk, but will not load or is the wrong kind."""
    name = want.host_name
    if host.rivals:
        rival = " and ".join(host.rivals)
        return Plan.blocked(
            f"{rival} is loaded on {name} and keeps the nvidia module out", blacklist(name, rival)
        )
    running = kernels.kernel(kernels.running) if kernels is not None else None
    if running is not None and (wrong := wrong_flavour(host.devices, running.flavour)):
        return _install(want, host, kernels, f"{wrong} on {name} for kernel {running.name}")
    if host.secure_boot and kernels is not None and running is not None:
        if running.name not in kernels.signed:
            return Plan.blocked(
                f"Secure Boot is on at {name}, and the nvidia module of kernel {running.name} is "
                "not signed: `Key was rejected by service`",
                SECURE_BOOT.on(name),
            )
        if kernels.mok_enrolled is False:
            return Plan.blocked(
                f"Secure Boot is on at {name}, and the key that dkms signs with is not enrolled",
                SECURE_BOOT.on(name),
            )
    return None


def _wrong_loaded(
    want: Deployment, host: HostDriver, kernels: HostKernels | None, gpus: GpuFacts | None
) -> Plan:
    driver, name = want.playbook.driver, want.host_name
    reason = f"module {host.loaded} is loaded on {name}, the playbook wants {driver.version}"
    if not gpu.same_version(host.on_disk, driver.version):
        return _replace(want, host, kernels, gpus, reason)
    reason += f"; {driver.version} is installed there and waits to be loaded"
    if driver.install != "host-and-guest" or host.busy or not host.references:
        return Plan.blocked(reason, f"stop what uses the GPUs and reboot {name}{_who(host, gpus)}")
    return Plan.change(reason, _unload(want, host, reason))


def _replace(
    want: Deployment,
    host: HostDriver,
    kernels: HostKernels | None,
    gpus: GpuFacts | None,
    reason: str,
) -> Plan:
    """Another driver instead of the loaded one."""
    driver, name = want.playbook.driver, want.host_name
    if not may_install(want):
        return Plan.blocked(
            reason,
            f"install {driver.version} on {name} and reboot it, "
            f"or set driver.version: {host.loaded} in the playbook",
        )
    if host.busy or not host.references:
        used = ", ".join(host.busy) or "nvidia"
        return Plan.blocked(
            f"{reason}; it cannot be replaced while it is in use ({used})",
            f"stop what uses the GPUs of {name}{_who(host, gpus)}, then run again",
        )
    plan = _install(want, host, kernels, reason)
    if plan.state is not PlanState.CHANGES:
        return plan
    return Plan.change(reason, _unload(want, host, reason), *plan.changes)


def _who(host: HostDriver, gpus: GpuFacts | None) -> str:
    """Holders of the wanted GPUs, when the gpus step saw some."""
    held: dict[Holder, None] = {}
    for _, holder in gpus.holders if gpus is not None else ():
        held[holder] = None
    return f" ({', '.join(map(str, held))})" if held else ""


def _unload(want: Deployment, host: HostDriver, reason: str) -> Change:
    return Change(
        f"unload the nvidia module {host.loaded} on {want.host_name}",
        reason,
        Shell(Where.HOST, install.UNLOAD, timeout_s=120.0),
        undo=f"modprobe nvidia nvidia_uvm (while {host.loaded} is on disk)",
    )


def _install(want: Deployment, host: HostDriver, kernels: HostKernels | None, reason: str) -> Plan:
    """Installs the driver where it may; else the refusal that comes first."""
    driver, name = want.playbook.driver, want.host_name
    if not may_install(want):
        signed = " (Secure Boot is on: the module must be signed)" if host.secure_boot else ""
        return Plan.blocked(
            reason,
            f"install {driver.version} on {name} with dkms{signed}, or set driver.install: "
            "host-and-guest with driver.package or driver.packages in the playbook",
        )
    if refusal := unfit(want, host, kernels, reason):
        return refusal
    if driver.packages:
        names = " ".join(one.partition("=")[0] for one in driver.packages)
        change = Change(
            f"install {', '.join(driver.packages)} on {name} and hold them",
            reason,
            install.apt_job(driver.packages, driver.version),
            undo=f"apt-mark unhold {names} && apt-get remove {names}",
        )
        return Plan.change(reason, change)
    flavour = flavour_for(host.devices, driver.version, driver.flavour)
    flags = install.host_flags(driver.version, flavour.wanted)
    if driver.package is None:
        return Plan.blocked(reason, "add driver.package to the playbook")
    return _with_run(want, driver.package, reason, flags, "driver-host", True)


def _with_run(
    want: Deployment,
    package: DriverPackage,
    reason: str,
    flags: str,
    job: str,
    module: bool,
) -> Plan:
    """The `.run` file on the host, brought there when it lies here."""
    driver, name = want.playbook.driver, want.host_name
    path = package.file or f"{install.FOLDER}/NVIDIA-{driver.version}.run"
    changes = []
    if package.local is not None:
        changes.append(send(want, package.local, path, package.sha256, Where.HOST))
    what = "driver" if module else "driver libraries"
    changes.append(
        Change(
            f"install {what} {driver.version} on {name}",
            reason,
            install.run_job(
                Where.HOST,
                package,
                path,
                driver.version,
                flags,
                job,
                owned=package.file is None,
                module=module,
            ),
            undo="nvidia-uninstall --silent",
        )
    )
    return Plan.change(reason, *changes)


def send(want: Deployment, local: str, path: str, sha256: str, where: Where) -> Change:
    """The package of this machine goes to the one that installs it."""
    place = want.host_name if where is Where.HOST else f"container {want.vmid}"
    return Change(
        f"send the driver package to {place}",
        "the installer runs there",
        SendFile(where, local, path, sha256),
        undo=f"rm -f {path}",
    )


def _next_kernel(want: Deployment, host: HostDriver, kernels: HostKernels | None) -> Plan:
    """All right now; and after the next boot?"""
    wanted, name = want.playbook.driver.version, want.host_name
    if host.loaded:
        flavour = f" ({host.flavour})" if host.flavour else ""
        reason = f"module {host.loaded}{flavour} is loaded on {name}"
    else:
        reason = f"module {wanted} is on {name} for kernel {host.kernel}, not loaded yet"
    lost, fix = next_boot_problem(want, host, kernels)
    if not lost:
        if host.loaded and kernels is None and not gpu.same_version(host.on_disk, host.loaded):
            found = f"has {host.on_disk}" if host.on_disk else "has no nvidia module"
            return Plan.nothing(
                f"{reason}, but after a reboot kernel {host.kernel} {found}: rebuild it "
                "(dkms autoinstall)"
            )
        return Plan.nothing(reason)
    boot = kernels.next_boot() if kernels is not None else None
    kernel = kernels.kernel(boot.kernel) if kernels is not None and boot is not None else None
    known = kernels is not None and any(
        gpu.same_version(build.version, wanted) for build in kernels.dkms
    )
    if kernel is None or not kernel.headers or not known or not may_install(want):
        return Plan.nothing(f"{reason}; but {lost}" + (f" ({fix})" if fix else ""))
    return Plan.change(
        lost,
        Change(
            f"build the nvidia module {wanted} for kernel {kernel.name} on {name}",
            lost,
            install.dkms_job(wanted, kernel.name),
            undo=f"dkms uninstall nvidia/{wanted} -k {kernel.name}",
        ),
    )
