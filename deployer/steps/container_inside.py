"""What a running guest sees: its nodes by numbers, then libraries, then CUDA and why it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployer.deployment import Deployment
from deployer.model import Facts, Plan, PlanState
from deployer.pct_device import DeviceEntry
from deployer.steps.container_devices import aside
from deployer.steps.container_facts import ContainerFacts, GuestNodes
from deployer.steps.cuda_proof import CudaProof
from deployer.steps.driver_facts import GuestDriver, HostDriver
from deployer.steps.driver_guest import plan_guest
from deployer.steps.gpus_facts import GpuFacts

SHUT_OUT = "Operation not permitted"
NO_ACCESS = "Permission denied"
GONE = ("No such device or address", "No such device")


@dataclass(frozen=True)
class NeedsRestart:
    """Only a new start brings it into force."""

    reason: str


def wrong_nodes(host: GpuFacts, guest: GuestNodes) -> list[str]:
    """Needed paths that are no such device in the guest."""
    return [path for path in host.needed() if not guest.node(path).same_device(host.node(path))]


def wrong_reason(vmid: int, host: GpuFacts, guest: GuestNodes, paths: Sequence[str]) -> str:
    """In words, path by path."""
    said = []
    for path in paths:
        node = guest.node(path)
        right = host.node(path)
        if node.kind == "missing":
            said.append(f"{path} is missing")
        elif not node.is_char:
            said.append(f"{path} is a regular file, not a device")
        elif not node.same_device(right):
            said.append(
                f"{path} is device {node.major}:{node.minor}, on the host it is "
                f"{right.major}:{right.minor}"
            )
        else:
            said.append(f"{path} is not in its configuration")
    return f"in container {vmid} " + ", ".join(said)


def plan_inside(want: Deployment, vmid: int, facts: Facts) -> Plan | NeedsRestart:
    """The nodes are right: libraries, then CUDA itself."""
    libraries = facts.get(GuestDriver)
    if libraries is not None:
        userspace = plan_guest(want, libraries)
        if userspace.state is not PlanState.NOTHING:
            return userspace
    cuda = facts.get(CudaProof)
    if cuda is not None and cuda.timed_out:
        return Plan.blocked(
            f"CUDA gave no answer in container {vmid} in time: a GPU or its driver is stuck",
            f"look for `Xid` in `dmesg` on {want.host_name}; such a GPU needs a host reboot",
        )
    host, seen = facts.need(GpuFacts), facts.need(ContainerFacts)
    if cuda is not None and not cuda.good and cuda.refused:
        return _refused(want, vmid, seen, cuda)
    if cuda is not None and cuda.cause is not None:
        return Plan.blocked(
            f"CUDA does not start in container {vmid}: {cuda.describe()}",
            cuda.cause.on(want.host_name),
        )
    reason = f"container {vmid} runs and has {', '.join(host.needed())}"
    if cuda is not None and cuda.good:
        reason += "; CUDA starts in it"
    return Plan.nothing(reason + aside(vmid, seen, host))


def plan_plain(want: Deployment, facts: Facts) -> Plan:
    """A model that runs on the host itself: no container, but CUDA must start there too."""
    reason = f"the model runs on {want.host_name} itself, in no container"
    cuda, gpus, host = facts.get(CudaProof), facts.get(GpuFacts), facts.get(HostDriver)
    # Before the steps driver and gpus have done their part there is nothing to judge.
    ready = gpus is not None and gpus.ready
    right = host is not None and host.userspace.is_version(want.playbook.driver.version)
    if cuda is not None and ready and right:
        if cuda.cause is not None:
            return Plan.blocked(
                f"CUDA does not start on {want.host_name}: {cuda.describe()}",
                cuda.cause.on(want.host_name),
            )
        if cuda.good:
            return Plan.nothing(f"{reason}; CUDA starts on it")
    return Plan.nothing(reason)


def _refused(
    want: Deployment, vmid: int, seen: ContainerFacts, cuda: CudaProof
) -> Plan | NeedsRestart:
    """The error of opening a node tells a rule from a mode from a driver that is gone."""
    path, said = cuda.refused[0]
    head = f"{path} cannot be opened in container {vmid}: {said}"
    config = seen.config()
    entries = {entry.path: (k, entry) for k, entry in config.after_restart().devices().items()}
    key, entry = entries.get(path, ("", DeviceEntry("")))
    if said == SHUT_OUT:
        if entry.denies_write:
            return Plan.blocked(
                f"{head} ({key} says deny-write)",
                f"on {want.host_name}: pct set {vmid} --{key} {path},mode=0666; pct reboot {vmid}",
            )
        # The configuration allows it: the rules in force are those of its last start.
        return NeedsRestart(f"{head}: the device rules in force are older than its configuration")
    if said == NO_ACCESS:
        if key:
            fix = f"pct set {vmid} --{key} {path},mode=0666; pct reboot {vmid}"
        else:
            mode = seen.host_mode(path)
            shown = f" (now {mode:04o})" if mode is not None else ""
            fix = f"chmod 0666 {path}{shown}, or a devN entry with mode=0666 in place of raw lines"
        kind = "an unprivileged" if config.unprivileged else "a privileged"
        return Plan.blocked(
            f"{head} (mode and owner of the node, in {kind} container)",
            f"on {want.host_name}: {fix}",
        )
    if said in GONE:
        return Plan.blocked(
            f"{head} (the driver behind it is gone)",
            f"run `deploy doctor {want.host_name}`, and restart the container when its GPUs are on "
            "nvidia again",
        )
    return Plan.blocked(head, f"look at `dmesg` on {want.host_name}")
