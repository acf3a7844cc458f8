"""Step `driver`: the host's kernel module and the guest's libraries are the wanted version.

A module that is on disk but not loaded is no failure here: with every GPU on vfio-pci it cannot be
loaded, and the step `gpus` loads it when it has freed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from deployer import apt_texts
from deployer.deployment import Deployment
from deployer.errors import StepFailed
from deployer.model import Facts, Plan, PlanState, Probe, Where
from deployer.nvidia_texts import api_mismatches, smi_verdict, standing
from deployer.state import DeploymentState
from deployer.steps import cuda_proof
from deployer.steps.base import Step, StepContext
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import (
    GuestDriver,
    HostDriver,
    HostKernels,
    HostSmi,
    System,
)
from deployer.steps.driver_guest import guest_silent, plan_guest, plan_plain
from deployer.steps.driver_host import plan_host
from deployer.steps.driver_probes import guest_probe, host_probes
from deployer.steps.driver_table import lines, lost_at_boot, lost_kernels, table
from deployer.steps.gpus_facts import GpuFacts

ROUNDS = 3


class DriverStep(Step):
    """Checks versions; installs only what `driver.install` of the playbook allows."""

    name: ClassVar[str] = "driver"

    def probes(self, want: Deployment) -> list[Probe]:
        """Module, kernels and nvidia-smi of the host, libraries and CUDA of the guest."""
        cuda = cuda_proof.probe(want.guest, want.playbook.engine.venv)
        probes = [*host_probes(), cuda]
        return probes if want.vmid is None else [*probes, guest_probe()]

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """The host first; then the guest, which must equal it. The table of versions goes along."""
        host = facts.get(HostDriver)
        if host is None:
            silent = facts.silent.get(Where.HOST, "it was not asked")
            return Plan.blocked(f"{want.host_name} cannot be looked at: {silent}", "try again")
        plan = _decide(want, host, facts)
        if host.timed_out:
            return plan
        rows = table(want, host, facts.get(HostKernels), facts.get(GuestDriver))
        return plan.noted(*lines(want, rows, host, facts.get(CudaProof)))

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the changes, looks again, and goes on: host module, next kernel, guest libraries."""
        for _ in range(ROUNDS):
            try:
                super().apply(context, facts, plan)
            except StepFailed as error:
                if (told := apt_texts.explain(error.evidence)) is not None:
                    error.add(told.cause)
                    log = f" ({error.fix})" if error.fix else ""
                    error.fix = f"on {context.want.host_name}: {told.fix}{log}"
                raise
            plan = self.plan(context.want, context.reprobe(), context.state)
            if plan.state is not PlanState.CHANGES:
                return


def _decide(want: Deployment, host: HostDriver, facts: Facts) -> Plan:
    kernels, gpus = facts.get(HostKernels), facts.get(GpuFacts)
    on_host = plan_host(want, host, facts.get(HostSmi), kernels, gpus)
    if on_host.state is not PlanState.NOTHING:
        return on_host
    if want.vmid is None:
        inside = plan_plain(want, host.userspace, host.system)
    elif guest_silent(want, facts):
        # The container's start is a later step's work, which then sees to its libraries.
        return Plan.nothing(
            f"{on_host.reason}; the libraries in container {want.vmid} are looked at when it runs"
        )
    else:
        inside = plan_guest(want, facts.need(GuestDriver))
    if inside.state is PlanState.NOTHING:
        return Plan.nothing(f"{on_host.reason}; {inside.reason}")
    return inside


def warnings(want: Deployment, facts: Facts) -> Iterable[tuple[str, str]]:
    """What stands in no one's way now, but will: (what, action)."""
    host, smi, name = facts.get(HostDriver), facts.get(HostSmi), want.host_name
    if smi is not None and smi.asked:
        verdict = smi_verdict(smi.exit, smi.text, timed_out=smi.timed_out)
        if verdict is not None:
            yield f"nvidia-smi on {name}: {verdict.cause}", verdict.on(name)
    if host is not None and not host.timed_out:
        wanted = want.playbook.driver.version
        yield from host_warnings(name, wanted, host, facts.get(HostKernels))
    guest = facts.get(GuestDriver)
    if guest is not None and want.vmid is not None:
        yield from _upgrades(guest.system, f"container {want.vmid}")
        modules = [p.name for p in guest.system.packages if "dkms" in p.name]
        if modules:
            yield (
                f"container {want.vmid} has {', '.join(modules)}: a guest shares the host's kernel",
                f"in the container: apt-get purge {' '.join(modules)}",
            )
    proof = facts.get(CudaProof)
    if proof is not None and (cause := proof.cause) is not None:
        where = f"container {want.vmid}" if want.vmid is not None else name
        yield f"{where}: {proof.describe()}", cause.on(name)


def host_warnings(
    name: str, wanted: str, host: HostDriver, kernels: HostKernels | None
) -> Iterable[tuple[str, str]]:
    """Of the host `name` alone, when the driver shall be `wanted`: (what, action)."""
    for lost in (lost_at_boot(name, wanted, kernels), lost_kernels(name, wanted, kernels)):
        if lost[0]:
            yield lost
    for told, line in standing(host.log):
        yield f"{told.cause} ({line})", told.on(name)
    for one in api_mismatches("\n".join(host.log))[-1:]:
        who = f"{one.process} (pid {one.pid})" if one.process else "a program"
        yield (
            f"{who} came to the module {one.module} with libraries {one.client}",
            f"libraries and module must be of one version, on {name} and in every container",
        )
    own = host.userspace
    if host.loaded and own.libraries and not own.is_version(host.loaded):
        yield (
            f"on {name} {own.describe(host.loaded)}: what uses GPU memory is not seen there",
            f"install the libraries and nvidia-smi of exactly {host.loaded} on {name}",
        )
    if host.rivals:
        rival = ", ".join(host.rivals)
        yield f"also loaded on {name}: {rival}", f"blacklist {rival}: it can take GPUs at boot"
    yield from _upgrades(host.system, name)


def _upgrades(system: System, place: str) -> Iterable[tuple[str, str]]:
    """Packages that an upgrade may take away from below the loaded module."""
    loose = [package.name for package in system.driver_packages() if not package.held]
    if not loose:
        return
    names = " ".join(loose)
    if system.unattended:
        yield (
            f"unattended upgrades may change the driver on {place}: {', '.join(loose)}",
            f"on {place}: apt-mark hold {names}",
        )
    else:
        yield (
            f"the next upgrade may change the driver on {place}: {', '.join(loose)}",
            f"on {place}: apt-mark hold {names}",
        )
