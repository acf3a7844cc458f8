"""The proof of a stop: the port is free, and the host sees the GPUs' memory given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployer.model import ProbeOutput, Where
from deployer.steps.base import StepContext
from deployer.steps.server_facts import PortOwner, parse_server
from deployer.steps.server_script import server_script_text
from deployer.steps.server_wanted import server_job_name
from deployer.steps.stop_gpu import read_gpu_memory
from deployer.steps.stop_told import RELEASE_S, memory_lost, still_there

SETTLED_S = 5.0
"""So long the same other processes must be seen to hold all that is used, to wait no more."""


@dataclass(frozen=True)
class StopProven:
    """Waits for both, RELEASE_S seconds each; what stays is a StepFailed."""

    context: StepContext
    now: Callable[[], float]
    sleep: Callable[[float], None]

    def port_is_free(self, *, others_may_stay: bool) -> str:
        """Waits until our processes are gone and the port is free; what became of it, in words.

        With `others_may_stay` a process that is not ours may keep the port: none of ours will
        follow there, and it is left alone.
        """
        context, want, ends = self.context, self.context.want, self.now() + RELEASE_S
        script = server_script_text(want)

        def marked(one: PortOwner) -> bool:
            return one.job.split("/")[0] == server_job_name(want)

        while True:
            answer = context.on(want.guest).run(script, timeout_s=30)
            fact = parse_server(ProbeOutput(answer.exit, answer.stdout, answer.stderr))
            left = (*(fact.job.members if fact.job else ()), *(one.pid for one in fact.left))
            if fact.asked and not fact.listening and not left:
                return f"port {want.port} free"
            if others_may_stay and not left and fact.owners and not any(map(marked, fact.owners)):
                told = "; ".join(f"pid {one.pid} ({one.command[:200]})" for one in fact.owners)
                context.note(f"port {want.port} is held by {told}, which is left alone", "warning")
                return f"port {want.port} held by another process"
            if self.now() >= ends:
                who = [f"pid {owner.pid}: {owner.command[:200]}" for owner in fact.owners]
                raise still_there(
                    want, f"port {want.port}", (*who, *(f"pid {pid}" for pid in left)), "waited"
                )
            context.progress(f"waiting for port {want.port}", 0, 0, "", fact.problem)
            self.sleep(0.5)

    def gpu_memory(self) -> str:
        """Waits until the host sees it given back; what is known of it, in words."""
        context, want, ends = self.context, self.context.want, self.now() + RELEASE_S
        floor = want.playbook.stop.gpu_floor_mib
        seen: tuple[str, ...] = ()
        since = self.now()
        while True:
            memory = read_gpu_memory(context.on(Where.HOST), want.gpus)
            if not memory.known:
                context.note(
                    f"GPU memory could not be read on the host: {memory.problem}", "warning"
                )
                return "GPU memory not known"
            over = memory.over(floor)
            if not over:
                return "GPU memory back"
            if memory.holders != seen:
                seen, since = memory.holders, self.now()
            if memory.explained(floor) and self.now() - since >= SETTLED_S:
                break
            if self.now() >= ends:
                break
            context.progress("waiting for GPU memory", 0, 0, "", memory.told(over))
            self.sleep(1.0)
        if memory.holders:
            context.note(
                f"GPU memory is still used ({memory.told(over)}) by others, which are left alone: "
                + "; ".join(memory.holders),
                "warning",
            )
            return "GPU memory used by others"
        raise memory_lost(want, memory, over, floor)
