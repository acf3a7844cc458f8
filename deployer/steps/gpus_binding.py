"""A set of moves as one change: how a plan shows it, how it runs, what its exit means."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from deployer.errors import RemoteCommandFailed, StepBlocked, StepFailed
from deployer.events import ChangeDone, ChangeStarted
from deployer.model import Change, Procedure, Where
from deployer.steps.base import StepContext
from deployer.steps.gpus_moves import Move, apply_script, budget_s
from deployer.steps.gpus_script import FAILED, HELD, STUCK


class UnbindStuck(StepFailed):
    """A write to sysfs did not return. Only a host reboot clears it; nothing else is tried."""


@dataclass(frozen=True)
class Binding:
    """What one run of the script does."""

    moves: tuple[Move, ...]
    limit_s: float
    daemon: bool = False
    """nvidia-persistenced may be stopped for the time of it."""
    unload: tuple[str, ...] = ()
    """Modules to unload afterwards, when no GPU is on nvidia any more."""

    def steps(self, moving: Sequence[Move], loads: Sequence[str] = ()) -> str:
        """The writes in words of sh, for a reader. `moving`: those that are not there yet."""
        lines = []
        if self.daemon:
            lines.append(
                "systemctl stop nvidia-persistenced    # if it is all that holds them; "
                "started again afterwards"
            )
        for move in moving:
            device = f"/sys/bus/pci/devices/{move.address}"
            if move.target:
                lines.append(f"echo {move.target} > {device}/driver_override")
            if move.source:
                lines.append(
                    f"echo {move.address} > /sys/bus/pci/drivers/{move.source}/unbind"
                    f"    # detached, at most {self.limit_s:g} s, driver link read back"
                )
        lines.extend(f"modprobe {module}" for module in loads if module != "nvidia_uvm")
        lines.extend(
            f"echo {move.address} > /sys/bus/pci/drivers_probe" for move in moving if move.target
        )
        if "nvidia_uvm" in loads:
            lines.append("modprobe nvidia_uvm")
        for move in self.moves:
            if move.override is not None:
                device = f"/sys/bus/pci/devices/{move.address}"
                lines.append(f"echo '{move.override}' > {device}/driver_override")
        if any(move.target == "nvidia" for move in self.moves):
            lines.append("nvidia-modprobe -u -c MINOR...    # or mknod from /proc/devices")
        lines.extend(f"modprobe -r {module}" for module in self.unload)
        return "\n".join(lines)

    def action(self, moving: Sequence[Move], loads: Sequence[str] = ()) -> Procedure:
        """As the action of a change."""
        return Procedure(Where.HOST, self.steps(moving, loads), self)


def run_binding(context: StepContext, change: Change, binding: Binding) -> None:
    """Runs the script on the host. Raises UnbindStuck, StepBlocked (in use) or StepFailed."""
    want = context.want
    ids = (want.host_name, want.id)
    count = len(binding.moves)
    context.bus.emit(ChangeStarted(*ids, context.step, change.title))
    began = time.monotonic()
    context.progress(change.title, 0, count, "functions")
    script = apply_script(
        binding.moves, binding.limit_s, daemon=binding.daemon, unload=binding.unload
    )
    limit = budget_s(binding.moves, binding.limit_s)
    answer = context.on(Where.HOST).run(script, timeout_s=limit)
    if answer.exit != 0:
        said = tuple(line for line in answer.error_text.splitlines() if line.strip())
        raise _error(want.host_name, change.title, answer.exit, said)
    context.progress(change.title, count, count, "functions")
    seconds = time.monotonic() - began
    context.bus.emit(ChangeDone(*ids, context.step, change.title, seconds))


def _error(host: str, title: str, code: int, said: tuple[str, ...]) -> StepFailed:
    # After its verdict the script may still say what became of nvidia-persistenced.
    verdicts = [line for line in said if not line.startswith(("kernel:", "nvidia-persistenced "))]
    what = verdicts[-1] if verdicts else f"{title}: exit {code}"
    if code == STUCK:
        fix = f"reboot {host}; find out first who still holds the GPU"
        return UnbindStuck(what, where=host, fix=fix, evidence=said)
    if code == HELD:
        fix = "stop the process or its VM, then run this again"
        return StepBlocked(what, where=host, fix=fix, evidence=said)
    error = StepFailed if code == FAILED else RemoteCommandFailed
    return error(what, where=host, fix=load_fix(what, host), evidence=said)


def load_fix(said: str, host: str) -> str:
    """The way out of a failed bind, by the text of modprobe or the kernel."""
    if "Key was rejected" in said:
        return "Secure Boot rejects the module: sign it, or turn Secure Boot off"
    if "Device or resource busy" in said or "Invalid argument" in said:
        return "a VM owns its IOMMU group: shut that VM down, then run this again"
    if "No such device" in said:
        return (
            f"`dmesg | grep NVRM` on {host}: every GPU is on another driver (vfio-pci, nouveau, "
            "nova_core), or this driver does not know the GPU"
        )
    if "not found" in said:
        return f"install the nvidia module for the running kernel of {host} (`dkms status`)"
    if "is in use" in said:
        return f"find who uses it: `ls -l /proc/*/fd | grep nvidia` on {host}"
    return f"look at `dmesg | tail` on {host}"
