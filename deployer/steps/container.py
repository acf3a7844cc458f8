"""Step `container`: the LXC guest exists, runs, and sees the GPUs through the right device nodes.

A node is judged inside the guest by type and numbers, never by its name: a bind mount of a missing
host node leaves a regular file that opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from deployer import proxmox
from deployer.deployment import Deployment
from deployer.errors import Unreachable
from deployer.model import Change, Facts, Plan, PlanState, Probe, Where
from deployer.pct_config import mounted_devices
from deployer.state import DeploymentState
from deployer.steps import container_changes as changes
from deployer.steps.base import Step, StepContext
from deployer.steps.container_facts import ContainerFacts, CudaCheck, GuestNodes, probes
from deployer.steps.driver_facts import GuestDriver
from deployer.steps.driver_guest import plan_guest
from deployer.steps.gpus_facts import GpuFacts

ROUNDS = 3
"""Add nodes; restart when hot-plug did not show them; install libraries in the running guest."""
ANSWER_DEADLINE_S = 90.0


class ContainerStep(Step):
    """Adds devN entries, starts or restarts the guest when it may, looks inside."""

    name: ClassVar[str] = "container"
    refuses_first: ClassVar[bool] = True

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._pause = pause

    def probes(self, want: Deployment) -> list[Probe]:
        """pct's view, the guest's nodes, and whether CUDA starts there."""
        return [] if want.vmid is None else probes(want.vmid)

    def plan(self, want: Deployment, facts: Facts, state: DeploymentState) -> Plan:
        """Configuration first, then what the guest sees."""
        if want.vmid is None:
            return Plan.nothing(f"the model runs on {want.host_name} itself, in no container")
        seen = facts.get(ContainerFacts)
        if seen is None or seen.timed_out:
            return Plan.blocked(
                f"pct on {want.host_name} gave no answer in time",
                f"look at `pvecm status` and `systemctl status pve-cluster` on {want.host_name}",
            )
        if refusal := _refuse(want, want.vmid, seen):
            return refusal
        host = facts.get(GpuFacts)
        if host is None or not host.ready:
            return Plan.unknown("gpus", "its devices are known when the GPUs are on nvidia")
        after = seen.config().after_restart()
        have = {entry.path for entry in after.devices().values()} | set(mounted_devices(after))
        missing = [path for path in host.needed() if path not in have]
        try:
            added = changes.set_devices(want.vmid, seen, host, missing) if missing else []
        except ValueError as error:
            return Plan.blocked(
                f"container {want.vmid}: {error}", "delete devN entries that it no longer needs"
            )
        if seen.status != "running":
            reason = f"container {want.vmid} is {seen.status or 'not running'}"
            return Plan.change(reason, *added, changes.start(want.vmid, reason))
        return _plan_running(want, want.vmid, facts, added, missing)

    def apply(self, context: StepContext, facts: Facts, plan: Plan) -> None:
        """Runs the changes, looks again, and goes on while looking shows more to do.

        A node that hot-plug did not bring needs a restart, and libraries can only be installed in
        a guest that runs; neither is knowable before.
        """
        for _ in range(ROUNDS):
            super().apply(context, facts, plan)
            self._await_guest(context)
            plan = self.plan(context.want, context.reprobe(), context.state)
            if plan.state is not PlanState.CHANGES:
                return

    def _await_guest(self, context: StepContext) -> None:
        """Waits until the guest's own door answers; after a start its sshd comes last."""
        deadline = self._clock() + ANSWER_DEADLINE_S
        while True:
            try:
                context.on(Where.GUEST).run("exit 0", timeout_s=15.0)
                return
            except Unreachable:
                if self._clock() >= deadline:
                    raise
            context.progress(
                f"container {context.want.vmid} answers",
                ANSWER_DEADLINE_S - max(0.0, deadline - self._clock()),
                ANSWER_DEADLINE_S,
                "s",
            )
            self._pause(1.0)


def _refuse(want: Deployment, vmid: int, seen: ContainerFacts) -> Plan | None:
    """Reasons to touch nothing."""
    if not seen.exists:
        if seen.status:
            return Plan.blocked(
                f"/etc/pve/lxc/{vmid}.conf on {want.host_name} cannot be read",
                f"run as root there, and look at `systemctl status pve-cluster`: "
                f"pct says {seen.status_text}",
            )
        return Plan.blocked(
            f"container {vmid} does not exist on {want.host_name}",
            f"create it (`pct create {vmid} ...`), or correct the vmid in the inventory",
        )
    if lock := seen.config().lock:
        return Plan.blocked(
            f"container {vmid} is locked ({lock})",
            f"wait for that task to end; if none runs any more: `pct unlock {vmid}`",
        )
    if not seen.status:
        return Plan.blocked(
            f"pct cannot tell the status of container {vmid}: {seen.status_text}",
            f"run `pct status {vmid}` on {want.host_name}",
        )
    return None


def _plan_running(
    want: Deployment,
    vmid: int,
    facts: Facts,
    added: list[Change],
    missing: Sequence[str],
) -> Plan:
    host, seen = facts.need(GpuFacts), facts.need(ContainerFacts)
    guest = facts.get(GuestNodes)
    if guest is None:
        silent = facts.silent.get(Where.GUEST, "it was not asked")
        return Plan.unknown("container", f"container {vmid} runs but cannot be asked: {silent}")
    wrong = [path for path in host.needed() if not guest.node(path).same_device(host.node(path))]
    if not wrong and not missing:
        return _plan_inside(want, vmid, facts)
    # Only a new devN on a recent Proxmox shows up without a restart.
    occupied = [path for path in missing if guest.node(path).kind not in ("missing", "char")]
    hotplug = (
        seen.version >= proxmox.HOTPLUG_SINCE
        and set(wrong) <= set(missing)
        and not occupied
        and bool(added)
    )
    reason = _wrong_reason(vmid, host, guest, wrong or missing)
    if hotplug or not wrong:
        return Plan.change(reason, *added)
    if want.container is None or want.container.restart == "never":
        return Plan.blocked(
            f"{reason}; that needs a restart of container {vmid}, and its restart is never",
            f"restart it at a good time (`pct reboot {vmid}`), or set restart: allowed",
        )
    return Plan.change(reason, *added, changes.restart(vmid, reason))


def _wrong_reason(vmid: int, host: GpuFacts, guest: GuestNodes, paths: Sequence[str]) -> str:
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


def _plan_inside(want: Deployment, vmid: int, facts: Facts) -> Plan:
    """The nodes are right: libraries, then CUDA itself."""
    libraries = facts.get(GuestDriver)
    if libraries is not None:
        userspace = plan_guest(want, libraries)
        if userspace.state is not PlanState.NOTHING:
            return userspace
    cuda = facts.get(CudaCheck)
    if cuda is not None and cuda.timed_out:
        return Plan.blocked(
            f"CUDA gave no answer in container {vmid} in time: a GPU or its driver is stuck",
            f"look for `Xid` in `dmesg` on {want.host_name}; such a GPU needs a host reboot",
        )
    if cuda is not None and cuda.cu_init not in (None, 0):
        return Plan.blocked(
            f"CUDA does not start in container {vmid}: cuInit answers {cuda.cu_init}",
            f"restart it (`pct reboot {vmid}`); then compare /dev/nvidia-uvm in it with the host's",
        )
    host = facts.need(GpuFacts)
    reason = f"container {vmid} runs and has {', '.join(host.needed())}"
    if cuda is not None and cuda.cu_init == 0:
        reason += "; CUDA starts in it"
    return Plan.nothing(reason)
